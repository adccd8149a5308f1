# Two commands do everything on a fresh machine: `make demo` and `make test`.
# They make their own environment in .venv and install what they need.

PART ?= all
BIN := .venv/bin
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: help demo test check lint docs test-real accept fmt clean

help:
	@echo "make demo       watch an agent learn (about a minute after installation)"
	@echo "make test       run the tests"
	@echo "make check      lint, types, import contracts, documentation, tests"
	@echo "make docs       build the documentation site into site/, offline"
	@echo "make test-real  smoke tests of heavy real parts, each in an environment of its own"
	@echo "make accept     everything that must be shown, by PART (PART=loop); results in bench/results"
	@echo "make fmt        format the code"

.venv/.ready: pyproject.toml constraints.txt scripts/setup.sh
	@bash scripts/setup.sh

demo: .venv/.ready
	@$(BIN)/afield demo

# Five at a time, since most of them wait, in the order of tests/conftest.py. With bytecode files whatever the
# environment says: the processes that the tests start would compile every module again.
test: export PYTHONDONTWRITEBYTECODE =
test: .venv/.ready
	@$(BIN)/python -m pytest -n 5 --dist loadfile --no-loadscope-reorder

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(MKDOCS)

docs: .venv/.ready
	$(MKDOCS)

check: lint test

test-real: .venv/.ready
	@bash scripts/services.sh
	@$(BIN)/python -m pytest tests/real -m "real and not long" --timeout 1800

accept: .venv/.ready
	@$(BIN)/python -m bench.accept $(PART)

fmt: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .cache dist build
