# Everything runs in a virtual environment, made when it is missing.
# make demo PYTHON=python3.12 VENV=elsewhere: another interpreter (3.10 or newer), another place.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: help demo test browser mutants lint check benchmark memory clean

help:
	@echo "demo       decode real weights in all formats with ONNX's ReferenceEvaluator, as a table"
	@echo "test       run the tests"
	@echo "lint       ruff and mypy"
	@echo "browser    test the HTML report in headless Chromium, which must be installed"
	@echo "mutants    the suite's own score: every wrong decoder must be caught"
	@echo "check      generated files and the package are what the scripts make"
	@echo "benchmark  time every format beside ggml's C, gguf-py and, where it is installed, PyTorch (minutes)"
	@echo "memory     peak memory of every format, type and number of threads, 256 Mi elements (minutes)"
	@echo "clean      remove what these have made"

demo: $(VENV)/demo
	$(BIN)/python scripts/demo.py

test: $(VENV)/dev
	$(BIN)/python -m pytest

browser: $(VENV)/dev
	$(BIN)/python -m pytest --override-ini addopts= tests/browser

mutants: $(VENV)/dev
	$(BIN)/python -m conformance mutants

lint: $(VENV)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

check: $(VENV)/dev
	$(BIN)/python scripts/extract_codebooks.py --check
	$(BIN)/python scripts/make_real_weights.py --check
	$(BIN)/python scripts/generate_test_data.py --check
	$(BIN)/python scripts/write_suite_tables.py --check
	$(BIN)/python scripts/write_performance.py --check
	$(BIN)/python scripts/write_magika.py --check
	$(BIN)/python scripts/check_package.py

benchmark: $(VENV)/dev
	$(BIN)/python scripts/benchmark.py

memory: $(VENV)/dev
	$(BIN)/python scripts/measure_memory.py

# The extras demo and dev; a file of that name says that one is installed.
$(VENV)/demo $(VENV)/dev: $(VENV)/%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed, %s is older: make PYTHON=..." % sys.executable)'
	@echo "installing into $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) .venvs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
