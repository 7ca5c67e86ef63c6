# Everything runs in .venv; override the interpreter with `make PYTHON=python3.11 ...`.
PYTHON ?= python3
JOBS ?= 2
# One arithmetic thread for each test worker: more only fight for the same cores.
TEST_THREADS ?= 1
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvrl-setup

.PHONY: setup train test lint check clean

setup: $(STAMP)

# Without an NVIDIA GPU this torch release has a CPU build for Linux; the plain one brings gigabytes of CUDA.
$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	command -v nvidia-smi >/dev/null 2>&1 || $(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(STAMP)

train: setup
	$(BIN)/kvrl train examples/quickstart/config.yaml

test: setup
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -n $(JOBS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache
