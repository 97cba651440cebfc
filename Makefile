# phloem: every target works in a fresh clone. `make setup` is done by the others when it is needed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
MINUTES ?= 10
WORKERS ?= 2
# Processes that share the tests out, each with one thread for tensor work: more would wait for each other.
# Tests that need more threads set them.
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal
CLIENTS := $(VENV)/.clients

.PHONY: help setup demo test test-all soak lint types format bench dist check-dist clean

help:            ## This list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*## /\t/' | expand -t 14

setup: $(STAMP)  ## Make .venv and install phloem into it, with what tests and lint need

$(STAMP): pyproject.toml constraints.txt requirements-flashinfer.txt requirements-sglang.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing phloem and its dependencies (about a minute; torch is the large one)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-flashinfer.txt -r requirements-sglang.txt
	@touch $@

$(CLIENTS): $(STAMP) requirements-clients.txt
	@echo "Installing other people's clients of the server for the slow tests"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[clients]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-clients.txt
	@touch $@

demo: setup      ## Chat and sixteen questions on a real model, with the prefix cache on and off
	$(BIN)/phloem demo

test: setup      ## The tests, without the slow ones, in WORKERS (2) processes
	$(PYTEST) -m "not slow and not gpu"

test-all: setup $(CLIENTS)  ## All tests, with the clients that the slow ones need
	$(BIN)/python -m pytest -q -m "not gpu"

soak: setup      ## 64 rude clients for MINUTES (10): no failures, nothing left behind, no growth
	PHLOEM_SOAK_S=$$(($(MINUTES) * 60)) $(BIN)/python -m pytest -q -s tests/runtime/server/test_soak.py

lint: setup      ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup     ## mypy
	$(BIN)/mypy

format: setup    ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup     ## Every benchmark that needs no server
	$(BIN)/phloem bench radix
	$(BIN)/phloem bench reuse

dist: setup       ## The wheel and the sdist, under dist/
	rm -rf dist && $(BIN)/python -m build --outdir dist > /dev/null

check-dist: dist ## Install the wheel into an empty environment and start the command there
	rm -rf dist/env && $(PYTHON) -m venv dist/env
	dist/env/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd dist && env/bin/phloem --help > /dev/null && env/bin/python -c "from phloem.radix import RadixCache; from phloem.runtime import Engine"
	@cd dist/env/lib/python3*/site-packages && for name in radix runtime kernels; do \
	    if [ -e $$name ] || [ -e $$name.py ]; then echo "the wheel installs a top-level $$name"; exit 1; fi; done
	@echo "the wheel works in an empty environment"

clean:           ## Remove what the targets above made
	rm -rf $(VENV) dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
