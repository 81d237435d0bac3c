# Two commands do everything on a fresh machine: make run, make test.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := core engine
EDITABLE := $(addprefix -e ./,$(PACKAGES))
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test lint types tests bench docs gpu-test clean

run: $(VENV)/installed
	$(BIN)/python examples/generate_and_check.py

test: lint types tests

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/generate.py --check

types: $(VENV)/installed-dev
	$(BIN)/mypy

tests: $(VENV)/installed-dev
	$(BIN)/pytest -n 2 --dist loadfile

docs: $(VENV)/installed-dev
	$(BIN)/python docs/generate.py

gpu-test: # on a GPU host whose python has the packages installed
	$(PYTHON) -m pytest -m gpu

bench: $(VENV)/installed-dev
	$(BIN)/python benchmarks/bind_hook.py
	$(BIN)/python benchmarks/start_up.py
	$(BIN)/python benchmarks/torch_native_cpu.py
	$(BIN)/python benchmarks/engine_cpu.py

$(VENV)/installed: constraints.txt Makefile $(addsuffix /pyproject.toml,$(PACKAGES))
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "attnplug needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation $(EDITABLE)
	$(PIP) transformers tokenizers
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) pytest pytest-xdist hypothesis mypy ruff
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
