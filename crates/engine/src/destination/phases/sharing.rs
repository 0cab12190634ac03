//! Deduplication, as the destination agrees to it: pages by name, and reading the VM's
//! disks.

use std::sync::Arc;

use content::Domain;
use data_threads::DataThreads;
use dedup::destination::{Arriving, Blocks, Outbox, Resolving, Sharing};
use dedup::storage::Disks;
use placer::Placer;
use qemu::guest_disks;
use qemu::machine::Machine;
use wire::{SharingOrder, StorageOrder};

use super::audit::Auditing;
use super::connect::Connected;
use super::storage::{self, Waiting};

/// What the VM's content is shared by.
#[derive(Clone)]
pub(super) struct Shares {
    pub(super) sharing: Arc<Sharing>,
    domain: Domain,
    /// Whether other hosts of the rack are asked.
    rack: bool,
    /// Whether the source waits until there is something to find.
    pub(super) sleeps: bool,
}

/// What pages that come by name are found by.
#[derive(Default)]
pub(super) struct Found {
    /// None: content is not shared, in neither direction.
    pub(super) shares: Option<Shares>,
    /// The VM's disks that are read, and what names their pages if nothing is shared.
    disks: Option<(Disks, String)>,
}

impl Found {
    /// By what is shared, and disks with what names their pages if nothing is.
    pub(super) fn of(shares: Option<Shares>, disks: Option<(Disks, String)>) -> Self {
        Self { shares, disks }
    }

    /// The stage that finds them, and what it tells the source. None if no page comes
    /// by name.
    pub(super) fn admit(
        self,
        placer: Arc<Placer>,
        blocks: Blocks,
        threads: &Arc<DataThreads>,
    ) -> std::io::Result<Option<(Resolving, Outbox)>> {
        let (disks, secret) = self.disks.unzip();
        let sleeps = self.shares.as_ref().is_some_and(|shares| shares.sleeps);
        let vm = Arriving { placer, blocks, disks, sleeps };
        match (self.shares, secret) {
            (Some(Shares { sharing, domain, rack, .. }), _) => {
                sharing.admit((&domain, rack), vm, threads).map(Some)
            }
            (None, Some(secret)) => dedup::storage::admit(&secret, vm, threads).map(Some),
            (None, None) => Ok(None),
        }
    }
}

/// What was agreed on for pages that come by name, and a note for the source.
#[derive(Default)]
pub(super) struct Agreed {
    pub(super) shares: Option<Shares>,
    /// Both ends name the content of this domain alike, whether it is shared now or not.
    pub(super) domain: Option<Domain>,
    pub(super) note: Option<String>,
}

impl Agreed {
    fn to_nothing(why: &str) -> Self {
        let note = Some(format!("content is not shared: {why}"));
        Self { note, ..Self::default() }
    }
}

/// What the source's order says of how pages come.
pub(super) struct Wanted {
    /// How content is to be shared.
    pub(super) sharing: Agreed,
    /// Which disks are to be read.
    pub(super) storage: Option<StorageOrder>,
    /// How it is audited.
    pub(super) audit: Auditing,
}

/// What pages are found by, and what the source is told of that.
#[derive(Default)]
pub(super) struct Told {
    pub(super) found: Found,
    /// Content is shared.
    pub(super) sharing: bool,
    /// Why it is not, or not as far as was wanted.
    pub(super) note: Option<String>,
    /// Which disks are read.
    pub(super) storage: Vec<bool>,
    /// Why the other disks are not.
    pub(super) storage_notes: Vec<String>,
}

impl Connected<'_> {
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
        let domain = Some(wanted.domain.clone());
        let sleeps = wanted.if_any && !rack && !sharing.has_any(&sharing.key(&wanted.domain));
        if sleeps && !wanted.may_sleep {
            return Agreed { domain, ..Agreed::default() };
        }
        let note = (rack != wanted.rack && !wanted.auto).then(|| {
            "content is shared with this host's VMs only: the agent at the destination knows \
             of no rack, or of no directory"
                .to_owned()
        });
        let (sharing, domain_of) = (Arc::clone(sharing), wanted.domain.clone());
        let shares = Shares { sharing, domain: domain_of, rack, sleeps };
        Agreed { shares: Some(shares), domain, note }
    }

    /// Makes ready for what is agreed on.
    pub(super) fn share(
        &self,
        machine: &Machine,
        Wanted { sharing: Agreed { shares, note, .. }, storage: from_disks, .. }: Wanted,
    ) -> Told {
        let sharing = shares.is_some();
        let Some(wanted) = from_disks else {
            let found = Found::of(shares, None);
            return Told { found, sharing, note, ..Told::default() };
        };
        let disks = guest_disks::disks(&machine.qmp, &machine.cwd);
        let waiting = Waiting {
            disks: disks.map_err(|error| error.to_string()),
            user: self.shared.local.programs.user().cloned(),
        };
        let (disks, storage_notes) =
            storage::open(waiting, &wanted, &self.shared.local, self.lanes.threads());
        let storage = disks.opened.iter().map(Option::is_some).collect();
        let found = Found { shares, disks: Some((disks, wanted.secret)) };
        Told { found, sharing, note, storage, storage_notes }
    }
}
