//! A program at work in a guest.

use std::thread;
use std::time::{Duration, Instant};

use super::App;
use super::figures::{AFTER, AppFigures};
use crate::contender::Moved;
use crate::neighbour::AtWork;
use crate::part;
use crate::served::{Served, Serving};
use lab::error::{LabError, Result};
use lab::guest::Guest;
use lab::hosts::Outside;

const PORT: u16 = 7816;
/// The third host's address in the guests' network.
const OUTSIDE: &str = "10.78.0.1";
/// Longest time until a program reports work.
const READY_MAX: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(200);
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
    pub(super) fn start(app: App, guest: &Guest, outside: &Outside) -> Result<Self> {
        let command = match app {
            App::Memcached => return Serving::start(outside).map(Self::Served),
            App::Postgres => {
                "su postgres -c \"pgbench --no-vacuum --client=8 --time=3600 --progress=1 bench\""
            }
            App::Dbench => "stdbuf -oL dbench -D /srv/dbench -t 3600 2",
        };
        let mut child = part::start(&outside.host, &["app-progress", &PORT.to_string()])?;
        let reports = child.stdout.take();
        let began = Instant::now();
        let at_work = AtWork::hear(vec![child], reports)?;
        // Its output goes to the third host.
        let line = format!("exec >/dev/tcp/{OUTSIDE}/{PORT} 2>&1; exec {command}");
        guest.ask(&format!("sh setsid bash -c '{line}' </dev/null >/dev/null 2>&1 &"))?;
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
