//! A migration's progress: on a terminal, two lines that are redrawn; elsewhere, a line at
//! each phase, and each second at first.

use std::io::IsTerminal;

use api::{Phase, Progress};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use report::amount;
use report::progress::{limit, phase};

use super::bar::{DRAWS_PER_S, pause_s, permille};
use super::follow::Shown;
use crate::output::eprint_line;

/// Shortest time between two lines of one phase, without a terminal, in seconds.
const LINE_EVERY_S: f64 = 1.0;

/// Draws progress to standard error.
pub(crate) enum Display {
    /// On a terminal: the phase, and the progress below it.
    ///
    /// They are two bars because each is cut to the terminal's width separately.
    Drawn {
        /// Draws both at once.
        both: MultiProgress,
        /// The first line.
        upper: ProgressBar,
        /// The second, with the bar.
        lower: ProgressBar,
    },
    /// In a file or a pipe.
    Lines {
        /// The last line.
        last: LastLine,
    },
}

/// What the last line without a terminal shows.
pub(crate) struct LastLine {
    phase: Phase,
    elapsed_s: f64,
    /// Whether it shows what is waited for.
    waits: bool,
}

impl LastLine {
    /// Before the first: that a move is being prepared is not worth a line, until it is known what
    /// is waited for, or has lasted.
    const NONE: Self = Self { phase: Phase::Prepare, elapsed_s: 0.0, waits: false };

    fn of(progress: &Progress) -> Self {
        let Progress { phase, elapsed_s, ref waits_for, .. } = *progress;
        Self { phase, elapsed_s, waits: waits_for.is_some() }
    }

    /// Whether there is something new to show after it.
    fn is_followed_by(&self, next: &Self) -> bool {
        next.phase != self.phase
            || next.waits && !self.waits
            || next.elapsed_s >= self.elapsed_s + pause_s(self.elapsed_s, LINE_EVERY_S)
    }
}

impl Display {
    pub(crate) fn new() -> Self {
        if !std::io::stderr().is_terminal() {
            return Self::Lines { last: LastLine::NONE };
        }
        let both = MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(DRAWS_PER_S));
        let line = |template| {
            ProgressStyle::with_template(template)
                .expect("the template is fixed")
                .progress_chars("━╸─")
        };
        let upper = both.add(ProgressBar::no_length().with_style(line("{wide_msg}")));
        let lower =
            both.add(ProgressBar::new(1000).with_style(line("{bar:16.cyan/dim} {wide_msg}")));
        Self::Drawn { both, upper, lower }
    }

    /// Clears the progress from the terminal.
    pub(crate) fn clear(&self) {
        if let Self::Drawn { both, upper, lower } = self {
            upper.finish_and_clear();
            lower.finish_and_clear();
            // This fails only if the terminal was closed.
            let _ = both.clear();
        }
    }
}

impl Shown for Display {
    type State = Progress;
    const CANCELLING: &str = "Cancelling; unless it is past its commit, the VM stays where it is. \
                              Ctrl-C again: don't wait for it.";
    const LOST: &str = "the agent ended before the migration did; when it runs again, `droveway \
                        list` shows where the VM is";
    const UNSEEN: &str = "The migration may continue: once the agents answer, `droveway list` on \
                          both hosts shows where the VM is";

    fn show(&mut self, progress: &Progress) {
        match self {
            Self::Drawn { upper, lower, .. } => {
                upper.set_message(upper_line(progress));
                lower.set_message(lower_line(progress));
                lower.set_position(permille(progress.percent));
            }
            Self::Lines { last } => {
                let line = LastLine::of(progress);
                if last.is_followed_by(&line) {
                    *last = line;
                    eprint_line(format_args!("{}", plain(progress)));
                }
            }
        }
    }

    fn say(&self, text: &str) {
        match self {
            Self::Drawn { both, .. } => both.suspend(|| eprint_line(format_args!("{text}"))),
            Self::Lines { .. } => eprint_line(format_args!("{text}")),
        }
    }

    fn is_over(state: &Progress) -> bool {
        state.outcome.is_some()
    }
}

/// The line with the phase.
fn upper_line(progress: &Progress) -> String {
    let head = format!(
        "{}  {} → {}  {}  {}",
        progress.vm,
        progress.from,
        progress.to,
        phase(progress),
        amount::seconds(progress.elapsed_s)
    );
    let mut parts = vec![head];
    parts.extend(pressure(progress));
    parts.join(" · ")
}

/// The line with the progress.
fn lower_line(progress: &Progress) -> String {
    advance(progress).join(" · ")
}

/// Everything on one line.
fn plain(progress: &Progress) -> String {
    let mut parts =
        vec![format!("{:>8}  {}", amount::seconds(progress.elapsed_s), phase(progress))];
    parts.extend(advance(progress));
    parts.extend(pressure(progress));
    parts.join(" · ")
}

/// What is done and what is left.
pub(super) fn advance(progress: &Progress) -> Vec<String> {
    let mut parts = memory(progress);
    if progress.disk_left_bytes > 0
        && matches!(progress.phase, Phase::Prepare | Phase::FirstPass | Phase::LaterPass)
    {
        parts.push(format!("disks: {} left", amount::size(progress.disk_left_bytes)));
    }
    parts
}

fn memory(progress: &Progress) -> Vec<String> {
    let left = format!("{} left", amount::size(progress.left_bytes));
    let percent = format!("{:.0} %", progress.percent.clamp(0.0, 100.0));
    match progress.phase {
        Phase::Prepare => {
            progress.waits_for.iter().map(|what| format!("waiting for {what}")).collect()
        }
        // The last measurements no longer apply.
        Phase::Loaded | Phase::Committed | Phase::Running => Vec::new(),
        Phase::Stopped => vec![percent, left],
        Phase::FirstPass | Phase::LaterPass => vec![
            percent,
            format!(
                "{} (wire {})",
                amount::rate(progress.delivered_bytes_per_s),
                amount::rate(progress.wire_bytes_per_s)
            ),
            match progress.time_left_s {
                Some(time) => format!("{left}, about {}", amount::seconds(time)),
                None => left,
            },
        ],
    }
}

/// What slows the migration.
fn pressure(progress: &Progress) -> Vec<String> {
    if !matches!(progress.phase, Phase::FirstPass | Phase::LaterPass) {
        return Vec::new();
    }
    let dirties = progress.dirties().map(|rate| format!("dirties {}", amount::rate(rate)));
    let mut parts: Vec<String> = dirties.into_iter().collect();
    if progress.share < 1.0 {
        parts.push(format!("throttled to {:.0} %", progress.share * 100.0));
    }
    parts.extend(limit(progress).map(str::to_owned));
    parts
}

#[cfg(test)]
mod tests {
    use api::Limit;

    use super::*;

    fn progress() -> Progress {
        Progress {
            id: "deadbeef".to_owned(),
            vm: "web1".to_owned(),
            from: "host-a".to_owned(),
            to: "host-b".to_owned(),
            phase: Phase::LaterPass,
            elapsed_s: 1.42,
            ram_bytes: 1 << 30,
            percent: 73.4,
            delivered_bytes_per_s: 812.0 * 1_048_576.0,
            wire_bytes_per_s: 101.0 * 1_048_576.0,
            share: 1.0,
            dirty_bytes_per_s: 5.0 * 1_048_576.0,
            pass: 3,
            left_bytes: 270 << 20,
            disk_bytes: 0,
            disk_left_bytes: 0,
            time_left_s: Some(0.4),
            limit: Limit::Network,
            by_xl: false,
            waits_for: None,
            notes: Vec::new(),
            outcome: None,
            in_doubt: false,
        }
    }

    #[test]
    fn a_throttled_vm_is_shown_as_throttled() {
        let slowed = Progress { share: 0.204, ..progress() };
        assert!(plain(&slowed).contains(" · throttled to 20 % · "), "{}", plain(&slowed));
    }

    #[test]
    fn a_line_says_all_that_matters() {
        assert_eq!(
            plain(&progress()),
            "  1.42 s  pass 3 · 73 % · 812 MiB/s (wire 101 MiB/s) · 270 MiB left, about 400 ms · \
             dirties 5.00 MiB/s · limited by the network"
        );
        assert_eq!(
            upper_line(&progress()),
            "web1  host-a → host-b  pass 3  1.42 s · dirties 5.00 MiB/s · limited by the network"
        );
        assert!(lower_line(&progress()).chars().count() + 17 <= 80, "fits a terminal");
    }

    #[test]
    fn a_dirty_rate_that_is_not_known_is_not_shown() {
        let first = Progress { phase: Phase::FirstPass, dirty_bytes_per_s: 0.0, ..progress() };
        assert!(!plain(&first).contains("dirties"), "{}", plain(&first));
        assert!(upper_line(&first).ends_with("first pass  1.42 s · limited by the network"));
    }

    #[test]
    fn the_operators_limit_is_not_blamed_on_the_network() {
        let bounded = Progress { limit: Limit::Bound, ..progress() };
        assert!(upper_line(&bounded).ends_with(" · limited by --limit"));
    }

    #[test]
    fn a_domain_of_xen_waits_for_xl() {
        for (by_xl, expected) in [(false, " · limited by QEMU"), (true, " · limited by xl")] {
            let waiting = Progress { limit: Limit::Qemu, by_xl, ..progress() };
            assert!(upper_line(&waiting).ends_with(expected), "{}", upper_line(&waiting));
        }
    }

    #[test]
    fn disks_that_move_are_shown_until_they_are_there() {
        let moving = Progress { disk_left_bytes: 3 << 30, ..progress() };
        assert!(lower_line(&moving).ends_with("about 400 ms · disks: 3.00 GiB left"));
        let stopped = Progress { phase: Phase::Stopped, ..moving };
        assert!(!lower_line(&stopped).contains("disks"));
    }

    #[test]
    fn without_a_terminal_a_line_has_something_new() {
        let preparing = || Progress { phase: Phase::Prepare, elapsed_s: 0.0, ..progress() };
        let waits = || Progress { waits_for: Some("host-b".to_owned()), ..preparing() };
        let later = || Progress { elapsed_s: 1.0, ..preparing() };
        let lines = |seen: &[Progress]| {
            let mut last = LastLine::NONE;
            let mut is_due = |progress: &&Progress| {
                let line = LastLine::of(progress);
                let is_due = last.is_followed_by(&line);
                if is_due {
                    last = line;
                }
                is_due
            };
            seen.iter().filter(|progress| is_due(progress)).map(plain).collect::<Vec<_>>()
        };
        let all = [preparing(), waits(), preparing(), waits(), progress(), progress()];
        assert_eq!(lines(&all), [plain(&waits()), plain(&progress())]);
        assert_eq!(lines(&[preparing(), later(), waits()]), [plain(&later()), plain(&waits())]);
    }

    #[test]
    fn figures_are_shown_only_while_they_are_current() {
        for (phase, text) in [
            (Phase::Prepare, "  1.42 s  preparing"),
            (Phase::Stopped, "  1.42 s  stopped · 73 % · 270 MiB left"),
            (Phase::Loaded, "  1.42 s  loaded"),
        ] {
            assert_eq!(plain(&Progress { phase, ..progress() }), text);
        }
        let waits_for = Some("host-b to start its QEMU".to_owned());
        let preparing = Progress { phase: Phase::Prepare, waits_for, ..progress() };
        assert_eq!(plain(&preparing), "  1.42 s  preparing · waiting for host-b to start its QEMU");
    }
}
