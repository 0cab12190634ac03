//! A gang's progress: on a terminal, a line for each moving VM and one for the gang, redrawn;
//! elsewhere, a line whenever a VM enters another phase.

use std::collections::HashMap;
use std::io::IsTerminal;

use api::{GangProgress, MoveProgress, MoveState, Phase};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use report::progress::phase;
use report::{Stayed, amount};

use super::bar::{DRAWS_PER_S, pause_s, permille};
use super::follow::Shown;
use super::migration::advance;
use crate::output::eprint_line;

/// Shortest time between two lines of the gang, without a terminal, in seconds.
const LINE_EVERY_S: f64 = 5.0;

/// Draws progress to standard error.
pub(crate) struct Display {
    way: Way,
    /// VMs whose end was printed.
    told: Vec<bool>,
}

enum Way {
    /// On a terminal.
    Drawn { all: MultiProgress, gang: ProgressBar, vms: HashMap<usize, ProgressBar> },
    /// In a file or a pipe.
    Lines { last: HashMap<usize, Phase>, gang_at_s: f64 },
}

fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:16.cyan/dim} {wide_msg}")
        .expect("the template is fixed")
        .progress_chars("━╸─");
    ProgressBar::new(1000).with_style(style)
}

impl Display {
    pub(crate) fn new() -> Self {
        if !std::io::stderr().is_terminal() {
            let way = Way::Lines { last: HashMap::new(), gang_at_s: 0.0 };
            return Self { way, told: Vec::new() };
        }
        let target = ProgressDrawTarget::stderr_with_hz(DRAWS_PER_S);
        let all = MultiProgress::with_draw_target(target);
        let gang = all.add(bar());
        Self { way: Way::Drawn { all, gang, vms: HashMap::new() }, told: Vec::new() }
    }

    /// Clears the progress from the terminal.
    pub(crate) fn clear(&self) {
        if let Way::Drawn { all, gang, vms } = &self.way {
            vms.values().chain([gang]).for_each(ProgressBar::finish_and_clear);
            // This fails only if the terminal was closed.
            let _ = all.clear();
        }
    }

    fn show_vm(&mut self, number: usize, one: &MoveProgress, elapsed_s: f64) {
        match &mut self.way {
            Way::Drawn { all, gang, vms } => match (one.state, &one.progress) {
                (MoveState::Moving, progress) => {
                    let drawn = vms.entry(number).or_insert_with(|| all.insert_before(gang, bar()));
                    drawn.set_message(vm_line(one));
                    drawn.set_position(permille(progress.as_ref().map_or(0.0, |p| p.percent)));
                }
                _ => {
                    if let Some(drawn) = vms.remove(&number) {
                        drawn.finish_and_clear();
                        all.remove(&drawn);
                    }
                }
            },
            Way::Lines { last, .. } => {
                let Some(progress) = &one.progress else { return };
                if last.insert(number, progress.phase) != Some(progress.phase) {
                    eprint_line(format_args!(
                        "{:>8}  {}",
                        amount::seconds(elapsed_s),
                        vm_line(one)
                    ));
                }
            }
        }
    }

    fn tell_end(&mut self, number: usize, one: &MoveProgress) {
        if self.told.len() <= number {
            self.told.resize(number + 1, false);
        }
        if one.state.has_ended() && !self.told[number] {
            self.told[number] = true;
            self.say(&end_line(one));
        }
    }
}

impl Shown for Display {
    type State = GangProgress;
    const CANCELLING: &str = "Cancelling; VMs that have not moved yet stay where they are. Ctrl-C \
                              again: don't wait for it.";
    const LOST: &str = "the agent ended before the gang did. VMs that move from other hosts \
                        continue by themselves; when the agent runs again, `droveway gang` lists \
                        the gang, and `droveway gang --resume ID` resumes it";
    const UNSEEN: &str = "The gang, or its VMs that move now, may continue: once the agent \
                          answers, `droveway gang` shows its state, and `droveway gang --resume \
                          ID` resumes it if it was interrupted";

    fn show(&mut self, progress: &GangProgress) {
        for (number, one) in progress.moves.iter().enumerate() {
            self.show_vm(number, one, progress.elapsed_s);
            self.tell_end(number, one);
        }
        match &mut self.way {
            Way::Drawn { gang, .. } => {
                gang.set_message(gang_line(progress));
                gang.set_position(permille(percent(progress)));
            }
            Way::Lines { gang_at_s, .. } => {
                if progress.elapsed_s >= *gang_at_s + pause_s(*gang_at_s, LINE_EVERY_S) {
                    *gang_at_s = progress.elapsed_s;
                    eprint_line(format_args!(
                        "{:>8}  {}",
                        amount::seconds(progress.elapsed_s),
                        gang_line(progress)
                    ));
                }
            }
        }
    }

    fn say(&self, text: &str) {
        match &self.way {
            Way::Drawn { all, .. } => all.suspend(|| eprint_line(format_args!("{text}"))),
            Way::Lines { .. } => eprint_line(format_args!("{text}")),
        }
    }

    fn is_over(progress: &GangProgress) -> bool {
        progress.outcome.is_some()
    }
}

#[allow(clippy::cast_precision_loss, reason = "shown on a bar")]
fn percent(progress: &GangProgress) -> f64 {
    let totals = &progress.totals;
    100.0 * totals.moved_bytes as f64 / totals.used_bytes.max(1) as f64
}

/// The line of a moving VM.
fn vm_line(one: &MoveProgress) -> String {
    let mut parts = vec![match &one.progress {
        Some(progress) => format!("{}  {} → {}  {}", one.vm, one.from, one.to, phase(progress)),
        None => format!("{}  {} → {}  starting", one.vm, one.from, one.to),
    }];
    if let Some(progress) = &one.progress {
        parts.extend(advance(progress));
    }
    parts.join(" · ")
}

/// The line of a VM whose move has ended.
fn end_line(one: &MoveProgress) -> String {
    if one.state == MoveState::Done {
        return format!("{} is at {}.", one.vm, one.to);
    }
    Stayed {
        vm: &one.vm,
        from: &one.from,
        to: &one.to,
        tried: one.state == MoveState::Failed,
        reason: one.reason.as_deref(),
        in_doubt: one.in_doubt,
    }
    .to_string()
}

/// The line of the whole gang.
fn gang_line(progress: &GangProgress) -> String {
    let totals = &progress.totals;
    let mut parts = vec![format!("{} of {} VMs moved", totals.done, progress.moves.len())];
    for (count, word) in [
        (totals.moving, "moving"),
        (totals.waiting, "waiting"),
        (totals.failed, "failed"),
        (totals.cancelled, "not moved"),
    ] {
        if count > 0 {
            parts.push(format!("{count} {word}"));
        }
    }
    parts.push(format!(
        "{} of {}",
        amount::size(totals.moved_bytes),
        amount::size(totals.used_bytes)
    ));
    if totals.moving > 0 {
        parts.push(format!("wire {}", amount::rate(totals.wire_bytes_per_s)));
    }
    parts.join(" · ")
}

#[cfg(test)]
mod tests {
    use api::GangTotals;

    use super::*;

    fn one(state: MoveState, reason: Option<&str>) -> MoveProgress {
        MoveProgress {
            vm: "web1".to_owned(),
            from: "host-a".to_owned(),
            to: "host-b".to_owned(),
            ram_bytes: 1 << 30,
            state,
            migration: None,
            reason: reason.map(str::to_owned),
            in_doubt: false,
            progress: None,
        }
    }

    #[test]
    fn each_end_is_told_with_its_reason() {
        for (state, reason, text) in [
            (MoveState::Done, None, "web1 is at host-b."),
            (
                MoveState::Failed,
                Some("no room"),
                "web1 was not moved from host-a to host-b: no room.",
            ),
            (
                MoveState::Cancelled,
                Some("the gang was cancelled"),
                "web1 stays at host-a: the gang was cancelled.",
            ),
        ] {
            assert_eq!(end_line(&one(state, reason)), text);
        }
        let failed = one(MoveState::Failed, Some("host-b is silent"));
        let in_doubt = MoveProgress { in_doubt: true, ..failed };
        assert_eq!(end_line(&in_doubt), "web1 is in doubt: host-b is silent.");
    }

    #[test]
    fn the_gangs_line_counts_all() {
        let totals = GangTotals {
            waiting: 1,
            moving: 2,
            done: 3,
            failed: 0,
            cancelled: 0,
            used_bytes: 4 << 30,
            moved_bytes: 1 << 30,
            wire_bytes_per_s: 112.0 * 1_048_576.0,
        };
        let progress = GangProgress {
            id: "gdeadbeef".to_owned(),
            elapsed_s: 9.0,
            moves: vec![one(MoveState::Waiting, None); 6],
            totals,
            notes: Vec::new(),
            outcome: None,
        };
        assert_eq!(
            gang_line(&progress),
            "3 of 6 VMs moved · 2 moving · 1 waiting · 1.00 GiB of 4.00 GiB · wire 112 MiB/s"
        );
        assert_eq!(permille(percent(&progress)), 250);
    }
}
