# Two commands do everything on a bare machine: `make demo` and `make test`.
# `make demo DEMO_ARGS=--json` prints one JSON object a step.
# Both make .venv first, from the locked requirements.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FRAMEWORKS := $(VENV)/frameworks
GENERATORS := $(VENV)/generators
# Once made, these are renewed by `make test`, as .venv is.
MADE := $(wildcard $(FRAMEWORKS)/.installed $(FRAMEWORKS)-mcp1/.installed $(GENERATORS)/.installed)
PYTEST_ARGS ?=
DEMO_ARGS ?=

.PHONY: demo cluster-demo test check lint bench compare fuzz planted soak release docker image lock clean frameworks

demo: $(STAMP) docker
	@$(BIN)/python scripts/demo.py $(DEMO_ARGS)

cluster-demo: $(STAMP) docker
	@PYTHONPATH=tests:. $(BIN)/python scripts/cluster_demo.py

test: $(STAMP) docker $(MADE)
	@scripts/test $(BIN) $(PYTEST_ARGS)

check: $(STAMP) docker $(MADE)
	@scripts/test $(BIN) --changed $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache > $(VENV)/lint-imports.log 2>&1 || (cat $(VENV)/lint-imports.log; exit 1)

bench: $(STAMP) image
	@$(BIN)/fumehood images build python > /dev/null
	PYTHONPATH=tests $(BIN)/python -m benchmarks.run

compare: $(STAMP) docker
	@scripts/compare $(BIN)

fuzz: $(STAMP)
	@scripts/fuzz $(BIN)

planted: $(STAMP)
	$(BIN)/python scripts/planted.py

soak: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m benchmarks.soak

release: $(STAMP) docker
	@scripts/release $(BIN)

# Without Docker everything but containers works, so a failure here ends nothing; it says why.
docker:
	@PYTHON="$(PYTHON)" scripts/docker-setup || true

image: $(STAMP) docker
	@$(BIN)/fumehood images build > /dev/null

$(STAMP): pyproject.toml requirements/dev.lock scripts/setup
	@scripts/setup "$(PYTHON)" "$(VENV)"
	@touch $(STAMP)

# Where an environment has the engine on its path only, it finds the parts in this metadata.
METADATA = ln -sfn $(CURDIR)/$(VENV)/lib/python3*/site-packages/fumehood-*.dist-info $(@D)/lib/python3*/site-packages/

# For the tests of the adapters: the frameworks would not fit the developers' pins.
frameworks: $(FRAMEWORKS)/.installed $(FRAMEWORKS)-mcp1/.installed $(GENERATORS)/.installed

$(FRAMEWORKS)/.installed: requirements/frameworks.lock Makefile | $(STAMP)
	$(BIN)/python -m venv --without-pip $(FRAMEWORKS)
	$(BIN)/uv pip install --quiet --python=$(FRAMEWORKS)/bin/python --require-hashes \
		--requirement requirements/frameworks.lock
	@$(METADATA)
	@touch $@

$(GENERATORS)/.installed: requirements/generators.lock | $(STAMP)
	$(BIN)/python -m venv --without-pip $(GENERATORS)
	$(BIN)/uv pip install --quiet --python=$(GENERATORS)/bin/python --require-hashes \
		--requirement requirements/generators.lock
	@touch $@

# Without what `tool.uv` in pyproject.toml excludes, so without a check of dependencies.
$(FRAMEWORKS)-mcp1/.installed: requirements/frameworks-mcp1.lock Makefile | $(STAMP)
	$(BIN)/python -m venv --without-pip $(FRAMEWORKS)-mcp1
	$(BIN)/uv pip install --quiet --python=$(FRAMEWORKS)-mcp1/bin/python --require-hashes --no-deps \
		--requirement requirements/frameworks-mcp1.lock
	@$(METADATA)
	@touch $@

# The wheels of claude-agent-sdk hold a program of 350 MB that no test needs; its source does not.
lock: $(STAMP)
	$(BIN)/uv pip compile pyproject.toml --group dev --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-header --no-annotate --upgrade -o requirements/dev.lock
	$(BIN)/uv pip compile --group compare --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-header --no-annotate --upgrade -o requirements/compare.lock
	$(BIN)/uv pip compile --group fuzz --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-header --no-annotate --upgrade -o requirements/fuzz.lock
	$(BIN)/uv pip compile pyproject.toml --group frameworks --extra autogen --extra claude-agent-sdk \
		--extra deepagents --extra inspect-ai --extra jupyter --extra openai-agents \
		--extra pydantic-ai --extra smolagents --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-header --no-annotate \
		--no-binary claude-agent-sdk --emit-build-options \
		--upgrade -o requirements/frameworks.lock
	$(BIN)/uv pip compile pyproject.toml --group frameworks-mcp1 --extra crewai --extra langchain \
		--universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--no-annotate --upgrade -o requirements/frameworks-mcp1.lock
	$(BIN)/uv pip compile --group generators --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-header --no-annotate --upgrade -o requirements/generators.lock

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
