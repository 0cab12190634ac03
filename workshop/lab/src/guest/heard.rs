//! What was heard from a guest, on any number of sockets.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::connect;
use super::felt::{Beat, Felt, Silences, Written, felt, pages, silences, touched};
use crate::error::{FileContext, LabError, Result, SystemContext};

/// Longest time until a healthy guest sends its counts.
const COUNT_MAX: Duration = Duration::from_secs(2);

/// What a greeting begins with.
const GREETING: &str = "boot ";

const THE_PORT: &str = "the guest's port";

/// The state of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pulse {
    /// When it was last heard.
    pub last_beat: Instant,
    /// The longest silence since [`super::Guest::forget_gap`].
    pub gap: Duration,
    /// What it has rewritten since it booted.
    pub written: Written,
    /// When these counts arrived.
    pub written_at: Instant,
    /// How often it has booted.
    pub boots: u32,
    /// Beats with a number that was heard before: the guest has run twice, or its count of beats
    /// went back.
    pub twice: u32,
    /// Beats from its former host after one from its current host: it runs on both, unless the
    /// thread that listens there was late.
    pub behind: u32,
}

#[derive(Debug)]
struct State {
    pulse: Pulse,
    /// Beats since the gap was last forgotten.
    beats: Vec<Beat>,
    /// The numbers of all beats since it booted.
    numbers: HashSet<u64>,
    boot_id: Option<String>,
    answers: HashMap<String, String>,
    questions: u64,
    /// Sockets that were connected to.
    sockets: u32,
    /// The newest of them with a beat.
    newest: u32,
    /// The socket with the last beat, and its number: questions go there.
    port: Option<(u32, UnixStream)>,
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
        let pulse =
            Pulse { last_beat: now, gap, written, written_at: now, boots: 0, twice: 0, behind: 0 };
        Self {
            state: Mutex::new(State {
                pulse,
                beats: Vec::new(),
                numbers: HashSet::new(),
                boot_id: None,
                answers: HashMap::new(),
                questions: 0,
                sockets: 0,
                newest: 0,
                port: None,
            }),
            changed: Condvar::new(),
        }
    }
}

impl State {
    fn next_question(&mut self) -> (String, Option<(u32, UnixStream)>) {
        self.questions += 1;
        let port = self.port.as_ref();
        let port = port.and_then(|(number, port)| Some((*number, port.try_clone().ok()?)));
        (format!("q{}", self.questions), port)
    }
}

/// Raises the priority of this thread, where that is allowed. QEMU writes to a guest's port byte by
/// byte, so the socket holds only some 280 unread bytes. A guest that waits for the port as it is
/// stopped may wait for ever at the destination, if nothing has connected to its port there by
/// then.
fn come_first() {
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), -10);
}

/// Begins a new line, whatever is left of an earlier one.
fn question(id: &str, command: &str) -> String {
    format!("\n{id} {command}\n")
}

/// Hears what a guest says on a socket until that ends. Returns whether it said anything.
fn heard_at(heard: &Weak<Heard>, port: &UnixStream) -> bool {
    let Some(socket) = heard.upgrade().map(|heard| heard.next_socket()) else { return true };
    let Ok(stream) = port.try_clone() else { return true };
    let (mut reader, mut line, mut spoke) = (BufReader::new(stream), String::new(), false);
    while reader.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
        spoke = true;
        // A guest that moved in the middle of a line ends it on the other host.
        let Some(whole) = line.strip_suffix('\n') else { break };
        let Some(heard) = heard.upgrade() else { break };
        heard.hear(whole.trim_end_matches('\r'), port, socket);
        line.clear();
    }
    spoke
}

impl Heard {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens on a socket as soon as it exists, on a thread of its own, until the guest has spoken
    /// there and no longer does.
    pub(super) fn listen(self: &Arc<Self>, path: PathBuf, until: Instant) -> Result<()> {
        let heard = Arc::downgrade(self);
        let listen = move || {
            come_first();
            let over = || heard.strong_count() == 0;
            // The QEMU of a move that was cancelled may still accept, and ends without a word; the
            // next one has the same path.
            while connect(&path, until, over).is_some_and(|port| !heard_at(&heard, &port)) {}
        };
        std::thread::Builder::new()
            .name("guest-heard".to_owned())
            .spawn(listen)
            .doing("start a thread")?;
        Ok(())
    }

    fn next_socket(&self) -> u32 {
        let mut state = self.lock();
        state.sockets += 1;
        state.sockets
    }

    fn hear(&self, line: &str, port: &UnixStream, socket: u32) {
        let now = Instant::now();
        let mut state = self.lock();
        // A guest that was reset in the middle of a beat greets in the rest of that line. The beats
        // that follow would be taken for those of the boot before.
        let greeting = line.starts_with(['.', '=']).then(|| line.find(GREETING)).flatten();
        let line = greeting.map_or(line, |at| &line[at..]);
        if let Some(rest) = line.strip_prefix(['.', '=']) {
            state.pulse.gap = state.pulse.gap.max(now - state.pulse.last_beat);
            state.pulse.last_beat = now;
            let number = rest.split(' ').next().and_then(|it| u64::from_str_radix(it, 16).ok());
            if number.is_some_and(|number| !state.numbers.insert(number)) {
                state.pulse.twice += 1;
            }
            if socket < state.newest {
                state.pulse.behind += 1;
            }
            state.newest = state.newest.max(socket);
            let written = rest.split_once(' ').and_then(|(_, written)| counts(written));
            state.beats.push(Beat { at: now, socket, written });
            if let Some(written) = written {
                state.pulse.written = written;
                state.pulse.written_at = now;
            }
            if let Ok(port) = port.try_clone() {
                state.port = Some((socket, port));
            }
        } else if let Some(rest) = line.strip_prefix(GREETING) {
            // The guest repeats its greeting until it is sent a line. If the socket is gone, it is
            // answered on the next one.
            let _gone = (&*port).write_all(b"\n");
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

    /// Where it was listened to, for error messages.
    pub(super) fn places(&self) -> String {
        let state = self.lock();
        format!("; last heard at the {}. of {} sockets", state.newest, state.sockets)
    }

    pub(super) fn forget_gap(&self) {
        let mut state = self.lock();
        state.pulse.gap = Duration::ZERO;
        state.beats.clear();
    }

    pub(super) fn felt(&self, from: Instant, to: Instant, period: Duration) -> Felt {
        // Counts come with every tenth beat; a guest that is silent is judged by its counts so far.
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

    pub(super) fn touched(&self, from: Instant, to: Instant) -> Vec<(Instant, u64)> {
        touched(&self.lock().beats, from, to)
    }

    /// Sends a command once, to the socket with the last beat.
    pub(super) fn tell(&self, command: &str) -> Result<()> {
        let (id, port) = self.lock().next_question();
        let missing = || LabError::Missing { what: THE_PORT.to_owned() };
        let (_, mut port) = port.ok_or_else(missing)?;
        port.write_all(question(&id, command).as_bytes()).at("write to", THE_PORT)
    }

    /// Asks until there is an answer: a question to a QEMU that the guest is just leaving is lost,
    /// and repeated where the guest is heard next.
    pub(super) fn ask(&self, command: &str, until: Instant) -> Option<String> {
        let mut asked: Option<(String, u32)> = None;
        loop {
            let (mut answer, mut elsewhere) = (None, None);
            self.wait(until, |state| {
                answer = asked.as_ref().and_then(|(id, _)| state.answers.remove(id));
                let at = state.port.as_ref().map(|(number, _)| *number);
                elsewhere = at.filter(|at| asked.as_ref().is_none_or(|(_, asked)| asked != at));
                answer.is_some() || elsewhere.is_some()
            });
            if answer.is_some() || elsewhere.is_none() {
                return answer;
            }
            let (id, port) = self.lock().next_question();
            let (number, mut port) = port?;
            // If that socket is gone, the guest will be heard on another.
            let _gone = port.write_all(question(&id, command).as_bytes());
            asked = Some((id, number));
        }
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

/// `PAGES DISK_PAGES ANSWERS TOUCHED`.
fn counts(text: &str) -> Option<Written> {
    let mut numbers = text.split(' ').map(|number| number.parse().ok());
    let mut next = || numbers.next().flatten();
    let (pages, disk_pages, answers) = (next()?, next()?, next()?);
    Some(Written { pages, disk_pages, answers, touched: next()? })
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn heartbeats_answers_and_boots_are_told_apart() {
        let heard = Heard::default();
        let (port, _other) = UnixStream::pair().unwrap();
        for line in
            [".1", "boot abc lab.seed=1", "=a 77 5 3 8", "q1 ok pages=3", "boot abc x", "junk"]
        {
            heard.hear(line, &port, 1);
        }
        let pulse = heard.pulse();
        assert_eq!(
            (pulse.boots, pulse.written),
            (1, Written { pages: 77, disk_pages: 5, answers: 3, touched: 8 })
        );
        assert_eq!(pulse.twice, 0);
        heard.hear(".a", &port, 1);
        assert_eq!(heard.pulse().twice, 1);
        heard.hear(".b", &port, 2);
        assert_eq!(heard.pulse().behind, 0);
        heard.hear(".c", &port, 1);
        assert_eq!((heard.pulse().twice, heard.pulse().behind), (1, 1));
        heard.hear("boot def lab.seed=1", &port, 1);
        assert_eq!(heard.pulse().boots, 2);
    }

    #[test]
    fn a_guest_that_was_reset_within_a_beat_has_booted_and_beats_anew() {
        let heard = Heard::default();
        let (port, _other) = UnixStream::pair().unwrap();
        for line in ["boot abc", ".1", ".2", "q1 ok boot def", ".boot def", ".1", ".2"] {
            heard.hear(line, &port, 1);
        }
        assert_eq!((heard.pulse().boots, heard.pulse().twice), (2, 0));
        for line in ["=3 7boot ghi", ".1", ".2"] {
            heard.hear(line, &port, 1);
        }
        assert_eq!((heard.pulse().boots, heard.pulse().twice), (3, 0));
    }

    #[test]
    fn a_greeting_is_answered() {
        let heard = Heard::default();
        let (port, mut guest) = UnixStream::pair().unwrap();
        heard.hear("boot abc", &port, 1);
        let mut said = [0];
        guest.read_exact(&mut said).unwrap();
        assert_eq!(said, *b"\n");
    }

    /// As the QEMU of a move that was cancelled, and the next one at the same path.
    #[test]
    fn a_socket_that_ends_without_a_word_is_connected_to_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk");
        let heard = Arc::<Heard>::default();
        heard.listen(path.clone(), Instant::now() + Duration::from_secs(60)).unwrap();
        drop(UnixListener::bind(&path).unwrap().accept().unwrap());
        std::fs::remove_file(&path).unwrap();
        let (mut qemu, _) = UnixListener::bind(&path).unwrap().accept().unwrap();
        qemu.write_all(b".1 1 2 3 4\n").unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        assert!(heard.wait(until, |state| state.numbers.contains(&1)));
    }

    /// Answers the next question.
    fn answer(heard: &Heard, mut port: impl Read, number: u32) {
        let mut said = [0; 64];
        let len = port.read(&mut said).unwrap();
        let said = str::from_utf8(&said[..len]).unwrap();
        let id = said.trim_start().split(' ').next().unwrap();
        let (here, _there) = UnixStream::pair().unwrap();
        heard.hear(&format!("{id} ok {number}"), &here, number);
    }

    #[test]
    fn a_question_that_is_lost_in_a_move_is_asked_again() {
        let heard = Heard::default();
        let until = Instant::now() + Duration::from_secs(60);
        let ((first, gone), (second, mut silent)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        drop(gone);
        heard.hear(".1", &first, 1);
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| heard.ask("check", until));
            heard.hear(".2", &second, 2);
            // Read, and never answered.
            silent.read_exact(&mut [0; 4]).unwrap();
            let (third, last) = UnixStream::pair().unwrap();
            heard.hear(".3", &third, 3);
            answer(&heard, last, 3);
            assert_eq!(asking.join().unwrap().as_deref(), Some("ok 3"));
        });
    }
}
