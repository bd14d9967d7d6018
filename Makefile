# Two commands do everything on a bare machine: `make demo` and `make test`.
# Both make .venv first, from the locked requirements.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=

.PHONY: demo test lint bench soak lock clean

demo: $(STAMP)
	@scripts/demo $(BIN)

test: $(STAMP) lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache > $(VENV)/lint-imports.log 2>&1 || (cat $(VENV)/lint-imports.log; exit 1)

bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks.run

soak: $(STAMP)
	$(BIN)/python -m tests.benchmarks.soak

$(STAMP): pyproject.toml requirements/dev.lock scripts/setup
	@scripts/setup "$(PYTHON)" "$(VENV)"
	@touch $(STAMP)

# Needs the package `uv`; everybody else only reads the result.
lock:
	uv pip compile pyproject.toml --group dev --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-header --no-annotate --upgrade -o requirements/dev.lock

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
