# `make help` lists the targets.

RUNS ?= 5
FUZZ_SECONDS ?= 600
N ?= 1000
MOVES ?= 200
SEED ?= 1
CARGO ?= cargo
# By name, not by package: cargo then builds programs with the features that all packages need
# together, and not once more for each of them.
AS_ROOT = $(CARGO) run --quiet --bin lab -- as-root --
LAB = $(CARGO) run --quiet --release --bin lab --
# Cargo's output directory for tests.
DEBUG = $(or $(CARGO_TARGET_DIR),target)/debug

# Rust may just have been installed.
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: help setup toolchain build demo test tests lint unit end-to-end fuzz faults bench bench-audit bench-content bench-directory bench-locks bench-storage clean

help:
	@echo 'Try it'
	@echo '  make demo           two hosts, one VM that checks itself; there and back'
	@echo '  make demo-gang      two racks, four VMs with content in common'
	@echo 'Test'
	@echo '  make test           what the README promises: lints, unit tests, moves'
	@echo '  make test-all       the same with every end-to-end test; parsers are fuzzed'
	@echo '  make check          before a commit: lints, dependencies, unit tests; no VM'
	@echo '  make unit | end-to-end [SUITE=moves::]   one part, or those with this name'
	@echo '  make steady         end-to-end tests RUNS=5 times: which are unsteady'
	@echo '  make fuzz           every parser, FUZZ_SECONDS=600 each'
	@echo '  make field          a Debian, and what it and its owner do after moves;'
	@echo '                      RELEASE=trixie WAY=carried ROWS=balloon HOSTS=packages'
	@echo '  make faults         N=1000 faults in the middle of migrations, by SEED=1'
	@echo '  make long-life      a VM under load that moves MOVES=200 times, and what agents hold then;'
	@echo '                      GUEST=debian (as root)'
	@echo 'Test with other programs'
	@echo '  make libvirt-test   with real libvirts; some four minutes'
	@echo '  make kubevirt-test  with the proxies of KubeVirt; needs Go'
	@echo '  make proxmox-test   as Proxmox VE moves VMs, with OpenSSH'
	@echo '  make upgrade-test   between agents of this release and the one before'
	@echo '  make xen-test       with Xen and xl on two emulated hosts; some ten minutes'
	@echo '  make xen-record     streams of xl there, for the tests of crate xen'
	@echo 'Measure'
	@echo '  make bench          lists the benchmarks'
	@echo '  make bench-NAME     one of them, RUNS=5 times, QEMU=11.1 CONGESTION=reno PREDICT=1'
	@echo '                      gang-*: VMS=8 LINKS=0.4 GUESTS=fixed DATA=random RESTS=1'
	@echo '                      cache-*: SAN=nfs MBIT=200; libvirt-*: LIBVIRT=newest'
	@echo '  make bench-apps     what the papers ran, as root; an hour at most'
	@echo 'Package'
	@echo '  make packages       .deb and .rpm into target/packages'
	@echo '  make packages-test  installs them in a fresh root'
	@echo '  make ansible-test   the Ansible role against two fresh roots'
	@echo '  make install-test   as install.md says, on two fresh hosts with systemd'
	@echo 'Set up'
	@echo '  make setup          installs what is missing; the others do it too'
	@echo '  make clean          removes what was built, unpacked, or left by a killed lab'

toolchain:
	@scripts/toolchain

# Cargo prints what it compiles: a first build takes minutes.
setup: toolchain
	@echo 'setup: compiling the lab (some minutes the first time)'
	@$(CARGO) build --release --bin lab
	@$(LAB) setup

# Fetches packages and builds guests at the same time.
build: toolchain
	@echo 'setup: compiling the lab, then droveway (some minutes the first time)'
	@$(CARGO) build --release --bin lab
	@$(LAB) setup & setup=$$!; $(CARGO) build --release --bin droveway --bin lab && wait $$setup

demo: build
	@$(LAB) demo

# All VMs of a rack.
.PHONY: demo-gang
demo-gang: build
	@$(LAB) demo-gang

lint: style
	$(CARGO) clippy --workspace --all-targets -- --deny warnings

# What of the lints compiles next to nothing.
.PHONY: style
style: toolchain
	@scripts/subjects
	$(CARGO) fmt --all --check
	$(CARGO) clippy --package bare-guest --features kernel --target x86_64-unknown-none -- --deny warnings

# Licences, versions, sources and advisories of the dependencies.
.PHONY: deny check
deny: toolchain
	@scripts/deny

# Before a commit: all that moves no VM.
check: lint deny unit

# Also builds the programs that tests run: droveway, lab and suite. It builds the same as `cargo
# test --workspace --no-run`, which prints the names of a hundred programs even when there is
# nothing to compile.
#
# Setup mostly downloads and unpacks, one package after the other, so the lab's command comes first,
# and the rest is compiled meanwhile. A test program with it has cargo choose the same features of
# dependencies as for all tests; otherwise many would be compiled twice.
tests: toolchain
	$(CARGO) build --bin lab --test usage
	@$(DEBUG)/lab setup --tests & setup=$$!; \
	$(CARGO) build --workspace --bins --tests || { kill $$setup; exit 1; }; wait $$setup

# The lab's own tests make hosts too.
unit: tests
	$(DEBUG)/lab as-root --kit -- $(DEBUG)/suite unit

# What single end-to-end tests need: a Debian that has booted, which takes some minutes once, and an
# NFS server. Tests that don't find it make it themselves.
.PHONY: field-guest
field-guest: tests
	@$(DEBUG)/lab setup --field --nfs

# SUITE: a part of the names of tests, or options of the suite.
end-to-end: tests
	$(DEBUG)/lab as-root --kit -- $(DEBUG)/suite end-to-end $(SUITE)

.PHONY: steady
steady: tests
	$(DEBUG)/lab as-root --kit -- $(DEBUG)/suite end-to-end $(SUITE) --steady $(RUNS)

# All tests with real libvirts: some four minutes. `make test` runs a part of them.
.PHONY: libvirt-test
libvirt-test: tests
	$(DEBUG)/lab as-root --kit -- $(DEBUG)/suite end-to-end libvirt
	LAB_LIBVIRT=newest $(DEBUG)/lab as-root --kit -- $(DEBUG)/suite end-to-end libvirt

# KubeVirt's own proxies and records of pods at both ends, and Kubernetes' own parser for the
# manifests.
.PHONY: kubevirt-test
kubevirt-test: tests
	KUBEVIRT_PROXIES=$$(scripts/kubevirt-proxies) $(DEBUG)/lab as-root --kit -- $(DEBUG)/suite end-to-end kubevirt::

# With OpenSSH at both ends, forwarding what Proxmox VE has it forward.
.PHONY: proxmox-test
proxmox-test: tests
	$(DEBUG)/lab as-root --kit -- $(DEBUG)/suite end-to-end proxmox::

# With real Xen on two emulated hosts, made of Debian's packages.
.PHONY: xen-test
xen-test: tests
	@$(DEBUG)/lab setup --xen
	$(DEBUG)/lab as-root --kit -- $(DEBUG)/suite end-to-end xen_hosts::

# Streams of xl itself, for the tests and fuzzing of crate xen.
.PHONY: xen-record
xen-record: tests
	@$(DEBUG)/lab setup --xen
	$(DEBUG)/lab as-root --kit -- $(DEBUG)/suite end-to-end \
	    xen_hosts::what_xl_writes_is_understood_and_kept
	@mkdir -p workshop/seeds/recorded
	cp target/xen-streams/*.xl workshop/seeds/recorded/

# With agents of the previous release, which has to be compiled first.
.PHONY: upgrade-test
upgrade-test: tests
	PREVIOUS_DROVEWAY=$$(scripts/previous) $(DEBUG)/lab as-root --kit -- $(DEBUG)/suite end-to-end upgrade

# Debian and RPM packages, into target/packages.
.PHONY: packages packages-test
packages: toolchain
	@scripts/packages

# In a fresh root of Debian.
packages-test: packages
	@scripts/packages-test

# The Ansible role, against two such roots.
.PHONY: ansible-test
ansible-test: packages
	@scripts/ansible-test

# The commands of docs/operations/install.md, on two fresh hosts with systemd.
.PHONY: install-test
install-test: packages
	@scripts/install-test

.PHONY: test-all test-others
test: toolchain
	@MAKE="$(MAKE)" scripts/test promised

test-all: toolchain
	@MAKE="$(MAKE)" scripts/test all

# After `make test`: the rest of `make test-all`.
test-others: toolchain
	@MAKE="$(MAKE)" scripts/test others

fuzz: toolchain
	@scripts/fuzz $(FUZZ_SECONDS)

faults: setup
	$(CARGO) build --bin droveway --bin faults
	@$(AS_ROOT) $(DEBUG)/faults $(N) $(SEED)

# Goes on where the last run has ended; at most 40 minutes.
.PHONY: field
field: setup $(if $(HOSTS),packages)
	$(CARGO) build --bin droveway --bin field
	@WAY="$(WAY)" HOSTS="$(HOSTS)" $(DEBUG)/field $(RELEASE) $(ROWS)

.PHONY: long-life
long-life: setup
	$(CARGO) build --bin droveway --bin long-life
	@$(AS_ROOT) $(DEBUG)/long-life $(MOVES) $(GUEST)

bench: toolchain
	@$(LAB) bench
	@echo 'audit      noting pages for the audit'
	@echo 'content    naming pages, and looking names up'
	@echo 'directory  how many contents a second the embedded directory is asked for'
	@echo 'locks      what a range lock buys: placing, and mapping guest memory, 1 to 8 threads'

bench-audit: toolchain
	@$(CARGO) bench --quiet --package audit --bench ledger

bench-content: toolchain
	@$(CARGO) bench --quiet --package content --bench content

bench-directory: toolchain
	@$(CARGO) bench --quiet --package directory --bench lookups

bench-locks: toolchain
	@$(CARGO) bench --quiet --package rangelock --bench locks

bench-storage: toolchain
	@$(CARGO) bench --quiet --package storage --bench read

# Large VMs that have used little of their memory, in all four variants.
.PHONY: bench-large
bench-large: bench-large-memfd bench-large-memfd-hint bench-large-anonymous bench-large-anonymous-hint

.PHONY: bench-libvirt
bench-libvirt: bench-libvirt-idle bench-libvirt-nics bench-libvirt-busy bench-libvirt-twins bench-libvirt-unshaped bench-libvirt-disk bench-libvirt-tls

# A Debian whose programs are at work, over four NICs, or with disks on a storage host. Its image
# needs root.
.PHONY: bench-apps bench-apps-nics bench-apps-cache
bench-apps-nics: bench-apps-memcached bench-apps-memcached-disk bench-apps-postgres bench-apps-dbench
bench-apps-cache: bench-apps-cache-postmark bench-apps-cache-postgres

# The papers' own workloads, with the contenders that matter most, twice each: an hour at most, and
# what would not end in it is left out.
bench-apps: RUNS = 2
bench-apps: build
	@$(LAB) bench-apps --runs $(RUNS)

# A domain of 128 MiB takes minutes by xl alone.
bench-xen: RUNS = 2

bench-%: build
	@$(if $(LIBVIRT),LAB_LIBVIRT=$(LIBVIRT)) $(if $(CONGESTION),LAB_CONGESTION=$(CONGESTION)) $(if $(PREDICT),LAB_PREDICT=1) $(LAB) bench $* --runs $(RUNS) $(if $(VMS),--vms $(VMS)) $(if $(LINKS),--links $(LINKS)) $(if $(GUESTS),--guests $(GUESTS)) $(if $(DATA),--data $(DATA)) $(if $(RESTS),--rests) $(if $(SAN),--san $(SAN)) $(if $(MBIT),--mbit $(MBIT)) $(if $(QEMU),--qemu $(QEMU))

clean:
	@$(AS_ROOT) $(DEBUG)/lab clean
	@$(DEBUG)/lab clean --store
	$(CARGO) clean
