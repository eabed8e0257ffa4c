# One command for each thing a contributor or CI does; everything runs in .venv at the checkout's root.
PYTHON ?= python3
PY := .venv/bin/python
HOST ?= 127.0.0.1
PORT ?= 8080
MODEL ?= smollm2-135m
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup compiler native native-sanitize serve check test test-full test-live bench benchmarks gen wheel clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

# --- environment ---------------------------------------------------------------------------------------------------------

.venv/bin/python: | compiler
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "calstack: Python 3.11 or newer is needed; install it and run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "calstack: Python's venv module is missing; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv .venv

.venv/.tools: .venv/bin/python | compiler
	@echo "setup: build tools" >&2
	@$(PY) -m pip install -q --disable-pip-version-check 'scikit-build-core>=1.1' 'nanobind>=3.1' 'cmake>=3.22' ninja
	@touch $@

# The checkout itself is installed in place: Python edits need no rebuild, `make native` rebuilds the compiled module.
EDITABLE = $(PY) -m pip install -q --disable-pip-version-check --no-build-isolation -C wheel.cmake=false -C wheel.py-api=py3 -C editable.mode=inplace

.venv/.serve: pyproject.toml .venv/.tools
	@echo "setup: calstack and its compiler" >&2
	@$(EDITABLE) -e '.[compile]'
	@touch $@

.venv/.dev: pyproject.toml .venv/.serve
	@echo "setup: test and check tools" >&2
	@$(EDITABLE) -e '.[compile,test,dev]'
	@touch $@

.venv/.clients: pyproject.toml .venv/.dev
	@echo "setup: other people's clients" >&2
	@$(EDITABLE) -e '.[compile,test,dev,clients]'
	@touch $@

setup: native .venv/.dev  ## .venv with everything, and the compiled module

compiler:
	@tools/build_native.sh --check

native: .venv/.tools  ## build the compiled module (incremental)
	@tools/build_native.sh

# --- what a user runs ----------------------------------------------------------------------------------------------------

serve: native .venv/.serve  ## fetch, compile, verify and serve $(MODEL) on $(HOST):$(PORT)
	@calbin=$$(.venv/bin/calstack pull $(MODEL) | tail -n 1) && \
	  .venv/bin/calstack verify "$$calbin" >&2 && \
	  exec .venv/bin/calstack serve "$$calbin" --host $(HOST) --port $(PORT)

# --- what a contributor and CI run ---------------------------------------------------------------------------------------

check: setup  ## format, lint, types, import contracts, sizes, changelog, generated files
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PY) tools/size_report.py
	$(PY) tools/check_changelog.py
	$(PY) tools/gen.py --check

test: setup  ## the default tests
	.venv/bin/calstack pull $(MODEL)
	$(PY) -m pytest $(ARGS)

test-full: setup .venv/.clients  ## every test but the ones that need torch
	.venv/bin/calstack pull $(MODEL)
	$(PY) -m pytest -m "not live" --timeout 1800 $(ARGS)

test-live: setup  ## compare with torch and transformers
	@$(EDITABLE) -e '.[live]'
	$(PY) -m pytest -m live --timeout 1800 $(ARGS)

bench: setup  ## offline benchmark of $(MODEL); ARGS are passed on
	.venv/bin/calstack bench "$$(.venv/bin/calstack pull $(MODEL) | tail -1)" $(ARGS)

benchmarks: native  ## microbenchmarks of the kernels; ARGS names some of them
	@tools/run_benchmarks.sh $(ARGS)

native-sanitize: .venv/.tools  ## the native tests under address and undefined-behaviour sanitizers
	@tools/native_sanitize.sh

gen: setup  ## write the generated reference pages and schemas
	$(PY) tools/gen.py

wheel: .venv/.tools  ## a wheel in dist/
	$(PY) -m pip wheel -q --no-deps --no-build-isolation -w dist .

clean:  ## remove build outputs, keep .venv
	rm -rf build dist src/calstack/native/_core*.so
