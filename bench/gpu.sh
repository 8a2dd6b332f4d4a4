#!/bin/sh
# The vLLM engine on this machine's GPU: set up, checked, timed.
#
#     bench/gpu.sh [MODEL]        a model's name, a hub repository, or a directory in Transformers' layout
#
# What is installed and fetched already is not again, so that a second run needs no network. The tests are stopped after
# TEST_LIMIT_S, so that they leave time for the figures. Exit status: that of the tests, else that of the bench.
set -eu
model="${1:-large-v3-turbo}"
[ ! -d "$model" ] || model="$(cd "$model" && pwd)"
cd "$(dirname "$0")/.."
python="$PWD/.venv-vllm/bin/python"

nvidia-smi --query-gpu=name,memory.total,compute_cap,driver_version --format=csv || {
    echo "bench/gpu.sh: there is no NVIDIA GPU here" >&2
    exit 2
}
make setup-dev setup-vllm
HARK_ENGINE=vllm .venv/bin/hark fetch "$model"
.venv/bin/hark fetch base # the tests' own

tests=0 bench=0
HARK_VLLM_PYTHON="$python" timeout "${TEST_LIMIT_S:-420}" .venv/bin/pytest -m vllm --durations 5 || tests=$?
[ "$tests" = 0 ] || echo "bench/gpu.sh: the tests ended with $tests" >&2
HARK_MODEL="$model" HARK_ENGINE_PYTHON="$python" .venv/bin/python -m bench.gpu || bench=$?
[ "$tests" = 0 ] || exit "$tests"
exit "$bench"
