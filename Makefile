# Each target installs what it needs, including system packages, on a fresh Debian or Ubuntu machine.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

SANITIZE  := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1
# Without tests of memory use: a sanitizer keeps freed memory, and shadow memory for the rest.
SANITIZED := -k "not memory" \
             tests/mount/test_semantics.py tests/mount/test_damage.py tests/mount/test_fastpath.py \
             tests/mount/test_fastpath_hazards.py tests/mount/test_large_files.py
THREADS   := -fsanitize=thread -fno-omit-frame-pointer -O1
# setarch -R: no address space randomisation, because TSan's shadow memory needs fixed address ranges.
THREADED  := TSAN_OPTIONS=report_thread_leaks=0 setarch -R $(BIN)/python -m pytest
PROMISES  := $(addprefix tests/mount/test_, semantics.py places.py posix.py own_changes.py comparisons.py contents.py \
             credentials.py writing_rights.py hazards.py warm_up.py damage.py numbers.py) \
             tests/security
# Tests wait most of the time, so some run in parallel; those marked `alone` run afterwards. $(call tests,MARKERS,ARGUMENTS)
AT_ONCE   ?= 4
tests = $(BIN)/python -m pytest -n $(AT_ONCE) --dist worksteal -m "not alone and not ceph and not packages$(1)" $(2) && \
	$(BIN)/python -m pytest -m "alone and not ceph and not packages$(1)" $(2)
FUZZ_S    ?= 10
# A client and an MDS that are killed, and a restart, on a read-only mount.
CEPH_SHORT := "(killed_and and read-only) or (nothing_is_compared and read-only)"

.PHONY: demo test check lint fuzz nightly stress soak soak-ceph soak-sanitized crash mutate test-posix test-ceph test-deb dist \
	deb format bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.run
	$(BIN)/python -m benchmarks.demo

# All tests with the fast path; the promises again without it; parts of them again with a fast path built with ASan and
# UBSan, and with TSan. `make stress` runs all mount tests without the fast path.
# The quick tests find about half of 8 mutants; at least one must be found.
test: $(VENV)/.dev
	scripts/system-packages --sources
	scripts/build-fastpath
	$(call tests)
	$(call tests, and not slow,$(PROMISES) --no-fastpath)
	scripts/build-fastpath $(SANITIZE)
	{ $(call tests, and not slow,$(SANITIZED)); } || { scripts/build-fastpath; exit 1; }
	scripts/build-fastpath $(THREADS)
	$(THREADED) tests/mount/test_fastpath_hazards.py tests/soak || { scripts/build-fastpath; exit 1; }
	scripts/build-fastpath
	$(MAKE) fuzz
	scripts/system-packages --ceph
	$(BIN)/python -m pytest tests/ceph -k $(CEPH_SHORT)
	scripts/system-packages --posix
	$(BIN)/python -m tests.posix --short --place full --place full-python fio stress-ng
	rm -f build/mutants-short.jsonl
	$(BIN)/python -m tests.mutation --quick --number 8 --batch 4 --at-least 0.12 --results build/mutants-short.jsonl

check: lint
	$(BIN)/python -m pytest -m "not mount and not slow and not packages"

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	scripts/system-packages --locks
	PYTHON=$(BIN)/python scripts/check-locks

# The stress tests at full length, with the fast path and without: half an hour each. Then all mount tests without it.
STRESS := tests/mount/test_stress.py tests/mount/test_hostile_source.py -s --stress-seconds 1800 --timeout 3600
stress: $(VENV)/.dev
	scripts/build-fastpath
	$(BIN)/python -m pytest $(STRESS)
	$(BIN)/python -m pytest $(STRESS) --no-fastpath
	$(BIN)/python -m pytest tests/mount/test_space.py --sequences 30
	$(BIN)/python -m pytest tests/mount/test_space.py --sequences 30 --no-fastpath
	$(call tests,,tests/mount --no-fastpath)

# The long and random forms, three hours: make nightly [POSIX_SUITES=directory for pjdfstest] [MINUTES=10]
nightly: MINUTES = 10
nightly: NIGHT = -s --timeout 3600
nightly: $(VENV)/.dev
	scripts/system-packages --sources
	scripts/system-packages --ceph
	scripts/build-fastpath
	$(BIN)/python -m pytest -n $(AT_ONCE) --dist worksteal tests/sources --all-sources
	$(BIN)/python -m pytest $(NIGHT) tests/damage --damages 300
	MODEL_RUNS=600 $(BIN)/python -m pytest $(NIGHT) tests/model/test_node.py
	MODEL_RUNS=20 $(BIN)/python -m pytest $(NIGHT) tests/model/test_mounted.py
	MODEL_RUNS=20 $(BIN)/python -m pytest $(NIGHT) tests/model/test_mounted.py --no-fastpath
	DIFFERENTIAL_RUNS=20 $(BIN)/python -m pytest $(NIGHT) tests/mount/test_several_users.py
	DIFFERENTIAL_RUNS=20 $(BIN)/python -m pytest $(NIGHT) tests/mount/test_several_users.py --no-fastpath
	RELAY_WALKS=20000 $(BIN)/python -m pytest $(NIGHT) tests/model/test_relay.py
	RACES=20000 $(BIN)/python -m pytest $(NIGHT) tests/security/test_races.py
	RACES=20000 $(BIN)/python -m pytest $(NIGHT) tests/security/test_races.py --no-fastpath
	$(MAKE) crash
	$(BIN)/python -m pytest $(STRESS) --stress-seconds $$(($(MINUTES) * 60))
	$(BIN)/python -m pytest $(STRESS) --stress-seconds $$(($(MINUTES) * 60)) --no-fastpath
	$(if $(POSIX_SUITES),$(MAKE) test-posix SUITES=pjdfstest)

# Everything at once: make soak MINUTES=60 [SOAK_SOURCE=directory for the source]; on a real CephFS: make soak-ceph
MINUTES ?= 60
SOAK = tests/soak -s --stress-seconds $$(($(MINUTES) * 60)) --timeout 0
soak: $(VENV)/.dev
	scripts/build-fastpath
	SOAK_SOURCE="$(SOAK_SOURCE)" $(BIN)/python -m pytest $(SOAK)

soak-ceph: $(VENV)/.dev
	scripts/system-packages --ceph
	scripts/build-fastpath
	$(BIN)/python -m tests.ceph.cluster sh -c 'SOAK_SOURCE=$$CEPHFS exec $(BIN)/python -m pytest $(SOAK)'

# The same with a fast path built with ASan and UBSan, then with TSan.
soak-sanitized: $(VENV)/.dev
	scripts/build-fastpath $(SANITIZE)
	$(BIN)/python -m pytest $(SOAK) || { scripts/build-fastpath; exit 1; }
	scripts/build-fastpath $(THREADS)
	$(THREADED) $(SOAK) || { scripts/build-fastpath; exit 1; }
	scripts/build-fastpath

# 1,000 power cuts and 500 kills: a quarter of an hour.
crash: $(VENV)/.dev
	scripts/build-fastpath
	$(BIN)/python -m pytest tests/crash -s --crash-points 1000 --kills 500 --timeout 3600

# Mutation tests: does a test fail if the code is changed? A run continues where the last one ended:
# make mutate [SEED=number] [NUMBER=how-many]
NUMBER ?= 300
mutate: $(VENV)/.dev
	scripts/build-fastpath
	$(BIN)/python -m tests.mutation $(if $(SEED),--seed $(SEED)) --number $(NUMBER)

# Other projects' filesystem suites on mounts, compared with the disk underneath and with bindfs:
# make test-posix POSIX_SUITES=directory-with-their-sources [SUITES="ltp/rename* fsx"] [POSIX="--short --place full"]
test-posix: $(VENV)/.dev
	scripts/system-packages --posix
	scripts/build-fastpath
	POSIX_SUITES="$(POSIX_SUITES)" $(BIN)/python -m tests.posix $(POSIX) $(SUITES)

# Mounts over a real CephFS whose clients and servers fail.
test-ceph: $(VENV)/.dev
	scripts/system-packages --ceph
	scripts/build-fastpath
	$(BIN)/python -m pytest tests/ceph
	$(BIN)/python -m pytest tests/ceph --no-fastpath

# Arbitrary requests of the kernel, index records and shared memory of a predecessor: make fuzz FUZZ_S=600
fuzz:
	scripts/system-packages --fuzz
	tests/fuzz/run $(FUZZ_S)

# Wheels and an sdist into dist/: cachefs-ml, whose fast path contains LMDB, and the client alone for jobs.
# SOURCE_DATE_EPOCH: two builds give the same files.
dist: export SOURCE_DATE_EPOCH ?= $(shell sed -n 's/^ -- .*>  //p;T;q' packaging/deb/changelog | xargs -0 date +%s -d)
dist: $(VENV)/.made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	rm -rf dist build/client build/lib build/bdist.*
	CACHEFS_DISTRIBUTE=1 $(BIN)/python -m build --outdir dist .
	$(BIN)/python packaging/client/stage.py build/client
	$(BIN)/python -m build --wheel --outdir dist build/client

# A package for the release of Debian or Ubuntu that this runs on, into dist/. Its mirror has what the package depends on.
deb: dist
	scripts/system-packages /usr/bin/python3
	packaging/deb/build dist/cachefs_ml-*-manylinux_*.whl

# Uses what `make deb` has built, in empty virtual environments and in an empty system, which debootstrap makes.
test-deb: $(VENV)/.dev deb
	scripts/system-packages --deb
	$(BIN)/python -m pytest -m packages tests/packages

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[tools]'
	mkdir -p build
	$(BIN)/python -m benchmarks.all

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

# pip compiles pyfuse3: that needs a compiler, libfuse's headers and Python's headers.
# (A stamp file as target: bin/python is a link to a program that is older than any checkout.)
$(VENV)/.made: scripts/system-packages
	scripts/system-packages $(PYTHON)
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/.run
