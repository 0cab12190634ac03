//! The rates of one migration so far.

use client::cluster::{Point, Running};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, GraphType, Widget};
use report::amount;

type Curve = (&'static str, Color, fn(&Point) -> Option<f64>);

const CURVES: [Curve; 2] = [
    ("on the wire", Color::Green, |point| Some(point.wire)),
    ("dirtied", Color::Yellow, |point| point.dirty),
];

/// The latest values, each in its curve's colour.
fn title(one: &Running<'_>) -> Line<'static> {
    let mut spans = vec![Span::styled(format!(" {} ", one.progress.vm), Modifier::BOLD)];
    for (name, colour, value) in CURVES {
        let rate = one.points.last().and_then(value);
        let rate = rate.map_or_else(|| "—".to_owned(), amount::rate);
        spans.push(Span::styled(format!("━ {name} {rate} "), colour));
    }
    Line::from(spans)
}

pub(super) fn draw(one: &Running<'_>, area: Rect, buffer: &mut Buffer) {
    let points = |value: fn(&Point) -> Option<f64>| -> Vec<(f64, f64)> {
        one.points.iter().filter_map(|point| Some((point.at_s, value(point)?))).collect()
    };
    let curves = CURVES.map(|(name, colour, value)| (name, colour, points(value)));
    let most = curves.iter().flat_map(|(_, _, points)| points).map(|(_, rate)| *rate);
    let most = most.fold(1.0, f64::max);
    let ends = one.points.first().zip(one.points.last());
    let (begin, end) = ends.map_or((0.0, 1.0), |(first, last)| (first.at_s, last.at_s));
    let sets = curves.iter().map(|(_, colour, points)| {
        Dataset::default()
            .marker(Marker::Braille)
            .graph_type(GraphType::Line)
            .style(Style::new().fg(*colour))
            .data(points)
    });
    let x = Axis::default()
        .bounds([begin, end])
        .labels([begin, end].map(|time| Line::from(amount::seconds(time))));
    let y = Axis::default()
        .bounds([0.0, most])
        .labels([0.0, most / 2.0, most].map(|rate| Line::from(amount::rate(rate))));
    Chart::new(sets.collect())
        .block(Block::bordered().title(title(one)))
        .legend_position(None)
        .x_axis(x)
        .y_axis(y)
        .render(area, buffer);
}
