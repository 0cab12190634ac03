//! The switchover to scale: what the blackout was made of, against its goal.

use api::{Phase, Report};

use super::scale::positive;
use crate::{amount, summary};

/// A bar from the VM's stop, with marks for the goal and the prediction. Empty
/// where the VM never stopped.
pub(super) fn section(report: &Report) -> String {
    let Some(downtime_ms) = report.downtime_ms else {
        return String::new();
    };
    let downtime_ms = positive(downtime_ms);
    #[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
    let goal_ms = report.downtime_goal_ms as f64;
    let predicted_ms = report.predicted_downtime_ms.map(positive);
    let end_ms = downtime_ms.max(goal_ms).max(predicted_ms.unwrap_or(0.0)).max(0.001) * 1.06;
    let place = |ms: f64| (ms / end_ms * 100.0).clamp(0.0, 100.0);

    let mut out = String::from(
        "<section class=\"card\"><h2>Switchover</h2><p class=\"about\">From the source stopping \
         the VM to the destination running it, against the goal</p>\n<div class=\"bar\">\n",
    );
    let mut keys = String::new();
    for (class, name, from_ms, to_ms) in parts(report, downtime_ms) {
        out.push_str(&format!(
            "<i class=\"{class}\" style=\"left:{:.2}%;width:{:.2}%\"></i>\n",
            place(from_ms),
            place(to_ms) - place(from_ms)
        ));
        keys.push_str(&format!(
            "<li><i class=\"{class}\"></i>{name} <b>{}</b></li>",
            amount::milliseconds(to_ms - from_ms)
        ));
    }
    out.push_str(&mark("goal", place(goal_ms), &format!("goal {}", summary::goal(report))));
    if let Some(ms) = predicted_ms {
        let text = format!("predicted {}", amount::milliseconds(ms));
        out.push_str(&mark("predicted", place(ms), &text));
    }
    out.push_str(&format!("</div>\n<ul class=\"legend\">{keys}</ul></section>\n"));
    out
}

/// Stretches of the blackout, in milliseconds from its begin. The engine's
/// phases divide it; its length is what QEMU's own events say.
fn parts(report: &Report, downtime_ms: f64) -> Vec<(&'static str, &'static str, f64, f64)> {
    let start = |phase| report.phases.iter().find(|p| p.phase == phase).map(|p| p.start_s);
    let Some(stopped) = start(Phase::Stopped) else {
        return vec![("stop", "stopped", 0.0, downtime_ms)];
    };
    let after = |phase| {
        start(phase).map_or(downtime_ms, |at: f64| (positive(at - stopped) * 1e3).min(downtime_ms))
    };
    let loaded = after(Phase::Loaded);
    let committed = after(Phase::Committed).max(loaded);
    vec![
        ("stop", "last pages and device state", 0.0, loaded),
        ("load", "loaded, waiting for the word", loaded, committed),
        ("commit", "committed, starting", committed, downtime_ms),
    ]
}

fn mark(class: &str, place: f64, text: &str) -> String {
    // Near the right edge the text stands left of its mark.
    let side = if place > 70.0 { "before" } else { "after" };
    format!("<u class=\"{class} {side}\" style=\"left:{place:.2}%\"><span>{text}</span></u>\n")
}
