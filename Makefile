# make demo | test | bench-NAME [RUNS=5] | fuzz [FUZZ_SECONDS=600] | faults [N=1000] [SEED=1]

RUNS ?= 5
FUZZ_SECONDS ?= 600
N ?= 1000
SEED ?= 1
CARGO ?= cargo
AS_ROOT = $(CARGO) run --quiet --package lab -- as-root --
LAB = $(CARGO) run --quiet --release --package lab --

# Rust may just have been installed.
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: help setup toolchain build demo test lint unit end-to-end fuzz faults bench bench-locks clean

help:
	@echo 'make demo         two hosts, one VM that writes and checks itself; there and back'
	@echo 'make test         format, lints, unit tests, a short fuzz run, end to end'
	@echo 'make bench-NAME   one benchmark, RUNS=5 times; make bench lists them'
	@echo 'make fuzz         every parser, FUZZ_SECONDS=600 each'
	@echo 'make faults       N=1000 things that break in the middle of a migration, by SEED=1'
	@echo 'make setup        install what is missing; the others do it too'
	@echo 'make clean        remove what was built and unpacked, and what a killed lab left behind'

toolchain:
	@scripts/toolchain

setup: toolchain
	@$(CARGO) run --quiet --package lab -- setup

build: toolchain
	$(CARGO) build --quiet --release --package droveway --package lab

demo: setup build
	@$(LAB) demo

lint: toolchain
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- --deny warnings

# The lab's own tests make hosts too.
unit: setup
	$(AS_ROOT) $(CARGO) test --no-fail-fast --workspace --exclude end-to-end

# They run real QEMUs: one after the other.
end-to-end: setup
	$(CARGO) build --package droveway
	$(AS_ROOT) $(CARGO) test --no-fail-fast --package end-to-end -- --test-threads=1

test: setup
	@MAKE="$(MAKE)" scripts/test

fuzz: toolchain
	@scripts/fuzz $(FUZZ_SECONDS)

faults: setup
	$(CARGO) build --package droveway --package end-to-end
	@$(AS_ROOT) target/debug/faults $(N) $(SEED)

bench: toolchain
	@$(LAB) bench
	@echo 'locks      what a range lock buys: placing, and mapping guest memory, 1 to 8 threads'

bench-locks: toolchain
	@$(CARGO) bench --quiet --package rangelock --bench locks

bench-%: setup build
	@$(LAB) bench $* --runs $(RUNS)

clean:
	@$(AS_ROOT) $(CARGO) run --quiet --package lab -- clean
	$(CARGO) clean
	rm -rf .lab
