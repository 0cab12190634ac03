//! `doctor`: check this host, or whether its VMs can move to another host.

use std::ffi::OsString;
use std::io::{IsTerminal, stdout};
use std::process::ExitCode;

use api::{Examination, Finding, Severity};
use clap::Args as ClapArgs;
use client::{Client, Problem, segment};
use ratatui::crossterm::terminal;

use crate::output::{print_json, print_line, print_raw};

/// The width of the columns before a finding's text.
const INDENT: usize = 27;
/// The width of a line, broken between words; less on a narrow terminal.
const WIDTH: usize = 100;
/// On a narrower terminal, lines are as long as if it had this width.
const WIDTH_MIN: usize = 60;

#[derive(Debug, ClapArgs)]
pub(crate) struct DoctorArgs {
    /// The other host
    host: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the findings, and fails if there is an error among them.
pub(crate) async fn run(client: &Client, args: &DoctorArgs) -> Result<ExitCode, Problem> {
    let path = match &args.host {
        Some(host) => format!("/v1/doctor/{}", segment(host)),
        None => "/v1/doctor".to_owned(),
    };
    let examined: Examination = client.get(&path).await?;
    if args.json {
        print_json(&examined)?;
    } else {
        // The texts in it are plain.
        print_raw(format_args!("{}", table(&examined, Look::of_output())))?;
        if args.host.is_some() {
            print_line(format_args!("{UNSEEN}"))?;
        }
    }
    Ok(if examined.has_errors() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The last line about a pair of hosts: a VM that can go there by what was found may be refused.
const UNSEEN: &str = "Not checked: disks, other devices, and networks behind the VMs' taps. A move \
                      checks disks and devices before it starts.";

/// How findings are shown.
#[derive(Clone, Copy)]
struct Look {
    colour: bool,
    width: usize,
}

impl Look {
    /// For what standard output is.
    fn of_output() -> Self {
        let is_terminal = stdout().is_terminal();
        let size = is_terminal.then(terminal::size).and_then(Result::ok);
        Self {
            colour: is_terminal && permits_colour(std::env::var_os),
            width: width(size.map(|(columns, _)| columns)),
        }
    }
}

/// Whether the environment permits colours on a terminal.
fn permits_colour(variable: impl Fn(&'static str) -> Option<OsString>) -> bool {
    variable("NO_COLOR").is_none_or(|value| value.is_empty())
        && variable("TERM").is_none_or(|term| term != "dumb")
}

/// The width of lines on a terminal with that many columns, of which some know none.
fn width(columns: Option<u16>) -> usize {
    match columns {
        Some(columns @ 1..) => usize::from(columns).clamp(WIDTH_MIN, WIDTH),
        Some(0) | None => WIDTH,
    }
}

fn table(examined: &Examination, look: Look) -> String {
    let mut out = String::new();
    let mut host = "";
    for finding in &examined.findings {
        if finding.host != host {
            host = &finding.host;
            out += &format!("{}{}\n", if out.is_empty() { "" } else { "\n" }, plain(host));
        }
        out += &row(finding, look);
    }
    out + "\n" + &sum(&examined.findings) + "\n"
}

fn row(finding: &Finding, Look { colour, width }: Look) -> String {
    let (word, code) = match finding.severity {
        Severity::Ok => ("ok", "32"),
        Severity::Note => ("note", "36"),
        Severity::Warning => ("warning", "33"),
        Severity::Error => ("error", "31"),
    };
    let shown = if colour { format!("\x1b[{code}m{word:<8}\x1b[0m") } else { format!("{word:<8}") };
    let about = plain(&finding.about);
    let mut out = format!("  {shown} {about:<15} {}\n", wrapped(&plain(&finding.text), width));
    if let Some(advice) = &finding.advice {
        let advice = wrapped(&format!("-> {}", plain(advice)), width);
        out += &format!("{:INDENT$}{advice}\n", "");
    }
    out
}

/// Wraps a text to the column of findings.
fn wrapped(text: &str, width: usize) -> String {
    let mut out = String::new();
    let mut at = INDENT;
    for (number, word) in text.split_whitespace().enumerate() {
        let length = word.chars().count();
        if number > 0 && at + 1 + length > width {
            out += &format!("\n{:INDENT$}", "");
            at = INDENT;
        } else if number > 0 {
            out.push(' ');
            at += 1;
        }
        out += word;
        at += length;
    }
    out
}

/// Removes control characters: another host's text must not control this terminal.
fn plain(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

fn sum(findings: &[Finding]) -> String {
    let count = |severity| findings.iter().filter(|one| one.severity == severity).count();
    let counted = |number: usize, word: &str| match number {
        0 => format!("no {word}s"),
        1 => format!("1 {word}"),
        _ => format!("{number} {word}s"),
    };
    format!(
        "{}, {}, {}.",
        counted(count(Severity::Error), "error"),
        counted(count(Severity::Warning), "warning"),
        counted(count(Severity::Note), "note"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Look = Look { colour: false, width: WIDTH };

    fn finding(host: &str, severity: Severity, text: &str) -> Finding {
        Finding {
            host: host.to_owned(),
            about: "kvm".to_owned(),
            severity,
            text: text.to_owned(),
            advice: (severity > Severity::Ok).then(|| "do something".to_owned()),
        }
    }

    #[test]
    fn findings_are_told_by_host_with_what_to_do() {
        let findings = vec![
            finding("a -> b", Severity::Ok, "Fine."),
            finding("b", Severity::Warning, "Not so fine."),
        ];
        let text = table(&Examination { of: "a -> b".to_owned(), findings }, PLAIN);
        let expected = "a -> b\n  ok       kvm             Fine.\n\nb\n  warning  kvm             Not so \
                        fine.\n                           -> do something\n\nno errors, 1 warning, \
                        no notes.\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn colours_are_for_terminals_and_words_of_others_are_plain() {
        let bad = finding("a", Severity::Error, "\x1b[2Jgone");
        let coloured = Look { colour: true, ..PLAIN };
        assert!(row(&bad, coloured).starts_with("  \x1b[31merror   \x1b[0m "));
        assert!(!row(&bad, PLAIN).contains('\x1b'));
    }

    #[test]
    fn the_environment_can_turn_colours_off() {
        for (name, value, permits) in [
            ("NO_COLOR", "1", false),
            ("NO_COLOR", "", true),
            ("TERM", "dumb", false),
            ("TERM", "xterm", true),
            ("HOME", "/", true),
        ] {
            let variable = |asked: &str| (asked == name).then(|| OsString::from(value));
            assert_eq!(permits_colour(variable), permits, "{name}={value}");
        }
    }

    #[test]
    fn long_texts_keep_to_their_column() {
        let long = finding("a", Severity::Ok, &"word ".repeat(40));
        for (columns, most) in [
            (None, WIDTH),
            (Some(0), WIDTH),
            (Some(200), WIDTH),
            (Some(80), 80),
            (Some(9), WIDTH_MIN),
        ] {
            let row = row(&long, Look { width: width(columns), ..PLAIN });
            let widest = row.lines().map(|line| line.chars().count()).max().unwrap_or(0);
            assert!(widest <= most && widest > most - 5, "{columns:?}: {row}");
            assert!(row.lines().skip(1).all(|line| line.starts_with(&" ".repeat(INDENT))), "{row}");
            assert_eq!(row.split_whitespace().filter(|word| *word == "word").count(), 40);
        }
    }
}
