# Each of these sets everything up on a fresh machine: `make demo`, `make real` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Another version of torch, or all else as pinned: make test VENV=.venv-2.11 TORCH=2.11.0
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)

.PHONY: help demo real test quick verl skyrl lint bench campaign docs docs-serve clean
.PHONY: dist version dist-build dist-check dist-install wheels hub

help:
	@echo "make demo   environment, install, and a tiny model that learns with GSPO (minutes, CPU)"
	@echo "make real   environment, install, and a real model of 135M parameters that learns sums (minutes, CPU, 93 MB)"
	@echo "make test   environment, install, all tests"
	@echo "make lint   formatting, lint, types, import arrows"
	@echo "make bench  our losses and others': checked, then timed, in tables and plots (under ten minutes, CPU)"
	@echo "make quick  environment, install, the quick tests (one minute)"
	@echo "make verl   the tests that need verl, in an environment of its own"
	@echo "make skyrl  the tests that need SkyRL or torchtitan, in an environment of their own (Python 3.12)"
	@echo "make campaign  tests and benchmarks on a GPU"
	@echo "make docs   the documentation as a site, in site/"
	@echo "make dist   what is published: built, checked, installed into bare environments and used there"
	@echo "make hub    the losses as a kernel of the Hugging Face hub, in dist/hub"
	@echo "make wheels wheels as they are published, in containers; ARCHS=aarch64 for the other architecture"

# torch comes first and pinned: the extension is compiled against it (hence no build isolation), and its own pins decide
# everything below it. Users of the package are free to choose; see the ranges in pyproject.toml.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel ninja
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --no-build-isolation --editable '.[test]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/gspo demo --output runs/demo --overwrite

# One thread, as for the times in the README; several gain little on a model this small.
real: $(READY)
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt gguf
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.smollm2

# Idle OpenMP threads of one test process would otherwise spin on the cores of the others.
test quick: export OMP_WAIT_POLICY = PASSIVE
test: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

quick: $(READY)
	$(BIN)/python -m pytest -m quick --numprocesses auto --maxprocesses 8 --dist loadfile

# verl needs an older transformers than ours, and an older packaging
VERL ?= .venv-verl
$(VERL)/.ready: pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	$(PYTHON) -m venv $(VERL)
	sed '/^transformers/d; /^packaging/d; s/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VERL)/constraints.txt
	$(VERL)/bin/python -m pip install --quiet --upgrade pip setuptools wheel ninja
	$(VERL)/bin/python -m pip install --quiet --constraint $(VERL)/constraints.txt torch numpy
	$(VERL)/bin/python -m pip install --quiet --constraint $(VERL)/constraints.txt --no-build-isolation --editable '.[train]' \
	    verl==0.9.1 'hydra-core>=1.3' TransferQueue fastapi uvicorn cachetools msgspec pyzmq pytest pytest-xdist hypothesis
	@touch $@

verl: $(VERL)/.ready
	$(VERL)/bin/python -m pytest tests/integrations/test_registries.py tests/integrations/test_backends.py \
	    tests/examples/test_verl.py

# SkyRL and torchtitan need older versions of transformers, PEFT and datasets than ours. Without their dependencies, many of
# which are for GPUs alone, they import what the tests run.
SKYRL ?= .venv-skyrl
$(SKYRL)/.ready: pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	python3.12 -m venv $(SKYRL)
	sed '/^transformers/d; /^peft/d; s/^torch==.*/torch==$(TORCH)/' constraints.txt > $(SKYRL)/constraints.txt
	$(SKYRL)/bin/python -m pip install --quiet --upgrade pip setuptools wheel ninja
	$(SKYRL)/bin/python -m pip install --quiet --constraint $(SKYRL)/constraints.txt torch numpy
	$(SKYRL)/bin/python -m pip install --quiet --constraint $(SKYRL)/constraints.txt --no-build-isolation --editable '.[train]' \
	    'transformers<=5.8.0' peft==0.18.1 ray jaxtyping loguru omegaconf hydra-core tensordict s3fs func_timeout torchdata \
	    polars cloudpathlib einops tensorboard tyro pytest pytest-xdist hypothesis
	$(SKYRL)/bin/python -m pip install --quiet --no-deps skyrl==0.3.0 skyrl-gym==0.4.0 torchtitan==0.3.0 spmd_types==0.2.3 \
	    torch_checkpointing
	@touch $@

skyrl: $(SKYRL)/.ready
	$(SKYRL)/bin/python -m pytest tests/integrations/test_registries.py tests/integrations/test_backends.py \
	    tests/examples/frameworks/test_torchtitan.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m benchmarks run all --out runs/bench
	$(BIN)/python -m benchmarks report --results runs/bench

CAMPAIGN ?= runs/campaign
# nine minutes are for a rented device; here every stage shall finish
CAMPAIGN_OPTIONS ?= --minutes 30
campaign: $(READY)
	$(BIN)/python -m benchmarks campaign --out $(CAMPAIGN) $(CAMPAIGN_OPTIONS)

# Tools that need neither torch nor this package, by the groups of pyproject.toml.
$(VENV)/.docs $(VENV)/.wheels: $(VENV)/.%: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group $*
	@touch $@

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict

docs-serve: $(VENV)/.docs
	$(BIN)/python -m mkdocs serve

$(VENV)/.dist: $(READY)
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --group dist
	@touch $@

DIST ?= dist
TAG ?=
# which of sdist, compiled and pure
KINDS ?= sdist compiled pure
# every interpreter with every torch; no version: the one that pip takes
DIST_PYTHONS ?= $(PYTHON)
DIST_TORCHES ?= $(TORCH)
ARCHS ?= auto

dist: version
	$(MAKE) dist-build
	$(MAKE) dist-check
	$(MAKE) dist-install

version: $(VENV)/.dist
	$(BIN)/python -m release version $(if $(TAG),--tag $(TAG))

dist-build: $(VENV)/.dist
	rm -rf $(DIST)
	$(BIN)/python -m release build $(KINDS) --out $(DIST)

dist-check: $(VENV)/.dist
	$(BIN)/python -m release check --out $(DIST)

dist-install: $(VENV)/.dist
	$(BIN)/python -m release install --out $(DIST) --python $(DIST_PYTHONS) --torch $(DIST_TORCHES)

hub: $(READY)
	$(BIN)/python -m release hub --out $(DIST)/hub

# needs docker, and Python 3.11 or newer
wheels: $(VENV)/.wheels
	$(BIN)/python -m cibuildwheel --platform linux --archs $(ARCHS) --output-dir $(DIST)

clean:
	rm -rf $(VENV) $(VERL) build $(DIST) *.egg-info gspo_kernels/_C*.so runs site
