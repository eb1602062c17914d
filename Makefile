# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# Most tests wait for each other's processes, so more of them than cores can run at once.
WORKERS ?= 4
# Hundreds of processes would compile the package, each worker the tests, again and again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

.PHONY: install train test test-all explore fuzz check format bench docs clean

install: $(VENV)/.installed

# torch comes first and pinned: without the pin pip may fetch gigabytes of CUDA packages.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs,hf,plot,s3]'
	touch $@

train: install
	$(BIN)/python examples/train_text.py

# The laws: a few minutes on two cores.
test: install
	$(PYTEST) -m "not slow"

# Everything: also soaks, drills, real servers, all architectures.
test-all: install
	$(PYTEST)

# Each law that is tried on random examples, on ones that nobody has tried yet.
explore: install
	$(PYTEST) --hypothesis-profile=explore -m hypothesis

fuzz: install
	$(BIN)/python -m tests.fuzz --minutes 5 --seed 1000

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/python -m tests.benchmarks --json outputs/benchmarks.json

docs: install
	$(BIN)/python docs/make.py
	@echo "open docs/build/site/index.html"

clean:
	rm -rf $(VENV) build dist docs/build *.egg-info
