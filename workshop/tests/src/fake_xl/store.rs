//! The domains of a host, each in a directory of its own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use xen::DomainKind;

use super::Life;
use super::memory::Memory;

const SETTINGS: &str = "settings";
const DOMAINS: &str = "domains";
const STATE: &str = "state";
const CONFIG: &str = "config";
const ID: &str = "id";
const NEXT_ID: &str = "next-id";
const PAGE_KIB: u32 = 4;

/// What a domain does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It runs.
    Running,
    /// It was created, and not unpaused.
    Paused,
    /// It has suspended itself.
    Suspended,
}

impl State {
    const ALL: [Self; 3] = [Self::Running, Self::Paused, Self::Suspended];

    /// As `xl list` prints it. A domain that waits for work is blocked.
    pub(super) fn letters(self) -> &'static str {
        match self {
            Self::Running => "-b----",
            Self::Paused => "--p---",
            Self::Suspended => "---s--",
        }
    }
}

/// The domains of a host.
#[derive(Clone, Debug)]
pub struct Store {
    home: PathBuf,
    host: String,
    life: Life,
}

impl Store {
    /// Makes it, for the host of this name.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn create(home: PathBuf, host: &str, life: &Life) -> io::Result<Self> {
        for dir in [DOMAINS, "points"] {
            fs::create_dir_all(home.join(dir))?;
        }
        fs::write(home.join(SETTINGS), format!("{host}\n{}\n", life.path().display()))?;
        Ok(Self { home, host: host.to_owned(), life: life.clone() })
    }

    /// Opens the one that was made there.
    pub(super) fn open(home: PathBuf) -> io::Result<Self> {
        let settings = fs::read_to_string(home.join(SETTINGS))?;
        let (host, life) = settings
            .trim_end()
            .split_once('\n')
            .ok_or_else(|| io::Error::other("the settings have no two lines"))?;
        let (host, life) = (host.to_owned(), Life::at(Path::new(life)));
        Ok(Self { home, host, life })
    }

    pub(super) fn home(&self) -> &Path {
        &self.home
    }

    /// The names of all domains, in order.
    ///
    /// # Errors
    /// If the directory can't be read.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.home.join(DOMAINS))? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    /// A domain by its name or number.
    ///
    /// # Errors
    /// If there is none.
    pub fn domain(&self, name: &str) -> io::Result<Domain> {
        let known = self.names()?.into_iter().map(|name| self.named(&name));
        let mut known = known.filter(|domain| domain.name == name || domain.id() == name);
        known.next().ok_or_else(|| {
            io::Error::other(format!("{name} is an invalid domain identifier (rc=-6)"))
        })
    }

    fn named(&self, name: &str) -> Domain {
        Domain { store: self.clone(), name: name.to_owned() }
    }

    /// Creates a domain that runs.
    ///
    /// # Errors
    /// If there is one of that name, or it can't be written.
    pub fn start(&self, name: &str, kind: DomainKind, pages: u32) -> io::Result<Domain> {
        let domain = self.make(name, &config(name, kind, pages), &Memory::filled(kind, pages))?;
        domain.set(State::Running)?;
        Ok(domain)
    }

    /// Makes the directory of a domain, which is paused.
    pub(super) fn make(&self, name: &str, config: &Value, memory: &Memory) -> io::Result<Domain> {
        let domain = self.named(name);
        fs::create_dir(domain.dir())?;
        let next = self.home.join(NEXT_ID);
        let id: u32 = fs::read_to_string(&next).ok().and_then(|it| it.parse().ok()).unwrap_or(1);
        fs::write(&next, (id + 1).to_string())?;
        fs::write(domain.dir().join(ID), id.to_string())?;
        fs::write(domain.dir().join(CONFIG), config.to_string())?;
        fs::write(domain.dir().join(STATE), State::Paused.letters())?;
        memory.save(&domain.dir())?;
        Ok(domain)
    }
}

/// A domain's configuration, as far as anybody reads it.
pub(super) fn config(name: &str, kind: DomainKind, pages: u32) -> Value {
    let shown = match kind {
        DomainKind::Pv => "pv",
        DomainKind::Hvm => "pvh",
    };
    json!({
        "c_info": { "type": shown, "name": name, "uuid": uuid(name) },
        "b_info": {
            "max_vcpus": 1,
            "max_memkb": pages * PAGE_KIB,
            "target_memkb": pages * PAGE_KIB,
            "kernel": "/boot/vmlinuz",
        },
    })
}

/// A UUID for a domain, which it keeps when it moves.
#[must_use]
pub fn uuid(name: &str) -> String {
    let number = name.bytes().fold(0_u64, |number, byte| (number << 7) ^ u64::from(byte));
    format!("6a8f3a6e-93f4-4c1d-8a5f-{:012x}", number & 0xffff_ffff_ffff)
}

/// A domain.
#[derive(Clone, Debug)]
pub struct Domain {
    store: Store,
    name: String,
}

impl Domain {
    fn dir(&self) -> PathBuf {
        self.store.home.join(DOMAINS).join(&self.name)
    }

    fn read(&self, file: &str) -> io::Result<String> {
        fs::read_to_string(self.dir().join(file))
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn id(&self) -> String {
        self.read(ID).unwrap_or_default()
    }

    /// What it does.
    ///
    /// # Errors
    /// If it is gone.
    pub fn state(&self) -> io::Result<State> {
        let letters = self.read(STATE)?;
        let known = State::ALL.into_iter().find(|state| state.letters() == letters);
        known.ok_or_else(|| io::Error::other(format!("the state {letters:?} is unknown")))
    }

    /// Has it do something else.
    pub(super) fn set(&self, state: State) -> io::Result<()> {
        let Store { host, life, .. } = &self.store;
        let before = self.state()?;
        if before == State::Running && state != State::Running {
            life.note_stopped(host, &self.name)?;
        }
        // In two steps: `xl list` may read it meanwhile.
        let (path, new) = (self.dir().join(STATE), self.dir().join("state.new"));
        fs::write(&new, state.letters())?;
        fs::rename(&new, &path)?;
        if before != State::Running && state == State::Running {
            life.note_running(host, &self.name)?;
        }
        Ok(())
    }

    /// Its configuration, as xl sends it.
    pub(super) fn config(&self) -> io::Result<Value> {
        serde_json::from_str(&self.read(CONFIG)?).map_err(io::Error::other)
    }

    /// Its kind.
    ///
    /// # Errors
    /// If it is gone.
    pub fn kind(&self) -> io::Result<DomainKind> {
        Ok(kind_in(&self.config()?))
    }

    /// Its memory.
    ///
    /// # Errors
    /// If it is gone.
    pub fn memory(&self) -> io::Result<Memory> {
        Memory::load(&self.dir())
    }

    pub(super) fn keep(&self, memory: &Memory) -> io::Result<()> {
        memory.save(&self.dir())
    }

    pub(super) fn rename(&mut self, name: &str) -> io::Result<()> {
        let renamed = self.store.named(name);
        fs::rename(self.dir(), renamed.dir())?;
        *self = renamed;
        Ok(())
    }

    /// Ends it.
    ///
    /// # Errors
    /// If it is gone.
    pub fn destroy(self) -> io::Result<()> {
        self.set(State::Paused)?;
        fs::remove_dir_all(self.dir())
    }
}

/// The kind of domain that a configuration is for.
pub(super) fn kind_in(config: &Value) -> DomainKind {
    if config["c_info"]["type"] == "pv" { DomainKind::Pv } else { DomainKind::Hvm }
}

/// How many pages a configuration is for.
pub(super) fn pages_in(config: &Value) -> io::Result<u32> {
    let kib = config["b_info"]["max_memkb"].as_u64();
    let pages = kib.and_then(|kib| u32::try_from(kib / u64::from(PAGE_KIB)).ok());
    pages.ok_or_else(|| io::Error::other("the configuration has no max_memkb"))
}
