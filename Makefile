# `make train` and `make test` set everything up by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard native/*.c native/*.h)

# Where it is set, each new interpreter would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-gpu test-systemd crash crash-all search mutants verify stress fuzz soak lint typing bench \
	bench-gpu reproduce gpu-ready docs clean

train: $(VENV)/built
	$(BIN)/gadei-ps train examples/intents.csv --out runs/intents --overwrite

WORKERS ?= 3  # of pytest; most tests wait for processes, so more than the cores

# In two parts: tests fork their own process, so those that make it large have processes of their own.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -rs -m "not gpu and not systemd"

test: $(VENV)/frameworks
	$(PYTEST) --part large; large=$$?; $(PYTEST) --part small && exit $$large

# The units under a systemd that is booted in namespaces. Needs root, systemd, dbus and util-linux.
# WALK_ROUNDS=500: a long random walk instead of one of 15 rounds, an hour or so.
test-systemd: $(VENV)/built
	$(BIN)/python -m pytest -m systemd -rs tests/systemd

# On a machine with a GPU; a test that lacks something is skipped and says what. CUDA: 12 or 13, what
# the driver has. GPU_PYTHON: an interpreter that has all packages already; for it only gadei-ps is
# built, and nothing is fetched.
CUDA ?= 13

test-gpu: gpu-ready
	$(GPU_BIN) -m pytest -m gpu -rs

bench-gpu: gpu-ready
	$(GPU_BIN) -m gadei_ps.benchmarks.gpu

ifdef GPU_PYTHON
GPU_BIN := $(GPU_PYTHON)
gpu-ready:
	$(GPU_BIN) -m pip install -q --no-index --no-deps --no-build-isolation -e .
else
GPU_BIN := $(BIN)/python
gpu-ready: $(VENV)/built
	$(GPU_BIN) -m pip install -q -e '.[torch,dev,cuda$(CUDA)]'
endif

# A thousand kills of servers and a thousand of learners (500 in each of two jobs); `test` has a short version.
crash: $(VENV)/built
	CRASH_ROUNDS=500 $(BIN)/python -m pytest --timeout 7200 tests/crash

# The counts of tests/exhaustive, whole: hours. `test` has a part of each.
crash-all: $(VENV)/built
	CRASH_ALL=1 $(BIN)/python -m pytest --timeout 7200 tests/exhaustive

# The properties with other examples than those that `test` draws in each run.
search: $(VENV)/frameworks
	$(BIN)/python -m pytest -n $(WORKERS) -m hypothesis --hypothesis-profile search

# Leaves out stores, fences, leases and checks of generations one by one: hours. Needs root.
mutants: $(VENV)/built
	$(BIN)/python tests/exhaustive/mutants.py

# The protocol's models; needs spin and a C compiler.
verify:
	native/verify/run

# The C ring under ThreadSanitizer, and litmus tests of the memory orders.
stress:
	tests/stress/run

# Coverage-guided fuzzing of the C code; needs clang.
fuzz:
	tests/fuzz/run

# Half an hour of kills and checkpoints, after which nothing may have grown.
soak: $(VENV)/built
	$(BIN)/python -m gadei_ps.benchmarks.soak

lint: $(VENV)/built typing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy build/typing/gadei_ps

bench: $(VENV)/built
	$(BIN)/python -m pip install -q -e '.[torch,dev,bench]'
	$(BIN)/python -m gadei_ps.benchmarks

# What the papers on synchronization models report, measured again: an hour or so.
reproduce: $(VENV)/built
	$(BIN)/python -m pip install -q -e '.[torch,dev,bench]'
	$(BIN)/python -m gadei_ps.benchmarks.reproduce

docs: $(VENV)/built
	$(BIN)/python -m pip install -q -e '.[torch,dev,docs]'
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# C sources are compiled by pip. It would compile modules of Python on one core only, and all of them:
# nothing here imports what is in these folders, or little of it.
EXTRAS = torch,dev
RARE := tests|testing/_internal|_vendor|_vendored|mypyc?|lexers|sympy/physics|pytorch_lightning
RARE := $(RARE)|jax/experimental|pallas|internal_test_util|ray/(data|llm|rllib|serve|train|tune)
RARE := $(RARE)|transformers/models
define set-up
$(BIN)/python native/build_identity.py
$(BIN)/python -m pip install -q --upgrade pip
$(BIN)/python -m pip install -q --no-compile -e '.[$(EXTRAS)]'
$(BIN)/python -W ignore -m compileall -qq -j 0 -x '/($(RARE))/' $(VENV)/lib || true
endef

# The stamp is made last: an interrupted set-up is done again.
$(VENV)/built: pyproject.toml setup.py $(NATIVE) | $(VENV)/bin/python
	$(set-up)
	touch $@

# With what only tests need: some 80 MB more to fetch, 330 MB on the disk.
$(VENV)/frameworks: EXTRAS = torch,dev,browser,frameworks
$(VENV)/frameworks: pyproject.toml setup.py $(NATIVE) | $(VENV)/bin/python
	$(set-up)
	touch $(VENV)/built $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The tree as it is imported, for mypy: learners/ and watchdog/ are subpackages of gadei_ps.
typing:
	mkdir -p build/typing/gadei_ps
	for path in gadei_ps/*; do ln -sfn ../../../$$path build/typing/gadei_ps/; done
	ln -sfn ../../../learners ../../../watchdog ../../../systemd ../../../benchmarks build/typing/gadei_ps/

clean:
	rm -rf $(VENV) build *.egg-info gadei_ps/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
