//! One plot over time as inline SVG: bands for the phases, the blackout, lines
//! or stacked areas, axes.

use api::{Phase, Report};

use super::scale::{Scale, positive, time_label};
use super::text::escape;
use crate::amount;
use crate::line::phase_name;

/// Units of the drawing; a screen scales them.
pub(super) const WIDTH: f64 = 992.0;
const HEIGHT: f64 = 216.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = WIDTH - 10.0;
const TOP: f64 = 22.0;
const BOTTOM: f64 = HEIGHT - 24.0;
/// A blackout of 2 ms in a minute must still be seen.
const BLACKOUT_WIDTH_MIN: f64 = 2.0;
/// Of the blackout's label, which ends where the blackout ends.
const BLACKOUT_LABEL: f64 = 112.0;
/// A letter of a band's label is about this wide.
const LETTER: f64 = 6.2;

/// One curve.
pub(super) struct Series {
    /// For the legend.
    pub(super) name: String,
    /// A CSS colour.
    pub(super) colour: String,
    /// One for each sample.
    pub(super) values: Vec<f64>,
}

/// How curves are drawn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// Each a line, the first with a faint area below it.
    Lines,
    /// On top of each other.
    Stacked,
}

/// What values are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    /// Bytes.
    Bytes,
    /// Bytes per second.
    Rate,
    /// Of 100.
    Percent,
}

impl Unit {
    /// What the script puts behind a value.
    fn behind(self) -> &'static str {
        match self {
            Self::Bytes => "",
            Self::Rate => "/s",
            Self::Percent => "%",
        }
    }
}

/// All that a plot needs.
pub(super) struct Plot<'r> {
    /// Its heading.
    pub(super) title: &'static str,
    /// What its values mean, in a few words.
    pub(super) about: &'static str,
    /// What values are.
    pub(super) unit: Unit,
    /// How.
    pub(super) style: Style,
    /// What.
    pub(super) series: Vec<Series>,
    /// When each value was measured.
    pub(super) at: &'r [f64],
    /// The migration, for its phases.
    pub(super) report: &'r Report,
}

/// The most entries that a legend lists one by one.
const LEGEND_MAX: usize = 12;

impl Plot<'_> {
    /// A `<figure>` with its legend.
    pub(super) fn figure(&self) -> String {
        let time = time_axis(self.report, self.at);
        let values = match self.unit {
            Unit::Percent => Scale::percent(),
            Unit::Bytes | Unit::Rate => Scale::bytes(self.most()),
        };
        let mut out = format!(
            "<figure class=\"card plot\" data-unit=\"{}\">\n<figcaption><h2>{}</h2><p>{}</p>\n{}\
             </figcaption>\n<div class=\"scroll\"><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
             aria-label=\"{}\">\n",
            self.unit.behind(),
            self.title,
            self.about,
            self.legend(),
            self.title
        );
        out.push_str(&bands(self.report, time));
        out.push_str(&self.grid(time, values));
        out.push_str(&self.curves(time, values));
        out.push_str(&format!(
            "<line class=\"zero\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{BOTTOM}\" y2=\"{BOTTOM}\"/>\n"
        ));
        out.push_str(&blackout(self.report, time));
        out.push_str(&format!(
            "<line class=\"cross\" x1=\"0\" x2=\"0\" y1=\"{TOP}\" y2=\"{BOTTOM}\"/>\n\
             <text class=\"when\" y=\"{}\"></text>\n",
            BOTTOM + 16.0
        ));
        out.push_str("</svg></div>\n</figure>\n");
        out
    }

    fn most(&self) -> f64 {
        match self.style {
            Style::Lines => self
                .series
                .iter()
                .flat_map(|s| &s.values)
                .copied()
                .map(positive)
                .fold(0.0, f64::max),
            Style::Stacked => self.sums().fold(0.0, f64::max),
        }
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

    /// Names with their peaks; the script puts the values at the pointer there.
    fn legend(&self) -> String {
        if self.series.len() > LEGEND_MAX {
            return format!("<p class=\"legend\">{} curves</p>\n", self.series.len());
        }
        let mut out = String::from("<ul class=\"legend\">");
        for series in &self.series {
            let peak = self.shown(series.values.iter().copied().map(positive).fold(0.0, f64::max));
            out.push_str(&format!(
                "<li><i style=\"background:{}\"></i>{} <b data-rest=\"{peak}\">{peak}</b></li>",
                series.colour,
                escape(&series.name),
            ));
        }
        out.push_str("<li class=\"mode\">peak</li></ul>\n");
        out
    }

    fn grid(&self, time: Scale, values: Scale) -> String {
        let mut out = String::from("<g class=\"grid\">\n");
        for tick in values.ticks() {
            let y = y(values, tick);
            out.push_str(&format!(
                "<line class=\"tick\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
                LEFT - 8.0,
                y + 4.0,
                if tick == 0.0 { "0".to_owned() } else { self.tick(tick) }
            ));
        }
        for tick in time.ticks() {
            let x = x(time, tick);
            // A label at the very edge would be cut.
            let anchor = if x > RIGHT - 16.0 { "end" } else { "middle" };
            out.push_str(&format!(
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>\n",
                BOTTOM + 16.0,
                time_label(tick, time.step)
            ));
        }
        out.push_str("</g>\n");
        out
    }

    /// A tick is round: `150 MiB/s`, not `1.50`.
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

    fn curves(&self, time: Scale, values: Scale) -> String {
        let mut out = String::new();
        match self.style {
            Style::Lines => {
                for (index, series) in self.series.iter().enumerate() {
                    let line = points(time, values, self.at, |n| value(series, n));
                    if index == 0 && !line.is_empty() {
                        out.push_str(&format!(
                            "<path class=\"area\" style=\"fill:{}\" d=\"{}\"/>\n",
                            series.colour,
                            closed(&line, self.at, time)
                        ));
                    }
                    out.push_str(&format!(
                        "<path class=\"line\" style=\"stroke:{}\" d=\"{line}\"/>\n",
                        series.colour
                    ));
                }
            }
            Style::Stacked => {
                let mut below = vec![0.0; self.at.len()];
                let mut layers = Vec::new();
                for series in &self.series {
                    for (n, sum) in below.iter_mut().enumerate() {
                        *sum += value(series, n);
                    }
                    layers.push((series, below.clone()));
                }
                // The highest first, so that each covers the part that is not
                // its own and the edge of its own layer stays on top.
                for (series, sums) in layers.iter().rev() {
                    let line =
                        points(time, values, self.at, |n| sums.get(n).copied().unwrap_or(0.0));
                    if !line.is_empty() {
                        out.push_str(&format!(
                            "<path class=\"layer\" style=\"fill:{}\" d=\"{}\"/>\n",
                            series.colour,
                            closed(&line, self.at, time)
                        ));
                    }
                }
            }
        }
        out
    }
}

/// The axis that all plots of a report share.
pub(super) fn time_axis(report: &Report, at: &[f64]) -> Scale {
    let last = at.iter().copied().map(positive).fold(0.0, f64::max);
    Scale::time(positive(report.total_s).max(last))
}

/// Where the script finds the axis, in units of the drawing.
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

fn points(time: Scale, values: Scale, at: &[f64], value: impl Fn(usize) -> f64) -> String {
    let mut out = String::new();
    for (n, &at) in at.iter().enumerate() {
        let letter = if n == 0 { 'M' } else { 'L' };
        out.push_str(&format!("{letter}{:.1} {:.1}", x(time, at), y(values, value(n))));
    }
    out
}

/// A line's area down to 0.
fn closed(line: &str, at: &[f64], time: Scale) -> String {
    let (first, last) = (at.first().copied().unwrap_or(0.0), at.last().copied().unwrap_or(0.0));
    format!("{line}L{:.1} {BOTTOM}L{:.1} {BOTTOM}Z", x(time, last), x(time, first))
}

/// Phases behind the curves, every other one tinted, named where there is room.
fn bands(report: &Report, time: Scale) -> String {
    let mut out = String::from("<g class=\"bands\">\n");
    // The blackout's own label needs its place.
    let room = blackout_span(report, time).map_or(RIGHT, |(_, right)| right - BLACKOUT_LABEL);
    let ends = report.phases.iter().skip(1).map(|next| next.start_s).chain([time.max]);
    for (index, (phase, end)) in report.phases.iter().zip(ends).enumerate() {
        // The blackout is marked by itself.
        if phase.phase >= Phase::Stopped {
            continue;
        }
        let (from, to) = (x(time, phase.start_s), x(time, end));
        let width = (to - from).max(0.0);
        if index % 2 == 0 {
            out.push_str(&format!(
                "<rect x=\"{from:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{:.1}\"/>\n",
                BOTTOM - TOP
            ));
        }
        let name = phase_name(phase.phase);
        #[allow(clippy::cast_precision_loss, reason = "a dozen letters")]
        let end = from + name.len() as f64 * LETTER;
        if end < to && end < room {
            out.push_str(&format!(
                "<text x=\"{:.1}\" y=\"{}\">{name}</text>\n",
                from + 1.0,
                TOP - 8.0
            ));
        }
    }
    out.push_str("</g>\n");
    out
}

/// The time without the VM, on top of everything.
fn blackout(report: &Report, time: Scale) -> String {
    let (Some((left, right)), Some(ms)) = (blackout_span(report, time), report.downtime_ms) else {
        return String::new();
    };
    format!(
        "<g class=\"blackout\"><rect x=\"{left:.1}\" y=\"{TOP}\" width=\"{:.1}\" \
         height=\"{:.1}\"/><text x=\"{right:.1}\" y=\"{}\" text-anchor=\"end\">downtime \
         {}</text></g>\n",
        right - left,
        BOTTOM - TOP,
        TOP - 8.0,
        amount::milliseconds(ms)
    )
}

/// Where the blackout is drawn.
fn blackout_span(report: &Report, time: Scale) -> Option<(f64, f64)> {
    let stopped = report.phases.iter().find(|phase| phase.phase == Phase::Stopped)?.start_s;
    let left = x(time, stopped).min(RIGHT - BLACKOUT_WIDTH_MIN);
    let right = x(time, stopped + positive(report.downtime_ms?) / 1e3);
    Some((left, right.max(left + BLACKOUT_WIDTH_MIN)))
}
