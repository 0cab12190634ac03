//! What was heard from a guest, on however many sockets.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::connect;
use super::felt::{Beat, Felt, Silences, Written, felt, pages, silences};
use crate::error::{LabError, Result, SystemContext};

/// What a guest that is well takes at most to say how much it has written.
const COUNT_MAX: Duration = Duration::from_secs(2);

/// How a guest fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pulse {
    /// When it was last heard.
    pub last_beat: Instant,
    /// The longest silence since [`super::Guest::forget_gap`].
    pub gap: Duration,
    /// What it has rewritten since it booted.
    pub written: Written,
    /// When it said so.
    pub written_at: Instant,
    /// How often it has booted.
    pub boots: u32,
    /// Beats that were heard more than once: the guest has run twice.
    pub twice: u32,
}

#[derive(Debug)]
struct State {
    pulse: Pulse,
    /// Since the gap was last forgotten.
    beats: Vec<Beat>,
    /// The numbers of all beats since it booted.
    numbers: HashSet<u64>,
    boot_id: Option<String>,
    answers: HashMap<String, String>,
    questions: u64,
    /// Sockets that were listened on.
    sockets: u32,
    /// The socket that was heard last: where questions go.
    port: Option<UnixStream>,
}

#[derive(Debug)]
pub(super) struct Heard {
    state: Mutex<State>,
    changed: Condvar,
}

impl Default for Heard {
    fn default() -> Self {
        let now = Instant::now();
        let written = Written::default();
        let gap = Duration::ZERO;
        let pulse = Pulse { last_beat: now, gap, written, written_at: now, boots: 0, twice: 0 };
        Self {
            state: Mutex::new(State {
                pulse,
                beats: Vec::new(),
                numbers: HashSet::new(),
                boot_id: None,
                answers: HashMap::new(),
                questions: 0,
                sockets: 0,
                port: None,
            }),
            changed: Condvar::new(),
        }
    }
}

impl Heard {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens on a socket as soon as it is there, on a thread of its own.
    pub(super) fn listen(self: &Arc<Self>, path: PathBuf, until: Instant) -> Result<()> {
        let socket = {
            let mut state = self.lock();
            state.sockets += 1;
            state.sockets
        };
        let heard = Arc::downgrade(self);
        let listen = move || {
            let over = || heard.strong_count() == 0;
            let Some(stream) = connect(&path, until, over) else { return };
            let Ok(port) = stream.try_clone() else { return };
            let mut reader = BufReader::new(stream);
            let mut line = String::new();
            while reader.read_line(&mut line).is_ok() {
                // A guest that moved in the middle of a line ends it elsewhere.
                let Some(whole) = line.strip_suffix('\n') else { return };
                let Some(heard) = heard.upgrade() else { return };
                heard.hear(whole.trim_end_matches('\r'), &port, socket);
                line.clear();
            }
        };
        std::thread::Builder::new()
            .name("guest-heard".to_owned())
            .spawn(listen)
            .doing("start a thread")?;
        Ok(())
    }

    fn hear(&self, line: &str, port: &UnixStream, socket: u32) {
        let now = Instant::now();
        let mut state = self.lock();
        if let Some(rest) = line.strip_prefix(['.', '=']) {
            state.pulse.gap = state.pulse.gap.max(now - state.pulse.last_beat);
            state.pulse.last_beat = now;
            let number = rest.split(' ').next().and_then(|it| u64::from_str_radix(it, 16).ok());
            if number.is_some_and(|number| !state.numbers.insert(number)) {
                state.pulse.twice += 1;
            }
            let written = rest.split_once(' ').and_then(|(_, written)| counts(written));
            state.beats.push(Beat { at: now, socket, written });
            if let Some(written) = written {
                state.pulse.written = written;
                state.pulse.written_at = now;
            }
            if let Ok(port) = port.try_clone() {
                state.port = Some(port);
            }
        } else if let Some(rest) = line.strip_prefix("boot ") {
            let id = rest.split(' ').next().map(str::to_owned);
            if id != state.boot_id {
                state.boot_id = id;
                state.pulse.boots += 1;
                state.numbers.clear();
            }
        } else if let Some((id, answer)) = line.split_once(' ') {
            state.answers.insert(id.to_owned(), answer.to_owned());
        }
        drop(state);
        self.changed.notify_all();
    }

    pub(super) fn pulse(&self) -> Pulse {
        self.lock().pulse
    }

    pub(super) fn forget_gap(&self) {
        let mut state = self.lock();
        state.pulse.gap = Duration::ZERO;
        state.beats.clear();
    }

    pub(super) fn felt(&self, from: Instant, to: Instant, period: Duration) -> Felt {
        // Counts come with every tenth beat; a guest that is silent by then
        // gets what it did until then.
        let until = Instant::now() + COUNT_MAX;
        self.wait(until, |state| state.pulse.written_at > to);
        felt(&self.lock().beats, from, to, period)
    }

    pub(super) fn silences(&self, from: Instant, period: Duration) -> Silences {
        silences(&self.lock().beats, from, period)
    }

    pub(super) fn pages(&self, from: Instant, to: Instant) -> Vec<(Instant, u64)> {
        pages(&self.lock().beats, from, to)
    }

    pub(super) fn next_question(&self) -> Result<(String, UnixStream)> {
        let mut state = self.lock();
        state.questions += 1;
        let id = format!("q{}", state.questions);
        let port = state.port.as_ref().and_then(|port| port.try_clone().ok());
        let port = port.ok_or_else(|| LabError::Missing { what: "the guest's port".to_owned() })?;
        Ok((id, port))
    }

    pub(super) fn wait_answer(&self, id: &str, timeout: Duration) -> Option<String> {
        let until = Instant::now() + timeout;
        let mut found = None;
        self.wait(until, |state| {
            found = state.answers.remove(id);
            found.is_some()
        });
        found
    }

    pub(super) fn wait_boot(&self, until: Instant) -> bool {
        self.wait_boots(1, until) && self.wait(until, |state| state.port.is_some())
    }

    pub(super) fn wait_boots(&self, boots: u32, until: Instant) -> bool {
        self.wait(until, |state| state.pulse.boots >= boots)
    }

    pub(super) fn wait_beat(&self, timeout: Duration) -> bool {
        let now = Instant::now();
        self.wait(now + timeout, |state| state.pulse.last_beat > now)
    }

    fn wait(&self, until: Instant, mut enough: impl FnMut(&mut State) -> bool) -> bool {
        let mut state = self.lock();
        loop {
            if enough(&mut state) {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// `PAGES DISK_PAGES ANSWERS`.
fn counts(text: &str) -> Option<Written> {
    let mut numbers = text.split(' ').map(|number| number.parse().ok());
    let mut next = || numbers.next().flatten();
    Some(Written { pages: next()?, disk_pages: next()?, answers: next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_answers_and_boots_are_told_apart() {
        let heard = Heard::default();
        let (port, _other) = UnixStream::pair().unwrap();
        for line in
            [".1", "boot abc lab.seed=1", "=a 77 5 3", "q1 ok pages=3", "boot abc x", "junk"]
        {
            heard.hear(line, &port, 1);
        }
        let pulse = heard.pulse();
        assert_eq!(
            (pulse.boots, pulse.written),
            (1, Written { pages: 77, disk_pages: 5, answers: 3 })
        );
        let answer = heard.wait_answer("q1", Duration::ZERO);
        assert_eq!(answer.as_deref(), Some("ok pages=3"));
        assert_eq!(pulse.twice, 0);
        heard.hear(".a", &port, 1);
        assert_eq!(heard.pulse().twice, 1);
        heard.hear("boot def lab.seed=1", &port, 1);
        assert_eq!(heard.pulse().boots, 2);
        assert!(heard.next_question().is_ok());
    }
}
