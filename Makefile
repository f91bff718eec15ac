# `make demo` and `make test` work on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

.DEFAULT_GOAL := help

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'advnorm needs Python 3.11 or newer: make PYTHON=python3.11 ...'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

install: $(STAMP) ## create the virtual environment

demo: $(STAMP) ## train, evaluate and report in minutes on the CPU
	$(BIN)/advnorm demo

test: $(STAMP) ## run the fast tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not slow and not gpu'

test-all: $(STAMP) ## run all tests, also slow ones
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-gpu: ## run the tests for a CUDA device with the current python
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu

fuzz: $(STAMP) ## run thousands of bad commands, damaged files and bad calls, for at most 15 minutes
	cd tests && $(abspath $(BIN))/python -m support.fuzz --cases 1000 --seconds 900

docs: $(STAMP) ## build the documentation site, run its tutorials, check its links
	$(BIN)/python docs/_site/build.py

lint: $(STAMP) ## check the style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## check the types
	$(BIN)/pyright

format: $(STAMP) ## rewrite files to the style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .cache build site

.PHONY: help install demo test test-all test-gpu fuzz docs lint types format clean
