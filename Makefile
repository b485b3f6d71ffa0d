# `make demo` and `make test` are each enough on a machine that has only Python 3.11 to 3.13: the
# first of them to run creates the virtual environment, and pyproject.toml's change renews it.
#
# Set on the command line or in the environment:
#   PYTHON       the interpreter to build the environment from
#   VENV         where the environment lies
#   ACCELERATOR  cuda or cpu, instead of asking nvidia-smi
#   TORCH_INDEX  where the CPU build of PyTorch comes from. PyPI's Linux builds carry CUDA, several
#                GB: TORCH_INDEX='--index-url https://download.pytorch.org/whl/cpu' avoids that
#   WORKERS      processes that run the tests
#   ARGS         more arguments for pytest or for the benchmarks

VENV ?= .venv
TORCH_INDEX ?=
WORKERS ?= 2
ARGS ?=

# The first interpreter that runs, is of a supported version and can create an environment. A name
# on the PATH is no proof: version managers leave shims for versions that are not active.
SUPPORTED := import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && echo $$p && break; done)

ACCELERATOR ?= $(shell test "$$(uname -s)" = Linux && nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)

# Without a GPU an exact PyTorch, so that what the tests saw is what runs; with one, the range in
# pyproject.toml, so that pip finds a build that shares its CUDA libraries with JAX.
CPU_TORCH := torch==2.13.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint types bench clean

demo: $(INSTALLED)
	$(BIN)/python examples/quickstart.py $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 with venv on the PATH: set PYTHON=" >&2; exit 1; }
	@echo "installing into $(VENV) with $(PYTHON), for $(ACCELERATOR)"
	$(PYTHON) -m venv $(VENV)
	@if [ "$(ACCELERATOR)" = cuda ]; then set -ex; \
		$(PIP) -e '.[dev,cuda]'; \
	else set -ex; \
		$(PIP) $(TORCH_INDEX) $(CPU_TORCH); \
		$(PIP) -e '.[dev]'; \
	fi
	@touch $@
