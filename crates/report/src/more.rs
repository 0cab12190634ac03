//! The summary's line with the command that shows the whole report.

const HEAD: &str = "More: ";

pub(super) fn line(id: &str) -> String {
    format!("\n{HEAD}droveway report {id}")
}

/// The summary without that line, for use in the report itself.
pub(super) fn without(summary: &str) -> String {
    let lines: Vec<&str> = summary.lines().filter(|line| !line.starts_with(HEAD)).collect();
    lines.join("\n")
}
