# What a newcomer and CI run. `make` alone says what there is.
# Each target works from a fresh clone: the first one that needs it makes a virtual environment in .venv.

PORT ?= 8000
ARGS ?=
SHARED := ../shared
# the first interpreter that can make a virtual environment and is new enough (a name on the path may be an empty shim)
PYTHON ?= $(shell for p in python3.11 python3.13 python3.12 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
RUN := .venv/bin/python

# a configuration's own `listen` holds, unless PORT was asked for as well
SERVE_PORT = $(if $(and $(filter -c% --config%,$(ARGS)),$(filter file,$(origin PORT))),,--port $(PORT))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help run test lint types bench agreement conformance soak memory test-vllm clean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

run: .venv/run.stamp ## serve on PORT (8000) with the embedded synthetic upstream; ARGS is added to the command
ifeq ($(filter --backend% -c% --config%,$(ARGS)),)
	@echo
	@echo 'tokenpipe, with a synthetic engine behind it. Once it says that it is listening, try in another terminal:'
	@echo
	@echo "  curl -N http://127.0.0.1:$(PORT)/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"model\": \"synthetic\", \"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], \"stream\": true}'"
	@echo
	@echo 'and look on in a browser: /-/dashboard at the admin address that it names (http://127.0.0.1:9400/-/dashboard)'
	@echo
endif
	@exec $(RUN) -m gateway serve $(SERVE_PORT) $(ARGS)

# all three are run, so that one run shows all there is to mend; pytest comes last, with its closing line
test: .venv/test.stamp ## ruff, mypy --strict and the tests; ARGS is added to pytest's command
	@status=0; \
	$(RUN) -m ruff check . || status=1; \
	$(RUN) -m mypy --strict gateway || status=1; \
	$(RUN) -m pytest $(ARGS) || status=1; \
	exit $$status

lint: .venv/test.stamp ## ruff alone
	@$(RUN) -m ruff check .

types: .venv/test.stamp ## mypy alone
	@$(RUN) -m mypy --strict gateway

bench: .venv/run.stamp ## processor time an event and a request, beside nginx's (needs gcc and nginx)
	@if [ -f $(SHARED)/bench/compare.py ]; then \
	  exec $(RUN) $(SHARED)/bench/compare.py \
	    '$(RUN) -m gateway serve --port {port} --admin-port 0 --backend {upstream} --log-level warning' $(ARGS); \
	else echo 'make bench: there is no $(SHARED)/bench/compare.py here'; fi

agreement: .venv/run.stamp ## the same run by loadtest, vllm bench serve and evalscope perf, half an hour; ARGS='--evalscope PATH'
	@exec $(RUN) -m tests.bench.agreement $(ARGS)

conformance: .venv/run.stamp ## the conformance kit, if it lies beside this checkout; ARGS='--kind framing'
	@if [ -f $(SHARED)/conformance/run.py ]; then \
	  exec $(RUN) $(SHARED)/conformance/run.py \
	    '$(RUN) -m gateway serve --port {port} --admin-port {admin} --backend {upstream}' \
	    --config-command '$(RUN) -m gateway serve -c {config}' $(ARGS); \
	else echo 'make conformance: there is no $(SHARED)/conformance/run.py here'; fi

soak: .venv/test.stamp ## 100,000 streams with every ending mixed in, minutes long; ARGS='--streams 5000'
	@exec $(RUN) -m tests.soak $(ARGS)

memory: .venv/test.stamp ## memory at 100 streams, and for each of 1,000 clients that stop reading
	@exec $(RUN) -m tests.bench.memory $(ARGS)

VLLM := $(or $(VLLM_URL),$(and $(VLLM_PREFILL_URL),$(VLLM_DECODE_URL)))
test-vllm: $(if $(VLLM),.venv/vllm.stamp) ## the tests against a running vLLM; VLLM_URL=http://127.0.0.1:18000
ifeq ($(VLLM),)
	@echo 'make test-vllm: VLLM_URL is not set. One on the CPU, ready after a minute, and the tests in another terminal:'
	@echo '  $(SHARED)/vllm/setup.sh && $(SHARED)/vllm/serve.sh 18000'
	@echo '  make test-vllm VLLM_URL=http://127.0.0.1:18000'
	@echo 'A pair, that prefills and decodes (setup.sh --nixl first), alone or besides:'
	@echo '  $(SHARED)/vllm/serve.sh 18100 --role prefill 18150 & $(SHARED)/vllm/serve.sh 18200 --role decode 18250'
	@echo '  make test-vllm VLLM_PREFILL_URL=http://127.0.0.1:18100 VLLM_DECODE_URL=http://127.0.0.1:18200'
else
	@VLLM_URL='$(VLLM_URL)' VLLM_PREFILL_URL='$(VLLM_PREFILL_URL)' VLLM_DECODE_URL='$(VLLM_DECODE_URL)' exec $(RUN) -m pytest -m vllm tests/vllm $(ARGS)
endif

clean: ## remove what these targets made
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Always from nothing, and the stamp last: an installation that was interrupted half way is never taken for a whole one.
.venv/run.stamp: setup.cfg setup.py
	@[ -n '$(PYTHON)' ] || { echo 'tokenpipe needs Python 3.11 or later with venv: apt-get install python3 python3-venv' >&2; exit 1; }
	rm -rf .venv
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --use-pep517 -e .
	@touch $@

# on top of it, so that a gateway which runs from it goes on
.venv/test.stamp: .venv/run.stamp
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --use-pep517 -e '.[test]'
	@touch $@

.venv/vllm.stamp: .venv/test.stamp
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --use-pep517 -e '.[test,vllm]'
	@touch $@
