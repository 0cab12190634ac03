//! The plots of a report, and the values that the script shows at the pointer.

use api::Report;
use maud::{Markup, PreEscaped, html};

use super::plot::{Plot, Series, Style, Unit, time_axis, time_span};
use super::scale::positive;

/// All plots, or the reason why there are none.
pub(super) fn sections(report: &Report) -> Markup {
    if report.samples.len() < 2 {
        return html! {
            section.card { p.quiet { "It ended before there was anything to plot." } }
        };
    }
    let at: Vec<f64> = report.samples.iter().map(|sample| positive(sample.at_s)).collect();
    let mut plots = vec![
        wire(report, &at),
        delivered(report, &at),
        share(report, &at),
        left(report, &at),
        lanes(report, &at),
    ];
    plots.retain(|plot| !plot.series.is_empty());
    html! {
        @for plot in &plots { (plot.figure()) }
        script #numbers type="application/json" { (numbers(report, &at, &plots)) }
    }
}

fn rate(report: &Report, name: &str, colour: &str, value: fn(&api::Sample) -> f64) -> Series {
    Series {
        name: name.to_owned(),
        colour: format!("var(--{colour})"),
        values: report.samples.iter().map(value).collect(),
    }
}

/// The rates that cost bytes on the wire.
fn wire<'r>(report: &'r Report, at: &'r [f64]) -> Plot<'r> {
    Plot {
        title: "On the wire",
        about: "What was sent, and what the guest dirtied meanwhile, which is counted only after \
                the first pass",
        unit: Unit::Rate,
        style: Style::Lines,
        series: vec![
            rate(report, "sent", "green", |s| s.wire_bytes_per_s),
            rate(report, "dirtied", "orange", |s| s.dirty_bytes_per_s),
        ],
        at,
        report,
    }
}

/// The delivered rate, in its own plot: zero pages, which cost nothing on the wire, are
/// delivered a hundred times as fast as a network carries.
fn delivered<'r>(report: &'r Report, at: &'r [f64]) -> Plot<'r> {
    Plot {
        title: "Delivered",
        about: "Guest memory that reached the destination, also what need not be sent: pages of \
                zeros, and content that it had",
        unit: Unit::Rate,
        style: Style::Lines,
        series: vec![rate(report, "delivered", "blue", |s| s.delivered_bytes_per_s)],
        at,
        report,
    }
}

/// The share of CPU time of a throttled VM.
fn share<'r>(report: &'r Report, at: &'r [f64]) -> Plot<'r> {
    let series = report.slowed.iter().map(|_| Series {
        name: "share".to_owned(),
        colour: "var(--orange)".to_owned(),
        values: report.samples.iter().map(|sample| sample.share * 100.0).collect(),
    });
    Plot {
        title: "CPU time that the VM kept",
        about: "Its share of what it used before it was throttled",
        unit: Unit::Percent,
        style: Style::Lines,
        series: series.collect(),
        at,
        report,
    }
}

#[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
fn left<'r>(report: &'r Report, at: &'r [f64]) -> Plot<'r> {
    let series = |name: &str, colour: &str, value: fn(&api::Sample) -> u64| Series {
        name: name.to_owned(),
        colour: format!("var(--{colour})"),
        values: report.samples.iter().map(|sample| value(sample) as f64).collect(),
    };
    Plot {
        title: "Left to move",
        about: "Guest memory that the destination does not have yet, and the part of it in the \
                source's buffers",
        unit: Unit::Bytes,
        style: Style::Lines,
        series: vec![
            series("left", "violet", |s| s.left_bytes),
            series("in buffers", "grey", |s| s.pool_bytes),
        ],
        at,
        report,
    }
}

fn lanes<'r>(report: &'r Report, at: &'r [f64]) -> Plot<'r> {
    let count = report.samples.iter().map(|s| s.lanes_bytes_per_s.len()).max().unwrap_or(0);
    let series = (0..count).map(|lane| Series {
        name: format!("lane {}", lane + 1),
        colour: lane_colour(lane, count),
        values: report
            .samples
            .iter()
            .map(|sample| sample.lanes_bytes_per_s.get(lane).copied().unwrap_or(0.0))
            .collect(),
    });
    Plot {
        title: "Lanes",
        about: "Each connection’s share of the wire",
        unit: Unit::Rate,
        style: Style::Stacked,
        series: series.collect(),
        at,
        report,
    }
}

/// A lane's colour: a mix of two hues, so that neighbours differ and the order is visible.
pub(super) fn lane_colour(lane: usize, count: usize) -> String {
    #[allow(clippy::cast_precision_loss, reason = "64 lanes at most")]
    let share = if count < 2 { 0.0 } else { lane as f64 / (count - 1) as f64 * 100.0 };
    format!("color-mix(in oklab, var(--lane-last) {share:.0}%, var(--lane-first))")
}

/// The values as JSON; it has only numbers, so nothing in it can end the script element.
fn numbers(report: &Report, at: &[f64], plots: &[Plot<'_>]) -> PreEscaped<String> {
    let values: Vec<Vec<Vec<f64>>> = plots
        .iter()
        .map(|plot| {
            let clean = |values: &Vec<f64>| values.iter().map(|v| positive(*v).round()).collect();
            plot.series.iter().map(|series| clean(&series.values)).collect()
        })
        .collect();
    let json = serde_json::json!({
        "at": at,
        "end": time_axis(report, at).max,
        "span": time_span(),
        "width": super::plot::WIDTH,
        "values": values,
    });
    PreEscaped(json.to_string())
}
