//! The destination's side of the agreement on deduplication: pages by name, and reading the VM's
//! disks.

use std::sync::Arc;

use content::Domain;
use data_threads::DataThreads;
use dedup::destination::{Arriving, Blocks, Outbox, PagePlacer, Resolving, Sharing};
use dedup::storage::Disks;
use page::Reserve;
use qemu::guest_disks;
use qemu::machine::Machine;
use wire::{SharingOrder, StorageOrder};

use super::audit::Auditing;
use super::connect::Connected;
use super::storage::{self, Waiting};

/// How the VM's content is shared.
#[derive(Clone)]
pub(super) struct Shares {
    pub(super) sharing: Arc<Sharing>,
    domain: Domain,
    /// Whether other hosts of the rack are queried.
    rack: bool,
    /// Whether the source waits until there is content to find.
    pub(super) sleeps: bool,
}

impl Shares {
    /// Whether the source may send names with bodies instead of asking. A rack is asked for each
    /// name: else two of its hosts might get the same content from elsewhere.
    pub(super) fn names_with_bodies(&self) -> bool {
        !self.rack
    }
}

/// How pages that are sent by name are found.
#[derive(Default)]
pub(super) struct ContentSources {
    /// None if content is shared in neither direction.
    pub(super) shares: Option<Shares>,
    /// The VM's disks that are read, and the secret that keys their names if nothing is shared.
    disks: Option<(Disks, String)>,
}

impl ContentSources {
    /// From shared content, and from disks with the secret that keys their names if nothing is
    /// shared.
    pub(super) fn of(shares: Option<Shares>, disks: Option<(Disks, String)>) -> Self {
        // Without one that is read, the source names nothing for them, and tables as large as a
        // part of the VM's RAM would be made for nothing.
        let disks = disks.filter(|(disks, _)| disks.opened.iter().any(Option::is_some));
        Self { shares, disks }
    }

    /// Whether disks are read only for memory that is written directly: a shared thread that places
    /// a page inline would wait for this VM's QEMU, and hold up other VMs.
    pub(super) fn reads_for_mapped_only(&self) -> bool {
        self.shares.is_some() && self.disks.is_some()
    }

    /// The stage that finds them, and its messages to the source. None if no page is sent by name.
    pub(super) fn admit(
        self,
        placer: Arc<dyn PagePlacer>,
        blocks: Blocks,
        threads: &Arc<DataThreads>,
        memory: &Arc<Reserve>,
    ) -> std::io::Result<Option<(Resolving, Outbox)>> {
        let (disks, secret) = self.disks.unzip();
        let sleeps = self.shares.as_ref().is_some_and(|shares| shares.sleeps);
        let memory = Arc::clone(memory);
        let vm = Arriving { placer, blocks, disks, sleeps, memory };
        match (self.shares, secret) {
            (Some(Shares { sharing, domain, rack, .. }), _) => {
                sharing.admit((&domain, rack), vm, threads).map(Some)
            }
            (None, Some(secret)) => Resolving::admit_alone(&secret, vm, threads).map(Some),
            (None, None) => Ok(None),
        }
    }
}

/// The agreement on pages by name, and a note for the source.
#[derive(Default)]
pub(super) struct Agreed {
    pub(super) shares: Option<Shares>,
    /// Both ends make the same names for content of this domain, whether it is shared now or not.
    pub(super) domain: Option<Domain>,
    pub(super) note: Option<String>,
}

impl Agreed {
    fn to_nothing(why: &str) -> Self {
        let note = Some(format!("content is not shared: {why}"));
        Self { note, ..Self::default() }
    }
}

/// The parts of the source's order about pages, and what is noted about the others.
pub(super) struct PagesOrder {
    /// How content is to be shared.
    pub(super) sharing: Agreed,
    /// Which disks are to be read.
    pub(super) storage: Option<StorageOrder>,
    /// How the move is audited.
    pub(super) audit: Auditing,
    /// What this host noted when it started QEMU.
    pub(super) notes: Vec<String>,
    /// Whether QEMU has mapped the RAM that its former one has.
    pub(super) maps_ram: bool,
}

/// How pages are found, and what is reported to the source.
#[derive(Default)]
pub(super) struct PagesReport {
    pub(super) found: ContentSources,
    /// Whether content is shared.
    pub(super) sharing: bool,
    /// Why it is not shared, or not as far as ordered.
    pub(super) note: Option<String>,
    /// Which disks are read.
    pub(super) storage: Vec<bool>,
    /// Why the other disks are not.
    pub(super) storage_notes: Vec<String>,
}

impl Connected<'_> {
    /// Agrees to pages by name as ordered, or returns why not.
    pub(super) fn agree(&self, wanted: &SharingOrder) -> Agreed {
        let Some(sharing) = &self.shared.local.sharing else {
            if wanted.auto {
                return Agreed::default();
            }
            return Agreed::to_nothing("the destination's agent has sharing turned off");
        };
        if let Some(why) = why_not(sharing, wanted) {
            return Agreed::to_nothing(&why);
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

    /// Prepares to find pages as agreed.
    pub(super) fn share(
        &self,
        machine: &Machine,
        PagesOrder { sharing: Agreed { shares, note, .. }, storage: from_disks, .. }: PagesOrder,
    ) -> PagesReport {
        let sharing = shares.is_some();
        let Some(wanted) = from_disks else {
            let found = ContentSources::of(shares, None);
            return PagesReport { found, sharing, note, ..PagesReport::default() };
        };
        let disks = guest_disks::disks(&machine.qmp, &machine.cwd);
        let waiting = Waiting {
            disks: disks.map_err(|error| error.to_string()),
            user: self.shared.local.programs.user().cloned(),
        };
        let (disks, storage_notes) =
            storage::open(waiting, &wanted, &self.shared.local, self.lanes.threads());
        let storage = disks.opened.iter().map(Option::is_some).collect();
        let found = ContentSources::of(shares, Some((disks, wanted.secret)));
        PagesReport { found, sharing, note, storage, storage_notes }
    }
}

/// Why both ends can't name pages alike.
fn why_not(sharing: &Sharing, SharingOrder { domain, print, .. }: &SharingOrder) -> Option<String> {
    // Messages between hosts of the rack have no room for any other domain.
    if let Err(error) = api::check_domain(&domain.0) {
        return Some(error.to_string());
    }
    let is_alike = sharing.key(domain).print().to_string() == *print;
    (!is_alike).then(|| "both hosts' content.key differ".to_owned())
}

#[cfg(test)]
mod tests {
    use ::storage::{FileSource, Opened, Settings};

    use super::*;

    #[test]
    fn only_disks_that_are_read_count() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let source = FileSource::open(file.path(), 0, None).unwrap();
        let one = Opened { source: Box::new(source), cached: false };
        for (opened, reads) in [(vec![None, None], false), (vec![None, Some(one)], true)] {
            let disks = Disks { opened, settings: Settings::default() };
            let found = ContentSources::of(None, Some((disks, "secret".to_owned())));
            assert_eq!(found.disks.is_some(), reads);
        }
    }

    #[test]
    fn content_is_shared_in_a_domain_that_is_one_and_with_the_same_key() {
        let sharing = Sharing::start(b"secret".to_vec(), None).unwrap();
        let why_not = |domain: &str, named_by: &str| {
            let domain = Domain(domain.to_owned());
            let print = sharing.key(&Domain(named_by.to_owned())).print().to_string();
            let wanted = SharingOrder {
                domain,
                print,
                rack: true,
                auto: false,
                if_any: false,
                may_sleep: false,
            };
            why_not(&sharing, &wanted)
        };
        assert_eq!(why_not("red", "red"), None);
        let long = "a".repeat(65);
        for (domain, named_by) in [("red", "blue"), (&*long, &*long), ("a b", "a b")] {
            assert!(why_not(domain, named_by).is_some(), "{domain}");
        }
    }
}
