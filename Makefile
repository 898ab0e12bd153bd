# `make train` and `make test` set everything up by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard native/*.c native/*.h)

.PHONY: train test lint typing bench docs clean

train: $(VENV)/built
	$(BIN)/gadei-ps train examples/intents.csv --out runs/intents

test: $(VENV)/built
	$(BIN)/python -m pytest -m "not gpu"

lint: $(VENV)/built typing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy build/typing/gadei_ps

bench: $(VENV)/built
	$(BIN)/python -m pip install -q -e '.[torch,dev,bench]'
	$(BIN)/python benchmarks/run.py

docs: $(VENV)/built
	$(BIN)/python -m pip install -q -e '.[torch,dev,docs]'
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# The stamp is made last: an interrupted set-up is done again. C sources are compiled by pip.
$(VENV)/built: pyproject.toml $(NATIVE) | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -e '.[torch,dev]'
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The tree as it is imported, for mypy: learners/ and watchdog/ are subpackages of gadei_ps.
typing:
	mkdir -p build/typing/gadei_ps
	for path in gadei_ps/*; do ln -sfn ../../../$$path build/typing/gadei_ps/; done
	ln -sfn ../../../learners ../../../watchdog build/typing/gadei_ps/

clean:
	rm -rf $(VENV) build *.egg-info gadei_ps/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
