//! The memory of a VM whose RAM is copied to its next QEMU on this host.
//!
//! Both QEMUs are in one cgroup. Its limit has room for what the VM has touched when the copy
//! starts, and for a part of what it touches meanwhile, in both. If it touches more, the kernel
//! would end one of them, perhaps the one that has the VM. So the room is checked all the time, and
//! the copy ends before there is too little of it.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use data_threads::Joined;
use engine::Watch;
use qemu::machine::Machine;

use crate::vms::registry::Registry;

/// Interval of checks, in which a guest may touch some 100 MiB.
const EACH: Duration = Duration::from_millis(50);

/// Ends a migration within this host when its VM's cgroup lacks memory for it, until it is dropped.
pub(super) struct CopyRoom {
    /// Ends the thread when it is dropped.
    _until: Sender<()>,
    _thread: Joined,
}

impl CopyRoom {
    /// That of a VM that leaves this QEMU. None: nothing limits its memory.
    pub(super) fn of(
        registry: &Arc<Registry>,
        vm: &str,
        former: &Arc<Machine>,
        watch: &Arc<Watch>,
    ) -> Option<Self> {
        registry.room_for_next(vm, former)?;
        let (registry, watch) = (Arc::clone(registry), Arc::clone(watch));
        let (vm, former) = (vm.to_owned(), Arc::clone(former));
        let (until, ends) = bounded(0);
        let thread = data_threads::spawn("copy-room", move || {
            while ends.recv_timeout(EACH) == Err(RecvTimeoutError::Timeout) {
                if let Some(why) = lacking(&registry, &vm, &former) {
                    return watch.end(&why);
                }
            }
        });
        match thread {
            Ok(thread) => Some(Self { _until: until, _thread: thread.into() }),
            Err(error) => {
                tracing::warn!(%error, "the room for a copy of the RAM is not checked");
                None
            }
        }
    }
}

/// Why the copy can't go on; none if it can, or that isn't known.
fn lacking(registry: &Registry, vm: &str, former: &Machine) -> Option<String> {
    let room = registry.room_for_next(vm, former)?;
    let touched = engine::used_private(former.process.pid())?;
    let next = registry.next(vm).and_then(|next| next.machine());
    let copied = next.and_then(|next| engine::used_private(next.process.pid()));
    missing(room, touched, copied.unwrap_or(0))
}

fn missing(room: u64, touched: u64, copied: u64) -> Option<String> {
    let left = touched.saturating_sub(copied);
    (room < left).then(|| {
        format!(
            "{} MiB of what the VM has touched are yet to be copied, and its cgroup leaves {} MiB \
             by now: raise its limit (MemoryMax= of its scope, or of a slice above it)",
            left >> 20,
            room >> 20
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_ends_when_the_rest_of_it_has_no_room() {
        const MIB: u64 = 1 << 20;
        for (room, touched, copied, ends) in [
            (100, 100, 0, false),
            (99, 100, 0, true),
            (40, 100, 60, false),
            // It has touched more.
            (20, 120, 60, true),
            // All of it is there, and the next QEMU's own memory.
            (0, 100, 100, false),
            (0, 100, 130, false),
        ] {
            let why = missing(room * MIB, touched * MIB, copied * MIB);
            assert_eq!(why.is_some(), ends, "{room} {touched} {copied}: {why:?}");
        }
        let why = missing(20 * MIB, 120 * MIB, 60 * MIB).unwrap();
        assert!(why.starts_with("60 MiB of what the VM has touched are yet to be"), "{why}");
        assert!(why.contains("its cgroup leaves 20 MiB"), "{why}");
    }
}
