//! One plot over time as inline SVG: bands for the phases, the downtime, lines or stacked
//! areas, axes.

use api::{Phase, Report};
use maud::{Markup, html};

use super::scale::{Scale, positive, time_label};
use crate::{amount, phase_name};

/// The drawing's width, in units that the browser scales.
pub(super) const WIDTH: f64 = 992.0;
const HEIGHT: f64 = 216.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = WIDTH - 10.0;
const TOP: f64 = 22.0;
const BOTTOM: f64 = HEIGHT - 24.0;
/// The least width of the downtime, so that 2 ms in a minute are visible.
const BLACKOUT_WIDTH_MIN: f64 = 2.0;
/// The width of the downtime's label, which ends where the downtime ends.
const BLACKOUT_LABEL: f64 = 112.0;
/// The approximate width of a letter of a band's label.
const LETTER: f64 = 6.2;

/// One curve.
pub(super) struct Series {
    /// Its name, for the legend.
    pub(super) name: String,
    /// A CSS colour.
    pub(super) colour: String,
    /// Its values, one for each sample.
    pub(super) values: Vec<f64>,
}

/// How curves are drawn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// Each as a line, the first with a faint area below it.
    Lines,
    /// On top of each other.
    Stacked,
}

/// The unit of values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    /// Bytes.
    Bytes,
    /// Bytes per second.
    Rate,
    /// Percent.
    Percent,
}

impl Unit {
    /// What the script appends to a value.
    fn behind(self) -> &'static str {
        match self {
            Self::Bytes => "",
            Self::Rate => "/s",
            Self::Percent => "%",
        }
    }
}

/// One plot.
pub(super) struct Plot<'r> {
    /// Its heading.
    pub(super) title: &'static str,
    /// The meaning of its values, in a few words.
    pub(super) about: &'static str,
    /// The unit of its values.
    pub(super) unit: Unit,
    /// How its curves are drawn.
    pub(super) style: Style,
    /// Its curves.
    pub(super) series: Vec<Series>,
    /// When each value was measured.
    pub(super) at: &'r [f64],
    /// The migration, for its phases.
    pub(super) report: &'r Report,
}

/// The most entries that a legend lists one by one.
const LEGEND_MAX: usize = 12;

impl Plot<'_> {
    /// The plot as a `<figure>` with its legend.
    pub(super) fn figure(&self) -> Markup {
        let time = time_axis(self.report, self.at);
        let values = match self.unit {
            Unit::Percent => Scale::percent(),
            Unit::Bytes => Scale::bytes(self.most()),
            Unit::Rate => Scale::rates(self.values()),
        };
        let is_cut = self.unit != Unit::Percent && self.most() > values.max;
        html! {
            figure.card.plot data-unit=(self.unit.behind()) {
                figcaption {
                    h2 { (self.title) }
                    p {
                        (self.about)
                        @if is_cut { ". Short peaks are cut at the top; their height is below" }
                    }
                    (self.legend())
                }
                div.scroll {
                    svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label=(self.title) {
                        (bands(self.report, time))
                        (self.grid(time, values))
                        (self.curves(time, values))
                        line.zero x1=(LEFT) x2=(RIGHT) y1=(BOTTOM) y2=(BOTTOM) {}
                        (blackout(self.report, time))
                        line.cross x1="0" x2="0" y1=(TOP) y2=(BOTTOM) {}
                        text.when y=(BOTTOM + 16.0) {}
                    }
                }
            }
        }
    }

    fn values(&self) -> Vec<f64> {
        match self.style {
            Style::Lines => {
                self.series.iter().flat_map(|s| &s.values).copied().map(positive).collect()
            }
            Style::Stacked => self.sums().collect(),
        }
    }

    fn most(&self) -> f64 {
        self.values().into_iter().fold(0.0, f64::max)
    }

    fn sums(&self) -> impl Iterator<Item = f64> {
        (0..self.at.len()).map(|n| self.series.iter().map(|s| value(s, n)).sum())
    }

    fn shown(&self, value: f64) -> String {
        match self.unit {
            Unit::Bytes => amount::bytes(value),
            Unit::Rate => amount::rate(value),
            Unit::Percent => format!("{value:.0} %"),
        }
    }

    /// Names with their peaks, which the script replaces by the values at the pointer.
    fn legend(&self) -> Markup {
        if self.series.len() > LEGEND_MAX {
            return html! { p.legend { (self.series.len()) " curves" } };
        }
        let peak = |series: &Series| {
            self.shown(series.values.iter().copied().map(positive).fold(0.0, f64::max))
        };
        html! {
            ul.legend {
                @for series in &self.series {
                    @let peak = peak(series);
                    li {
                        i style={ "background:" (series.colour) } {}
                        (series.name) " " b data-rest=(peak) { (peak) }
                    }
                }
                li.mode { "peak" }
            }
        }
    }

    fn grid(&self, time: Scale, values: Scale) -> Markup {
        html! {
            g.grid {
                @for tick in values.ticks() {
                    @let y = y(values, tick);
                    line.tick x1=(LEFT) x2=(RIGHT) y1=(tenths(y)) y2=(tenths(y)) {}
                    text x=(tenths(LEFT - 8.0)) y=(tenths(y + 4.0)) text-anchor="end" {
                        @if tick == 0.0 { "0" } @else { (self.tick(tick)) }
                    }
                }
                @for tick in time.ticks() {
                    @let x = x(time, tick);
                    // A label at the edge would be cut off.
                    @let anchor = if x > RIGHT - 16.0 { "end" } else { "middle" };
                    text x=(tenths(x)) y=(tenths(BOTTOM + 16.0)) text-anchor=(anchor) {
                        (time_label(tick, time.step))
                    }
                }
            }
        }
    }

    /// The label of a tick, without trailing zeros: `150 MiB/s`.
    fn tick(&self, value: f64) -> String {
        let text = self.shown(value);
        let (number, unit) = text.split_once(' ').unwrap_or((&text, ""));
        let number = if number.contains('.') {
            number.trim_end_matches('0').trim_end_matches('.')
        } else {
            number
        };
        format!("{number} {unit}")
    }

    fn curves(&self, time: Scale, values: Scale) -> Markup {
        match self.style {
            Style::Lines => self.lines(time, values),
            Style::Stacked => self.layers(time, values),
        }
    }

    fn lines(&self, time: Scale, values: Scale) -> Markup {
        html! {
            @for (index, series) in self.series.iter().enumerate() {
                @let line = points(time, values, self.at, |n| value(series, n));
                @if index == 0 && !line.is_empty() {
                    @let area = closed(&line, self.at, time);
                    path.area style={ "fill:" (series.colour) } d=(area) {}
                }
                path.line style={ "stroke:" (series.colour) } d=(line) {}
            }
        }
    }

    fn layers(&self, time: Scale, values: Scale) -> Markup {
        let mut below = vec![0.0; self.at.len()];
        let mut layers = Vec::new();
        for series in &self.series {
            for (n, sum) in below.iter_mut().enumerate() {
                *sum += value(series, n);
            }
            layers.push((series, below.clone()));
        }
        html! {
            // The highest layer first, so that each covers the part below its own and its
            // edge stays visible.
            @for (series, sums) in layers.iter().rev() {
                @let edge = |n: usize| sums.get(n).copied().unwrap_or(0.0);
                @let line = points(time, values, self.at, edge);
                @if !line.is_empty() {
                    @let area = closed(&line, self.at, time);
                    path.layer style={ "fill:" (series.colour) } d=(area) {}
                }
            }
        }
    }
}

/// The axis that all plots of a report share.
pub(super) fn time_axis(report: &Report, at: &[f64]) -> Scale {
    let last = at.iter().copied().map(positive).fold(0.0, f64::max);
    Scale::time(positive(report.total_s).max(last))
}

/// The two ends of the time axis for the script, in units of the drawing.
pub(super) fn time_span() -> [f64; 2] {
    [LEFT, RIGHT]
}

/// `part` of `whole`, from 0 to 1.
#[allow(clippy::cast_precision_loss, reason = "a share of pixels")]
pub(super) fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { (part as f64 / whole as f64).clamp(0.0, 1.0) }
}

fn value(series: &Series, n: usize) -> f64 {
    positive(series.values.get(n).copied().unwrap_or(0.0))
}

fn x(time: Scale, at: f64) -> f64 {
    LEFT + time.place(at) * (RIGHT - LEFT)
}

fn y(values: Scale, value: f64) -> f64 {
    BOTTOM - values.place(value) * (BOTTOM - TOP)
}

/// A length, as precise as a drawing needs.
fn tenths(length: f64) -> String {
    format!("{length:.1}")
}

fn points(time: Scale, values: Scale, at: &[f64], value: impl Fn(usize) -> f64) -> String {
    let mut out = String::new();
    for (n, &at) in at.iter().enumerate() {
        let letter = if n == 0 { 'M' } else { 'L' };
        out.push_str(&format!("{letter}{:.1} {:.1}", x(time, at), y(values, value(n))));
    }
    out
}

/// The area between a line and 0.
fn closed(line: &str, at: &[f64], time: Scale) -> String {
    let (first, last) = (at.first().copied().unwrap_or(0.0), at.last().copied().unwrap_or(0.0));
    format!("{line}L{:.1} {BOTTOM}L{:.1} {BOTTOM}Z", x(time, last), x(time, first))
}

/// Phases behind the curves, every other one tinted, named where there is room.
fn bands(report: &Report, time: Scale) -> Markup {
    // The downtime's own label needs this space.
    let room = blackout_span(report, time).map_or(RIGHT, |(_, right)| right - BLACKOUT_LABEL);
    let ends = report.phases.iter().skip(1).map(|next| next.start_s).chain([time.max]);
    let bands = report.phases.iter().zip(ends).enumerate();
    // The downtime is marked separately.
    let before = bands.filter(|(_, (phase, _))| phase.phase < Phase::Stopped);
    html! {
        g.bands {
            @for (index, (phase, end)) in before {
                @let (from, to) = (x(time, phase.start_s), x(time, end));
                @if index % 2 == 0 {
                    @let width = (to - from).max(0.0);
                    rect x=(tenths(from)) y=(TOP) width=(tenths(width)) height=(tenths(BOTTOM - TOP)) {}
                }
                @let name = phase_name(phase.phase);
                @let end = from + label_width(name);
                @if end < to && end < room {
                    text x=(tenths(from + 1.0)) y=(TOP - 8.0) { (name) }
                }
            }
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "a dozen letters")]
fn label_width(label: &str) -> f64 {
    label.len() as f64 * LETTER
}

/// The downtime, drawn on top of everything.
fn blackout(report: &Report, time: Scale) -> Markup {
    let (Some((left, right)), Some(ms)) = (blackout_span(report, time), report.downtime_ms) else {
        return Markup::default();
    };
    let (width, height) = (tenths(right - left), tenths(BOTTOM - TOP));
    html! {
        g.blackout {
            rect x=(tenths(left)) y=(TOP) width=(width) height=(height) {}
            text x=(tenths(right)) y=(TOP - 8.0) text-anchor="end" {
                "downtime " (amount::milliseconds(ms))
            }
        }
    }
}

/// The two ends of the drawn downtime.
fn blackout_span(report: &Report, time: Scale) -> Option<(f64, f64)> {
    let stopped = report.phases.iter().find(|phase| phase.phase == Phase::Stopped)?.start_s;
    let left = x(time, stopped).min(RIGHT - BLACKOUT_WIDTH_MIN);
    let right = x(time, stopped + positive(report.downtime_ms?) / 1e3);
    Some((left, right.max(left + BLACKOUT_WIDTH_MIN)))
}
