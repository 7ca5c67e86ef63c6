# Everything runs in .venv; override the interpreter with `make PYTHON=python3.11 ...`.
PYTHON ?= python3
JOBS ?= 2
# One arithmetic thread for each test worker: more only fight for the same cores.
TEST_THREADS ?= 1
# What pip installs where there is no NVIDIA GPU. On Linux the package of this name is the CUDA build (over 500 MB, and
# its nvidia packages): PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS lead pip to PyTorch's CPU builds, `make TORCH=FILE.whl` to a file.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvrl-setup

.PHONY: setup train test lint check results clean

setup: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@test -x $(BIN)/python || { echo "set-up: making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@command -v nvidia-smi >/dev/null 2>&1 || { echo "set-up: installing $(TORCH) (minutes, if it is downloaded)"; \
		$(BIN)/python -m pip install --quiet '$(TORCH)'; }
	@echo "set-up: installing kvrl and what it needs (minutes)"
	@$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $(STAMP)
	@echo "set-up: done. The command is $(BIN)/kvrl; after '. $(BIN)/activate' it is kvrl"

train: setup
	@echo "train: the warm start comes first (one to two minutes), then 60 steps"
	$(BIN)/kvrl train examples/quickstart/config.yaml

test: setup
	@echo "test: about 4 minutes on 2 idle cores"
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -n $(JOBS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

# The studies of docs/results.md and both figures of the log-ratio's spread: hours, and they go on where they stopped.
STUDIES := gentle tight matrix algorithms distill distill_default
results: setup
	$(BIN)/kvrl fetch smollm2-135m
	$(BIN)/kvrl study $(STUDIES:%=examples/results/%.yaml) --output_dir runs/results --jobs $(JOBS) --report docs/results.md
	$(BIN)/kvrl study examples/results/smollm2.yaml --output_dir runs/results --jobs 1 --report docs/results.md
	$(BIN)/kvrl variance --model tiny --output docs/variance.png
	$(BIN)/kvrl variance --model smollm2-135m --output docs/variance_smollm2.png

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache
