//! The contests: the workload on the guest's files, the speed of the links, and the contenders.

use std::fmt;
use std::time::Duration;

use clap::{Args, ValueEnum};
use lab_guest::cache::{Layout, Use};
use lab_guest::orders::Orders;
use serde_json::{Value, json};

use crate::contender::{CarriedFromDisks, Contender, Droveway, Mode, Qemu};
use crate::scenario::variant;
use lab::guest::GuestSpec;
use lab::hosts::Link;

const MIB: u64 = 1 << 20;
const MB: u64 = 1_000_000;
const MEMORY: &str = "512M";
/// Nearly 70 % of that memory.
const CACHED_BYTES: u64 = 350 * MIB;
/// Memory of the guest's programs, which does not shrink.
const OTHER_BYTES: u64 = 40 * MIB;
const SEED: u64 = 11;
/// As for gangs: with a shorter tick the guest's beats themselves take a tenth of a core.
const TICK_MS: u64 = 10;
/// An argument that all contenders of Droveway get.
const SHARED: &str = "--shared-disks";
/// The contender whose agents read no faster than this.
pub(super) const LIMITED: &str = "droveway-carried-limited";
pub(super) const LIMIT_MBIT: u32 = 100;
/// Shares of the restorable pages that come from storage, in percent.
const SHARES: [&str; 6] = ["0", "20", "40", "60", "80", "100"];
/// What a disk that seeks serves per second.
const SEEKS_PER_S: u32 = 200;
/// Rate of the usual links.
pub const MBIT: u32 = 500;

/// How fast the storage's links are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum San {
    /// A quarter of the network
    Quarter,
    /// As the network
    #[default]
    Same,
    /// Twice the network
    Double,
    /// As the network, and a tenth of it once half of the guest's memory has crossed either
    Slows,
    /// As the network, with a disk that seeks for each request
    Seeks,
    /// As the network, with an NFS server in place of an NBD server
    Nfs,
}

/// The links of a contest.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Links {
    /// How fast the network is next to a storage host, in Mbit/s; storage changes with it
    #[arg(long, default_value_t = MBIT, value_parser = clap::value_parser!(u32).range(8..))]
    pub mbit: u32,
    /// How fast the storage host is
    #[arg(long, value_enum, default_value_t = San::Same)]
    pub san: San,
}

impl Links {
    /// The link between the hosts.
    #[must_use]
    pub fn network(self) -> Link {
        Link::one(self.mbit)
    }

    /// Rate of the link to the storage host, at first.
    #[must_use]
    pub fn san_mbit(self) -> u32 {
        match self.san {
            San::Quarter => self.mbit / 4,
            San::Same | San::Slows | San::Seeks | San::Nfs => self.mbit,
            San::Double => self.mbit * 2,
        }
    }

    /// Requests that the storage host's disk serves per second, if they are limited.
    #[must_use]
    pub fn requests_per_s(self) -> Option<u32> {
        (self.san == San::Seeks).then_some(SEEKS_PER_S)
    }

    /// Rate of the link to the storage host after it has slowed.
    #[must_use]
    pub fn slowed_mbit(self) -> Option<u32> {
        (self.san == San::Slows).then_some((self.mbit / 10).max(1))
    }
}

impl fmt::Display for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "network {} Mbit/s, storage {} Mbit/s", self.mbit, self.san_mbit())?;
        if self.san == San::Nfs {
            write!(f, " by NFS")?;
        }
        if let Some(requests) = self.requests_per_s() {
            write!(f, ", {requests} requests/s")?;
        }
        match self.slowed_mbit() {
            Some(mbit) => write!(f, ", {mbit} from half-way on"),
            None => Ok(()),
        }
    }
}

/// A contest.
pub struct CacheScenario {
    /// Its name: `make bench-NAME`.
    pub name: &'static str,
    /// What it measures, for people.
    pub about: &'static str,
    /// The workload on the guest's files.
    pub kind: Use,
    /// Bytes of files that the guest reads and writes per second.
    pub bytes_per_s: u64,
    /// Whether the guest is watched until it reads as much as before.
    pub watched: bool,
}

/// A contender, and what its guest does before.
pub struct Contestant {
    /// How the VM moves.
    pub contender: Box<dyn Contender>,
    /// Whether the guest drops its page cache before the move.
    pub drops: bool,
}

impl Contestant {
    fn new(contender: impl Contender + 'static) -> Self {
        Self { contender: Box::new(contender), drops: false }
    }

    fn ours(name: &str, arguments: &[&str]) -> Self {
        Self::new(Droveway::new(variant(name, &[&[SHARED], arguments].concat())))
    }

    /// Its name in tables.
    #[must_use]
    pub fn name(&self) -> String {
        if self.drops { "qemu-drop".to_owned() } else { self.contender.name() }
    }
}

impl CacheScenario {
    /// All contestants, new.
    #[must_use]
    pub fn contestants(&self) -> Vec<Contestant> {
        let qemu = [Mode::Precopy, Mode::Multifd, Mode::Zstd].map(Qemu::new).map(Contestant::new);
        let carried = |name, lines| Contestant::new(CarriedFromDisks::new(name, lines));
        let limited = format!("storage = \"on\"\nstorage-limit = \"{LIMIT_MBIT}M\"");
        let ends = [
            Contestant::ours("off", &["--storage", "off"]),
            Contestant::ours("adaptive", &["--storage", "auto"]),
            carried("droveway-carried-off", "storage = \"off\"".to_owned()),
            carried("droveway-carried-adaptive", "storage = \"on\"".to_owned()),
            carried(LIMITED, limited),
        ];
        let middle: Vec<_> = if self.watched {
            vec![Contestant { drops: true, ..Contestant::new(Qemu::new(Mode::Precopy)) }]
        } else {
            let share = |share: &&str| {
                let arguments = ["--storage", "auto", "--storage-share", share];
                Contestant::ours(&format!("r{share}"), &arguments)
            };
            SHARES.iter().map(share).collect()
        };
        qemu.into_iter().chain(middle).chain(ends).collect()
    }

    /// The guest's files.
    #[must_use]
    pub fn layout(&self) -> Layout {
        Layout { kind: self.kind, cached_bytes: CACHED_BYTES, seed: SEED }
    }

    /// Bytes that have to get to the destination, from the source or from storage.
    #[must_use]
    pub fn content_bytes(&self) -> u64 {
        CACHED_BYTES + OTHER_BYTES
    }

    /// The guest, without its disk.
    #[must_use]
    pub fn guest(&self) -> GuestSpec {
        let orders = Orders {
            seed: SEED,
            random_bytes: OTHER_BYTES,
            cache: self.kind,
            cache_bytes: CACHED_BYTES,
            cache_rate: self.bytes_per_s,
            tick_ms: TICK_MS,
            ..Orders::default()
        };
        GuestSpec::new("bench", MEMORY, orders)
    }

    /// The downtime goal.
    #[must_use]
    pub fn goal(&self) -> Duration {
        Duration::from_millis(300)
    }

    /// When a contender gives up. All by storage takes a minute where storage has a quarter of 200
    /// Mbit/s.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(180)
    }

    /// Name of the result file for these links.
    #[must_use]
    pub fn label(&self, links: Links) -> String {
        let san = links.san.to_possible_value().map(|value| value.get_name().to_owned());
        let san = san.filter(|_| links.san != San::Same);
        let mbit = (links.mbit != MBIT).then(|| links.mbit.to_string());
        let parts = [Some(self.name.to_owned()), san, mbit];
        parts.into_iter().flatten().collect::<Vec<_>>().join("-")
    }

    /// The guest, for the results.
    #[must_use]
    pub fn guest_json(&self) -> Value {
        let layout = self.layout();
        json!({
            "memory": MEMORY,
            "random_bytes": OTHER_BYTES,
            "cached_bytes": CACHED_BYTES,
            "files": layout.files(),
            "files_bytes": layout.bytes(),
            "touched_bytes_per_s": self.bytes_per_s,
        })
    }

    /// The links, for the results.
    #[must_use]
    pub fn links_json(&self, links: Links, congestion_control: &str) -> Value {
        json!({
            "nics": 1,
            "mbit_per_s_each": links.mbit,
            "storage_mbit_per_s": links.san_mbit(),
            "storage_slowed_mbit_per_s": links.slowed_mbit(),
            "storage_requests_per_s": links.requests_per_s(),
            "congestion_control": congestion_control,
            "downtime_goal_ms": u64::try_from(self.goal().as_millis()).unwrap_or(u64::MAX),
        })
    }
}

/// All contests.
#[must_use]
pub fn all() -> Vec<CacheScenario> {
    let contest = |name, about, kind, bytes_per_s| CacheScenario {
        name,
        about,
        kind,
        bytes_per_s,
        watched: false,
    };
    vec![
        contest(
            "cache-web",
            "512 MiB, 350 of them page cache: static files of 300 KB, read at 15 MB/s",
            Use::Web,
            15 * MB,
        ),
        contest(
            "cache-postmark",
            "the same with files that are made, deleted, read and written, at 6 MB/s",
            Use::Mail,
            6 * MB,
        ),
        contest(
            "cache-db",
            "the same with a few big files, read and written at random, at 5 MB/s",
            Use::Database,
            5 * MB,
        ),
        CacheScenario {
            watched: true,
            ..contest(
                "cache-after",
                "the same with one file that is read again and again: what that gets before, \
                 during and after",
                Use::Reading,
                100 * MB,
            )
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_say_what_is_not_usual() {
        let web = &all()[0];
        let label = |mbit, san| web.label(Links { mbit, san });
        assert_eq!(label(500, San::Same), "cache-web");
        assert_eq!(label(200, San::Same), "cache-web-200");
        assert_eq!(label(500, San::Quarter), "cache-web-quarter");
        assert_eq!(label(200, San::Slows), "cache-web-slows-200");
        let slows = Links { mbit: 500, san: San::Slows };
        assert_eq!(
            slows.to_string(),
            "network 500 Mbit/s, storage 500 Mbit/s, 50 from half-way on"
        );
        assert_eq!(Links { mbit: 500, san: San::Double }.san_mbit(), 1000);
        assert_eq!(label(500, San::Seeks), "cache-web-seeks");
        let seeks = Links { mbit: 500, san: San::Seeks }.to_string();
        assert_eq!(seeks, "network 500 Mbit/s, storage 500 Mbit/s, 200 requests/s");
        assert_eq!(label(500, San::Nfs), "cache-web-nfs");
        let nfs = Links { mbit: 500, san: San::Nfs }.to_string();
        assert_eq!(nfs, "network 500 Mbit/s, storage 500 Mbit/s by NFS");
    }

    #[test]
    fn contenders_have_names_of_their_own() {
        for scenario in all() {
            let mut names: Vec<_> = scenario.contestants().iter().map(Contestant::name).collect();
            let shares = names.iter().filter(|name| name.starts_with("droveway-r")).count();
            assert_eq!(shares, if scenario.watched { 0 } else { 6 });
            assert!(names.contains(&"droveway-adaptive".to_owned()));
            assert!(names.contains(&LIMITED.to_owned()));
            names.sort();
            let count = names.len();
            names.dedup();
            assert_eq!(names.len(), count, "{names:?}");
        }
    }
}
