//! Guests as most tests use them.

use lab::guest::GuestSpec;
use lab::hosts::RUN_DIR;
use lab_guest::orders::Orders;

/// Time between beats of Linux guests. Under TCG each beat of one takes two milliseconds of CPU time:
/// with fifty of them in a second, a tenth of a core for as long as the test takes.
const LINUX_TICK_MS: u64 = 100;
/// Time that their writers sleep at least: each time that Linux wakes up costs CPU time as well.
const LINUX_WRITE_STEP_MS: u64 = 40;

/// A Linux guest with `memory` that holds 32 MiB of content and rewrites 16 MiB of it at `rate`
/// bytes per second.
#[must_use]
pub fn guest(memory: &str, rate: u64) -> GuestSpec {
    let mut spec = GuestSpec::new("web1", memory, orders(rate));
    spec.orders.tick_ms = LINUX_TICK_MS;
    spec.orders.write_step_ms = LINUX_WRITE_STEP_MS;
    spec
}

/// The same without an operating system, for all that doesn't depend on one.
#[must_use]
pub fn bare(memory: &str, rate: u64) -> GuestSpec {
    GuestSpec::bare("web1", memory, orders(rate))
}

fn orders(rate: u64) -> Orders {
    Orders {
        seed: 5,
        random_bytes: 8 << 20,
        text_bytes: 8 << 20,
        working_set_bytes: 16 << 20,
        rate,
        // No test here judges single milliseconds.
        write_step_ms: 10,
        tick_ms: 20,
        ..Orders::default()
    }
}

/// A guest with `memory` that holds the same incompressible `common_bytes` as its twins, and 8 MiB
/// that it rewrites at `rate`. Text follows, which twins have in common as well: pages that wait in
/// the agent's buffers when QEMU's first pass ends are sent without names.
#[must_use]
pub fn twin(name: &str, memory: &str, common_bytes: u64, rate: u64) -> GuestSpec {
    let mut spec = bare(memory, rate);
    spec.name = name.to_owned();
    spec.orders.random_bytes = common_bytes;
    spec.orders.text_bytes = 48 << 20;
    spec.orders.working_set_bytes = 8 << 20;
    spec
}

/// QEMU's arguments for a QMP socket of the VM's owner, in addition to the agent's; see
/// [`World::own_qmp`].
#[must_use]
pub fn own_qmp_argument(name: &str) -> [String; 2] {
    ["-qmp".to_owned(), format!("unix:{RUN_DIR}/{name}.own,server=on,wait=off")]
}
