//! The few figures that readers want first.

use api::Report;
use maud::{Markup, html};

use super::plot::ratio;
use crate::amount;
use crate::summary::goal;

/// A row of tiles.
pub(super) fn tiles(report: &Report) -> Markup {
    let mut tiles = Vec::new();
    if let Some(ms) = report.downtime_ms {
        tiles.push(tile("Downtime", &amount::milliseconds(ms), &format!("goal {}", goal(report))));
    }
    tiles.push(tile(
        "Took",
        &amount::seconds(report.total_s),
        &format!("{} of it to prepare", amount::seconds(report.prepare_s)),
    ));
    tiles.push(tile(
        "On the wire",
        &amount::size(report.wire_bytes),
        &format!(
            "{} of {} of RAM",
            percent(share(report.wire_bytes, report.ram_bytes)),
            amount::size(report.ram_bytes)
        ),
    ));
    let handed_bytes = report.body_bytes + report.fill_bytes;
    let moving_s = report.total_s - report.prepare_s;
    if moving_s > 0.0 && moving_s.is_finite() {
        #[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
        let guest_bytes = handed_bytes as f64;
        tiles.push(tile(
            "Delivered at",
            &amount::rate(guest_bytes / moving_s),
            &passes_and_lanes(report),
        ));
    }
    if handed_bytes > 0 {
        tiles.push(tile(
            "Zero or fill",
            &percent(ratio(report.fill_bytes, handed_bytes)),
            &format!("of {} handed over", amount::size(handed_bytes)),
        ));
    }
    html! {
        section.tiles {
            @for tile in tiles { (tile) }
        }
    }
}

/// Unlike [`ratio`], may exceed 1: pages that the VM rewrites are sent again.
#[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// A percentage that is rounded to 0 or 100 only if it is exact.
fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent > 0.0 && percent < 0.5 {
        "<1 %".to_owned()
    } else if percent > 99.5 && percent < 100.0 {
        ">99 %".to_owned()
    } else {
        format!("{percent:.0} %")
    }
}

fn tile(name: &str, value: &str, about: &str) -> Markup {
    let (number, unit) = value.split_once(' ').unwrap_or((value, ""));
    html! {
        div.tile {
            p { (name) }
            strong { (number) small { " " (unit) } }
            p.quiet { (about) }
        }
    }
}

fn passes_and_lanes(report: &Report) -> String {
    let lanes = amount::counted(report.lanes.len() as u64, "lane");
    match report.passes {
        0 => format!("over {lanes}"),
        count => format!("{} over {lanes}", amount::counted(u64::from(count), "pass")),
    }
}
