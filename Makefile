# Every target sets up what it needs: a virtual environment in .venv, through plain pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# One compute thread a process: spinning OpenMP threads of several processes starve each other.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv demo test long check system ci mutants test-gpu bench clean distclean
.DELETE_ON_ERROR:

help:
	@echo "make demo      set up, start the whole mesh, ask it three questions, check the answers"
	@echo "make test      set up, and all tests that need no root, no server and no GPU"
	@echo "make long      tests of whole meshes that take minutes"
	@echo "make check     ruff and pyright"
	@echo "make system    containers and collectors: needs root, installs its tools"
	@echo "make ci        check, test, long, system"
	@echo "make mutants   put known bugs back one by one; each must be caught by its tests"
	@echo "make test-gpu  tests that need a CUDA device"
	@echo "make bench     NAME=...: one benchmark of bench/"
	@echo "make clean     remove caches and build outputs; distclean: the environment, too"

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or later is needed, {sys.executable} is {v.major}.{v.minor}; set PYTHON=")'
	@command -v g++ >/dev/null || { echo "g++ is needed (Debian: apt-get install g++)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/deepmesh demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not gpu and not system and not long" $(ARGS)

long: $(STAMP)
	$(BIN)/python -m pytest -m long $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

system: $(STAMP)
	tests/system/install.sh $(BIN)/python
	$(BIN)/python -m pytest -m system tests/system $(ARGS)

ci: check test long system

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(ARGS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu $(ARGS)

bench: $(STAMP)
	@test -n "$(NAME)" -a -f "bench/$(NAME).py" || { echo "NAME= one of: $(basename $(notdir $(wildcard bench/*.py)))" >&2; exit 2; }
	$(BIN)/python -m bench.$(NAME) $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	find kernels -name '*.so' -delete

distclean: clean
	rm -rf $(VENV)
