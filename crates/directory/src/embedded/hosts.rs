//! Hosts as entries refer to them: a number, and how often the host was forgotten.

use std::collections::HashMap;

use crate::error::DirectoryError;
use crate::host::HostName;

/// Many racks' worth. Their names come from peers.
pub(super) const HOSTS_MAX: usize = 4096;

/// The number of no host.
const NOBODY: u16 = 0;
/// Takes the place of the second holder where content is only claimed.
const CLAIM: u16 = u16::MAX;
const _: () = assert!(HOSTS_MAX < CLAIM as usize, "numbers begin with 1");

/// A host in an entry, between two times that it was forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) host: u16,
    /// Wraps around after 65,536 times; entries that old have long expired.
    generation: u16,
}

impl Mark {
    pub(super) const NOBODY: Self = Self { host: NOBODY, generation: 0 };
    pub(super) const CLAIM: Self = Self { host: CLAIM, generation: 0 };
}

#[derive(Debug)]
struct Known {
    name: HostName,
    generation: u16,
}

/// All hosts that were ever named.
#[derive(Debug, Default)]
pub(super) struct Hosts {
    numbers: HashMap<HostName, u16>,
    /// The host with number 1 comes first.
    known: Vec<Known>,
}

impl Hosts {
    fn known(&self, number: u16) -> Option<&Known> {
        self.known.get(usize::from(number).checked_sub(1)?)
    }

    /// A host's current mark. None if it was never named.
    pub(super) fn mark(&self, host: &HostName) -> Option<Mark> {
        let number = *self.numbers.get(host)?;
        let known = self.known(number)?;
        Some(Mark { host: number, generation: known.generation })
    }

    /// Whether a mark is its host's current one.
    pub(super) fn counts(&self, mark: Mark) -> bool {
        self.known(mark.host).is_some_and(|known| known.generation == mark.generation)
    }

    /// The name of a host, by the number in a valid mark.
    ///
    /// # Panics
    /// If there is no such host: marks are made here only.
    pub(super) fn name(&self, number: u16) -> &HostName {
        &self.known(number).expect("numbers are given here, and never taken back").name
    }

    pub(super) fn add(&mut self, host: &HostName) -> Result<(), DirectoryError> {
        if self.numbers.contains_key(host) {
            return Ok(());
        }
        if self.known.len() >= HOSTS_MAX {
            return Err(DirectoryError::HostsMax { max: HOSTS_MAX });
        }
        self.known.push(Known { name: host.clone(), generation: 0 });
        let number = u16::try_from(self.known.len()).expect("below CLAIM");
        self.numbers.insert(host.clone(), number);
        Ok(())
    }

    pub(super) fn forget(&mut self, host: &HostName) {
        let number = self.numbers.get(host).copied().unwrap_or(NOBODY);
        let known = usize::from(number).checked_sub(1).and_then(|at| self.known.get_mut(at));
        if let Some(known) = known {
            known.generation = known.generation.wrapping_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_bounded_and_forgotten_one_by_one() {
        let mut hosts = Hosts::default();
        let host = |number: usize| HostName::new(&format!("h{number}")).unwrap();
        for number in 0..HOSTS_MAX {
            hosts.add(&host(number)).unwrap();
            hosts.add(&host(number)).unwrap();
        }
        assert!(hosts.add(&host(HOSTS_MAX)).is_err());
        let [first, last] = [0, HOSTS_MAX - 1].map(|number| hosts.mark(&host(number)).unwrap());
        assert_eq!(hosts.name(last.host), &host(HOSTS_MAX - 1));
        hosts.forget(&host(0));
        hosts.forget(&host(HOSTS_MAX));
        assert!(!hosts.counts(first) && hosts.counts(last));
        assert!(hosts.counts(hosts.mark(&host(0)).unwrap()));
        assert!(!hosts.counts(Mark::NOBODY) && !hosts.counts(Mark::CLAIM));
    }
}
