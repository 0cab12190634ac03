//! Whether pages may come by name, and what is read of the VM's disks.

use std::sync::Arc;

use content::Domain;
use qemu::machine::Machine;
use wire::{AuditOrder, SharingOrder, StorageOrder};

use super::{Arrival, End, storage};
use crate::sharing::{Disks, Sharing};

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

/// That, or why none may; and what is not used of it.
pub(super) type Agreed = Result<(Shares, Option<&'static str>), &'static str>;

/// What the source's order says of how pages come.
pub(super) struct Wanted {
    /// How content is to be shared.
    pub(super) sharing: Option<Agreed>,
    /// Which disks are to be read.
    pub(super) storage: Option<StorageOrder>,
    /// How it is audited.
    pub(super) audit: AuditOrder,
}

/// What the source is told of it.
pub(super) struct Told {
    pub(super) shares: Option<Shares>,
    /// Content is shared.
    pub(super) sharing: bool,
    /// Which disks are read.
    pub(super) storage: Vec<bool>,
}

impl Arrival<'_> {
    /// Whether pages may come by name, as the source wants; or why not.
    pub(super) fn agree(&self, wanted: &SharingOrder) -> Agreed {
        let Some(sharing) = &self.shared.local.sharing else {
            return Err("the agent at the destination is told not to");
        };
        if sharing.key(&wanted.domain).print().to_string() != wanted.print {
            return Err("both hosts' content.key differ");
        }
        let alone = (wanted.rack && sharing.rack().is_none())
            .then_some("the agent at the destination knows of no rack, or of no directory");
        let rack = wanted.rack && alone.is_none();
        let (sharing, domain) = (Arc::clone(sharing), wanted.domain.clone());
        Ok((Shares { sharing, domain, rack, keeps: true, disks: None }, alone))
    }

    /// Makes ready for what is agreed on; `notes` say what is not.
    pub(super) fn share(
        &self,
        machine: &Machine,
        Wanted { sharing: agreed, storage: from_disks, .. }: Wanted,
        notes: &mut Vec<String>,
    ) -> Result<Told, End> {
        let shares = match agreed {
            None => None,
            Some(Ok((shares, alone))) => {
                let text = |why| format!("content is shared with this host's VMs only: {why}");
                notes.extend(alone.map(text));
                Some(shares)
            }
            Some(Err(why)) => {
                notes.push(format!("content is not shared: {why}"));
                None
            }
        };
        let sharing = shares.is_some();
        let Some(wanted) = from_disks else {
            return Ok(Told { shares, sharing, storage: Vec::new() });
        };
        let (disks, why) =
            storage::open(machine, &wanted, &self.shared.local, self.lanes.threads());
        notes.extend(why);
        let storage = disks.opened.iter().map(Option::is_some).collect();
        let shares = match shares {
            Some(shares) => shares,
            None => Shares::alone(&wanted).map_err(End::failed)?,
        };
        Ok(Told { shares: Some(Shares { disks: Some(disks), ..shares }), sharing, storage })
    }
}
