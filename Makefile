# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test lint bench clean

help:
	@echo "make demo   environment, install, and a tiny model that learns with GSPO (minutes, CPU)"
	@echo "make test   environment, install, all tests"
	@echo "make lint   formatting, lint, types, import arrows"
	@echo "make bench  everyone's losses, judged, timed, in tables and plots (under ten minutes, CPU)"

# torch comes first and pinned: the extension is compiled against it (hence no build isolation), and its own pins decide
# everything below it. Users of the package are free to choose; see the ranges in pyproject.toml.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel ninja
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/gspo demo --output runs/demo --overwrite

test: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m benchmarks run all --out runs/bench
	$(BIN)/python -m benchmarks report --results runs/bench

clean:
	rm -rf $(VENV) build dist *.egg-info gspo_kernels/_C*.so runs
