# `make quickstart` trains the demonstration; `make test` runs the suite. Both build .venv first; PYTHON picks its Python.
PYTHON ?= python3
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
JOBS ?= 2
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax

.PHONY: install quickstart test slow benchmarks lint clean

install: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

quickstart: install
	$(BIN)/rljax train experiments/quickstart.py

test: install
	$(BIN)/python -m pytest -n $(JOBS) tests

slow: $(VENV)-compile/.installed  # apart: the GPU compiler without a driver has much to say in every process
	$(VENV)-compile/bin/python -m pytest -m slow tests
$(VENV)-compile/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-compile
	$(VENV)-compile/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,compile]'
	touch $@

benchmarks: install
	$(BIN)/python benchmarks/loop.py
	$(BIN)/python benchmarks/sharding.py
	$(BIN)/python benchmarks/cpu.py

lint:
	$(BIN)/python -m pip install --quiet ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

clean:
	rm -rf .venv* .cache
