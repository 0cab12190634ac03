//! A guest that checks its own memory, and the lab's connection to it.
//!
//! The guest speaks on its second serial port, a socket in its host's [`crate::hosts::RUN_DIR`];
//! after a move, on the same path on the other host. Heartbeats are judged by their arrival here:
//! the guest's own clocks stand still while QEMU has stopped it, so nothing inside can see a
//! downtime.

mod felt;
mod heard;
mod spec;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use felt::{Felt, Silences, Written};
use heard::Heard;
pub use heard::Pulse;
pub(crate) use spec::{BARE_CPU, Boot};
pub use spec::{GuestSpec, System};

use crate::error::{LabError, Result};
use crate::hosts::Host;

/// A tiny guest boots in 2 s with KVM, in 10 s under TCG on a busy machine, and then fills its
/// memory.
const BOOT_MAX: Duration = Duration::from_secs(120);
/// A whole Debian takes half a minute of a core under TCG, and services more.
const SYSTEM_BOOT_MAX: Duration = Duration::from_secs(600);
/// Checking a GiB takes a second, under TCG several.
const ANSWER_MAX: Duration = Duration::from_secs(120);
/// A guest that moves has a socket on the other host before that.
const ARRIVE_MAX: Duration = Duration::from_secs(600);

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// Pages looked at.
    pub pages: u64,
    /// Pages that are not as the guest wrote them.
    pub wrong: u64,
    /// The first of them.
    pub first_wrong: String,
}

/// A running guest.
#[derive(Debug)]
pub struct Guest {
    /// Its description.
    pub spec: GuestSpec,
    heard: Arc<Heard>,
}

impl Guest {
    /// Listens to a guest that was started on `host`, until it has booted.
    ///
    /// # Errors
    /// If it stays silent; with the end of its console.
    pub fn meet(spec: GuestSpec, host: &Host) -> Result<Self> {
        let guest = Self::listen(spec, host)?;
        guest.wait_boot(host)?;
        Ok(guest)
    }

    /// Listens to a guest that is about to be started on `host`.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn listen(spec: GuestSpec, host: &Host) -> Result<Self> {
        let guest = Self { spec, heard: Arc::default() };
        guest.heard.listen(guest.spec.socket(host), Instant::now() + ARRIVE_MAX)?;
        Ok(guest)
    }

    /// Waits until it has booted on `host`.
    ///
    /// # Errors
    /// If it stays silent; with the end of its console.
    pub fn wait_boot(&self, host: &Host) -> Result<()> {
        if self.heard.wait_boot(Instant::now() + self.boot_max()) {
            return Ok(());
        }
        let detail = format!("; its console: {}", self.spec.console(host));
        let what = format!("the guest {}", self.spec.name);
        Err(LabError::Silent { what, waited: self.boot_max(), detail })
    }

    fn boot_max(&self) -> Duration {
        if self.spec.kernel.is_some() { SYSTEM_BOOT_MAX } else { BOOT_MAX }
    }

    /// Also listens on `host`, as soon as the guest's QEMU has its socket there. To be called
    /// before the guest moves there.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn expect_on(&self, host: &Host) -> Result<()> {
        self.heard.listen(self.spec.socket(host), Instant::now() + ARRIVE_MAX)
    }

    /// Has it check all of its memory.
    ///
    /// # Errors
    /// If it doesn't answer.
    pub fn check(&self) -> Result<Checked> {
        self.checked("check")
    }

    /// Has it read and check all that it wrote to its disk.
    ///
    /// # Errors
    /// If it doesn't answer, or has no disk.
    pub fn check_disk(&self) -> Result<Checked> {
        self.checked("check-disk")
    }

    /// Has it read and check all files on its disks' file systems.
    ///
    /// # Errors
    /// If it doesn't answer, or has no files.
    pub fn check_files(&self) -> Result<Checked> {
        self.checked("files-check")
    }

    /// Has it read and check one of `one_of` files in its page cache.
    ///
    /// # Errors
    /// If it doesn't answer, or has none.
    pub fn check_cache(&self, one_of: usize) -> Result<Checked> {
        self.checked(&format!("cache-check {one_of}"))
    }

    fn checked(&self, command: &str) -> Result<Checked> {
        let answer = self.ask(command)?;
        let field = |name: &str| {
            answer.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
        };
        let number = |name: &str| field(name).and_then(|number| number.parse().ok());
        match (number("pages"), number("wrong")) {
            (Some(pages), Some(wrong)) => {
                let first_wrong = answer.split_once("first=").map_or("", |(_, first)| first);
                if wrong > 0 {
                    // The caller may only count them, and the guest is gone soon.
                    let name = &self.spec.name;
                    eprintln!("lab: {name}: {wrong} of {pages} pages are wrong: {first_wrong}");
                }
                Ok(Checked { pages, wrong, first_wrong: first_wrong.to_owned() })
            }
            _ => Err(LabError::Guest { command: command.to_owned(), answer }),
        }
    }

    /// Sends it a command, and returns its answer.
    ///
    /// # Errors
    /// If it doesn't answer, or answers with an error.
    pub fn ask(&self, command: &str) -> Result<String> {
        let answer = self.heard.ask(command, Instant::now() + ANSWER_MAX);
        let answer = answer.ok_or_else(|| LabError::Silent {
            what: "the guest".to_owned(),
            waited: ANSWER_MAX,
            detail: format!(" after {command:?}"),
        })?;
        match answer.split_once(' ').unwrap_or((&answer, "")) {
            ("ok", text) => Ok(text.to_owned()),
            _ => Err(LabError::Guest { command: command.to_owned(), answer }),
        }
    }

    /// Sends a command that has no answer: reboot, poweroff.
    ///
    /// # Errors
    /// If its port can't be written to.
    pub fn tell(&self, command: &str) -> Result<()> {
        self.heard.tell(command)
    }

    /// Forgets the longest gap and all beats so far.
    pub fn forget_gap(&self) {
        self.heard.forget_gap();
    }

    /// What it felt between two instants, since [`Guest::forget_gap`]. Waits a little for the beats
    /// of that time.
    #[must_use]
    pub fn felt(&self, from: Instant, to: Instant) -> Felt {
        self.heard.felt(from, to, self.spec.orders.tick())
    }

    /// The silence of its switchover, and the longest one between `from` and that; since
    /// [`Guest::forget_gap`].
    #[must_use]
    pub fn silences(&self, from: Instant) -> Silences {
        self.heard.silences(from, self.spec.orders.tick())
    }

    /// Pages of memory that it had written, at instants between two; since [`Guest::forget_gap`].
    #[must_use]
    pub fn pages(&self, from: Instant, to: Instant) -> Vec<(Instant, u64)> {
        self.heard.pages(from, to)
    }

    /// Pages of files in its page cache that it had read and written, at instants between two;
    /// since [`Guest::forget_gap`].
    #[must_use]
    pub fn touched(&self, from: Instant, to: Instant) -> Vec<(Instant, u64)> {
        self.heard.touched(from, to)
    }

    /// Its current state.
    #[must_use]
    pub fn pulse(&self) -> Pulse {
        self.heard.pulse()
    }

    /// Waits for its next beat.
    ///
    /// # Errors
    /// If it stays silent.
    pub fn wait_beat(&self, timeout: Duration) -> Result<()> {
        if self.heard.wait_beat(timeout) {
            return Ok(());
        }
        let what = format!("the guest {}", self.spec.name);
        Err(LabError::Silent { what, waited: timeout, detail: self.heard.places() })
    }

    /// Waits until it has booted `boots` times in all.
    ///
    /// # Errors
    /// If it does not.
    pub fn wait_boots(&self, boots: u32) -> Result<()> {
        if self.heard.wait_boots(boots, Instant::now() + self.boot_max()) {
            return Ok(());
        }
        let what = format!("the guest {}", self.spec.name);
        let detail = "; it did not boot".to_owned();
        Err(LabError::Silent { what, waited: self.boot_max(), detail })
    }
}

/// Connects as soon as the socket accepts connections.
fn connect(path: &Path, until: Instant, over: impl Fn() -> bool) -> Option<UnixStream> {
    while Instant::now() < until && !over() {
        if let Ok(stream) = UnixStream::connect(path) {
            return Some(stream);
        }
        // No event tells when another program listens on a socket.
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}
