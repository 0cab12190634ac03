//! A directory in memory, for an agent of the rack.
//!
//! Names are spread over shards. Each shard is a table with its own lock. A batch is sorted by
//! shard, so each shard is locked once for it. Hosts are recorded apart, under a read-write lock:
//! look-ups never wait for each other there, and to forget a host changes one number.

mod hosts;
mod table;

use std::fmt;
use std::time::{Duration, Instant};

use content::Name;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use crate::directory::{Answer, Directory, Terms};
use crate::error::DirectoryError;
use crate::host::HostName;
use crate::protocol::RequestKind;
use hosts::{HOSTS_MAX, Hosts, Mark};
use table::{ClaimResult, Table, WAYS};

/// Many more than the querying cores, so that two seldom meet, and few enough for a batch of 128
/// to have more than one name for each.
const SHARDS: u8 = 64;

/// The most names that are sorted at a time, on the stack.
const SORTED_MAX: usize = 256;
const _: () = assert!(SORTED_MAX <= 256, "a place among them fits a byte");

/// The unit of deadlines: 13 years of them fit an entry.
const TICK: Duration = Duration::from_millis(100);

/// How large an [`Embedded`] directory gets, and how long it remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most contents that it knows, at 32 bytes each. It takes no memory before it needs it.
    /// At least 512.
    pub entries_max: usize,
    /// How long records are valid.
    pub terms: Terms,
}

impl Default for Limits {
    /// 256 MiB, for 32 GiB of distinct content.
    fn default() -> Self {
        Self { entries_max: 1 << 23, terms: Terms::default() }
    }
}

/// How full an [`Embedded`] directory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Contents that it knows, including expired ones whose room is not needed yet.
    pub entries: usize,
    /// How many it can know.
    pub entries_max: usize,
    /// How many it has dropped, or never recorded, for want of room.
    pub evicted: u64,
    /// The memory of its entries, with the room for more.
    pub bytes: usize,
}

/// One shard. Two of them share no cache line.
#[repr(align(64))]
#[derive(Debug)]
struct Shard(Mutex<Table>);

/// A directory in this process's memory.
pub struct Embedded {
    hosts: RwLock<Hosts>,
    shards: Box<[Shard]>,
    entries_max: usize,
    claim_ticks: u32,
    hold_ticks: u32,
    clock: Box<dyn Fn() -> Instant + Send + Sync>,
    began: Instant,
}

/// What is valid now.
struct Now<'a> {
    tick: u32,
    hosts: RwLockReadGuard<'a, Hosts>,
}

impl Embedded {
    /// An empty one.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self::with_clock(limits, Instant::now)
    }

    /// An empty one that reads the time from `clock`.
    #[must_use]
    pub fn with_clock(limits: Limits, clock: impl Fn() -> Instant + Send + Sync + 'static) -> Self {
        let buckets_max = (limits.entries_max / (usize::from(SHARDS) * WAYS)).max(1);
        let shard = || Shard(Mutex::new(Table::new(buckets_max)));
        Self {
            hosts: RwLock::default(),
            shards: (0..SHARDS).map(|_| shard()).collect(),
            entries_max: buckets_max * WAYS * usize::from(SHARDS),
            claim_ticks: ticks(limits.terms.claim).saturating_add(1),
            hold_ticks: ticks(limits.terms.hold).saturating_add(1),
            began: clock(),
            clock: Box::new(clock),
        }
    }

    /// How full it is.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let mut usage = Usage { entries_max: self.entries_max, ..Usage::default() };
        for shard in &self.shards {
            let table = shard.0.lock();
            usage.entries += table.used();
            usage.evicted += table.evicted();
            usage.bytes += table.bytes();
        }
        usage
    }

    fn now(&self) -> Now<'_> {
        let tick = ticks((self.clock)().saturating_duration_since(self.began));
        Now { tick, hosts: self.hosts.read() }
    }

    /// What is valid now, and the mark of `host` in new entries.
    fn marking(&self, host: &HostName) -> Result<(Now<'_>, Mark), DirectoryError> {
        let now = self.now();
        if let Some(mark) = now.hosts.mark(host) {
            return Ok((now, mark));
        }
        drop(now);
        self.hosts.write().add(host)?;
        let now = self.now();
        let mark = now.hosts.mark(host).ok_or(DirectoryError::HostsMax { max: HOSTS_MAX })?;
        Ok((now, mark))
    }

    /// Calls `each` with the table of each name, the name's index in `names`, and the name.
    fn visit(&self, names: &[Name], mut each: impl FnMut(&mut Table, usize, &Name)) {
        let mut first = 0;
        for part in names.chunks(SORTED_MAX) {
            let mut order = [0_u16; SORTED_MAX];
            let order = &mut order[..part.len()];
            for (place, (number, name)) in order.iter_mut().zip((0_u16..).zip(part)) {
                *place = shard_of(name) << 8 | number;
            }
            order.sort_unstable();
            for together in order.chunk_by(|one, other| one >> 8 == other >> 8) {
                let shard = usize::from(together[0] >> 8);
                let mut table = self.shards[shard].0.lock();
                for number in together {
                    let number = usize::from(number & 0xff);
                    each(&mut table, first + number, &part[number]);
                }
            }
            first += part.len();
        }
    }
}

impl Directory for Embedded {
    fn request(
        &self,
        kind: RequestKind,
        host: &HostName,
        names: &[Name],
        answers: &mut Vec<Answer>,
        _until: Instant,
    ) -> Result<(), DirectoryError> {
        match kind {
            RequestKind::Claim => {
                let (now, by) = self.marking(host)?;
                let until = now.tick.saturating_add(self.claim_ticks);
                answers.resize(names.len(), Answer::Yours);
                let name = |host| now.hosts.name(host).clone();
                self.visit(names, |table, nth, content| {
                    match table.claim(content, by, until, &now) {
                        ClaimResult::Nothing => {}
                        ClaimResult::Held(host) => answers[nth] = Answer::Held(name(host)),
                        ClaimResult::Claimed(host) => answers[nth] = Answer::Coming(name(host)),
                    }
                });
            }
            RequestKind::Hold => {
                let (now, by) = self.marking(host)?;
                let until = now.tick.saturating_add(self.hold_ticks);
                self.visit(names, |table, _, name| table.hold(name, by, until, &now));
            }
            RequestKind::Release => {
                let now = self.now();
                if let Some(by) = now.hosts.mark(host) {
                    self.visit(names, |table, _, name| table.release(name, by));
                }
            }
            RequestKind::Forget => self.hosts.write().forget(host),
        }
        Ok(())
    }
}

impl fmt::Debug for Embedded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Embedded").field("usage", &self.usage()).finish_non_exhaustive()
    }
}

/// Uses other bits of the name than the tables do.
fn shard_of(name: &Name) -> u16 {
    let [.., byte, _] = name.0;
    u16::from(byte % SHARDS)
}

fn ticks(time: Duration) -> u32 {
    u32::try_from(time.as_millis() / TICK.as_millis()).unwrap_or(u32::MAX)
}

impl Now<'_> {
    /// Whether a mark was made since its host was last forgotten.
    fn counts(&self, mark: Mark) -> bool {
        self.hosts.counts(mark)
    }
}
