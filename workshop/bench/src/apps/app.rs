//! The programs of guests, and the contests of each.

use crate::contender::{Contender, Droveway, Mode, Options, Qemu};
use crate::scenario::variant;
use lab::hosts::Link;

/// Rate of the network next to a storage host, and of each host's link to that.
pub(super) const STORAGE_MBIT: u32 = 500;
/// Rate of the storage links where nothing is measured.
pub(super) const FAST_MBIT: u32 = 10_000;

/// A program, and who uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum App {
    /// Four clients on a third host change and read values.
    Memcached,
    /// pgbench in the guest, with eight connections.
    Postgres,
    /// Two clients of DBench in the guest, on a disk that moves with it.
    Dbench,
    /// Postmark in the guest, with 500 files.
    Postmark,
    /// Sysbench in the guest, with four connections to its PostgreSQL.
    Sysbench,
    /// Clients on a third host request files of nginx at a fixed rate.
    Nginx,
}

/// A contest.
#[derive(Clone, Copy, Debug)]
pub struct AppScenario {
    /// Its name: `make bench-NAME`.
    pub name: &'static str,
    /// What it measures, for people.
    pub about: &'static str,
    pub(super) app: App,
    /// Whether the guest's data disk moves with it.
    pub(super) moves_disk: bool,
    /// Whether the guest's disks are on a storage host, from which its page cache may come.
    pub(super) from_storage: bool,
}

/// All contests.
#[must_use]
pub fn all() -> [AppScenario; 8] {
    let contest =
        |name, about, app| AppScenario { name, about, app, moves_disk: false, from_storage: false };
    [
        contest(
            "apps-memcached",
            "a Debian of 768 MiB whose memcached clients change 96 MiB; four NICs of 250 Mbit/s",
            App::Memcached,
        ),
        contest("apps-postgres", "the same with PostgreSQL under pgbench", App::Postgres),
        contest("apps-sysbench", "the same with PostgreSQL under sysbench's OLTP", App::Sysbench),
        contest(
            "apps-nginx",
            "the same with nginx, of which clients request 10 MB/s, answered or not",
            App::Nginx,
        ),
        AppScenario {
            moves_disk: true,
            ..contest(
                "apps-memcached-disk",
                "apps-memcached with a disk of 512 MiB that moves with it",
                App::Memcached,
            )
        },
        AppScenario {
            moves_disk: true,
            ..contest(
                "apps-dbench",
                "the same with DBench on a disk of 512 MiB that moves with it",
                App::Dbench,
            )
        },
        AppScenario {
            from_storage: true,
            ..contest(
                "apps-cache-postmark",
                "that Debian with Postmark's files on a storage host; network and storage 500 \
                 Mbit/s each",
                App::Postmark,
            )
        },
        AppScenario {
            from_storage: true,
            ..contest(
                "apps-cache-postgres",
                "the same with a database of 225 MB under pgbench at 30 transactions/s",
                App::Postgres,
            )
        },
    ]
}

impl AppScenario {
    /// The database that pgbench works on: where page cache is what matters, one that fills it.
    pub(super) fn database(self) -> &'static str {
        if self.from_storage { "large" } else { "bench" }
    }

    pub(super) fn link(self) -> Link {
        if self.from_storage {
            Link::one(STORAGE_MBIT)
        } else {
            Link { nics: 4, mbit_per_s: Some(250) }
        }
    }

    fn modes(self) -> &'static [Mode] {
        if self.from_storage {
            &[Mode::Precopy, Mode::Multifd, Mode::Zstd]
        } else if self.moves_disk {
            &[Mode::MirrorPrecopy, Mode::Mirror, Mode::MirrorZstd, Mode::MirrorAutoConverge]
        } else {
            &[Mode::Precopy, Mode::Multifd, Mode::Zstd, Mode::AutoConverge]
        }
    }

    fn ours(self) -> Vec<Options> {
        if self.from_storage {
            let named = |name, how| variant(name, &["--shared-disks", "--storage", how]);
            return vec![named("off", "off"), named("adaptive", "auto")];
        }
        // The system's disk is on this machine: what is read there would cost no link anything.
        let off: &[&str] = &["--storage", "off"];
        let disk: &[&str] =
            if self.moves_disk { &["--disks", "data", "--create-disks"] } else { &[] };
        vec![Options { variant: None, ..variant("", &[off, disk].concat()) }]
    }

    /// All contenders, new.
    pub(crate) fn contenders(self) -> Vec<Box<dyn Contender>> {
        let qemu = self.modes().iter().map(|mode| Box::new(Qemu::new(*mode)) as Box<dyn Contender>);
        let ours = self.ours().into_iter();
        let ours = ours.map(|options| Box::new(Droveway::new(options)) as Box<dyn Contender>);
        qemu.chain(ours).collect()
    }
}
