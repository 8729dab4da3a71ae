# Everything a checkout needs.  `make demo` and `make test` work on a fresh Linux x86-64 machine with Python 3.11.

PYTHON ?= python3
# Where pip finds the CPU build of torch if its configured index has none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := torch==2.13.0+cpu
ARGS ?=
MINUTES ?= 30

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REQUIREMENTS := requirements/cpu.txt requirements/plots.txt requirements/upstream.txt requirements/cpu-no-deps.txt

PYTEST := $(BIN)/python -m pytest -o console_output_style=count
# Fast layers first: a fault in the layout shows before an engine starts.
FAST := tests/docs tests/unit tests/upstream tests/patches tests/kernels
MOONCAKE := tests/transfer tests/engine/test_pd.py
ALL = $(FAST) $$($(LOADS_MOONCAKE) && echo tests/transfer tests/engine || echo tests/engine $(addprefix --ignore=,$(MOONCAKE)))
LOADS_MOONCAKE = $(BIN)/python -c 'import mooncake.engine' 2>/dev/null
SAY_IF_NOT = @$(LOADS_MOONCAKE) || echo 'LEFT OUT: $(MOONCAKE), because Mooncake does not load. On Debian and Ubuntu: apt-get install libibverbs1'

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-real demo-pd test test-all soak check bench bench-full readme-table gpu-check docs docs-check upstream-patch upstream-check upstream-verify fork clean no-version

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16
	@echo
	@echo 'variables: PYTHON=python3.11  ARGS="--part tiny" (demo), ARGS="--dcp 2" (demo-pd) or ARGS="-k layout" (test)'

venv: $(STAMP) ## make .venv with SGLang for CPUs, this package and the tools

$(STAMP): $(REQUIREMENTS) pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo 'expected Python 3.11 or newer, found no program "$(PYTHON)": try make PYTHON=python3.11'; exit 1; }
	@$(PYTHON) -c 'import sys; v = "%d.%d.%d" % sys.version_info[:3]; sys.version_info >= (3, 11) or sys.exit("expected Python 3.11 or newer, got %s from \"$(PYTHON)\": try make PYTHON=python3.11" % v)'
	@echo 'Installing into $(VENV): 3 to 5 minutes and about 3 GB.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-deps $(TORCH) || $(BIN)/python -m pip install --no-deps --index-url $(TORCH_INDEX) $(TORCH)
	$(BIN)/python -m pip install -r requirements/cpu.txt -r requirements/plots.txt -r requirements/upstream.txt
	$(BIN)/python -m pip install --no-deps -r requirements/cpu-no-deps.txt
	$(BIN)/python -m pip install --no-deps -e .
	@touch $@

demo: venv ## real servers on CPUs: plain SGLang, token round-robin and blocks, compared (10 to 12 minutes on two idle cores)
	$(BIN)/python -m sglang_dcp_block.demo $(ARGS)

demo-real: venv ## the trained model at TP8+DCP8 (12 minutes on two cores, 8 GB of memory)
	$(BIN)/python -m sglang_dcp_block.demo --part trained --real $(ARGS)

demo-pd: venv ## prefill and decode servers over Mooncake TCP, blocks against token round-robin
	$(BIN)/python -m sglang_dcp_block.demo.pd $(ARGS)

test: venv ## all tests but the slow ones, fast layers first (20 minutes on two idle cores)
	$(SAY_IF_NOT)
	$(PYTEST) $(ALL) $(ARGS)
	$(SAY_IF_NOT)

test-all: venv ## every test
	$(SAY_IF_NOT)
	$(PYTEST) -m 'slow or not slow' $(ALL) $(ARGS)
	$(SAY_IF_NOT)

soak: venv ## random traffic on served TP2+DCP2, GQA, MLA, and MLA behind a prefill server: MINUTES=30 each (ARGS="-k pd" for one)
	DCP_BLOCK_SOAK_MINUTES=$(MINUTES) $(PYTEST) -s -m slow tests/engine/test_soak.py $(ARGS)

check: venv ## linter, types and the fast tests
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) $(FAST) $(ARGS)

bench: venv ## what blocks gain and where they lose: 10 minutes on two idle cores
	$(BIN)/python -m benchmarks $(ARGS)

bench-full: venv ## the same with more shapes, and the study of fragmentation: an hour
	$(BIN)/python -m benchmarks --full $(ARGS)

readme-table: venv ## renew the README's figures from benchmarks/results
	$(BIN)/python -m benchmarks.headline README.md

gpu-check: ## the kernels on this machine's GPU; needs torch and triton, not SGLang, not .venv
	PYTHONPATH=python $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m sglang_dcp_block.gpu_check $(ARGS)

docs: venv ## write the pages, pictures and the dashboard that are made from the code
	$(BIN)/python -m sglang_dcp_block.patches --docs docs/patch-points.md
	$(BIN)/python -m sglang_dcp_block.compatibility docs/compatibility.md
	$(BIN)/python docs/pictures/draw.py
	$(BIN)/python docs/pictures/transfer_model.py
	$(BIN)/python docs/grafana/dashboard.py
	$(BIN)/python -m sglang_dcp_block.transfer_model docs/transfer-model.md
	$(BIN)/python -m upstream.removals docs/upstreaming.md

docs-check: venv ## dead links, names and errors that do not exist, snippets that do not run
	$(PYTEST) tests/docs tests/patches/test_docs.py tests/patches/test_error_docs.py $(ARGS)

upstream-patch: venv ## the change as a patch series for upstream, in dist/upstream
	$(BIN)/python -m upstream patch $(ARGS)

upstream-verify: venv ## the exported tree without the plugin: its tests, upstream's kits; ARGS=--engine for the engine (26 minutes)
	$(BIN)/python -m upstream verify $(ARGS)

fork: venv ## SGLang with the series, as a wheel in dist/fork
	$(BIN)/python -m upstream fork $(ARGS)

upstream-check: $(if $(VERSION),,no-version) venv ## what has moved in another SGLang: make upstream-check VERSION=0.5.22 ARGS=--diff
	$(BIN)/python -m upstream.check $(VERSION) $(ARGS)

no-version:
	@echo 'expected the release to look at, as in: make upstream-check VERSION=0.5.22'; exit 1

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find python tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
	rm -rf python/*.egg-info
