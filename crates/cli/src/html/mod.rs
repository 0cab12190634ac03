//! A report as one HTML page: styles, plots and the few lines of script are all
//! in it, so that it can be mailed, archived and opened offline.

mod figures;
mod plot;
mod plots;
mod scale;
mod switchover;
mod text;

use api::{Outcome, Report};

use crate::amount;
use crate::line::phase_name;
use crate::summary;
use text::escape;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");

/// The whole page.
pub(crate) fn page(report: &Report) -> String {
    let title = format!("{}: {} to {}", report.vm, report.from, report.to);
    let mut out = String::with_capacity(64 << 10);
    out.push_str("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    // The page loads nothing, whatever a VM is called.
    out.push_str(
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
         style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n",
    );
    out.push_str(&format!("<title>{} · Droveway</title>\n", escape(&title)));
    out.push_str(&format!("<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"));
    out.push_str(&header(report));
    out.push_str(&figures::tiles(report));
    out.push_str(&switchover::section(report));
    out.push_str(&plots::sections(report));
    out.push_str("<div class=\"pair\">\n");
    out.push_str(&phases(report));
    out.push_str(&lanes(report));
    out.push_str("</div>\n");
    out.push_str(&details(report));
    out.push_str(&format!(
        "<footer>Droveway {} · {} is guest memory, {} are lane bytes with their headers</footer>\n",
        env!("CARGO_PKG_VERSION"),
        "“delivered”",
        "“on the wire”"
    ));
    out.push_str(&format!("</main>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n"));
    out
}

fn header(report: &Report) -> String {
    let (class, badge, headline) = match &report.outcome {
        Outcome::Done => ("good", "Moved", format!("{} moved to {}", report.vm, report.to)),
        Outcome::Failed(_) => {
            ("bad", "Not moved", format!("{} was not moved to {}", report.vm, report.to))
        }
        Outcome::Cancelled => {
            ("calm", "Cancelled", format!("{} stayed at {}", report.vm, report.from))
        }
    };
    let lede = match &report.outcome {
        Outcome::Failed(reason) => summary::full_stop(reason),
        Outcome::Cancelled => {
            format!(
                "The move to {} was cancelled after {}.",
                report.to,
                amount::seconds(report.total_s)
            )
        }
        Outcome::Done => match report.downtime_ms {
            Some(ms) => format!(
                "From {} to {} in {}. Downtime was {} (goal {}).",
                report.from,
                report.to,
                amount::seconds(report.total_s),
                amount::milliseconds(ms),
                summary::goal(report)
            ),
            None => format!(
                "From {} to {} in {}, paused as its owner left it.",
                report.from,
                report.to,
                amount::seconds(report.total_s)
            ),
        },
    };
    let mut out = format!(
        "<header>\n<p class=\"kicker\"><span class=\"badge {class}\">{badge}</span>\
         <span>Migration {}</span><span>{}</span></p>\n<h1>{}</h1>\n<p class=\"lede\">{}</p>\n",
        escape(&report.id),
        text::utc(report.started_unix_s),
        escape(&headline),
        escape(&lede)
    );
    if !report.notes.is_empty() {
        out.push_str("<ul class=\"notes\">\n");
        for note in &report.notes {
            out.push_str(&format!("<li>{}</li>\n", escape(&summary::full_stop(note))));
        }
        out.push_str("</ul>\n");
    }
    out.push_str("</header>\n");
    out
}

fn phases(report: &Report) -> String {
    if report.phases.is_empty() {
        return String::new();
    }
    let mut out = String::from(
        "<section class=\"card\"><h2>Phases</h2><table><thead><tr><th>Phase</th>\
         <th class=\"n\">Began</th><th class=\"n\">Lasted</th></tr></thead><tbody>\n",
    );
    let ends = report.phases.iter().skip(1).map(|next| next.start_s).chain([report.total_s]);
    for (phase, end) in report.phases.iter().zip(ends) {
        out.push_str(&format!(
            "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>\n",
            phase_name(phase.phase),
            amount::seconds(phase.start_s),
            if phase.phase == api::Phase::Running {
                "—".to_owned()
            } else {
                amount::seconds(end - phase.start_s)
            }
        ));
    }
    out.push_str("</tbody></table></section>\n");
    out
}

fn lanes(report: &Report) -> String {
    if report.lanes.is_empty() {
        return String::new();
    }
    let most = report.lanes.iter().map(|lane| lane.wire_bytes).max().unwrap_or(0).max(1);
    let mut out = String::from(
        "<section class=\"card\"><h2>Lanes</h2><table><thead><tr><th>Lane</th>\
         <th class=\"n\">Sent</th><th></th><th class=\"n\">Batches</th><th class=\"n\">Died</th>\
         </tr></thead><tbody>\n",
    );
    for (index, lane) in report.lanes.iter().enumerate() {
        out.push_str(&format!(
            "<tr><td><i class=\"key\" style=\"background:{}\"></i>{}</td><td class=\"n\">{}</td>\
             <td class=\"share\"><i style=\"width:{:.1}%\"></i></td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td></tr>\n",
            plots::lane_colour(index, report.lanes.len()),
            escape(&lane.name),
            amount::size(lane.wire_bytes),
            plot::ratio(lane.wire_bytes, most) * 100.0,
            lane.batches,
            if lane.deaths == 0 { "—".to_owned() } else { lane.deaths.to_string() }
        ));
    }
    out.push_str("</tbody></table></section>\n");
    out
}

fn details(report: &Report) -> String {
    let mut out = String::from("<section class=\"card\"><h2>Details</h2><dl>\n");
    for [name, value] in summary::facts(report) {
        out.push_str(&format!(
            "<div><dt>{}</dt><dd>{}</dd></div>\n",
            escape(&name),
            escape(&value)
        ));
    }
    out.push_str("</dl></section>\n");
    out
}

/// A migration as it might have been, for tests.
#[cfg(test)]
pub(crate) fn example() -> Report {
    let json = include_str!("example.json");
    serde_json::from_str(json).expect("the example is a report")
}

#[cfg(test)]
mod tests {
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
}
