//! The hosts that gangs of this agent evacuate.
//!
//! Coordinators learn of them, and place no VMs there. Two gangs that evacuated one host would
//! order the same VMs to move, so only one does at a time.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;

/// The hosts that are evacuated.
#[derive(Clone, Debug, Default)]
pub(super) struct Evacuations(Arc<Mutex<BTreeSet<String>>>);

/// A host is among them until this is dropped.
#[derive(Debug)]
pub(super) struct Evacuating {
    all: Evacuations,
    host: String,
}

impl Evacuations {
    /// Adds a host; none if it is among them.
    pub(super) fn begin(&self, host: &str) -> Option<Evacuating> {
        let is_first = self.0.lock().insert(host.to_owned());
        is_first.then(|| Evacuating { all: self.clone(), host: host.to_owned() })
    }

    /// Each of the hosts.
    pub(super) fn hosts(&self) -> Vec<String> {
        self.0.lock().iter().cloned().collect()
    }
}

impl Drop for Evacuating {
    fn drop(&mut self) {
        self.all.0.lock().remove(&self.host);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_evacuated_by_one_gang_at_a_time() {
        let all = Evacuations::default();
        let (first, other) = (all.begin("y").unwrap(), all.begin("x").unwrap());
        assert!(all.begin("y").is_none());
        assert_eq!(all.hosts(), ["x", "y"]);
        drop(first);
        assert_eq!(all.hosts(), ["x"]);
        let again = all.begin("y").unwrap();
        drop((other, again));
        assert!(all.hosts().is_empty());
    }
}
