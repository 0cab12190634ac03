//! A directory in Redis 7 or newer or Valkey: one server, or a cluster of them.
//!
//! Whoever asks leaves a job and waits, until his own deadline whatever becomes
//! of the servers. A few threads, each with a connection of its own, do the jobs:
//! a batch is one pipeline of plain commands, or two. Nothing is kept on the
//! servers without a time to live; how much memory it takes, and what goes when
//! that is full, is for their operator to say (`maxmemory`, and
//! `maxmemory-policy volatile-lru`).

mod link;
mod record;
mod talk;

use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use content::Name;
use crossbeam_channel::{Receiver, SendTimeoutError, Sender, bounded};

use crate::directory::{Answer, Directory, Terms};
use crate::error::DirectoryError;
use crate::host::HostName;
use crate::protocol::Ask;
use crate::waiter::Waiter;
use link::Link;
use talk::Talk;

/// Jobs that wait. Who has one more waits for room.
const JOBS_MAX: usize = 64;
/// After a failure a thread tries to connect only after so long.
const RECONNECT: Duration = Duration::from_secs(1);
const CONNECT_MAX: Duration = Duration::from_secs(2);
/// So long a thread waits for replies though nobody waits for it any more: a
/// server that is slow for a moment is not made slower by new connections.
const PATIENCE: Duration = Duration::from_secs(1);

/// Where the servers are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Servers {
    /// One, as a URL: `redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE]`, or
    /// `redis+unix:///PATH`.
    One(String),
    /// Some of a cluster; they know the others.
    Cluster(Vec<String>),
}

/// What a [`Redis`] directory is made with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisSettings {
    /// Where the servers are.
    pub servers: Servers,
    /// Whose names these are. Others may use the same servers.
    pub cluster: String,
    /// Which rack.
    pub rack: String,
    /// How long what it is told counts.
    pub terms: Terms,
    /// How many connections it has, and so how many batches are under way.
    pub connections: usize,
}

/// A directory in Redis or Valkey.
///
/// It keeps one holder of each content, the last who said so: more would take a
/// set for each instead of one short string, and the embedded directory's second
/// holder is there for free.
pub struct Redis {
    at: String,
    jobs: Option<Sender<Job>>,
    workers: Vec<JoinHandle<()>>,
}

type Outcome = Result<Vec<Answer>, DirectoryError>;

/// What one call wants.
struct Job {
    ask: Ask,
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
    /// Until when it isn't tried again to connect, and why not.
    down: Option<(Instant, DirectoryError)>,
}

impl Redis {
    /// The directory of a rack. It connects when something is asked.
    ///
    /// # Errors
    /// If the settings can't be right, or there can't be threads.
    pub fn new(settings: &RedisSettings) -> Result<Self, DirectoryError> {
        let talk = Arc::new(Talk::new(settings)?);
        let at = talk.at().to_owned();
        let (sender, receiver) = bounded(JOBS_MAX);
        let mut redis = Self { at, jobs: Some(sender), workers: Vec::new() };
        for number in 0..settings.connections.max(1) {
            let (talk, receiver) = (Arc::clone(&talk), Receiver::clone(&receiver));
            let mut worker =
                Worker { talk, servers: settings.servers.clone(), link: None, down: None };
            let thread = thread::Builder::new().name(format!("directory-redis-{number}"));
            let thread = thread.spawn(move || worker.run(&receiver));
            let failed = |error| DirectoryError::Settings(format!("no thread for it: {error}"));
            redis.workers.push(thread.map_err(failed)?);
        }
        Ok(redis)
    }

    fn ask(&self, ask: Ask, host: &HostName, names: &[Name], until: Instant) -> Outcome {
        let waiter = Arc::new(Waiter::default());
        let (host, names) = (host.clone(), names.to_vec());
        let job = Job { ask, host, names, until, waiter: Arc::clone(&waiter) };
        let late = || DirectoryError::Late { at: self.at.clone() };
        let jobs = self.jobs.as_ref().expect("it is there until this is dropped");
        match jobs.send_deadline(job, until) {
            Ok(()) => waiter.wait(until).unwrap_or_else(|| Err(late())),
            Err(SendTimeoutError::Timeout(_)) => Err(late()),
            Err(SendTimeoutError::Disconnected(_)) => {
                let why = "its threads have ended".to_owned();
                Err(DirectoryError::Unreachable { at: self.at.clone(), why })
            }
        }
    }
}

impl Directory for Redis {
    fn claim(
        &self,
        host: &HostName,
        names: &[Name],
        answers: &mut Vec<Answer>,
        until: Instant,
    ) -> Result<(), DirectoryError> {
        answers.clear();
        *answers = self.ask(Ask::Claim, host, names, until)?;
        Ok(())
    }

    fn hold(&self, host: &HostName, names: &[Name], until: Instant) -> Result<(), DirectoryError> {
        self.ask(Ask::Hold, host, names, until).map(|_| ())
    }

    fn release(
        &self,
        host: &HostName,
        names: &[Name],
        until: Instant,
    ) -> Result<(), DirectoryError> {
        self.ask(Ask::Release, host, names, until).map(|_| ())
    }

    fn forget(&self, host: &HostName, until: Instant) -> Result<(), DirectoryError> {
        self.ask(Ask::Forget, host, &[], until).map(|_| ())
    }
}

impl Drop for Redis {
    /// Waits for jobs that are under way: until their deadlines, or for a second or
    /// two.
    fn drop(&mut self) {
        self.jobs = None;
        for worker in self.workers.drain(..) {
            // If it panicked, it has ended as well.
            let _ = worker.join();
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
            // After its deadline nobody waits for it any more.
            if Instant::now() < job.until {
                job.waiter.tell(self.perform(&job));
            }
        }
    }

    /// A connection that was idle may have ended unnoticed: then the job is done
    /// over a new one. Doing one twice is the same as once.
    fn perform(&mut self, job: &Job) -> Outcome {
        let was_open = self.link.is_some();
        let outcome = self.attempt(job);
        match outcome {
            Err(DirectoryError::Unreachable { .. }) if was_open => self.attempt(job),
            outcome => outcome,
        }
    }

    /// Any error leaves the connection with replies that nobody waits for.
    fn attempt(&mut self, job: &Job) -> Outcome {
        let mut link = match self.link.take() {
            Some(link) => link,
            None => self.connect()?,
        };
        let until = job.until.max(Instant::now() + PATIENCE);
        let outcome = self.talk.perform(&mut link, job.ask, &job.host, &job.names, until);
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
