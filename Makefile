# make serve: set up and serve the built-in model. make test: set up and run every test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= mini
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
FUZZ_S ?= 3600

.PHONY: help setup setup-test serve test lint fuzz screenshot clean

help:
	@echo "make serve   serve a model: MODEL=mini HOST=127.0.0.1 PORT=8000 ARGS='--continuous'"
	@echo "make test    run every test"
	@echo "make fuzz    requests that nobody would write, for FUZZ_S=3600 seconds"
	@echo "make lint    style and types"
	@echo "make screenshot   the picture of the page in the README; needs Chromium"
	@echo "make setup   only install into $(VENV)"
	@echo "make clean   remove the environment and the caches of this folder"

setup: $(VENV)/serve.installed

setup-test: $(VENV)/test.installed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/serve.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	@touch $@

$(VENV)/test.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[test]'
	@touch $@ $(VENV)/serve.installed

serve: setup
	@exec $(BIN)/python serve.py --model $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: setup-test
	$(BIN)/python -m pytest --cov --cov-report=term-missing $(ARGS)

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: setup-test
	BLINK_FUZZ_S=$(FUZZ_S) $(BIN)/python -m pytest tests/test_fuzz.py --timeout=0 -s -p no:logging $(ARGS)

screenshot: setup-test
	$(BIN)/python -m bench.screenshot docs/page.png

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
