# Every target that runs Python goes through .venv, which tools/make_venv.sh builds once and reuses.
PY := .venv/bin/python
READY := .venv/.ready

# Hundreds of processes import src and tests: compiled once, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

# The whole suite: files side by side where pytest-xdist is, so each process computes on one core.
# Inductor compiles in the process that asks: one that it started for that would import torch again.
ONE_THREAD := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
# One process more than cores, 4 at most: a file waits for its ranks, which wait for each other.
WORKERS = $(shell $(PY) -c 'import os, xdist; print("-n", min(4, os.cpu_count() + 1), "--dist loadfile --no-loadscope-reorder")' 2>/dev/null)
ON_CPUS := CUDA_VISIBLE_DEVICES= $(ONE_THREAD)

# Runs the arguments of pytest, and beside it (with the second ones) kernels under Triton's interpreter, whose variable is
# read at import. It has a worker of its own: when the others wait for ranks, a core is free.
define beside_interpreted
log=$$(mktemp) && trap 'rm -f $$log' EXIT; \
$(ON_CPUS) TRITON_INTERPRET=1 $(PY) -m pytest -q tests/kernels $(2) >$$log 2>&1 & interpreted=$$!; \
$(ON_CPUS) $(PY) -m pytest -q $(WORKERS) $(1); code=$$?; \
wait $$interpreted || code=$$?; cat $$log; exit $$code
endef

.DEFAULT_GOAL := help
.PHONY: help venv test nightly test-for test-oldest test-newest test-peers test-extras site quick quick-ranks golden demo bench kills card bench-docs lint format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 13
	@echo
	@echo 'test, demo and bench pass ARGS="..." on; PYTHON=/path/to/python3 picks the base of .venv.'

venv: $(READY)  ## create or update .venv

test: $(READY)  ## run the CPU tests; those of scripts, other trainers and compiling if what they run changed
ifdef ARGS
	CUDA_VISIBLE_DEVICES= $(PY) -m pytest -q $(ARGS)
else
	@left_out=$$($(PY) -m tools.affected leave-out); \
	echo "left out, nothing that they run changed: $${left_out:-none}"; \
	$(call beside_interpreted,$${left_out:+$$(printf -- '--ignore=%s ' $$left_out)})
endif

nightly: $(READY)  ## run all CPU tests, whole grids, with new examples of hypothesis
	@$(call beside_interpreted,--nightly --hypothesis-profile=explore,--nightly)

test-for: $(READY)  ## run the tests that import FILE, however far: make test-for FILE=src/...
	@found=$$($(PY) -m tools.affected tests $(FILE)) && echo "$${found:?no test imports $(FILE)}" && \
	$(ON_CPUS) $(PY) -m pytest -q $(WORKERS) $$found $(ARGS)

test-oldest: $(READY)  ## run the CPU tests with torch 2.11 and transformers 5.17 (downloads gigabytes once)
	tools/test_lane.sh oldest $(ARGS)

test-newest: $(READY)  ## run the CPU tests with the newest torch, transformers, TRL and PEFT (likewise)
	tools/test_lane.sh newest $(ARGS)

test-peers: $(READY)  ## run what reads or writes other trainers' files, or runs in them (likewise)
	tools/test_lane.sh peers tests/io/interchange tests/integrations $(ARGS)

site: $(READY)  ## build the pages as a site with search into site/ (needs pip install -e '.[site]')
	$(PY) -m mkdocs build --strict

# A Triton beside .venv's brings the products of Blackwell's formats.
TRITON := .venv/triton-3.9.0
test-extras: $(READY)  ## run what needs pip install -e '.[oracles,site,torchft,verl]', Chromium, and Triton 3.9
	$(ON_CPUS) $(PY) -m pytest -q tests/kernels/rows/test_microscaling.py tests/integrations/test_torchft.py \
		tests/integrations/test_verl.py tests/io/checkpoint/test_s3.py tests/test_site.py \
		tests/io/hf/test_bitsandbytes_oracle.py $(ARGS)
	[ -d $(TRITON) ] || $(PY) -m pip install -q --no-deps --target $(TRITON) triton==3.9.0
	$(ON_CPUS) PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(PY) -m pytest -q tests/kernels/test_block_scaled.py \
		tests/kernels/grouped/test_block_scaled.py
	$(ON_CPUS) PYTHONPATH=$(TRITON) $(PY) -m pytest -q tests/kernels/test_compile.py -k blocks

golden: $(READY)  ## remake this platform's golden records (ARGS="paths"; see CONTRIBUTING.md)
	$(ONE_THREAD) $(PY) -m tests.golden.make $(ARGS)

# What most changes break: records, the layer, the experts' operation, units of FSDP.
QUICK := tests/base/test_fields.py tests/test_api.py tests/base/test_torch_private.py \
	tests/test_pages.py tests/parallel/fsdp/test_unit.py tests/kernels/experts \
	tests/moe/test_layer.py tests/moe/test_router.py tests/moe/test_experts.py
# The same on ranks: a step, two golden paths.
QUICK_RANKS := tests/train/test_step.py tests/golden

quick: $(READY)  ## run the tests without ranks that most changes break, in a minute
	$(ON_CPUS) $(PY) -m pytest -q $(WORKERS) $(QUICK) $(ARGS)

quick-ranks: $(READY)  ## run those and a step and the golden paths on ranks
	$(ON_CPUS) $(PY) -m pytest -q $(WORKERS) $(QUICK) $(QUICK_RANKS) $(ARGS)

demo: $(READY)  ## train the tiny preset into runs/demo
	$(PY) -m moecore train --preset tiny --eval-every 50 --run-dir runs/demo $(ARGS)

bench: $(READY)  ## run the benchmarks (on a GPU; else a smoke), then: make bench-docs
	$(PY) -m pytest -q benchmarks $(ARGS)

kills: $(READY)  ## kill ranks in 1,500 steps, three ways to go on (20 minutes; needs .[torchft])
	$(ON_CPUS) $(PY) -m benchmarks.kills $(ARGS)

card: $(READY)  ## run a published figure's step on GPUs beside it: make card CARD=qwen3-30b-a3b-1gpu
	$(PY) -m benchmarks.card $(CARD) $(ARGS)

bench-docs: $(READY)  ## write the tables and plot of benchmarks/results, and the table of costs, from the records
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
