//! `doctor`: check this host, or whether its VMs can move to another host.

use std::io::IsTerminal;
use std::process::ExitCode;

use api::{Examination, Finding, Severity};
use clap::Args as ClapArgs;

use crate::client::{Client, segment};
use crate::output::{print, print_json};
use crate::problem::Problem;

/// The width of the columns before a finding's text.
const INDENT: usize = 27;
/// The width of a line, broken between words.
const WIDTH: usize = 100;

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
        print(format_args!("{}", table(&examined, std::io::stdout().is_terminal())))?;
    }
    Ok(if examined.has_errors() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn table(examined: &Examination, colour: bool) -> String {
    let mut out = String::new();
    let mut host = "";
    for finding in &examined.findings {
        if finding.host != host {
            host = &finding.host;
            out += &format!("{}{}\n", if out.is_empty() { "" } else { "\n" }, plain(host));
        }
        out += &row(finding, colour);
    }
    out + "\n" + &sum(&examined.findings) + "\n"
}

fn row(finding: &Finding, colour: bool) -> String {
    let (word, code) = match finding.severity {
        Severity::Ok => ("ok", "32"),
        Severity::Note => ("note", "36"),
        Severity::Warning => ("warning", "33"),
        Severity::Error => ("error", "31"),
    };
    let shown = if colour { format!("\x1b[{code}m{word:<8}\x1b[0m") } else { format!("{word:<8}") };
    let about = plain(&finding.about);
    let mut out = format!("  {shown} {about:<15} {}\n", wrapped(&plain(&finding.text)));
    if let Some(advice) = &finding.advice {
        out += &format!("{:INDENT$}{}\n", "", wrapped(&format!("-> {}", plain(advice))));
    }
    out
}

/// Wraps a text to the column of findings.
fn wrapped(text: &str) -> String {
    let mut out = String::new();
    let mut at = INDENT;
    for (number, word) in text.split_whitespace().enumerate() {
        let length = word.chars().count();
        if number > 0 && at + 1 + length > WIDTH {
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
        let text = table(&Examination { of: "a -> b".to_owned(), findings }, false);
        let expected = "a -> b\n  ok       kvm             Fine.\n\nb\n  warning  kvm             Not so \
                        fine.\n                           -> do something\n\nno errors, 1 warning, \
                        no notes.\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn colours_are_for_terminals_and_words_of_others_are_plain() {
        let bad = finding("a", Severity::Error, "\x1b[2Jgone");
        assert!(row(&bad, true).starts_with("  \x1b[31merror   \x1b[0m "));
        assert!(!row(&bad, false).contains('\x1b'));
    }

    #[test]
    fn long_texts_keep_to_their_column() {
        let text = "word ".repeat(40);
        let row = row(&finding("a", Severity::Ok, &text), false);
        assert!(row.lines().all(|line| line.chars().count() <= WIDTH), "{row}");
        assert!(row.lines().skip(1).all(|line| line.starts_with(&" ".repeat(INDENT))), "{row}");
        assert_eq!(row.split_whitespace().filter(|word| *word == "word").count(), 40);
    }
}
