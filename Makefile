# make demo   set everything up and run the main job with a real small model
# make test   set everything up and run all tests
# make check  format, lint, types, import contracts
# make soak [SOAK=20] [SEED=...]   property tests with SOAK times as many examples, random ones without a SEED; 10,000 handoffs,
#                                  the main job with all its prompts
# make sim [SEED=7]                the simulation, its random rounds with this seed only
# make bench-serve URL=http://127.0.0.1:8000   load a running server

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
URL ?= http://127.0.0.1:8000
MODEL ?= smollm2
ARGS ?=
SOAK ?= 20
SEED ?=
SOAKED := tests/property $(patsubst %,tests/integration/test_%.py,handoff_soak main_job tiny_pool)

.PHONY: demo test check format soak sim bench-serve clean

demo: $(READY)
	@$(BIN)/prelay demo

test: $(READY)
	$(BIN)/pytest $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: $(READY)
	@seed=$(or $(SEED),$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')); \
	again="make soak SOAK=$(SOAK) SEED=$$seed"; echo "$$again"; \
	PRELAY_SOAK=$(SOAK) $(BIN)/pytest $(SOAKED) --timeout=0 --hypothesis-seed=$$seed $(ARGS) \
		|| { echo "Failed. The same again: $$again"; exit 1; }

sim: $(READY)
	PRELAY_SEED=$(SEED) $(BIN)/pytest tests/simulation $(ARGS)

bench-serve: $(READY)
	$(BIN)/python -m benchmarks.serve --url $(URL) --model $(MODEL) $(ARGS)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Prelay needs Python 3.11 or newer, this is {sys.version}"'
	@echo "Setting up $(VENV) (about 2 GB, one minute with a fast network)."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --progress-bar on --editable . --group dev
	@touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
