# Each target makes what it needs on first use, and starts at once afterwards.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FUZZ_SECONDS ?= 60
MINUTES ?= 60

SOAK ?= --policy cadence --seeds 100 --minutes 60

.PHONY: demo demo-fleet test test-slow test-clusters test-dist dist chaos soak simulate differential trackers check fuzz bench docs \
  clean

demo: $(READY)  ## three workers, one of them three times slower: Sync against Cadence, in under three minutes
	$(BIN)/potluck demo

demo-fleet: $(READY)  ## a worker and the host are killed with -9, another joins, and no bit changes: half a minute to three
	$(BIN)/python -m examples.demo_fleet

test: $(READY)-to-test  ## everything that takes seconds, three tests at a time: most of them wait
	$(BIN)/pytest -n 3 --dist worksteal

test-slow: $(READY)-to-test  ## everything that takes minutes
	$(BIN)/pytest -m slow

dist: $(READY)-to-dist  ## wheel and sdist, in dist/
	rm -rf dist
	$(BIN)/python -m build

test-dist: $(READY)-to-dist  ## the package in an environment of its own; files for CI and clusters against their schemas
	$(BIN)/pytest -m slow tests/packaged

chaos: $(READY)-to-test  ## workers and coordinators killed, stopped, joined and left for minutes; the weights must not change
	$(BIN)/pytest -m slow tests/fleet

test-clusters: $(READY)-to-cluster  ## real SLURM and Ray clusters on this machine; what is not installed is skipped, and said
	$(BIN)/pytest -m slow -rs tests/clusters

soak: $(READY)-to-test  ## random schedules of real processes, by default under Cadence: 100, or an hour of them; SOAK="--policy sync"
	$(BIN)/python -m tests.fleet.soak $(SOAK)

simulate: $(READY)-to-test  ## whole fleets on a virtual clock, with any fault: an hour, or MINUTES; new ones each day
	$(BIN)/python -m tests.fleet.simulation --minutes $(MINUTES)

differential: $(READY)-to-test  ## random runs against a judge in plain PyTorch: an hour, or MINUTES; new ones each time
	$(BIN)/python -m tests.differential --minutes $(MINUTES) --seed $$(date +%s)

trackers: $(READY)-to-track  ## with Weights & Biases, MLflow and trackio themselves, offline
	$(BIN)/pytest -m "slow or not slow" tests/unit/test_trackers.py tests/cli/test_tracking.py

check: $(READY)-to-test  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: $(READY)-to-fuzz  ## whatever bytes arrive: a minute, or FUZZ_SECONDS; what fails is kept in build/fuzz/
	$(BIN)/python tests/fuzz/fuzz_wire.py -max_total_time=$(FUZZ_SECONDS)

bench: $(READY)-to-test  ## side by side with bare PyTorch; writes bench/results/
	$(BIN)/python -m bench

docs: $(READY)-to-document  ## the pages as a site: build/site/index.html; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build/site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch is installed first and pinned: an unpinned one may bring gigabytes of CUDA along.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Potluck needs Python 3.11 or newer; say which with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) (once; about a minute)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(READY)-to-test: $(READY)
	@echo "Setting up what the tests need: peers, S3 servers (once; about a minute and a half)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(READY)-to-dist: $(READY)-to-test
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dist]'
	@touch $@

$(READY)-to-cluster: $(READY)-to-test
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,ray]'
	@touch $@

$(READY)-to-fuzz: $(READY)-to-test
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[fuzz]'
	@touch $@

$(READY)-to-track: $(READY)-to-test
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[wandb,mlflow,trackio,otel]'
	@touch $@

$(READY)-to-document: $(READY)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@
