# Two commands matter: `make serve` and `make test`. Both create .venv from requirements.lock when it is missing or old.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
MODEL ?= smollm2-135m-instruct
ARGS ?=
# Processes that share the tests: one for those that start Ray, the rest for the others.
WORKERS ?= 2

BIN := .venv/bin
HOST_TESTS := test_hosts.py test_lost_clients.py test_ray_up.py
PACKAGES := kernels workers router cluster
# Without it the folder `kernels` of this checkout would shadow other packages of that name.
export PYTHONSAFEPATH = 1

.PHONY: serve test test-hosts lint types unit clients install lock clean

serve: .venv/.installed
	exec $(BIN)/tandem serve $(MODEL) $(ARGS)

# What only waits for the package index does it beside mypy; the tests start Ray, which wants the machine for itself.
test:
	$(MAKE) --jobs=3 .clients/.installed lint types
	$(MAKE) unit
	$(MAKE) clients

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed .typing/tandem
	$(BIN)/mypy $(PACKAGES:%=-p tandem.%)

unit: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(ARGS)

# Three machines as network namespaces: needs root and `ip` (sshd and rsync for `ray up`), and six minutes; not part of
# `make test`.
test-hosts: .venv/.installed .ray-default/.installed
	RUN_HOST_TESTS=1 $(BIN)/pytest $(HOST_TESTS:%=tests/deploy/%) $(ARGS)

# Programs of others against the API, in an environment of their own.
clients: .venv/.installed .clients/.installed
	LITELLM_LOCAL_MODEL_COST_MAP=True $(BIN)/python tests/clients/serve_scripted.py .clients/bin/python

install: .venv/.installed

# The lock names every package, so pip resolves nothing. The third line matters where the index offers torch built for
# CUDA: it adds the libraries that that build, and only that build, asks for. Otherwise it finds nothing to do.
.venv/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tandem needs Python 3.11 or newer: make PYTHON=...")'
	@echo "installing into .venv from requirements.lock: some minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-compile -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c requirements.lock torch
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Half of what is installed is never imported, so nothing is compiled ahead of time.
.clients/.installed: tests/clients/requirements.txt
	test -x .clients/bin/python || $(PYTHON) -m venv .clients
	.clients/bin/pip install --quiet --disable-pip-version-check --no-deps --no-compile -r tests/clients/requirements.txt
	@touch $@

# What Ray needs for jobs and `ray up`: beside the lock, so it stays out of .venv.
.ray-default/.installed: deploy/docker/ray-default.lock | .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade --target .ray-default -r $<
	@touch $@

# mypy sees the four folders under their real names through links.
.typing/tandem: Makefile
	@mkdir -p $@
	@for package in $(PACKAGES); do ln -sfn ../../$$package $@/$$package; done
	@touch $@

# Pins what is installed now and needed, after you have tried an upgrade in .venv. Reads installed metadata only.
lock:
	$(BIN)/python .ci/lock.py > requirements.lock.new
	mv requirements.lock.new requirements.lock

clean:
	rm -rf .venv .clients .ray-default .typing build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
