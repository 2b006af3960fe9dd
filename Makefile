# beeswarm: what a developer and a packager run. `make run` is the quickest way to see it.

CARGO ?= cargo
RUN_DIR ?= run
STATIC_TARGET := x86_64-unknown-linux-gnu
ROOT := $(if $(filter 0,$(shell id -u)),,sudo)

.PHONY: build run test check static bench bench-quick clean

build:
	$(CARGO) build --release --locked

# A whole cluster in one process with four targets, mounted at run/mnt. Ctrl-C unmounts. State stays in run/data.
run: build
	@mkdir -p $(RUN_DIR)/data $(RUN_DIR)/mnt
	$(ROOT) target/release/beeswarm --role all -p $(RUN_DIR)/data --mount $(RUN_DIR)/mnt --targets 4 --listen 127.0.0.1

# Unit tests, then tests on real mounts with real processes (root and /dev/fuse needed).
test:
	$(CARGO) test --locked --lib --bins
	$(CARGO) test --locked --test mount --test faults --test refusals --test full --test kill_matrix --test four_machines -- --test-threads=1

check:
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps --document-private-items

# One executable without any shared library. `--target` keeps build scripts and proc macros out of the static flags.
static:
	RUSTFLAGS="-C target-feature=+crt-static" $(CARGO) build --release --locked --target $(STATIC_TARGET)
	install -D target/$(STATIC_TARGET)/release/beeswarm dist/beeswarm
	file dist/beeswarm
	! ldd dist/beeswarm 2>/dev/null | grep -q '=>'

# Ours beside the plain local directory, in one run.
bench: build
	benches/mount.sh

clean:
	$(CARGO) clean
	rm -rf dist
