# Each target sets up what it needs: on a fresh machine `make demo` or `make test` is the only command.
#   make demo TORCH='torch==2.11.0'            another torch
#   make test PYTEST_ARGS='-k graph -x'        a part of the tests; -n 0 runs them in one process
#   make install PIP_ARGS='--no-index ...'     options for every pip call

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Installed where torch does not bring its own, which CPU builds do not; the kernels are compiled and interpreted in tests.
TRITON ?= triton==3.9.0
PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
# Two processes more than cores: tests that wait for others leave theirs idle.
WORKERS ?= $$($(PY) -c 'import os; print(os.cpu_count() + 2)')

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check $(PIP_ARGS)
STAMP := $(VENV)/.installed

.PHONY: help install demo test test-gpu test-pyg lint

help:
	@echo "make demo      train a GAT on a generated graph, next to plain PyG (under three minutes on 2 cores)"
	@echo "make test      the tests that need no GPU"
	@echo "make test-gpu  the tests that need one"
	@echo "make test-pyg PYG=PATH  PyG's own tests with these layers in place of PyG's; PATH is a checkout of PyG"
	@echo "make lint      ruff and mypy"
	@echo "make install   the environment alone, in $(VENV)"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Expected Python 3.10 or newer (got $$($(PYTHON) --version 2>&1)); choose one with PYTHON=..."; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) --quiet --upgrade pip
	$(PIP) -c constraints.txt '$(TORCH)'
	@test "$$(uname -s)" != Linux || $(PY) -c 'import triton' 2>/dev/null || $(PIP) '$(TRITON)'
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(PY) -m pyg_fullgraph train --compare pyg $(DEMO_ARGS)

test: $(STAMP)
	$(PY) -m pytest -n $(WORKERS) --dist load --maxschedchunk 1 -m 'not gpu and not multi_gpu' $(PYTEST_ARGS)

test-gpu: $(STAMP)
	$(PY) -m pytest -m 'gpu or multi_gpu' $(PYTEST_ARGS)

test-pyg: $(STAMP)
	$(PY) -m tests.pyg_suite --checkout $(PYG) $(PYTEST_ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m mypy
