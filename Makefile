# Two commands matter: `make run` serves on port 7860, `make test` proves it. Everything else is a part of those.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: run test unit check bench weights clean setup setup-dev

run: setup
	$(BIN)/hark serve

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

bench: setup-dev
	$(BIN)/hark fetch base
	$(BIN)/python -m bench.replay

clean:
	rm -rf $(VENV) build *.egg-info
