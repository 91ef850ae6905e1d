# Everyday verbs, the same for people and for CI.  `make help` lists them.
#
#   make setup PYTHON=python3.12     another interpreter (3.11 or newer)
#   make setup UV=                   pip even where uv is on the path
#   make setup TORCH_BACKEND=cpu     with uv: the CPU build of torch, also on a machine with a GPU
#   make setup PIP_ARGS="..."        with pip: extra arguments, e.g. an index of CPU builds of torch
#   make test WORKERS=0              in this process alone; as a rule one for each core, at most 4

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

CANDIDATES := python3 python3.13 python3.12 python3.11
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
UV ?= $(shell command -v uv 2>/dev/null)
TORCH_BACKEND ?= auto
PIP_ARGS ?=
WORKERS ?= auto
VENV ?= .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt
# Workers and the processes they start would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
# A file goes to one worker whole: what its tests share is made once.  Files begin in the order of
# tests/longest_first.py, and not by how many tests they have.
pytest = $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

ifeq ($(UV),)
create = $(PYTHON) -m venv $(VENV)
install = $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt $(PIP_ARGS) -e "$(1)"
else
create = $(UV) venv --quiet --allow-existing --python $(PYTHON) $(VENV)
install = $(UV) pip install --quiet --python $(BIN)/python --torch-backend=$(TORCH_BACKEND) \
	-c constraints.txt -e "$(1)"
endif

.PHONY: help setup demo test test-full compile lint mutants faults bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.dev  ## .venv with the package, editable, and the tools to work on it

demo: $(VENV)/.core  ## stream a completion from the bundled model
	@$(BIN)/paceline generate --echo --prompt "def fibonacci(n):" --max-tokens 128 --temperature 0

test: $(VENV)/.dev  ## the CPU suite
	$(pytest) -m "not gpu and not slow"

test-full: $(VENV)/.dev  ## the CPU suite with the long products
	$(pytest) -m "not gpu"

compile: $(VENV)/.dev  ## every launch of the kernel tests, as a compiler for an H100 takes it; needs no GPU
	PYTHONPATH=tests/kernels $(pytest) -p compiling -m "not gpu and not slow" tests/kernels

lint: $(VENV)/.dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

mutants: $(VENV)/.dev  ## mutate every derivation of metadata; the suite must notice
	$(BIN)/python tests/mutants/mutant_campaign.py --json docs/results/mutants.json

faults: $(VENV)/.dev  ## plant faults written by hand; the tests they name must notice
	$(BIN)/python tests/mutants/fault_campaign.py --json docs/results/faults.json

bench: $(VENV)/.core  ## latency of the bundled model on this machine
	$(BIN)/paceline bench latency --batch-size 1,8 --input-len 128 --output-len 65

clean:  ## remove what the verbs above made, the environment included
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks recipes -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@[[ -n "$(PYTHON)" ]] || { echo "python must be 3.11 or newer, got none of: $(CANDIDATES);" \
		"name one with PYTHON=..." >&2; exit 2; }
	$(create)

# Stamps: an installation is repeated only when what it depends on has changed.
$(VENV)/.core: $(INPUTS) | $(BIN)/python
	$(call install,.)
	@touch $@

$(VENV)/.dev: $(INPUTS) | $(BIN)/python
	$(call install,.[dev])
	@touch $@ $(VENV)/.core
