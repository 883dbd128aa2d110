# Everything runs in .venv, which is made on first use and brought up to date when pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
# A pinned torch: a bare `torch` takes the newest build, which on Linux pulls several GB of CUDA libraries even where
# there is no GPU. `==2.13.0` also matches the CPU build (2.13.0+cpu) where an index offers it; to name an index, pass
# TORCH="torch==2.13.0 --index-url URL".
TORCH ?= torch==2.13.0
# More than the two cores of a small machine: ranks wait for each other and processes for their start.
WORKERS ?= 3
ARGS ?=
# What of pyproject.toml's extras is installed; `clients` (500 MB) lets tests/clients run, which are skipped without it.
EXTRAS ?= dev

BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(EXTRAS)

.PHONY: help train test lint bench clean

help: ## what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

train: $(READY) ## train a GPT on the standard library's sources, resuming what is there; ARGS="--stage 3 ..."
	@$(BIN)/onecopy train $(ARGS)

test: lint ## linter, types and tests; ARGS="-k name", ARGS=--long
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(READY) ## linter and types alone
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY) ## the same step under DDP, FSDP2, DeepSpeed (where installed) and onecopy; ARGS="--help"
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/peers.py $(ARGS)

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

clean: ## remove the environment, caches and runs
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
