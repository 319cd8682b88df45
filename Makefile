# make demo: set up and see the main job.  make test: set up and run the checks.
# make check: the quick ones, in under a minute.  make test-slow: the slow ones.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: setup demo test test-slow check lint types clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Counterpoint needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,plots]'
	$(BIN)/counterpoint pull smollm2
	@touch $@

demo: setup
	$(BIN)/counterpoint demo

# Everything but the slow tests: style, types, tests.
test: lint types
	$(PYTEST) -m "not slow"

# What is slow and rarely fails: a pool's deaths at every state, long soaks.
test-slow: setup
	$(PYTEST) -m slow

# The inner loop: style, types, and the tests that need no model and no process. Under a minute.
check: lint types
	$(PYTEST) tests/arch tests/core tests/cost_model tests/replay tests/simulator tests/spec -m "not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) out .pytest_cache .ruff_cache .hypothesis
