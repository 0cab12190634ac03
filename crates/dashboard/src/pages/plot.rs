//! A migration's rates so far as inline SVG.

use client::cluster::{Point, Running};
use maud::{Markup, html};
use report::amount;
use report::html::scale::{Scale, time_label};

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 150.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = WIDTH - 8.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = HEIGHT - 22.0;

type Curve = (&'static str, &'static str, fn(&Point) -> Option<f64>);

const CURVES: [Curve; 3] = [
    ("delivered", "delivered", |point| Some(point.delivered)),
    ("on the wire", "wire", |point| Some(point.wire)),
    ("dirtied", "dirty", |point| point.dirty),
];

/// A figure with a legend that has the latest values.
pub(super) fn rates(one: &Running<'_>) -> Markup {
    let Some(last) = one.points.last() else { return Markup::default() };
    html! {
        figure.rates {
            figcaption {
                ul.legend {
                    @for (name, class, value) in CURVES {
                        @let rate = value(last).map_or_else(|| "—".to_owned(), amount::rate);
                        li { span.key.(class) {} (name) " " b { (rate) } }
                    }
                }
            }
            @if one.points.len() > 1 { (drawing(one.points)) }
        }
    }
}

fn drawing(points: &[Point]) -> Markup {
    let time = Scale::time(points[points.len() - 1].at_s);
    let values = axis(points);
    let x = |at_s: f64| LEFT + time.place(at_s) * (RIGHT - LEFT);
    let y = |value: f64| BOTTOM - values.place(value) * (BOTTOM - TOP);
    let line = |value: fn(&Point) -> Option<f64>| {
        let pairs = points
            .iter()
            .filter_map(|one| Some(format!("{:.1},{:.1}", x(one.at_s), y(value(one)?))));
        pairs.collect::<Vec<_>>().join(" ")
    };
    html! {
        svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label="Rates over time" {
            @for tick in values.ticks() {
                @let at = format!("{:.1}", y(tick));
                line.tick x1=(LEFT) x2=(RIGHT) y1=(at) y2=(at) {}
                text x=(LEFT - 8.0) y=(format!("{:.1}", y(tick) + 4.0)) text-anchor="end" {
                    @if tick == 0.0 { "0" } @else { (amount::rate(tick)) }
                }
            }
            // A label at the edge would be cut off.
            @for tick in time.ticks().skip(1).filter(|tick| time.place(*tick) < 0.97) {
                text x=(format!("{:.1}", x(tick))) y=(HEIGHT - 6.0) text-anchor="middle" {
                    (time_label(tick, time.step))
                }
            }
            @for (_, class, value) in CURVES {
                polyline.curve.(class) points=(line(value)) {}
            }
        }
    }
}

fn axis(points: &[Point]) -> Scale {
    Scale::rates(points.iter().flat_map(|one| CURVES.map(|(_, _, value)| value(one))).flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moments_peak_does_not_flatten_the_rest() {
        let point = |at_s, delivered| Point { at_s, wire: 10.0, delivered, dirty: None };
        let mut points: Vec<Point> = (0..20).map(|n| point(f64::from(n), 12.0)).collect();
        assert!((axis(&points).max - 15.0).abs() < 1e-9);
        points[3].delivered = 1e9;
        assert!((axis(&points).max - 20.0).abs() < 1e-9);
        points[3].delivered = f64::NAN;
        assert!(!drawing(&points).into_string().contains("NaN"));
    }
}
