//! The line of a summary that names the command which shows all of a report.

const HEAD: &str = "More: ";

pub(super) fn line(id: &str) -> String {
    format!("\n{HEAD}droveway report {id}")
}

/// A summary in the report itself: no line leads back to it.
pub(super) fn without(summary: &str) -> String {
    let lines: Vec<&str> = summary.lines().filter(|line| !line.starts_with(HEAD)).collect();
    lines.join("\n")
}
