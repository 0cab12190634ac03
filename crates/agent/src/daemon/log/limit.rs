//! A limit on the lines of each statement that logs.
//!
//! Each connection that is refused is a line, so anything that reaches the agent's ports could fill
//! the disk that has the log. What exceeds the limit is counted, and the count is logged.

use std::collections::HashMap;
use std::fmt::{Debug, Write};
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use data_threads::Joined;
use parking_lot::{Condvar, Mutex, MutexGuard};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// The lines of one statement within [`WINDOW`]. Each of a gang's VMs has some that begin with it.
const LINES_MAX: u32 = 100;
const WINDOW: Duration = Duration::from_secs(5);
/// The letters of a left-out message that are quoted.
const QUOTED_LETTERS_MAX: usize = 200;

/// The statements that have logged: no more than the program has.
pub(super) struct Limits {
    window: Duration,
    statements: Mutex<Statements>,
    changed: Condvar,
}

#[derive(Default)]
struct Statements {
    each: HashMap<Identifier, Statement>,
    is_closing: bool,
}

struct Statement {
    since: Instant,
    lines: u32,
    left_out: Option<LeftOut>,
}

/// The lines that were left out since [`Statement::since`].
struct LeftOut {
    level: Level,
    lines: u64,
    /// The message of the first one, without its fields.
    like: String,
}

/// Leaves out the events that exceed the limits.
pub(super) struct Limited(Arc<Limits>);

/// The thread that logs the counts. It ends when this is dropped, with the counts so far.
pub(crate) struct Counting {
    _thread: Joined,
    limits: Arc<Limits>,
}

impl Default for Limits {
    fn default() -> Self {
        Self::new(WINDOW)
    }
}

impl Limits {
    fn new(window: Duration) -> Self {
        Self { window, statements: Mutex::default(), changed: Condvar::new() }
    }

    pub(super) fn layer(self: &Arc<Self>) -> Limited {
        Limited(Arc::clone(self))
    }

    pub(super) fn count(self: &Arc<Self>) -> io::Result<Counting> {
        let limits = Arc::clone(self);
        let counting = thread::Builder::new().name("log-limit".to_owned()).spawn({
            let limits = Arc::clone(self);
            move || limits.report()
        })?;
        Ok(Counting { _thread: counting.into(), limits })
    }

    fn admits(&self, event: &Event<'_>) -> bool {
        let (meta, now) = (event.metadata(), Instant::now());
        let mut statements = self.statements.lock();
        let one = statements.each.entry(meta.callsite()).or_insert_with(|| Statement::at(now));
        if let Some(left_out) = &mut one.left_out {
            left_out.lines += 1;
            return false;
        }
        if now.duration_since(one.since) >= self.window {
            *one = Statement::at(now);
        }
        if one.lines < LINES_MAX {
            one.lines += 1;
            return true;
        }
        let mut message = Message::default();
        event.record(&mut message);
        one.left_out = Some(LeftOut { level: *meta.level(), lines: 1, like: message.0 });
        self.changed.notify_all();
        false
    }

    /// Logs each count when its window ends, and the rest when the log is closed.
    fn report(&self) {
        let mut statements = self.statements.lock();
        while !statements.is_closing {
            let now = Instant::now();
            match statements.due(self.window) {
                None => self.changed.wait(&mut statements),
                Some(due) if due > now => {
                    self.changed.wait_until(&mut statements, due);
                }
                Some(_) => self.log_counts(&mut statements, |since| now >= since + self.window),
            }
        }
        self.log_counts(&mut statements, |_| true);
    }

    fn log_counts(
        &self,
        statements: &mut MutexGuard<'_, Statements>,
        is_due: impl Fn(Instant) -> bool,
    ) {
        let due = statements.each.values_mut().filter(|one| is_due(one.since));
        let counts: Vec<LeftOut> = due.filter_map(Statement::begin_again).collect();
        let seconds = self.window.as_secs();
        MutexGuard::unlocked(statements, || {
            counts.iter().for_each(|left_out| left_out.log(seconds));
        });
    }
}

impl Statements {
    /// When the next count is to be logged.
    fn due(&self, window: Duration) -> Option<Instant> {
        let left_out = self.each.values().filter(|one| one.left_out.is_some());
        left_out.map(|one| one.since + window).min()
    }
}

impl Statement {
    fn at(since: Instant) -> Self {
        Self { since, lines: 0, left_out: None }
    }

    fn begin_again(&mut self) -> Option<LeftOut> {
        let left_out = self.left_out.take()?;
        *self = Self::at(Instant::now());
        Some(left_out)
    }
}

impl LeftOut {
    fn log(&self, seconds: u64) {
        let Self { level, lines, like } = self;
        // An error stays one, for those who log errors only.
        match *level {
            Level::ERROR => tracing::error!(lines, seconds, like, "lines were suppressed"),
            _ => tracing::warn!(lines, seconds, like, "lines were suppressed"),
        }
    }
}

impl<S: Subscriber> Layer<S> for Limited {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        // Counts are few: one for each statement and window.
        event.metadata().target() == module_path!() || self.0.admits(event)
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        self.limits.statements.lock().is_closing = true;
        self.limits.changed.notify_all();
    }
}

/// An event's message, at most [`QUOTED_LETTERS_MAX`] of it.
#[derive(Default)]
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            // An error means that it is full.
            let _ = write!(self, "{value:?}");
        }
    }
}

impl Write for Message {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = QUOTED_LETTERS_MAX.saturating_sub(self.0.chars().count());
        self.0.extend(text.chars().take(room));
        if room > 0 { Ok(()) } else { Err(std::fmt::Error) }
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::{Receiver, Sender, unbounded};
    use tracing::Dispatch;
    use tracing::dispatcher::with_default;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    const EVER: Duration = Duration::from_secs(3600);

    /// A line's level, its message, and the lines that it counts.
    type Line = (Level, String, u64);

    /// What passes the limits.
    struct Shown(Sender<Line>);

    #[derive(Default)]
    struct Fields {
        message: Message,
        like: String,
        lines: u64,
    }

    impl Visit for Fields {
        fn record_u64(&mut self, field: &Field, value: u64) {
            if field.name() == "lines" {
                self.lines = value;
            }
        }

        fn record_str(&mut self, field: &Field, value: &str) {
            if field.name() == "like" {
                value.clone_into(&mut self.like);
            }
        }

        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            self.message.record_debug(field, value);
        }
    }

    impl<S: Subscriber> Layer<S> for Shown {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            let mut fields = Fields::default();
            event.record(&mut fields);
            let text = format!("{}{}", fields.message.0, fields.like);
            self.0.send((*event.metadata().level(), text, fields.lines)).unwrap();
        }
    }

    /// Logs with these limits, and returns them with what passed.
    fn limited(window: Duration, log: impl FnOnce(&Receiver<Line>)) -> (Arc<Limits>, Vec<Line>) {
        let (show, shown) = unbounded();
        let limits = Arc::new(Limits::new(window));
        let log_of = tracing_subscriber::registry().with(limits.layer()).with(Shown(show));
        let log_of = Dispatch::new(log_of);
        let thread = thread::spawn({
            let (limits, log_of) = (Arc::clone(&limits), log_of.clone());
            move || with_default(&log_of, || limits.report())
        });
        let counting = Counting { _thread: thread.into(), limits: Arc::clone(&limits) };
        with_default(&log_of, || log(&shown));
        drop(counting);
        (limits, shown.try_iter().collect())
    }

    #[test]
    fn a_flood_of_one_statement_is_cut_and_counted() {
        let (limits, shown) = limited(EVER, |_| {
            for nth in 0..10_000 {
                tracing::error!(nth, "a connection was refused");
            }
            tracing::info!("another statement");
        });
        let passed = LINES_MAX as usize;
        let refused = (Level::ERROR, "a connection was refused".to_owned(), 0);
        assert!(shown[..passed].iter().all(|line| *line == refused), "{shown:?}");
        let like = "lines were suppresseda connection was refused".to_owned();
        let rest = [
            (Level::INFO, "another statement".to_owned(), 0),
            (Level::ERROR, like, 10_000 - u64::from(LINES_MAX)),
        ];
        assert_eq!(shown[passed..], rest);
        assert_eq!(limits.statements.lock().each.len(), 2, "an entry for each statement");
    }

    #[test]
    fn counts_come_by_themselves_and_then_lines_again() {
        let mut logged = 0;
        let mut seen = Vec::new();
        let (_, shown) = limited(Duration::from_millis(50), |shown| {
            let mut counts = 0;
            while counts < 3 {
                for _ in 0..1_000 {
                    logged += 1;
                    tracing::info!("a connection was refused");
                }
                let before = seen.len();
                seen.extend(shown.try_iter());
                counts += seen[before..].iter().filter(|(_, _, lines)| *lines > 0).count();
            }
        });
        seen.extend(shown);
        let of = |line: &Line| if line.2 == 0 { 1 } else { line.2 };
        assert_eq!(seen.iter().map(of).sum::<u64>(), logged, "none is lost");
        assert!(seen.iter().any(|(level, ..)| *level == Level::WARN));
    }

    #[test]
    fn a_long_message_is_quoted_in_part() {
        let (_, shown) = limited(EVER, |_| {
            for _ in 0..=LINES_MAX {
                tracing::warn!("{}{}", "ä".repeat(QUOTED_LETTERS_MAX - 1), "b".repeat(1 << 20));
            }
        });
        let (_, text, lines) = shown.last().unwrap();
        assert_eq!((text.ends_with("äb"), *lines), (true, 1));
    }
}
