//! A program at work in a guest.

use std::thread;
use std::time::{Duration, Instant};

use super::app::{App, AppScenario, FAST_MBIT, STORAGE_MBIT};
use super::figures::{AFTER, AppFigures};
use crate::contender::Moved;
use crate::neighbour::AtWork;
use crate::part;
use crate::served::{Served, Serving};
use lab::error::{LabError, Result};
use lab::field::SYSBENCH;
use lab::guest::Guest;
use lab::hosts::{Outside, Storage};

const PORT: u16 = 7816;
/// The third host's address in the guests' network.
const OUTSIDE: &str = "10.78.0.1";
/// Longest time until a program reports work.
const READY_MAX: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(200);
/// Files that Postmark has made before its transactions begin; some may have been deleted since.
const POSTMARK_FILES: u32 = 450;
/// How long it is watched before the migration, of which it reports once a second.
const WATCH: Duration = Duration::from_secs(6);
/// The last report is known after this time.
const REPORTED: Duration = Duration::from_millis(1500);

/// A program at work. Dropping it ends what runs outside of the guest.
pub(super) enum Load {
    /// Clients outside of the guest use it.
    Served(Serving),
    /// It works by itself, and reports how much.
    Counted { at_work: AtWork, alone: Instant, moving: Instant },
}

impl Load {
    /// Puts the program to work, and watches it for a while.
    pub(super) fn start(
        scenario: AppScenario,
        guest: &Guest,
        outside: &Outside,
        storage: Option<&Storage>,
    ) -> Result<Self> {
        if let Some(storage) = storage {
            storage.shape(FAST_MBIT)?;
            fill_cache(scenario.app, guest)?;
            storage.shape(STORAGE_MBIT)?;
        }
        let app = scenario.app;
        let command = match app {
            App::Memcached => return Serving::start(outside).map(Self::Served),
            App::Postgres => {
                // A database that writes as fast as it can leaves nothing that storage has.
                let rate = if scenario.from_storage { " --rate=30" } else { "" };
                let pgbench = "pgbench --no-vacuum --client=8 --time=3600 --progress=1";
                format!("su postgres -c \"{pgbench}{rate} {}\"", scenario.database())
            }
            App::Dbench => "stdbuf -oL dbench -D /srv/dbench -t 3600 2".to_owned(),
            App::Postmark => "sh /usr/local/lib/lab/report-postmark".to_owned(),
            App::Sysbench => format!(
                "su postgres -c \"stdbuf -oL sysbench {SYSBENCH} --threads=4 --time=0 \
                 --report-interval=1 run\""
            ),
            // It serves already.
            App::Nginx => String::new(),
        };
        let port = PORT.to_string();
        let mut arguments = vec!["app-web"];
        if app != App::Nginx {
            arguments = vec!["app-progress", port.as_str()];
        }
        let mut child = part::start(&outside.host, &arguments)?;
        let reports = child.stdout.take();
        let began = Instant::now();
        let at_work = AtWork::hear(vec![child], reports)?;
        if !command.is_empty() {
            // Its output goes to the third host.
            let line = format!("exec >/dev/tcp/{OUTSIDE}/{PORT} 2>&1; exec {command}");
            guest.ask(&format!("sh setsid bash -c '{line}' </dev/null >/dev/null 2>&1 &"))?;
        }
        while at_work.done(began, Instant::now()) == 0.0 {
            if began.elapsed() > READY_MAX {
                let what = format!("{app:?} in the guest");
                return Err(LabError::Silent { what, waited: READY_MAX, detail: String::new() });
            }
            thread::sleep(LOOK);
        }
        // It needs a moment to reach full speed.
        thread::sleep(WATCH / 3);
        let alone = Instant::now();
        thread::sleep(WATCH);
        Ok(Self::Counted { at_work, alone, moving: Instant::now() })
    }

    /// How often clients have read something wrong, as far as they report it here.
    pub(super) fn wrong(&self) -> u64 {
        match self {
            Self::Served(_) => 0,
            Self::Counted { at_work, .. } => at_work.wrong(),
        }
    }

    /// What it did, and what its clients got if it has any, some seconds after the VM has moved.
    pub(super) fn judge(&self, moved: &Moved) -> (AppFigures, Option<Served>) {
        match self {
            Self::Served(serving) => {
                let served = serving.judge(moved);
                (AppFigures::from(&served), Some(served))
            }
            Self::Counted { at_work, alone, moving } => {
                let known = moved.ran + AFTER + REPORTED;
                thread::sleep(known.saturating_duration_since(Instant::now()));
                let done = |from, to| at_work.done(from, to);
                (AppFigures::of(done, (*alone, *moving), moved), None)
            }
        }
    }
}

/// Has the page cache filled with what the program uses.
fn fill_cache(app: App, guest: &Guest) -> Result<()> {
    if app != App::Postmark {
        let read = "sh cat /var/lib/postgresql/15/main/base/*/* >/dev/null";
        return guest.ask(read).map(drop);
    }
    guest.ask("sh systemctl start postmark")?;
    let began = Instant::now();
    // It makes all its files first.
    let made = || -> Result<u32> {
        let counted = guest.ask("sh ls /srv/postmark | wc -l")?;
        Ok(counted.trim().parse().unwrap_or(0))
    };
    while made()? < POSTMARK_FILES {
        if began.elapsed() > READY_MAX {
            let what = "Postmark in the guest".to_owned();
            return Err(LabError::Silent { what, waited: READY_MAX, detail: String::new() });
        }
        thread::sleep(LOOK);
    }
    // As fast as it can, it would write all of memory again and again.
    guest.ask("sh systemctl set-property --runtime postmark CPUQuota=10% && sync").map(drop)
}
