# Everything happens in .venv, made on first use. PYTHON chooses the interpreter (3.10 to 3.13).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install test lint docs demo bench clean

help: ## this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## make .venv with the package, its extras and the pinned versions we test

# Torch first and pinned: an open range would fetch gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy hatchling editables
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $(STAMP)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP) ## build the site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Two processes of one thread each are faster than one of two: most tests are small.
test: lint docs ## all checks and tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

demo: $(STAMP) ## train and compare all methods on real digits, print the table, write the report
	$(BIN)/torchcpl demo

bench: $(STAMP) ## measure speed here and write the page of it
	$(BIN)/python -m bench.core --out results/core-cpu.json
	$(BIN)/python -m bench.speed
	$(BIN)/python -m bench.performance

clean: ## remove .venv, caches and runs
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
