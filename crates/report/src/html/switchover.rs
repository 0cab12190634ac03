//! The switchover to scale: the parts of the downtime, against its goal.

use api::{Phase, Report};
use maud::{Markup, html};

use super::scale::positive;
use crate::amount;
use crate::summary::goal;

/// A bar from the VM's stop, with marks for the goal and the prediction.
///
/// Empty if there was no downtime.
pub(super) fn section(report: &Report) -> Markup {
    let Some(downtime_ms) = report.downtime_ms else {
        return Markup::default();
    };
    let downtime_ms = positive(downtime_ms);
    #[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
    let goal_ms = report.downtime_goal_ms as f64;
    let predicted_ms = report.predicted_downtime_ms.map(positive);
    let end_ms = downtime_ms.max(goal_ms).max(predicted_ms.unwrap_or(0.0)).max(0.001) * 1.06;
    let place = |ms: f64| (ms / end_ms * 100.0).clamp(0.0, 100.0);

    let parts = parts(report, downtime_ms);
    html! {
        section.card {
            h2 { "Switchover" }
            p.about {
                "From the source stopping the VM to the destination running it, against the goal"
            }
            div.bar {
                @for part in &parts {
                    @let (left, right) = (place(part.from_ms), place(part.to_ms));
                    i class=(part.class) style=(format!("left:{left:.2}%;width:{:.2}%", right - left)) {}
                }
                (mark("goal", place(goal_ms), &format!("goal {}", goal(report))))
                @if let Some(ms) = predicted_ms {
                    @let text = format!("predicted {}", amount::milliseconds(ms));
                    (mark("predicted", place(ms), &text))
                }
            }
            ul.legend {
                @for part in &parts {
                    li {
                        i class=(part.class) {}
                        (part.name) " " b { (amount::milliseconds(part.to_ms - part.from_ms)) }
                    }
                }
            }
        }
    }
}

/// A part of the downtime, in milliseconds from its beginning.
struct Part {
    class: &'static str,
    name: &'static str,
    from_ms: f64,
    to_ms: f64,
}

/// The parts of the downtime.
///
/// The engine's phases divide it; its length is from QEMU's events.
fn parts(report: &Report, downtime_ms: f64) -> Vec<Part> {
    let part = |class, name, from_ms, to_ms| Part { class, name, from_ms, to_ms };
    let start = |phase| report.phases.iter().find(|p| p.phase == phase).map(|p| p.start_s);
    let Some(stopped) = start(Phase::Stopped) else {
        return vec![part("stop", "stopped", 0.0, downtime_ms)];
    };
    let after = |phase| {
        start(phase).map_or(downtime_ms, |at: f64| (positive(at - stopped) * 1e3).min(downtime_ms))
    };
    let loaded = after(Phase::Loaded);
    let committed = after(Phase::Committed).max(loaded);
    vec![
        part("stop", "last pages and device state", 0.0, loaded),
        part("load", "loaded, waiting for the commit", loaded, committed),
        part("commit", "committed, starting", committed, downtime_ms),
    ]
}

fn mark(class: &str, place: f64, text: &str) -> Markup {
    // Near the right edge, the text is left of its mark.
    let side = if place > 70.0 { "before" } else { "after" };
    html! {
        u.(class).(side) style=(format!("left:{place:.2}%")) { span { (text) } }
    }
}
