# `make demo` and `make test` need Python >= 3.11 with pip, and nothing else; they make .venv.

.PHONY: help demo test check bench clean

help:
	@echo "make demo    start the bundled model on two stages x two ranks and watch it answer"
	@echo "make test    all tests that need no GPU"
	@echo "make check   format, lint, types"
	@echo "make bench   the CPU benchmark"
	@echo "make clean   remove .venv and what the tools left"

demo:
	@scripts/setup
	@.venv/bin/stagecoach demo

test:
	@scripts/test

check:
	@scripts/check

bench:
	@scripts/bench cpu

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
