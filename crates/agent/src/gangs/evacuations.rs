//! The hosts that gangs of this agent evacuate.
//!
//! Coordinators are told of them, and place no VMs there.

use std::sync::Arc;

use parking_lot::Mutex;

/// The hosts that are evacuated, once for each gang.
#[derive(Clone, Debug, Default)]
pub(super) struct Evacuations(Arc<Mutex<Vec<String>>>);

/// A host is among them until this is dropped.
#[derive(Debug)]
pub(super) struct Evacuating {
    all: Evacuations,
    host: String,
}

impl Evacuations {
    /// Adds a host.
    pub(super) fn begin(&self, host: &str) -> Evacuating {
        self.0.lock().push(host.to_owned());
        Evacuating { all: self.clone(), host: host.to_owned() }
    }

    /// Each of the hosts.
    pub(super) fn hosts(&self) -> Vec<String> {
        let mut hosts = self.0.lock().clone();
        hosts.sort();
        hosts.dedup();
        hosts
    }
}

impl Drop for Evacuating {
    fn drop(&mut self) {
        let mut hosts = self.all.0.lock();
        if let Some(at) = hosts.iter().position(|host| *host == self.host) {
            hosts.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_evacuated_until_its_last_gang_has_ended() {
        let all = Evacuations::default();
        let (first, again, other) = (all.begin("y"), all.begin("y"), all.begin("x"));
        assert_eq!(all.hosts(), ["x", "y"]);
        drop(first);
        assert_eq!(all.hosts(), ["x", "y"]);
        drop(again);
        assert_eq!(all.hosts(), ["x"]);
        drop(other);
        assert!(all.hosts().is_empty());
    }
}
