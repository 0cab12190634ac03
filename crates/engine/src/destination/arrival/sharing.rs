//! Whether pages may come by name, and what is read of the VM's disks.

use std::sync::Arc;

use content::Domain;
use dedup::destination::Sharing;
use dedup::storage::Disks;
use qemu::machine::Machine;
use wire::{AuditOrder, SharingOrder, StorageOrder};

use super::{Arrival, End, storage};

/// What pages that come by name are found by.
pub(super) struct Shares {
    pub(super) sharing: Arc<Sharing>,
    pub(super) domain: Domain,
    /// Whether other hosts of the rack are asked.
    pub(super) rack: bool,
    /// Whether others find content of this VM.
    pub(super) keeps: bool,
    /// The VM's disks that are read.
    pub(super) disks: Option<Disks>,
}

impl Shares {
    /// Of a VM whose content is not shared.
    fn alone(order: &StorageOrder) -> std::io::Result<Self> {
        let sharing = Sharing::start(order.secret.clone().into_bytes(), None)?;
        let domain = Domain::default();
        Ok(Self { sharing, domain, rack: false, keeps: false, disks: None })
    }
}

/// What pages may come by name by, and what the source is told of it.
#[derive(Default)]
pub(super) struct Agreed {
    shares: Option<Shares>,
    note: Option<String>,
}

impl Agreed {
    fn to_nothing(why: &str) -> Self {
        Self { shares: None, note: Some(format!("content is not shared: {why}")) }
    }
}

/// What the source's order says of how pages come.
pub(super) struct Wanted {
    /// How content is to be shared.
    pub(super) sharing: Agreed,
    /// Which disks are to be read.
    pub(super) storage: Option<StorageOrder>,
    /// How it is audited.
    pub(super) audit: AuditOrder,
}

/// What the source is told of it.
#[derive(Default)]
pub(super) struct Told {
    pub(super) shares: Option<Shares>,
    /// Content is shared.
    pub(super) sharing: bool,
    /// Why it is not, or not as far as was wanted.
    pub(super) note: Option<String>,
    /// Which disks are read.
    pub(super) storage: Vec<bool>,
    /// Why others are not.
    pub(super) storage_notes: Vec<String>,
}

impl Arrival<'_> {
    /// Whether pages may come by name, as the source wants; or why not.
    pub(super) fn agree(&self, wanted: &SharingOrder) -> Agreed {
        let Some(sharing) = &self.shared.local.sharing else {
            if wanted.auto {
                return Agreed::default();
            }
            return Agreed::to_nothing("the agent at the destination is told not to");
        };
        if sharing.key(&wanted.domain).print().to_string() != wanted.print {
            return Agreed::to_nothing("both hosts' content.key differ");
        }
        let rack = wanted.rack && sharing.rack().is_some();
        if wanted.if_any && !rack && !sharing.has_any(&sharing.key(&wanted.domain)) {
            return Agreed::default();
        }
        let note = (rack != wanted.rack && !wanted.auto).then(|| {
            "content is shared with this host's VMs only: the agent at the destination knows \
             of no rack, or of no directory"
                .to_owned()
        });
        let (sharing, domain) = (Arc::clone(sharing), wanted.domain.clone());
        Agreed { shares: Some(Shares { sharing, domain, rack, keeps: true, disks: None }), note }
    }

    /// Makes ready for what is agreed on.
    pub(super) fn share(
        &self,
        machine: &Machine,
        Wanted { sharing: Agreed { shares, note }, storage: from_disks, .. }: Wanted,
    ) -> Result<Told, End> {
        let sharing = shares.is_some();
        let Some(wanted) = from_disks else {
            return Ok(Told { shares, sharing, note, ..Told::default() });
        };
        let (disks, storage_notes) =
            storage::open(machine, &wanted, &self.shared.local, self.lanes.threads());
        let storage = disks.opened.iter().map(Option::is_some).collect();
        let shares = match shares {
            Some(shares) => shares,
            None => Shares::alone(&wanted).map_err(End::failed)?,
        };
        let shares = Some(Shares { disks: Some(disks), ..shares });
        Ok(Told { shares, sharing, note, storage, storage_notes })
    }
}
