//! The servers' commands, all of them plain ones.
//!
//! - `SET key "claim ..." NX PX ... GET` claims content, or returns the earlier record.
//! - `SET key "hold ..." PX ...` records a holder, whatever was there before.
//! - A hash counts how often each host was forgotten. It is read with each batch; records with an
//!   earlier count are invalid.
//!
//! An invalid record is replaced by `GETDEL` and a new claim. If two hosts do so at the same
//! time, one may delete the other's claim. But it sees the claim that it deleted, and reports
//! that the content is coming there: so one of them fetches it, whichever the servers name
//! afterwards. Content is released by `GET` and `DEL`. A claim made between these two is lost:
//! then the content is sent twice.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use content::Name;
use parking_lot::Mutex;
use redis::{Cmd, RedisError, Value, cmd};

use super::link::Link;
use super::record::Record;
use super::{RedisSettings, Servers};
use crate::directory::{Answer, Terms};
use crate::error::DirectoryError;
use crate::host::HostName;
use crate::protocol::RequestKind;

/// The most names in a pipeline.
const NAMES_MAX: usize = 1024;
/// The hash lives this many times as long as any record.
const HOSTS_TERM_FACTOR: u32 = 2;
/// How often a batch is written at most if its host is forgotten meanwhile.
const ATTEMPTS_MAX: usize = 3;

/// How often each host was forgotten. Hosts that never were are not in it.
type Generations = HashMap<HostName, u64>;

/// A batch that was written for a host.
struct Done {
    /// How often the host had been forgotten.
    generation: u64,
    /// The same for all hosts.
    generations: Generations,
    replies: Vec<Value>,
}

/// What all threads share.
pub(super) struct Talk {
    at: String,
    prefix: Vec<u8>,
    terms: Terms,
    /// As last read; none before.
    generations: Mutex<Option<Generations>>,
}

impl Talk {
    pub(super) fn new(settings: &RedisSettings) -> Result<Self, DirectoryError> {
        // They use the characters of host names, so none of those that separate the parts of a
        // key.
        for name in [&settings.cluster, &settings.rack] {
            let check = HostName::new(name);
            check.map_err(|error| DirectoryError::Settings(error.to_string()))?;
        }
        let urls = match &settings.servers {
            Servers::One(url) => std::slice::from_ref(url),
            Servers::Cluster(urls) => urls.as_slice(),
        };
        let mut at = Vec::new();
        for url in urls {
            let client = redis::Client::open(url.as_str());
            let client = client.map_err(|error| DirectoryError::Settings(error.to_string()))?;
            // The address has no password.
            at.push(client.get_connection_info().addr().to_string());
        }
        if at.is_empty() {
            return Err(DirectoryError::Settings("no server is named".to_owned()));
        }
        let prefix = format!("droveway:{}:{}:", settings.cluster, settings.rack);
        Ok(Self {
            at: at.join(", "),
            prefix: prefix.into_bytes(),
            terms: settings.terms,
            generations: Mutex::new(None),
        })
    }

    pub(super) fn at(&self) -> &str {
        &self.at
    }

    /// Turns a client error into one that says who is to blame.
    pub(super) fn blame(&self, error: &RedisError) -> DirectoryError {
        let (at, why) = (self.at.clone(), error.to_string());
        if error.is_timeout() {
            DirectoryError::Late { at }
        } else if error.is_io_error() || error.is_connection_dropped() {
            DirectoryError::Unreachable { at, why }
        } else {
            DirectoryError::Refused { at, why }
        }
    }

    pub(super) fn perform(
        &self,
        link: &mut Link,
        kind: RequestKind,
        host: &HostName,
        names: &[Name],
        until: Instant,
    ) -> Result<Vec<Answer>, DirectoryError> {
        let mut answers = Vec::with_capacity(names.len());
        if kind == RequestKind::Forget {
            self.forget(link, host, until)?;
        }
        for part in names.chunks(NAMES_MAX) {
            match kind {
                RequestKind::Claim => self.claim(link, host, part, &mut answers, until)?,
                RequestKind::Hold => self.hold(link, host, part, until)?,
                RequestKind::Release => self.release(link, host, part, until)?,
                RequestKind::Forget => {}
            }
        }
        Ok(answers)
    }

    fn run(
        &self,
        link: &mut Link,
        commands: Vec<Cmd>,
        until: Instant,
    ) -> Result<Vec<Value>, DirectoryError> {
        let count = commands.len();
        let replies = link.run(commands, until).map_err(|error| self.blame(&error))?;
        if replies.len() != count {
            let why = format!("{} replies to {count} commands", replies.len());
            return Err(DirectoryError::Nonsense { at: self.at.clone(), why });
        }
        Ok(replies)
    }

    fn key(&self, name: &Name) -> Vec<u8> {
        [self.prefix.as_slice(), &name.0].concat()
    }

    fn hosts_key(&self) -> Vec<u8> {
        [self.prefix.as_slice(), b"hosts"].concat()
    }

    /// Commands that read how often hosts were forgotten, and prolong that hash's life.
    fn read_generations(&self) -> [Cmd; 2] {
        let (mut read, mut keep) = (cmd("HGETALL"), cmd("PEXPIRE"));
        read.arg(self.hosts_key());
        keep.arg(self.hosts_key()).arg(millis(self.terms.hold * HOSTS_TERM_FACTOR));
        [read, keep]
    }

    /// How often a host was forgotten, as last read.
    fn generation(
        &self,
        link: &mut Link,
        host: &HostName,
        until: Instant,
    ) -> Result<u64, DirectoryError> {
        let mut generations = self.generations.lock().clone();
        if generations.is_none() {
            let replies = self.run(link, self.read_generations().to_vec(), until)?;
            generations = Some(self.note(&replies));
        }
        Ok(generation(&generations.unwrap_or_default(), host))
    }

    fn note(&self, replies: &[Value]) -> Generations {
        let generations = replies.first().map(parse_generations).unwrap_or_default();
        *self.generations.lock() = Some(generations.clone());
        generations
    }

    fn forget(
        &self,
        link: &mut Link,
        host: &HostName,
        until: Instant,
    ) -> Result<(), DirectoryError> {
        let mut forget = cmd("HINCRBY");
        forget.arg(self.hosts_key()).arg(host.as_str()).arg(1);
        let [read, keep] = self.read_generations();
        let replies = self.run(link, vec![forget, read, keep], until)?;
        self.note(replies.get(1..).unwrap_or_default());
        Ok(())
    }

    /// Runs commands that contain how often `host` was forgotten, and runs them again if that has
    /// changed.
    fn run_as(
        &self,
        link: &mut Link,
        host: &HostName,
        until: Instant,
        commands: impl Fn(u64) -> Vec<Cmd>,
    ) -> Result<Done, DirectoryError> {
        let mut generation = self.generation(link, host, until)?;
        for _ in 0..ATTEMPTS_MAX {
            let mut all = self.read_generations().to_vec();
            let own = all.len();
            all.extend(commands(generation));
            let mut replies = self.run(link, all, until)?;
            let generations = self.note(&replies);
            let now = self::generation(&generations, host);
            if now == generation {
                let replies = replies.split_off(own);
                return Ok(Done { generation, generations, replies });
            }
            // The records just written are invalid.
            generation = now;
        }
        let why = format!("{host} is forgotten again and again");
        Err(DirectoryError::Refused { at: self.at.clone(), why })
    }

    /// Claims, and checks earlier records: renews claims of the host, and replaces invalid ones.
    fn claim(
        &self,
        link: &mut Link,
        host: &HostName,
        names: &[Name],
        answers: &mut Vec<Answer>,
        until: Instant,
    ) -> Result<(), DirectoryError> {
        let claim = |generation| Record { is_claim: true, generation, host: host.clone() };
        let done = self.run_as(link, host, until, |generation| {
            let record = claim(generation);
            names.iter().map(|name| self.claim_one(name, &record)).collect()
        })?;
        let record = claim(done.generation);
        let first = answers.len();
        let mut commands = Vec::new();
        let mut taken = Vec::new();
        for (nth, (name, found)) in names.iter().zip(&done.replies).enumerate() {
            let counts = counting(found, &done.generations);
            if counts.as_ref() == Some(&record) {
                let mut renew = cmd("PEXPIRE");
                renew.arg(self.key(name)).arg(millis(self.terms.claim));
                commands.push(renew);
            } else if counts.is_none() && *found != Value::Nil {
                let mut delete = cmd("GETDEL");
                delete.arg(self.key(name));
                taken.push((first + nth, commands.len()));
                commands.extend([delete, self.claim_one(name, &record)]);
            }
            answers.push(answer(counts, host));
        }
        let replies = self.run(link, commands, until)?;
        for (nth, at) in taken {
            // A valid record that was deleted, or was set before ours, is not ours.
            let both = replies.get(at..at + 2).unwrap_or_default();
            let counts = both.iter().find_map(|found| counting(found, &done.generations));
            if let Some(answer) = answers.get_mut(nth) {
                *answer = self::answer(counts, host);
            }
        }
        Ok(())
    }

    fn claim_one(&self, name: &Name, record: &Record) -> Cmd {
        let mut claim = cmd("SET");
        claim.arg(self.key(name)).arg(record.to_text());
        claim.arg("NX").arg("PX").arg(millis(self.terms.claim)).arg("GET");
        claim
    }

    fn hold(
        &self,
        link: &mut Link,
        host: &HostName,
        names: &[Name],
        until: Instant,
    ) -> Result<(), DirectoryError> {
        let done = self.run_as(link, host, until, |generation| {
            let text = Record { is_claim: false, generation, host: host.clone() }.to_text();
            let hold = |name| {
                let mut hold = cmd("SET");
                hold.arg(self.key(name)).arg(&text).arg("PX").arg(millis(self.terms.hold));
                hold
            };
            names.iter().map(hold).collect()
        });
        done.map(|_| ())
    }

    fn release(
        &self,
        link: &mut Link,
        host: &HostName,
        names: &[Name],
        until: Instant,
    ) -> Result<(), DirectoryError> {
        let on = |command, name| {
            let mut command = cmd(command);
            command.arg(self.key(name));
            command
        };
        let found = self.run(link, names.iter().map(|name| on("GET", name)).collect(), until)?;
        let is_its = |found: &Value| parse(found).is_some_and(|record| record.host == *host);
        let its = names.iter().zip(&found).filter(|(_, found)| is_its(found));
        self.run(link, its.map(|(name, _)| on("DEL", name)).collect(), until).map(|_| ())
    }
}

/// The answer to a host's claim, by the valid record if there is one.
fn answer(counts: Option<Record>, host: &HostName) -> Answer {
    match counts {
        Some(record) if !record.is_claim => Answer::Held(record.host),
        Some(record) if record.host != *host => Answer::Coming(record.host),
        _ => Answer::Yours,
    }
}

fn generation(generations: &Generations, host: &HostName) -> u64 {
    generations.get(host).copied().unwrap_or_default()
}

/// The record in a reply, if it is valid.
fn counting(reply: &Value, generations: &Generations) -> Option<Record> {
    let record = parse(reply)?;
    (generation(generations, &record.host) == record.generation).then_some(record)
}

fn parse(reply: &Value) -> Option<Record> {
    match reply {
        Value::BulkString(bytes) => Record::parse(bytes),
        _ => None,
    }
}

/// Skips fields that are no host or no number: this program did not write them.
fn parse_generations(reply: &Value) -> Generations {
    let Value::Array(fields) = reply else { return Generations::new() };
    let text = |value: &Value| match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        _ => None,
    };
    let pairs = fields.as_chunks::<2>().0.iter();
    let pairs = pairs.filter_map(|[host, generation]| {
        Some((HostName::new(&text(host)?).ok()?, text(generation)?.parse().ok()?))
    });
    pairs.collect()
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).clamp(1, 1 << 50)
}
