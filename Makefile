# Everything a developer runs. Each target makes what it needs: on a fresh machine with python3 (3.11 to 3.13), make and
# git, `make test` is enough. Set PYTHON to choose an interpreter, ARGS for more arguments to pytest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# The first that really runs (a version manager's shim may not) and is of a version that FlatCake supports.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { command -v $$p; break; }; done)
PROTOS := flatcake_proto/v1/store.proto flatcake_proto/v1/admin.proto flatcake_proto/v1/peer.proto
# tests/engines/NAME holds the tests and pins of each.
ENGINES := $(notdir $(patsubst %/,%,$(dir $(wildcard tests/engines/*/requirements.txt))))
TYPED := flatcake_server flatcake_client transport/flatcake_transport bench
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# importlib: test files of different rooms may have the same name.
PYTEST := python -m pytest -q
# Most tests wait for daemons, so two files at a time take little more than half as long. JOBS=0: one after the other.
JOBS ?= 2
export PATH := $(CURDIR)/$(BIN):$(PATH)

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##/  make \1\t/p' $(MAKEFILE_LIST)

# Made again when the dependencies change. The interpreter's venv module may come without pip (Debian's python3 without
# python3-venv); then pip itself, where there is one, brings virtualenv.
$(VENV)/.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 to 3.13: install one, or make PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV) \
	  && "$(PYTHON)" -m pip install --quiet --target build/virtualenv virtualenv \
	  && PYTHONPATH=build/virtualenv "$(PYTHON)" -m virtualenv --quiet $(VENV); } \
	  || { echo "make: cannot make $(VENV): install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(VENV)/.stamp-gpu: $(VENV)/.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,gpu]'
	@touch $@

venv: $(VENV)/.stamp  ## the virtual environment in .venv, with all that development needs

demo: $(VENV)/.stamp  ## a model's prefill stored, restored and compared, with a daemon of its own
	flatcake demo

# Packages of the distribution: installed as root where apt is (RUNLEVEL: without starting a service); else what needs them says so.
define apt_install
{ [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || RUNLEVEL=1 apt-get install -qq -y --no-install-recommends $(1) >&2 \
  || { apt-get update -qq && RUNLEVEL=1 apt-get install -qq -y --no-install-recommends $(1) >&2; } || true; }
endef

demo-cluster: $(VENV)/.stamp  ## three nodes and a Redis: a session that moves between them, kill -9 of one, every token compared
	@command -v redis-server valkey-server >/dev/null || $(call apt_install,redis-server)
	flatcake demo --cluster

test: $(VENV)/.stamp  ## all tests that this machine can run; what it cannot is skipped and said
	$(PYTEST) -n $(JOBS) --dist loadfile $(ARGS)

gpu: $(VENV)/.stamp-gpu  ## the tests that need a CUDA device
	$(PYTEST) -m gpu tests/gpu $(ARGS)

# Each engine, and each peer that bench/ compares with, has an environment of its own: what they pin does not go together.
# requirements.txt pins the engine; the library itself comes from this tree. no-deps.txt, where there is one, names what is
# installed without its dependencies: engines for CPU whose own lists would bring CUDA. torch for CPU ("+cpu") has an index of
# its own, asked where the configured ones do not have it.
.SECONDEXPANSION:
.venv-%/.stamp: tests/engines/%/requirements.txt $$(wildcard tests/engines/%/no-deps.txt) pyproject.toml
	@test -x .venv-$*/bin/pip || "$(PYTHON)" -m venv .venv-$* >/dev/null 2>&1 || { rm -rf .venv-$* \
	  && "$(PYTHON)" -m pip install --quiet --target build/virtualenv virtualenv \
	  && PYTHONPATH=build/virtualenv "$(PYTHON)" -m virtualenv --quiet .venv-$*; } \
	  || { echo "make: cannot make .venv-$*: install python3-venv" >&2; exit 1; }
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -r $< --editable . \
	  || PIP_EXTRA_INDEX_URL=$(TORCH_INDEX) .venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -r $< --editable .
	@test ! -f $(<D)/no-deps.txt || .venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(<D)/no-deps.txt
	@touch $@
.PRECIOUS: .venv-%/.stamp

# Its wheel links them, though only TCP is used.
MOONCAKE_LIBRARIES := libibverbs1 libnuma1 libcurl4
mooncake-libraries: .venv-mooncake/.stamp
	@.venv-mooncake/bin/python -c 'import mooncake.store' 2>/dev/null || $(call apt_install,$(MOONCAKE_LIBRARIES))
	@.venv-mooncake/bin/python -c 'import mooncake.store' \
	  || { echo "make: Mooncake's wheel needs libraries of the system: apt-get install $(MOONCAKE_LIBRARIES)" >&2; exit 1; }

peers: mooncake-libraries .venv-lmcache/.stamp  ## the environments of the stores that bench/peers/ compares with

test-engines: $(addprefix test-,$(ENGINES))  ## the connectors inside the real engines, each in its own environment

test-mooncake: mooncake-libraries

test-%: .venv-%/.stamp
	PATH="$(CURDIR)/.venv-$*/bin:$$PATH" .venv-$*/bin/python -m pytest -q tests/engines/$* $(ARGS)

bench-fabric: $(VENV)/.stamp  ## a file read over NVMe-oF beside the same file read locally, in that guest
	tests/fabric/run tests/fabric/guest/with-disk $(CURDIR)/$(BIN)/python bench/nvmeof.py --dir /tmp/ssd --rdma 192.0.2.1 $(ARGS)

test-fabric: $(VENV)/.stamp  ## NVMe-oF and soft RDMA on a real kernel, in a QEMU guest (as root; a minute or two)
	tests/fabric/run $(CURDIR)/$(BIN)/python -m pytest -q -c /dev/null -p no:cacheprovider --rootdir tests/fabric/guest \
	  tests/fabric/guest $(ARGS)

soak: $(VENV)/.stamp  ## the stateful and fault tests, many times as long
	$(PYTEST) --hypothesis-profile=soak --timeout=3600 -o faulthandler_timeout=0 tests/property tests/fault $(ARGS)

bench: $(VENV)/.stamp  ## every figure, a table each
	@for script in $$(find bench -maxdepth 1 -name '[a-z]*.py' ! -name replay_report.py | sort); do \
	  echo "== $$script"; python "$$script" $(ARGS); done

bench-replay: $(VENV)/.stamp peers  ## FlatCake, its peers and its ablations on three traces: docs/replay/, some 25 minutes
	python bench/replay_report.py $(ARGS)

check: $(VENV)/.stamp  ## style, types, who imports whom, generated code
	ruff check .
	ruff format --check .
	MYPYPATH=bench mypy $(TYPED)
	lint-imports
	$(MAKE) --no-print-directory proto-check

define generate
python -m grpc_tools.protoc -I flatcake_proto/v1=proto/flatcake/v1 --python_out=$(1) --grpc_python_out=$(1) \
  --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
endef

proto: $(VENV)/.stamp  ## the generated code, from proto/
	$(call generate,proto)

proto-check: $(VENV)/.stamp
	@mkdir -p build && fresh=$$(mktemp -d build/proto.XXXXXX) && trap 'rm -rf "$$fresh"' EXIT && $(call generate,"$$fresh") \
	  && diff -r -x __init__.py -x py.typed -x __pycache__ "$$fresh/flatcake_proto" proto/flatcake_proto >&2 \
	  || { echo "make: the generated code is not that of proto/: run make proto" >&2; exit 1; }

deploy/flatcake.toml: $(VENV)/.stamp flatcake_server/config.py flatcake_server/cli_serve.py  ## the commented configuration, from the model
	env -i PATH="$$PATH" FLATCAKE_CONFIG=/dev/null flatcake serve --socket /run/flatcake/flatcake.sock --print-config > $@

clean:  ## all that these targets made
	rm -rf $(VENV) .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.PHONY: help venv demo demo-cluster test mooncake-libraries peers test-engines test-fabric bench-fabric gpu soak bench bench-replay check proto proto-check clean
