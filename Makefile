# `make` lists the targets. All of them work in .venv, which scripts/bootstrap makes when it is not there yet.
# More words for pytest: make test PYTEST_ARGS='-k order -x'

.DEFAULT_GOAL := help
.PHONY: help setup demo check check-and-collect collect test test-long test-gpu test-exhaustive bench docs dist clean
BIN := .venv/bin
PYTEST_ARGS ?=
SITE ?= site
# Most tests wait for processes and networks: four at once keep two cores busy, and six are no faster.
export WORKERS ?= 4

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 20

setup: ## make .venv with the tested versions (a minute or two; nothing to do the second time)
	@scripts/bootstrap

demo: setup ## one rank against two, then kill -9 of a rank of a running training (under two minutes)
	$(BIN)/shoal demo

check: setup ## ruff, formatting, mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Importing all tests compiles them once: four workers of pytest that begin without would each do all of it. mypy has
# one thread, so that this takes no time on a machine with two cores.
collect: setup
	@env --unset PYTHONDONTWRITEBYTECODE $(BIN)/pytest --collect-only -qq > /dev/null || $(BIN)/pytest --collect-only -q

check-and-collect: check collect

test: setup ## check, then every test but the long ones
	@$(MAKE) --no-print-directory --jobs 2 --output-sync check-and-collect
	scripts/run-tests -m "not long and not exhaustive" $(PYTEST_ARGS)

# pytest ends with 5 when no test matched, which is no failure here.
test-long: setup ## the long tests
	scripts/run-tests -m "long and not exhaustive" $(PYTEST_ARGS) || [ $$? -eq 5 ]

test-gpu: setup ## the tests that need a GPU; they need a CUDA build of torch in .venv
	$(BIN)/pytest -m gpu $(PYTEST_ARGS)

test-exhaustive: setup ## every scenario, every way to exchange, thousands of fuzzed inputs (hours)
	$(BIN)/pytest -m exhaustive $(PYTEST_ARGS) || [ $$? -eq 5 ]

bench: setup ## every benchmark; one of them alone: .venv/bin/python benchmarks/NAME.py
	@for file in benchmarks/[a-z]*.py; do \
		[ -e "$$file" ] || { echo "there are no benchmarks yet"; continue; }; \
		echo "$(BIN)/python $$file"; $(BIN)/python "$$file" || exit; \
	done

# The extra `docs` alone, in an environment of its own: no torch, so it is made in seconds, and .venv stays as it is.
.venv-docs/made: pyproject.toml constraints.txt | setup
	$(BIN)/python -m venv --clear --without-pip .venv-docs
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])' \
		| xargs $(BIN)/python -m pip --python .venv-docs/bin/python install --quiet --constraint constraints.txt
	@touch $@

docs: setup .venv-docs/made ## the site of docs/, in site/: open site/index.html; search works without a server
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict --site-dir $(SITE)

dist: setup ## the wheel and the source archive, in dist/
	scripts/dist

clean: ## remove .venv, runs/, the site, caches and built packages (everything in runs/ is lost)
	rm -rf .venv .venv-docs site runs dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(wildcard src tests benchmarks examples) -name __pycache__ -prune -exec rm -rf {} +
