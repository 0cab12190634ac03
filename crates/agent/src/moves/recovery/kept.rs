//! What an earlier run's journals say before their switchovers are settled.

use std::net::{IpAddr, SocketAddr};

use qemu::machine;
use serde::Deserialize;
use switchover::Kept;
use switchover::journal::Opened;

use crate::vms::registry::Held;

/// The VMs of unfinished switchovers.
pub(crate) fn held(kept: &[Kept]) -> Held {
    Held(kept.iter().filter_map(vm).collect())
}

/// Those that were to leave, or may have been. The journal of such a VM's arrival may be here too.
pub(super) fn leaving(kept: &[Kept]) -> Held {
    let sources = kept.iter().filter(|one| !matches!(one, Kept::Destination(_)));
    Held(sources.filter_map(vm).collect())
}

/// Whether a journal's VM is among them, with its QEMU if that can be read.
pub(super) fn is_among(held: &Held, opened: &Opened) -> bool {
    match machine::Record::deserialize(&opened.qemu) {
        Ok(qemu) => held.holds(&opened.vm, &qemu),
        Err(_) => held.names(&opened.vm),
    }
}

/// A journal's VM, and its QEMU, if that can be read.
fn vm(kept: &Kept) -> Option<(String, Option<machine::Record>)> {
    if let Kept::Unreadable(error) = kept {
        return Some((error.vm()?.to_owned(), None));
    }
    let opened = opened(kept)?;
    Some((opened.vm.clone(), machine::Record::deserialize(&opened.qemu).ok()))
}

/// The addresses of their other hosts, as far as they are known.
pub(crate) fn hosts(kept: &[Kept]) -> impl Iterator<Item = IpAddr> {
    let address = |opened: &Opened| opened.peer_address.parse().ok().map(|at: SocketAddr| at.ip());
    kept.iter().filter_map(opened).filter_map(address)
}

fn opened(kept: &Kept) -> Option<&Opened> {
    match kept {
        Kept::Source(kept) => Some(kept.journal.opened()),
        Kept::Destination(kept) => Some(kept.journal.opened()),
        Kept::Unreadable(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use switchover::MigrationId;
    use switchover::journal::{Journal, JournalDir};
    use switchover::{destination, source};

    use super::*;

    #[test]
    fn hosts_of_either_side_are_known_and_a_name_is_no_address() {
        let dir = tempfile::tempdir().unwrap();
        let journals = JournalDir::open(dir.path()).unwrap();
        let opened = |vm: &str, peer_address: &str| Opened {
            migration: MigrationId::random().unwrap(),
            vm: vm.to_owned(),
            peer: "host-b".to_owned(),
            peer_address: peer_address.to_owned(),
            run: true,
            qemu: serde_json::Value::Null,
            listed: None,
            handed_over: false,
        };
        let left: Journal<source::Record> =
            journals.create(opened("web1", "10.0.0.2:7800")).unwrap();
        let came: Journal<destination::Record> =
            journals.create(opened("web2", "[2001:db8::3]:7800")).unwrap();
        let odd: Journal<source::Record> = journals.create(opened("web3", "host-b")).unwrap();
        drop((left, came, odd));
        let kept = journals.contents().unwrap();
        let mut addresses: Vec<String> = hosts(&kept).map(|at| at.to_string()).collect();
        addresses.sort();
        assert_eq!(addresses, ["10.0.0.2", "2001:db8::3"]);
        assert_eq!(held(&kept).0.len(), 3);
        let mut leaving: Vec<String> = leaving(&kept).0.into_iter().map(|(vm, _)| vm).collect();
        leaving.sort();
        assert_eq!(leaving, ["web1", "web3"]);
    }
}
