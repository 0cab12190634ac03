//! A report as one HTML page.
//!
//! It contains its styles, plots and script, so that it can be mailed, archived and opened offline.

mod figures;
mod plot;
mod plots;
pub mod scale;
mod switchover;

use api::{Outcome, Report};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::details::facts;
use super::summary::{goal, settled};
use crate::{amount, date, full_stop, phase_name};

const STYLE: &str = include_str!("html/style.css");
const SCRIPT: &str = include_str!("html/script.js");

/// Lets the page load nothing, whatever the name of a VM contains.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";

/// The whole page.
#[must_use]
pub fn page(report: &Report) -> String {
    let title = format!("{}: {} to {}", report.vm, report.from, report.to);
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " · Droveway" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                main {
                    (header(report))
                    (figures::tiles(report))
                    (switchover::section(report))
                    (plots::sections(report))
                    div.pair { (phases(report)) (lanes(report)) }
                    (details(report))
                    footer {
                        "Droveway " (env!("CARGO_PKG_VERSION")) " · “delivered” is guest memory, \
                         “on the wire” are lane bytes with their headers"
                    }
                }
                script { (PreEscaped(SCRIPT)) }
            }
        }
    };
    page.into_string() + "\n"
}

fn header(report: &Report) -> Markup {
    let (class, badge, headline) = match &report.outcome {
        Outcome::Done => ("good", "Moved", format!("{} moved to {}", report.vm, report.to)),
        Outcome::Failed(_) if report.in_doubt => {
            ("bad", "In doubt", format!("{} is in doubt", report.vm))
        }
        Outcome::Failed(_) => {
            ("bad", "Not moved", format!("{} was not moved to {}", report.vm, report.to))
        }
        Outcome::Cancelled => {
            ("calm", "Cancelled", format!("{} stayed at {}", report.vm, report.from))
        }
    };
    let lede = match &report.outcome {
        Outcome::Failed(reason) => full_stop(reason),
        Outcome::Cancelled => {
            format!(
                "The move to {} was cancelled after {}.",
                report.to,
                amount::seconds(report.total_s)
            )
        }
        Outcome::Done => settled(report).unwrap_or_else(|| match report.downtime_ms {
            Some(ms) => format!(
                "From {} to {} in {}. Downtime was {} (goal {}).",
                report.from,
                report.to,
                amount::seconds(report.total_s),
                amount::milliseconds(ms),
                goal(report)
            ),
            None => format!(
                "From {} to {} in {}, paused as its owner left it.",
                report.from,
                report.to,
                amount::seconds(report.total_s)
            ),
        }),
    };
    html! {
        header {
            p.kicker {
                span.badge.(class) { (badge) }
                span { "Migration " (report.id) }
                span { (date::utc_to_the_minute(report.started_unix_s)) }
            }
            h1 { (headline) }
            p.lede { (lede) }
            @if !report.notes.is_empty() {
                ul.notes {
                    @for note in &report.notes { li { (full_stop(note)) } }
                }
            }
        }
    }
}

fn phases(report: &Report) -> Markup {
    if report.phases.is_empty() {
        return Markup::default();
    }
    let ends = report.phases.iter().skip(1).map(|next| next.start_s).chain([report.total_s]);
    html! {
        section.card {
            h2 { "Phases" }
            table {
                thead { tr { th { "Phase" } th.n { "Began" } th.n { "Lasted" } } }
                tbody {
                    @for (phase, end) in report.phases.iter().zip(ends) {
                        tr {
                            td { (phase_name(phase.phase)) }
                            td.n { (amount::seconds(phase.start_s)) }
                            td.n {
                                @if phase.phase == api::Phase::Running { "—" }
                                @else { (amount::seconds(end - phase.start_s)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn lanes(report: &Report) -> Markup {
    if report.lanes.is_empty() {
        return Markup::default();
    }
    let most = report.lanes.iter().map(|lane| lane.wire_bytes).max().unwrap_or(0).max(1);
    html! {
        section.card {
            h2 { "Lanes" }
            table {
                thead {
                    tr {
                        th { "Lane" } th.n { "Sent" } th {} th.n { "Batches" } th.n { "Died" }
                    }
                }
                tbody {
                    @for (index, lane) in report.lanes.iter().enumerate() {
                        @let colour = plots::lane_colour(index, report.lanes.len());
                        @let percent = plot::ratio(lane.wire_bytes, most) * 100.0;
                        tr {
                            td { i.key style={ "background:" (colour) } {} (lane.name) }
                            td.n { (amount::size(lane.wire_bytes)) }
                            td.share { i style=(format!("width:{percent:.1}%")) {} }
                            td.n { (lane.batches) }
                            td.n { @if lane.deaths == 0 { "—" } @else { (lane.deaths) } }
                        }
                    }
                }
            }
        }
    }
}

fn details(report: &Report) -> Markup {
    html! {
        section.card {
            h2 { "Details" }
            dl {
                @for [name, value] in facts(report) {
                    div { dt { (name) } dd { (value) } }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::example::example;
    use super::*;

    #[test]
    fn names_and_notes_cannot_bring_markup() {
        let evil = "</script><img src=x onerror=alert(1)>\"'&";
        let mut report = example();
        report.vm = evil.to_owned();
        report.from = evil.to_owned();
        report.to = evil.to_owned();
        report.id = evil.to_owned();
        report.tap = evil.to_owned();
        report.notes = vec![evil.to_owned()];
        report.lanes[0].name = evil.to_owned();
        report.qemu = [evil.to_owned(), evil.to_owned()];
        for outcome in [Outcome::Done, Outcome::Cancelled, Outcome::Failed(evil.to_owned())] {
            report.outcome = outcome;
            let page = page(&report);
            assert!(!page.contains("<img"), "markup got through");
            assert_eq!(page.matches("</script>").count(), page.matches("<script").count());
        }
    }

    #[test]
    fn a_vm_in_doubt_is_not_said_to_have_stayed() {
        let outcome = Outcome::Failed("why".to_owned());
        let page = page(&Report { outcome, in_doubt: true, ..example() });
        assert!(page.contains("web1 is in doubt") && !page.contains("was not moved"), "{page}");
    }

    #[test]
    fn a_vm_whose_move_was_settled_later_is_not_said_to_be_paused() {
        let settled_unix_s = Some(1_709_210_096);
        let page = page(&Report { downtime_ms: None, settled_unix_s, ..example() });
        let expected = "web1 is on host-b. That was settled at 2024-02-29 12:34:56 UTC, after";
        assert!(page.contains(expected) && !page.contains("paused"), "{page}");
    }

    #[test]
    fn nothing_is_loaded_from_anywhere() {
        let page = page(&example());
        for outside in ["http://", "https://", "src=", "@import", "url(", "<link"] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn odd_reports_still_make_a_page() {
        let mut bare = example();
        bare.samples.clear();
        bare.phases.clear();
        bare.lanes.clear();
        bare.total_s = 0.0;
        bare.ram_bytes = 0;
        bare.wire_bytes = 0;
        bare.downtime_ms = None;
        let mut odd = example();
        odd.total_s = f64::NAN;
        odd.downtime_ms = Some(f64::INFINITY);
        for sample in &mut odd.samples {
            sample.delivered_bytes_per_s = f64::NAN;
            sample.lanes_bytes_per_s.clear();
        }
        for report in [bare, odd] {
            let page = page(&report);
            assert!(page.ends_with("</html>\n"));
            assert!(!page.contains("NaN") && !page.contains("inf"), "a number is no number");
        }
    }

    /// Zero pages arrive at a rate far above any network's, which would flatten all else.
    #[test]
    fn a_moments_peak_does_not_flatten_the_rest() {
        let cut = "Short peaks are cut at the top";
        let mut report = example();
        assert_eq!(page(&report).matches(cut).count(), 0);
        let usual = report.samples.iter().map(|s| s.delivered_bytes_per_s).fold(0.0, f64::max);
        report.samples[1].delivered_bytes_per_s = usual * 50.0;
        assert_eq!(page(&report).matches(cut).count(), 1);
    }
}
