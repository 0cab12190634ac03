//! A directory in Redis 7 or newer or Valkey: one server, or a cluster of them.
//!
//! A caller queues a job and waits, but never beyond its deadline, whatever happens to the
//! servers. A few threads, each with its own connection, do the jobs: a batch is one or two
//! pipelines of plain commands. All keys on the servers have a time to live. The servers'
//! operator decides how much memory they take, and what is evicted when it is full (`maxmemory`,
//! and `maxmemory-policy volatile-lru`).

mod link;
mod record;
mod talk;

use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use content::Name;
use crossbeam_channel::{Receiver, SendTimeoutError, Sender, bounded};
use data_threads::Joined;

use crate::directory::{Answer, Directory, Terms};
use crate::error::DirectoryError;
use crate::host::HostName;
use crate::protocol::RequestKind;
use crate::waiter::Waiter;
use link::Link;
use talk::Talk;

/// The most jobs that wait. A caller with another one waits for room.
const JOBS_MAX: usize = 64;
/// The shortest time between a thread's attempts to connect.
const RECONNECT: Duration = Duration::from_secs(1);
const CONNECT_MAX: Duration = Duration::from_secs(2);
/// The shortest wait for replies, even if the caller has given up: new connections would make a
/// server that is slow for a moment even slower.
const PATIENCE: Duration = Duration::from_secs(1);

/// Where the servers are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Servers {
    /// One, as a URL: `redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE]`, or
    /// `redis+unix:///PATH`.
    One(String),
    /// Some servers of a cluster; they know the others.
    Cluster(Vec<String>),
}

/// The settings of a [`Redis`] directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisSettings {
    /// Where the servers are.
    pub servers: Servers,
    /// The name of the Droveway cluster. Others may use the same servers.
    pub cluster: String,
    /// Which rack.
    pub rack: String,
    /// How long records are valid.
    pub terms: Terms,
    /// The number of connections, which is also the number of batches in flight.
    pub connections: usize,
}

/// A directory in Redis or Valkey.
///
/// It keeps one holder of each content, the last that was recorded. More would take a set for
/// each content instead of one short string; in the embedded directory the second holder costs
/// nothing.
///
/// Dropping it waits for jobs that are being done: until their deadlines, or for a second or two.
pub struct Redis {
    at: String,
    jobs: Sender<Job>,
    workers: Vec<Joined>,
}

type Outcome = Result<Vec<Answer>, DirectoryError>;

/// One call's request.
struct Job {
    kind: RequestKind,
    host: HostName,
    names: Vec<Name>,
    until: Instant,
    waiter: Arc<Waiter<Outcome>>,
}

/// A thread's connection.
struct Worker {
    talk: Arc<Talk>,
    servers: Servers,
    link: Option<Link>,
    /// Until when there is no new attempt to connect, and why the last one failed.
    down: Option<(Instant, DirectoryError)>,
}

impl Redis {
    /// The directory of a rack. It connects on its first call.
    ///
    /// # Errors
    /// If the settings are invalid, or a thread can't be started.
    pub fn new(settings: &RedisSettings) -> Result<Self, DirectoryError> {
        let talk = Arc::new(Talk::new(settings)?);
        let at = talk.at().to_owned();
        let (sender, receiver) = bounded(JOBS_MAX);
        let mut redis = Self { at, jobs: sender, workers: Vec::new() };
        for number in 0..settings.connections.max(1) {
            let (talk, receiver) = (Arc::clone(&talk), Receiver::clone(&receiver));
            let mut worker =
                Worker { talk, servers: settings.servers.clone(), link: None, down: None };
            let thread = thread::Builder::new().name(format!("directory-redis-{number}"));
            let thread = thread.spawn(move || worker.run(&receiver));
            let failed =
                |error| DirectoryError::Settings(format!("cannot start a thread for it: {error}"));
            redis.workers.push(thread.map_err(failed)?.into());
        }
        Ok(redis)
    }
}

impl Directory for Redis {
    fn request(
        &self,
        kind: RequestKind,
        host: &HostName,
        names: &[Name],
        answers: &mut Vec<Answer>,
        until: Instant,
    ) -> Result<(), DirectoryError> {
        let waiter = Arc::new(Waiter::default());
        let (host, names) = (host.clone(), names.to_vec());
        let job = Job { kind, host, names, until, waiter: Arc::clone(&waiter) };
        let late = || DirectoryError::Late { at: self.at.clone() };
        match self.jobs.send_deadline(job, until) {
            Ok(()) => {
                answers.extend(waiter.wait(until).unwrap_or_else(|| Err(late()))?);
                Ok(())
            }
            Err(SendTimeoutError::Timeout(_)) => Err(late()),
            Err(SendTimeoutError::Disconnected(_)) => {
                let why = "its threads have ended".to_owned();
                Err(DirectoryError::Unreachable { at: self.at.clone(), why })
            }
        }
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("at", &self.at).finish_non_exhaustive()
    }
}

impl Worker {
    fn run(&mut self, jobs: &Receiver<Job>) {
        for job in jobs {
            // After the deadline, its caller does not wait for it any more.
            if Instant::now() < job.until {
                job.waiter.tell(self.perform(&job));
            }
        }
    }

    /// An idle connection may have ended unnoticed: then the job is repeated over a new one. All
    /// jobs are idempotent.
    fn perform(&mut self, job: &Job) -> Outcome {
        let was_open = self.link.is_some();
        let outcome = self.attempt(job);
        match outcome {
            Err(DirectoryError::Unreachable { .. }) if was_open => self.attempt(job),
            outcome => outcome,
        }
    }

    /// Drops the connection after any error, because unread replies may be left in it.
    fn attempt(&mut self, job: &Job) -> Outcome {
        let mut link = match self.link.take() {
            Some(link) => link,
            None => self.connect()?,
        };
        let until = job.until.max(Instant::now() + PATIENCE);
        let outcome = self.talk.perform(&mut link, job.kind, &job.host, &job.names, until);
        self.link = outcome.is_ok().then_some(link);
        outcome
    }

    fn connect(&mut self) -> Result<Link, DirectoryError> {
        if let Some((again, error)) = &self.down
            && Instant::now() < *again
        {
            return Err(error.clone());
        }
        let begun = Instant::now();
        let link = Link::connect(&self.servers, CONNECT_MAX);
        let link = link.map_err(|error| self.talk.blame(&error));
        self.down = link.as_ref().err().map(|error| (begun + RECONNECT, error.clone()));
        link
    }
}
