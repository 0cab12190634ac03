//! Running migrations and gangs.

use api::{GangProgress, MoveProgress, MoveState, Phase};
use client::cluster::{EndedAs, Known, Running};
use maud::{Markup, html};
use report::amount;
use report::progress::{limit, phase};

use super::super::gate::Gate;
use super::plot;
use super::table::Column::{Number, Text};
use super::table::table;

/// A status for screen readers, which changes only when a migration starts or ends.
pub(super) fn status(known: &Known, running: usize) -> Markup {
    let last = known.history().into_iter().next();
    let runs = match running {
        0 => "No migration runs.".to_owned(),
        1 => "1 migration runs.".to_owned(),
        some => format!("{some} migrations run."),
    };
    html! {
        p #status .status role="status" {
            (runs)
            @if let Some(last) = last {
                " The last to end: " (last.vm) " "
                @match &last.result {
                    EndedAs::Done => { "moved to " (last.to) }
                    EndedAs::Failed(_) => { "was not moved to " (last.to) }
                    EndedAs::InDoubt(_) => { "is in doubt" }
                    EndedAs::Cancelled => { "stays at " (last.from) }
                }
                @if let Some(ms) = last.downtime_ms { ", downtime " (amount::milliseconds(ms)) }
                "."
            }
        }
    }
}

/// The most migrations with a card; those of gangs are also in their gang's table.
const CARDS_MAX: usize = 12;

pub(super) fn running(all: &[Running<'_>], gate: &Gate) -> Markup {
    html! {
        @if all.is_empty() { p.quiet { "No migration runs." } }
        @if !all.is_empty() {
            div.cards { @for one in all.iter().take(CARDS_MAX) { (card(one, gate)) } }
        }
        @if all.len() > CARDS_MAX {
            p.quiet { "And " (all.len() - CARDS_MAX) " more." }
        }
    }
}

fn card(one: &Running<'_>, gate: &Gate) -> Markup {
    let progress = one.progress;
    let percent = progress.percent.clamp(0.0, 100.0);
    let heading = format!("move-{}", progress.id);
    let streams = matches!(progress.phase, Phase::FirstPass | Phase::LaterPass);
    html! {
        article.card aria-labelledby=(heading) {
            header {
                h3 #(heading) { (progress.vm) }
                p.route { (progress.from) " → " (progress.to) }
                span.badge.calm { (phase(progress)) }
            }
            div.progress {
                progress max="100" value=(format!("{percent:.1}")) aria-label="At the destination" {
                    (format!("{percent:.0} %"))
                }
                span { (format!("{percent:.0} %")) }
            }
            dl.facts {
                (fact("Time so far", Some(amount::seconds(progress.elapsed_s))))
                (fact("Time left", progress.time_left_s.map(|time| {
                    format!("about {}", amount::seconds(time))
                })))
                (fact("Left", streams.then(|| amount::size(progress.left_bytes))))
                (fact("Limited by", limit(progress).filter(|_| streams).map(|text| {
                    text.strip_prefix("limited by ").unwrap_or(text).to_owned()
                })))
                @if progress.disk_left_bytes > 0 {
                    (fact("Disks left", Some(amount::size(progress.disk_left_bytes))))
                }
                @if progress.share < 1.0 {
                    (fact("Throttled to", Some(format!("{:.0} %", progress.share * 100.0))))
                }
            }
            (plot::rates(one))
            @if !progress.notes.is_empty() {
                ul.notes { @for note in &progress.notes { li { (note) } } }
            }
            @match (one.agent, one.gang) {
                _ if gate.is_read_only() => {}
                (Some(agent), _) => (cancel(gate, agent, &progress.id, &progress.vm)),
                (None, Some(gang)) => p.quiet { "It is cancelled with its gang, " (gang) "." },
                (None, None) => {}
            }
        }
    }
}

fn fact(name: &str, value: Option<String>) -> Markup {
    html! { div { dt { (name) } dd { (value.unwrap_or_else(|| "—".to_owned())) } } }
}

fn cancel(gate: &Gate, agent: usize, id: &str, what: &str) -> Markup {
    html! {
        form method="post" action="cancel" {
            input type="hidden" name="token" value=(gate.token());
            input type="hidden" name="agent" value=(agent);
            input type="hidden" name="id" value=(id);
            button.plain id={ "cancel-" (id) } { "Cancel" span.hidden { " the move of " (what) } }
        }
    }
}

/// Running gangs.
pub(super) fn gangs(known: &Known, gate: &Gate) -> Markup {
    let running: Vec<&GangProgress> = known.gangs().filter(|gang| gang.outcome.is_none()).collect();
    html! {
        @for gang in running {
            article.card aria-labelledby={ "gang-" (gang.id) } {
                header {
                    h3 id={ "gang-" (gang.id) } { "Gang " (gang.id) }
                    p.route {
                        (gang.totals.done) " of " (amount::counted(gang.moves.len() as u64, "VM"))
                        " moved"
                    }
                    @if gang.totals.failed > 0 {
                        span.badge.bad { (gang.totals.failed) " failed" }
                    }
                }
                div.progress {
                    @let share = gang_percent(gang);
                    progress max="100" value=(format!("{share:.1}")) aria-label="Moved" {
                        (format!("{share:.0} %"))
                    }
                    span { (format!("{share:.0} %")) }
                }
                dl.facts {
                    (fact("Time so far", Some(amount::seconds(gang.elapsed_s))))
                    (fact("Moving", Some(gang.totals.moving.to_string())))
                    (fact("Waiting", Some(gang.totals.waiting.to_string())))
                    (fact("On the wire", Some(amount::rate(gang.totals.wire_bytes_per_s))))
                }
                (gang_moves(gang))
                @if let (Some(agent), false) = (known.coordinator(&gang.id), gate.is_read_only()) {
                    (cancel(gate, agent, &gang.id, &format!("gang {}", gang.id)))
                }
            }
        }
    }
}

fn gang_percent(gang: &GangProgress) -> f64 {
    let sum: f64 = gang.moves.iter().map(|one| one.share() * one.ram_bytes as f64).sum();
    let all: f64 = gang.moves.iter().map(|one| one.ram_bytes as f64).sum();
    if all > 0.0 { sum / all * 100.0 } else { 0.0 }
}

fn gang_moves(gang: &GangProgress) -> Markup {
    let columns = [Text("VM"), Text("From"), Text("To"), Text("State"), Number("There")];
    html! {
        details id={ "moves-" (gang.id) } {
            summary { "Its VMs" }
            (table(&format!("VMs of gang {}", gang.id), columns, gang.moves.iter().map(gang_row)))
        }
    }
}

fn gang_row(one: &MoveProgress) -> Markup {
    let (state, class) = match one.state {
        MoveState::Waiting => ("waiting", "quiet"),
        MoveState::Moving => ("moving", "calm"),
        MoveState::Done => ("moved", "good"),
        MoveState::Failed if one.in_doubt => ("in doubt", "bad"),
        MoveState::Failed => ("failed", "bad"),
        MoveState::Cancelled => ("cancelled", "calm"),
    };
    html! {
        tr {
            th scope="row" { (one.vm) }
            td { (one.from) }
            td { (one.to) }
            td {
                span.badge.(class) { (state) }
                @if let Some(why) = &one.reason { span.why { (why) } }
            }
            td.n { (format!("{:.0} %", one.share() * 100.0)) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_in_doubt_is_not_said_to_have_failed() {
        let row = |in_doubt| {
            let one = MoveProgress {
                vm: "web1".to_owned(),
                from: "host-a".to_owned(),
                to: "host-b".to_owned(),
                ram_bytes: 1 << 30,
                state: MoveState::Failed,
                migration: None,
                reason: Some("host-b is silent".to_owned()),
                in_doubt,
                progress: None,
            };
            gang_row(&one).into_string()
        };
        assert!(row(true).contains("in doubt") && !row(true).contains("failed"));
        assert!(row(false).contains("failed"));
    }
}
