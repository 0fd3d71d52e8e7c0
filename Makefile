# Everything a newcomer needs: `make demo` and `make test` set up what they need themselves.
#   make demo PYTHON=python3.12          another interpreter
#   make demo TORCH="torch==2.12.0"       another torch
#   make demo VENV=/elsewhere/venv       another place for the environment

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
TORCH_VERSION ?= 2.13.0

# Without a GPU, ask for the CPU build by name: a plain `torch` can bring several GB of CUDA.
ifeq ($(shell uname -s),Linux)
ifeq ($(shell command -v nvidia-smi),)
TORCH ?= torch==$(TORCH_VERSION)+cpu
endif
endif
TORCH ?= torch==$(TORCH_VERSION)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

OUT ?= demo-output
STEPS ?= 300
REPEATS ?= 5

BIN := $(VENV)/bin
PIP := "$(BIN)/python" -m pip --disable-pip-version-check
PIPEDREAM := "$(BIN)/pipedream"
READY := $(VENV)/.pipedream-installed

.DEFAULT_GOAL := help
.PHONY: help demo test smoke lint types check check-speed bench-plan bench-emulated bench-runtime bench-replicas bench-convergence bench-memory install clean FORCE

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(READY) ## profile, plan and train a small language model with two workers on this CPU
	@mkdir -p "$(OUT)"
	$(PIPEDREAM) profile examples/bytes_gpt.py --threads 1 -o "$(OUT)/profile.json"
	$(PIPEDREAM) plan "$(OUT)/profile.json" --cluster local --devices 2 --stages 2 -o "$(OUT)/plan.json"
	$(PIPEDREAM) train "$(OUT)/plan.json" --steps $(STEPS) --threads 1

test: $(READY) ## run the tests
	"$(BIN)/python" -m pytest

smoke: $(READY) ## run the installed command from profile to train, checking exit codes and --json
	"$(BIN)/python" tests/smoke.py $(PIPEDREAM)

lint: $(READY) ## check style
	"$(BIN)/python" -m ruff check .

types: $(READY) ## check types
	"$(BIN)/python" -m mypy

check-speed: $(READY) ## check that four workers whose layers sleep keep busy, with room for a busy machine
	"$(BIN)/python" benchmarks/emulated.py --least 0.8

check: lint types test smoke check-speed ## everything that continuous integration runs

bench-plan: $(READY) ## plan published models beside what others found (REPEATS=5)
	"$(BIN)/python" benchmarks/plan.py --repeats $(REPEATS)

bench-convergence: $(READY) ## validation loss of every weight policy beside a plain loop; writes docs/convergence.md
	"$(BIN)/python" benchmarks/convergence.py --write

bench-emulated: $(READY) ## schedules with more workers than cores, beside torch's (REPEATS=5)
	"$(BIN)/python" benchmarks/emulated.py --repeats $(REPEATS)

bench-runtime: $(READY) ## two workers beside the ideal, DDP and torch's schedules; slow links need root (REPEATS=5)
	"$(BIN)/python" benchmarks/runtime.py --repeats $(REPEATS)

bench-replicas: $(READY) ## what of an all-reduce overlaps, on a limited link beside DDP; needs root (REPEATS=5)
	"$(BIN)/python" benchmarks/replicas.py --repeats $(REPEATS)

bench-memory: $(READY) ## predicted and measured peak memory of each worker, under every policy
	"$(BIN)/python" benchmarks/memory.py

install: $(READY) ## create the environment only

clean: ## remove the environment and everything that was built
	rm -rf "$(VENV)" "$(OUT)" build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path "./.git/*" -prune -exec rm -rf {} +

# The name of the wanted torch is kept in a file, so that another TORCH installs again.
$(VENV)/.torch-wanted: FORCE
	@test -x "$(BIN)/python" || { echo "creating $(VENV)"; "$(PYTHON)" -m venv "$(VENV)"; }
	@"$(BIN)/python" -c 'import sys; sys.exit("error: Python %d.%d is too old, 3.10 is needed\nhint: make demo PYTHON=python3.11" % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	@echo '$(TORCH)' | cmp -s - "$@" || echo '$(TORCH)' > "$@"

$(VENV)/.torch-installed: $(VENV)/.torch-wanted
	@echo "installing $(TORCH)"
	@$(PIP) install -qq $(TORCH) 2> "$(VENV)/torch-install.log" || $(PIP) install --quiet $(TORCH) --index-url $(TORCH_INDEX) || \
	  { cat "$(VENV)/torch-install.log" >&2; echo 'error: cannot install $(TORCH)' >&2; \
	    echo 'hint: choose a torch for this machine, for example: make demo TORCH=torch' >&2; exit 1; }
	@touch "$@"

$(READY): $(VENV)/.torch-installed setup.cfg pyproject.toml
	@echo "installing pipedream and its tools"
	@$(PIP) install -qq --editable ".[examples,dev]"
	@touch "$@"
