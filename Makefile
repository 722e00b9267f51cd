# make serve: set up and serve the built-in model. make test: set up and run every test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
RAY := .venv-ray
MODEL ?= mini
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
FUZZ_S ?= 3600

.PHONY: help setup setup-test serve test test-vllm test-ray lint fuzz docs screenshot clean

help:
	@echo "make serve   serve a model: MODEL=mini HOST=127.0.0.1 PORT=8000 ARGS='--continuous'"
	@echo "make test    run every test"
	@echo "make test-vllm   serve_vllm.py over the real vLLM, on the processor; installs 3.5 GB into $(VLLM)"
	@echo "make test-ray    deploy/ray_app.py on a Ray cluster of this machine; installs into $(RAY)"
	@echo "make fuzz    requests that nobody would write, for FUZZ_S=3600 seconds"
	@echo "make lint    style and types"
	@echo "make docs    docs/api.md, from the models that check the requests"
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

test-vllm: $(VLLM)/installed
	$(VLLM)/bin/python -m pytest -s tests/vllm/test_real_vllm.py $(ARGS)

# PyPI's torchvision and torchaudio want a CUDA torch. vLLM imports the first: without its requirements, and with the
# operators declared that it misses. The second, and torchcodec, are only in the way.
$(VLLM)/installed: pyproject.toml tests/vllm/requirements.txt tests/vllm/torchvision_operators.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --no-deps torchvision==0.28.0
	$(VLLM)/bin/python -m pip install --disable-pip-version-check -r tests/vllm/requirements.txt -e '.[test]'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	cp tests/vllm/torchvision_operators.py "$$($(VLLM)/bin/python -c 'import site; print(site.getsitepackages()[0])')"
	echo 'import torchvision_operators' > \
	  "$$($(VLLM)/bin/python -c 'import site; print(site.getsitepackages()[0])')/torchvision_operators.pth"
	@touch $@

test-ray: $(RAY)/installed
	$(RAY)/bin/python -m pytest -s tests/test_ray_app.py $(ARGS)

$(RAY)/installed: pyproject.toml
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --disable-pip-version-check -e '.[ray,test]'
	@touch $@

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: setup-test
	BLINK_FUZZ_S=$(FUZZ_S) $(BIN)/python -m pytest tests/test_fuzz.py --timeout=0 -s -p no:logging $(ARGS)

docs: setup-test
	$(BIN)/python -m docs.api

screenshot: setup-test
	$(BIN)/python -m bench.screenshot docs/page.png

clean:
	rm -rf $(VENV) $(VLLM) $(RAY) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
