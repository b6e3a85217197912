# Every target that runs Python goes through .venv, which tools/make_venv.sh builds once and reuses.
PY := .venv/bin/python
READY := .venv/.ready

# Hundreds of processes import src and tests: compiled once, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

# The whole suite: files side by side where pytest-xdist is, so each process computes on one core.
ONE_THREAD := OMP_NUM_THREADS=1
WORKERS = $(shell $(PY) -c 'import xdist' 2>/dev/null && echo '-n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder')

.DEFAULT_GOAL := help
.PHONY: help venv test golden demo bench bench-docs lint format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12
	@echo
	@echo 'test, demo and bench pass ARGS="..." on; PYTHON=/path/to/python3 picks the base of .venv.'

venv: $(READY)  ## create or update .venv

test: $(READY)  ## run the CPU tests (those for GPUs: .venv/bin/python -m pytest -m gpu)
	CUDA_VISIBLE_DEVICES= $(if $(ARGS),,$(ONE_THREAD)) $(PY) -m pytest -q $(if $(ARGS),$(ARGS),$(WORKERS))
	$(if $(ARGS),,CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(ONE_THREAD) $(PY) -m pytest -q $(WORKERS) tests/kernels)

golden: $(READY)  ## remake this platform's golden records (ARGS="paths"; see CONTRIBUTING.md)
	$(ONE_THREAD) $(PY) -m tests.golden.make $(ARGS)

# What most changes break: records, the layer, the experts' operation, a step, two golden paths.
QUICK := tests/test_fields.py tests/test_api.py tests/test_torch_names.py \
	tests/test_pages.py tests/test_step.py tests/shard/test_unit.py tests/kernels/experts \
	tests/moe/test_layer.py tests/moe/test_router.py tests/moe/test_experts.py tests/golden

quick: $(READY)  ## run the tests that most changes break, in about a minute
	CUDA_VISIBLE_DEVICES= $(ONE_THREAD) $(PY) -m pytest -q $(WORKERS) $(QUICK) $(ARGS)

demo: $(READY)  ## train the tiny preset into runs/demo
	$(PY) examples/train.py --preset tiny --eval-every 50 --run-dir runs/demo $(ARGS)

bench: $(READY)  ## run the benchmarks (on a GPU; else a smoke), then: make bench-docs
	$(PY) -m pytest -q benchmarks $(ARGS)

bench-docs: $(READY)  ## write docs/benchmarks.md, its plot and the table of costs from benchmarks/results
	$(PY) -m benchmarks.report
	$(PY) -m benchmarks.make_cost_table

lint: $(READY)  ## check format, lint rules and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy src/moecore

format: $(READY)  ## rewrite the code to the project's format
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:  ## remove caches and build outputs (keeps .venv and runs)
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . \( -path ./.venv -o -path ./runs \) -prune \
		-o -type d -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	bash tools/make_venv.sh
