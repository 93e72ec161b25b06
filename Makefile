# make demo   one command from a fresh clone to tokens: environment, model, cluster, prompts
# make test   ruff, mypy, pytest, in that order
# make chaos  end processes under load in every state of a request; print what became of it
# make false-deaths   five minutes of full load; count the deaths declared for nothing
# make experiments   the four recipes of the load generator, minutes to hours (docs/experiments)
# make hosts  three machines of namespaces, `ray up`, a cut link, a lost machine; needs root (docs/clusters.md)
# make loadgen-accuracy experiments   the load generator's figures beside a stub server's own record
# make cancel-storm   10,000 requests, a third cancelled at random moments; count what is left
# make fuzz   100,000 hostile messages and 10,000 handshakes per transport; count the refusals
# make mutants   faults of one line, each in a copy of the cache; print where the machine notices it
# make paging   requests that fit a KV memory, reserved contiguously and in blocks (docs/paging.md)
# make parity   every kind of model beside transformers; print the table of docs/models.md
# make peers  KVFerry and vLLM on the CPU, one after the other, under one load (docs/benchmarks.md)
# make wheel  build sdist and wheel into dist/, from what git tracks
# make ext    compile the kernels again, in place
# make triton   compile the GPU kernels for every architecture, print what they take (docs/triton.md)
# make sanitize   run every kernel under AddressSanitizer and UndefinedBehaviorSanitizer
# make neon   compile the kernels for aarch64 and run them under qemu
# make format | proto | clean | distclean
#
# PYTHON=python3.12 picks the interpreter; ARGS="--json" goes to `kvferry demo`, `chaos`, `mutants`,
# `paging`, `parity` or `peers`. pip's own settings (index, proxy, certificates) are honoured.

PYTHON ?= python3
VENV ?= .venv
PEERS_VENV ?= .venv-peers
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# The stamps lie in the environment, so that they vanish with it.
MADE := $(VENV)/.stamp-made
INSTALLED := $(VENV)/.stamp-installed
INSTALLED_DEV := $(VENV)/.stamp-installed-dev
INSTALLED_PEERS := $(PEERS_VENV)/.stamp-installed

.PHONY: help demo test chaos false-deaths hosts loadgen-accuracy cancel-storm fuzz mutants paging parity peers ext triton sanitize neon format proto clean distclean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make \)/\1/p' Makefile

demo: $(INSTALLED)
	@$(BIN)/kvferry demo $(ARGS)

test: $(INSTALLED_DEV)
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

chaos: $(INSTALLED)
	@$(BIN)/kvferry chaos $(ARGS)

false-deaths: $(INSTALLED)
	@$(BIN)/kvferry chaos --soak 300 $(ARGS)

# What was measured is kept in build/experiments, so that an interrupted run goes on.
experiments: $(INSTALLED)
	@mkdir -p build/experiments
	@for recipe in mixed-lengths prefixes pressure disaggregation; do \
		$(BIN)/kvferry loadgen sweep --recipe $$recipe --out build/experiments/$$recipe.json \
			--html docs/experiments/$$recipe.html $(ARGS) || exit; \
	done

triton: $(INSTALLED_DEV)
	@$(BIN)/python -m kvferry.kernels.triton.ahead --all $(ARGS)

loadgen-accuracy: $(INSTALLED_DEV)
	@$(BIN)/python -m tests.loadgen.accuracy $(ARGS)

hosts: $(INSTALLED_DEV)
	@$(BIN)/python -m tests.hosts $(ARGS)

cancel-storm: $(INSTALLED_DEV)
	@$(BIN)/python -m tests.storm $(ARGS)

fuzz: $(INSTALLED_DEV)
	@$(BIN)/python -m tests.fuzz $(ARGS)

mutants: $(INSTALLED_DEV)
	@$(BIN)/python -m tests.mutants $(ARGS)

paging: $(INSTALLED)
	@$(BIN)/python -m benchmarks.paging $(ARGS)

parity: $(INSTALLED_DEV)
	@$(BIN)/python -m tests.parity $(ARGS)

peers: $(INSTALLED) $(INSTALLED_PEERS)
	@$(BIN)/python -m benchmarks.peers --peer-venv $(PEERS_VENV) $(ARGS)

format: $(INSTALLED_DEV)
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

# From the root with -I., so that the generated modules import each other as kvferry.protos.*
proto: $(INSTALLED_DEV)
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
		kvferry/protos/*.proto

$(MADE):
	@command -v $(PYTHON) >/dev/null || { \
		echo "KVFerry needs Python 3.11 or newer, but there is no '$(PYTHON)': install it, or name" \
			"another with 'make PYTHON=python3.12 ...'" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"KVFerry needs Python 3.11 or newer, but $(PYTHON) is %d.%d: name another with " \
		"\"make PYTHON=python3.12 ...\"" % sys.version_info[:2])'
	@echo "Making $(VENV) ..." >&2
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) 'setuptools>=77' wheel
	@touch $@

# From a copy, so that nothing lying about in the tree gets in; the wheel is built from the sdist.
.PHONY: wheel
wheel: $(INSTALLED_DEV)
	@rm -rf build/tree dist
	@mkdir -p build/tree
	@git ls-files -z | tar --null --files-from=- --create | tar --extract --directory build/tree
	@$(BIN)/python -m build --no-isolation --outdir dist build/tree

# What an installation compiles.
EXT_SOURCES := setup.py kernels/cpu/sources.py $(wildcard kernels/cpu/src/*)

ext: $(MADE)
	@$(BIN)/python setup.py --quiet build_ext --inplace

sanitize: $(INSTALLED_DEV)
	@$(BIN)/python -m tests.kernels.sanitize

neon: $(INSTALLED_DEV)
	@$(BIN)/python -m tests.kernels.neon

$(INSTALLED): pyproject.toml constraints.txt $(EXT_SOURCES) | $(MADE)
	@echo "Installing KVFerry into $(VENV) (minutes the first time) ..." >&2
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt $(EXT_SOURCES) | $(MADE)
	@echo "Installing KVFerry and its development tools into $(VENV) (minutes the first time) ..." >&2
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $(INSTALLED) $@

$(INSTALLED_PEERS): benchmarks/peers/install.py | $(INSTALLED)
	@echo "Installing vLLM into $(PEERS_VENV) (minutes, 4 GB) ..." >&2
	@$(BIN)/python -m venv $(PEERS_VENV)
	@$(BIN)/python -m benchmarks.peers.install $(PEERS_VENV)
	@touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './$(PEERS_VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(PEERS_VENV)
