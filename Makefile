# Every target sets up what it needs: a virtual environment in .venv, through plain pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# One compute thread a process: spinning OpenMP threads of several processes starve each other.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Tests at once; each file stays in one process. JOBS=0 runs them one after the other.
JOBS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc); echo $$((n > 8 ? 8 : n)))
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Two runs of pytest, the second one also behind a failed first one: what measures time runs alone.
# $(1): the tests; $(2): files to look for them in. ARGS may leave one of the two runs without any
# (status 5), not both.
marked = $(if $(ARGS),,$(sort $(shell grep -rlE --include='test_*.py' 'mark\.$(1)\b' tests)))
define run_tests
@first=0; second=0; \
echo "---- $(1): $(JOBS) at once"; \
$(PYTEST) $(PARALLEL) -m "($(1)) and not alone" $(2) $(ARGS) || first=$$?; \
echo "---- $(1): what runs alone"; \
$(PYTEST) -m "($(1)) and alone" $(call marked,alone) $(ARGS) || second=$$?; \
case $$first/$$second in 0/0 | 0/5 | 5/0) ;; *) exit 1 ;; esac
endef

.PHONY: help licences fuzz venv kernels demo test long large check system chaos chaos-long soak ci mutants test-gpu test-gpus bench clean distclean
.DELETE_ON_ERROR:

help:
	@echo "make demo      set up, start the whole mesh, ask it three questions, check the answers"
	@echo "make test      set up, and all tests that need no root, no server and no GPU; JOBS=N files at once"
	@echo "make long      tests of whole meshes that take minutes"
	@echo "make large     groups of 128 ranks in the simulator, 20 kills of ranks: minutes each, by hand"
	@echo "make check     ruff and pyright"
	@echo "make system    containers, hosts, collectors, a browser: needs root, installs its tools"
	@echo "make chaos     3 minutes of random faults under streams; chaos-long: 210 of them"
	@echo "make soak      30 minutes at 80 % load: what grows or gets slower is named; by hand"
	@echo "make ci        check, test, long, system, chaos"
	@echo "make mutants   put known bugs back one by one; each must be caught by its tests"
	@echo "make test-gpu  tests that need a CUDA device"
	@echo "make test-gpus tests and benchmarks of two GPUs; PARTS=...: only these"
	@echo "make fuzz      MINUTES=60: all fuzz targets by coverage; what is found is kept"
	@echo "make licences  writes docs/licences.md: what runs with deepmesh, and how it is licensed"
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

kernels: $(STAMP)
	$(BIN)/python -m kernels.native

test: kernels
	$(call run_tests,not gpu and not system and not long and not large)

long: kernels
	$(call run_tests,long and not gpu,$(call marked,long))

large: $(STAMP)
	$(BIN)/python -m pytest -m "large and not system" $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

system: $(STAMP)
	tests/system/install.sh $(BIN)/python
	$(BIN)/python -m pytest -m system tests/system $(ARGS)

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --seconds 180 --slack 2 $(ARGS)

chaos-long: $(STAMP)
	$(BIN)/python -m tests.chaos --seconds 3600 --faults 210 $(ARGS)

soak: kernels
	$(BIN)/python -m tests.soak $(ARGS)

ci: check test long system chaos

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(ARGS)

test-gpu: $(STAMP)
	$(PYTEST) $(PARALLEL) -m "gpu and not long" -rs $(call marked,gpu) $(ARGS)
	$(PYTEST) -n $(JOBS) --dist load -m "gpu and long" -rs tests/kernels/test_cuda_sanitizers.py $(ARGS)

OUT ?= $(CURDIR)/bench/results
PARTS ?= comm kernels mesh decode prefill overlap determinism
test-gpus: $(STAMP)
	tests/two_gpus.sh $(BIN)/python $(OUT)/two_gpus $(PARTS)

MINUTES ?= 60
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[fuzz]"
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(ARGS)

licences: $(STAMP)
	$(BIN)/python -m tools.licences

bench: $(STAMP)
	@test -n "$(NAME)" -a -f "bench/$(NAME).py" || { echo "NAME= one of: $(basename $(notdir $(wildcard bench/*.py)))" >&2; exit 2; }
	$(BIN)/python -m bench.$(NAME) $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	find kernels -name '*.so' -delete

distclean: clean
	rm -rf $(VENV)
