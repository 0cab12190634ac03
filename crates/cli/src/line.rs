//! A migration's progress: on a terminal two lines that are redrawn, elsewhere
//! a line at each phase and each second.

use std::io::IsTerminal;

use api::{Limit, Phase, Progress};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::amount;

/// Redrawn this often at most.
const DRAWS_PER_S: u8 = 10;
/// Without a terminal, seconds between two lines of one phase.
const LINE_EVERY_S: f64 = 1.0;

/// Draws progress to standard error.
pub(crate) enum Display {
    /// On a terminal.
    Bar(ProgressBar),
    /// In a file or a pipe.
    Lines {
        /// What the last line was about.
        last: Option<(Phase, f64)>,
    },
}

impl Display {
    pub(crate) fn new() -> Self {
        if !std::io::stderr().is_terminal() {
            return Self::Lines { last: None };
        }
        let bar = ProgressBar::with_draw_target(
            Some(1000),
            ProgressDrawTarget::stderr_with_hz(DRAWS_PER_S),
        );
        let style = ProgressStyle::with_template("{prefix}\n{bar:24.cyan/dim} {wide_msg}")
            .expect("the template is fixed")
            .progress_chars("━╸─");
        bar.set_style(style);
        Self::Bar(bar)
    }

    pub(crate) fn show(&mut self, progress: &Progress) {
        match self {
            Self::Bar(bar) => {
                bar.set_prefix(upper(progress));
                bar.set_message(lower(progress));
                bar.set_position(permille(progress.percent));
            }
            Self::Lines { last } => {
                let due = last.is_none_or(|(phase, at)| {
                    phase != progress.phase || progress.elapsed_s >= at + LINE_EVERY_S
                });
                if due {
                    *last = Some((progress.phase, progress.elapsed_s));
                    eprintln!("{}", plain(progress));
                }
            }
        }
    }

    /// A word between the lines.
    pub(crate) fn say(&self, text: &str) {
        match self {
            Self::Bar(bar) => bar.suspend(|| eprintln!("{text}")),
            Self::Lines { .. } => eprintln!("{text}"),
        }
    }

    /// Leaves the terminal to what follows.
    pub(crate) fn clear(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to 0..=1000 first"
)]
fn permille(percent: f64) -> u64 {
    (percent * 10.0).clamp(0.0, 1000.0) as u64
}

fn upper(progress: &Progress) -> String {
    format!(
        "{}  {} → {}  {}  {}",
        progress.vm,
        progress.from,
        progress.to,
        phase(progress),
        amount::seconds(progress.elapsed_s)
    )
}

fn lower(progress: &Progress) -> String {
    let mut parts = vec![format!("{:.0} %", progress.percent.clamp(0.0, 100.0))];
    match progress.phase {
        // Nothing is measured yet, or all is measured: what was then says
        // nothing about now.
        Phase::Prepare | Phase::Loaded | Phase::Committed | Phase::Running => {
            return String::new();
        }
        Phase::Stopped => {
            parts.push(format!("{} left", amount::size(progress.left_bytes)));
            return parts.join(" · ");
        }
        Phase::FirstPass | Phase::LaterPass => {}
    }
    parts.push(format!(
        "{} (wire {})",
        amount::rate(progress.delivered_bytes_per_s),
        amount::rate(progress.wire_bytes_per_s)
    ));
    parts.push(format!("dirties {}", amount::rate(progress.dirty_bytes_per_s)));
    parts.push(match progress.time_left_s {
        Some(left) => {
            format!("{} left, about {}", amount::size(progress.left_bytes), amount::seconds(left))
        }
        None => format!("{} left", amount::size(progress.left_bytes)),
    });
    if let Some(limit) = limit(progress.limit) {
        parts.push(limit.to_owned());
    }
    parts.join(" · ")
}

fn plain(progress: &Progress) -> String {
    let head = format!("{:>8}  {}", amount::seconds(progress.elapsed_s), phase(progress));
    let lower = lower(progress);
    if lower.is_empty() { head } else { format!("{head} · {lower}") }
}

/// What a phase is, to somebody who watches.
pub(crate) fn phase(progress: &Progress) -> String {
    match progress.phase {
        Phase::LaterPass => format!("pass {}", progress.pass),
        phase => phase_name(phase).to_owned(),
    }
}

/// Its name, the same in text and HTML.
pub(crate) fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Prepare => "preparing",
        Phase::FirstPass => "first pass",
        Phase::LaterPass => "later passes",
        Phase::Stopped => "stopped",
        Phase::Loaded => "loaded",
        Phase::Committed => "committed",
        Phase::Running => "running",
    }
}

fn limit(limit: Limit) -> Option<&'static str> {
    match limit {
        Limit::Unknown => None,
        Limit::Network => Some("limited by the network"),
        Limit::Cpu => Some("limited by the CPU"),
        Limit::Qemu => Some("limited by QEMU"),
        Limit::Guest => Some("limited by the guest's writes"),
        Limit::Hold => Some("held until the rest fits the downtime goal"),
    }
}

#[cfg(test)]
mod tests {
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
            dirty_bytes_per_s: 5.0 * 1_048_576.0,
            pass: 3,
            left_bytes: 270 << 20,
            time_left_s: Some(0.4),
            limit: Limit::Network,
            notes: Vec::new(),
            outcome: None,
        }
    }

    #[test]
    fn a_line_says_all_that_matters() {
        assert_eq!(
            plain(&progress()),
            "  1.42 s  pass 3 · 73 % · 812 MiB/s (wire 101 MiB/s) · dirties 5.00 MiB/s · \
             270 MiB left, about 400 ms · limited by the network"
        );
    }

    #[test]
    fn what_is_over_is_not_shown() {
        for (phase, text) in [
            (Phase::Prepare, "  1.42 s  preparing"),
            (Phase::Stopped, "  1.42 s  stopped · 73 % · 270 MiB left"),
            (Phase::Loaded, "  1.42 s  loaded"),
        ] {
            assert_eq!(plain(&Progress { phase, ..progress() }), text);
        }
    }

    #[test]
    fn percents_stay_on_the_bar() {
        for (percent, position) in [(-1.0, 0), (f64::NAN, 0), (73.4, 734), (250.0, 1000)] {
            assert_eq!(permille(percent), position);
        }
    }
}
