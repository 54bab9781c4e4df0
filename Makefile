# Each target sets up what it needs, system packages included, on a fresh Debian or Ubuntu machine.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test check format bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.run
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -m "not mount and not slow"

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.run
	$(BIN)/python -m benchmarks.first_epoch

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

# pyfuse3 is compiled here: it needs libfuse's headers, a compiler and Python's headers.
$(VENV)/bin/python: scripts/system-packages
	scripts/system-packages $(PYTHON)
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/.run
