# Everything runs in .venv, made when it is missing. PYTHON chooses the interpreter (3.10 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test lint check benchmark memory clean

demo: $(VENV)/installed
	$(BIN)/python scripts/demo.py

test: $(VENV)/installed
	$(BIN)/python -m pytest

lint: $(VENV)/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

check: $(VENV)/installed
	$(BIN)/python scripts/extract_codebooks.py --check
	$(BIN)/python scripts/make_real_weights.py --check
	$(BIN)/python scripts/check_package.py

benchmark: $(VENV)/installed
	$(BIN)/python scripts/benchmark.py

memory: $(VENV)/installed
	$(BIN)/python scripts/measure_memory.py

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 10) or sys.exit("Python 3.10 or newer is needed; %s is %d.%d (make PYTHON=...)" % (sys.executable, *v))'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .venvs .pytest_cache .mypy_cache .ruff_cache .hypothesis
