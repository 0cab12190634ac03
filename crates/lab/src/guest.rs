//! A guest that checks its own memory, and the lab's talk with it.
//!
//! The guest speaks on its second serial port, a socket in its host's
//! [`RUN_DIR`]; after a move the same path on the other host. Heartbeats are
//! judged by when they arrive here: the guest's own clocks stand still while
//! QEMU has stopped it, so nothing inside could see a blackout.

mod felt;
mod heard;

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use felt::{Felt, Silences, Written};
use heard::Heard;
pub use heard::Pulse;
use lab_guest::orders::Orders;

use crate::error::{LabError, Result};
use crate::hosts::{Host, RUN_DIR};
use crate::setup::{Accelerator, Kit};

/// A tiny guest boots in 2 s with KVM, in 10 under TCG on a busy machine; and
/// fills its memory.
const BOOT_MAX: Duration = Duration::from_secs(120);
/// Checking a GiB takes a second, under TCG several.
const ANSWER_MAX: Duration = Duration::from_secs(120);
/// A guest that moved has a socket at the other host before that.
const ARRIVE_MAX: Duration = Duration::from_secs(600);

/// What a guest is.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    /// Its name, in paths.
    pub name: String,
    /// QEMU's `-m`, such as `512M`.
    pub memory: String,
    /// Its machine type.
    pub machine: String,
    /// How many virtual CPUs it has.
    pub vcpus: u32,
    /// What it does.
    pub orders: Orders,
    /// Whether QEMU ends when it reboots, as it does after a panic.
    pub no_reboot: bool,
    /// More words for its kernel.
    pub kernel_words: &'static str,
    /// Its initramfs, if it is not the usual one.
    pub initrd: Option<PathBuf>,
    /// More arguments of QEMU.
    pub extra: Vec<String>,
}

impl GuestSpec {
    /// A guest of `memory` that follows `orders`.
    #[must_use]
    pub fn new(name: &str, memory: &str, orders: Orders) -> Self {
        Self {
            name: name.to_owned(),
            memory: memory.to_owned(),
            machine: "q35".to_owned(),
            vcpus: 1,
            orders,
            no_reboot: true,
            kernel_words: "",
            initrd: None,
            extra: Vec::new(),
        }
    }

    /// QEMU and its arguments, as a user would write them.
    #[must_use]
    pub fn argv(&self, kit: &Kit, qemu: &Path) -> Vec<String> {
        // `max` under TCG has features that 7.2 can't migrate.
        let cpu = if kit.accelerator == Accelerator::Kvm { "host" } else { "qemu64" };
        // Huge pages in the guest would move memory that it left alone. And a kernel that
        // waits for its timer while a busy host lets QEMU wait takes it for a broken one.
        let mut quiet =
            "console=ttyS0 quiet panic=1 transparent_hugepage=never no_timer_check".to_owned();
        for word in self.kernel_words.split_whitespace() {
            quiet += " ";
            quiet += word;
        }
        let mut argv: Vec<String> = [
            &qemu.display().to_string(),
            // With named threads, what a vCPU spends is told from what the migration does.
            "-name",
            &format!("{},debug-threads=on", self.name),
            "-machine",
            &format!("{},accel={}", self.machine, kit.accelerator),
            "-cpu",
            cpu,
            "-m",
            &self.memory,
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-kernel",
            &kit.kernel.display().to_string(),
            "-initrd",
            &self.initrd.as_ref().unwrap_or(&kit.initrd).display().to_string(),
            "-append",
            &format!("{quiet} {}", self.orders),
            "-serial",
            &format!("file:{RUN_DIR}/{}.console", self.name),
            "-chardev",
            &format!("socket,id=talk,path={},server=on,wait=off", self.talk_path()),
            "-serial",
            "chardev:talk",
        ]
        .map(str::to_owned)
        .to_vec();
        if self.vcpus != 1 {
            argv.extend(["-smp".to_owned(), self.vcpus.to_string()]);
        }
        if self.no_reboot {
            argv.push("-no-reboot".to_owned());
        }
        argv.extend(self.extra.iter().cloned());
        argv
    }

    fn talk_path(&self) -> String {
        format!("{RUN_DIR}/{}.talk", self.name)
    }

    /// The socket on `host`, as seen from outside.
    fn socket(&self, host: &Host) -> PathBuf {
        host.run_dir.join(format!("{}.talk", self.name))
    }

    /// What the guest's kernel said on `host`, for messages of failure.
    #[must_use]
    pub fn console(&self, host: &Host) -> String {
        let console = host.run_dir.join(format!("{}.console", self.name));
        let text = std::fs::read(console).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(2000)..]).into_owned()
    }
}

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
    /// What it is.
    pub spec: GuestSpec,
    heard: Arc<Heard>,
}

impl Guest {
    /// Listens to a guest that was started on `host`, until it has booted.
    ///
    /// # Errors
    /// If it stays silent; with its console's end.
    pub fn meet(spec: GuestSpec, host: &Host) -> Result<Self> {
        let guest = Self::listen(spec, host)?;
        guest.wait_boot(host)?;
        Ok(guest)
    }

    /// Listens to a guest that is about to be started on `host`.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn listen(spec: GuestSpec, host: &Host) -> Result<Self> {
        let guest = Self { spec, heard: Arc::default() };
        guest.heard.listen(guest.spec.socket(host), Instant::now() + ARRIVE_MAX)?;
        Ok(guest)
    }

    /// Waits until it has booted on `host`.
    ///
    /// # Errors
    /// If it stays silent; with its console's end.
    pub fn wait_boot(&self, host: &Host) -> Result<()> {
        if self.heard.wait_boot(Instant::now() + BOOT_MAX) {
            return Ok(());
        }
        let detail = format!("; its console: {}", self.spec.console(host));
        let what = format!("the guest {}", self.spec.name);
        Err(LabError::Silent { what, waited: BOOT_MAX, detail })
    }

    /// Listens on `host` too, as soon as the guest's QEMU is there: to be
    /// called before it moves to it.
    ///
    /// # Errors
    /// If the system gives no thread.
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

    /// Has it read and check one of `one_of` files that it has in its page cache.
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
                    // Whoever asked may only count them, and the guest is gone soon.
                    let name = &self.spec.name;
                    eprintln!("lab: {name}: {wrong} of {pages} pages are wrong: {first_wrong}");
                }
                Ok(Checked { pages, wrong, first_wrong: first_wrong.to_owned() })
            }
            _ => Err(LabError::Guest { command: command.to_owned(), answer }),
        }
    }

    /// Tells it something; its answer.
    ///
    /// # Errors
    /// If it doesn't answer, or says no.
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

    /// Forgets the longest gap so far.
    pub fn forget_gap(&self) {
        self.heard.forget_gap();
    }

    /// What it felt between two instants, since [`Guest::forget_gap`]. Waits a
    /// little for the beats that belong to it.
    #[must_use]
    pub fn felt(&self, from: Instant, to: Instant) -> Felt {
        self.heard.felt(from, to, self.spec.orders.tick())
    }

    /// The silence of its switchover, and the longest between `from` and that;
    /// since [`Guest::forget_gap`].
    #[must_use]
    pub fn silences(&self, from: Instant) -> Silences {
        self.heard.silences(from, self.spec.orders.tick())
    }

    /// How many pages of memory it had written, at instants between two; since
    /// [`Guest::forget_gap`].
    #[must_use]
    pub fn pages(&self, from: Instant, to: Instant) -> Vec<(Instant, u64)> {
        self.heard.pages(from, to)
    }

    /// How many pages of files in its page cache it had read and written, at instants
    /// between two; since [`Guest::forget_gap`].
    #[must_use]
    pub fn touched(&self, from: Instant, to: Instant) -> Vec<(Instant, u64)> {
        self.heard.touched(from, to)
    }

    /// How it fares.
    #[must_use]
    pub fn pulse(&self) -> Pulse {
        self.heard.pulse()
    }

    /// Waits until it was heard after now.
    ///
    /// # Errors
    /// If it stays silent.
    pub fn wait_beat(&self, timeout: Duration) -> Result<()> {
        if self.heard.wait_beat(timeout) {
            return Ok(());
        }
        let what = format!("the guest {}", self.spec.name);
        Err(LabError::Silent { what, waited: timeout, detail: String::new() })
    }

    /// Waits until it has booted `boots` times in all.
    ///
    /// # Errors
    /// If it does not.
    pub fn wait_boots(&self, boots: u32) -> Result<()> {
        if self.heard.wait_boots(boots, Instant::now() + BOOT_MAX) {
            return Ok(());
        }
        let what = format!("the guest {}", self.spec.name);
        Err(LabError::Silent { what, waited: BOOT_MAX, detail: "; it did not boot".to_owned() })
    }
}

/// Connects as soon as the socket is there.
fn connect(path: &Path, until: Instant, over: impl Fn() -> bool) -> Option<UnixStream> {
    while Instant::now() < until && !over() {
        if let Ok(stream) = UnixStream::connect(path) {
            return Some(stream);
        }
        // Nothing tells when another program makes a socket.
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}
