//! docs/operations/messages.md quotes messages: each of them is in the code.

use std::fs;
use std::path::Path;

use lab::setup::repository;
use marks::runs;

#[runs(promised)]
#[test]
fn every_message_that_is_explained_is_in_the_code() {
    let page = fs::read_to_string(repository().join("docs/operations/messages.md")).unwrap();
    let mut code = String::new();
    read(&repository().join("crates"), &mut code);
    let code = joined(&code);
    let mut quoted = 0;
    for row in page.lines().filter(|line| line.starts_with("| `")) {
        let messages = row.trim_start_matches("| ").split(" | ").next().unwrap_or_default();
        for message in messages.split('`').skip(1).step_by(2) {
            let fixed = longest_fixed_part(message);
            assert!(code.contains(&fixed), "no message has `{fixed}`: {row}");
            quoted += 1;
        }
    }
    assert!(quoted >= 100, "{quoted} messages");
}

/// Appends all code below `dir`.
fn read(dir: &Path, code: &mut String) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read(&path, code);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            code.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

/// `code` without the breaks inside of its string literals.
fn joined(code: &str) -> String {
    let mut lines = code.split("\\\n");
    let first = lines.next().unwrap_or_default().to_owned();
    lines.fold(first, |joined, line| joined + line.trim_start()).replace("\\\"", "\"")
}

/// The longest part of a quoted message that does not depend on what the message fills in: words
/// in capitals, numbers and addresses.
fn longest_fixed_part(message: &str) -> String {
    let mut parts = vec![String::new()];
    for word in message.split_whitespace() {
        let bare = word.trim_matches(|c: char| !c.is_alphanumeric());
        let is_name = !bare.is_empty() && !bare.contains(|c: char| !c.is_ascii_uppercase());
        let is_filled = is_name || word.contains(['…', '/']) || word.contains(char::is_numeric);
        match parts.last_mut() {
            Some(part) if !is_filled => *part = format!("{part} {word}").trim_start().to_owned(),
            _ => parts.push(String::new()),
        }
    }
    let longest = parts.into_iter().max_by_key(String::len).unwrap_or_default();
    longest.trim_matches([' ', ',', ';', ':', '.', '(', ')']).to_owned()
}

#[runs(promised)]
#[test]
fn what_a_message_fills_in_is_left_out() {
    for (message, fixed) in [
        ("no agent answers at SOCKET: …", "no agent answers at"),
        ("HOST can't be queried: WHY.", "can't be queried"),
        ("… another migration of this VM is X; …", "another migration of this"),
        ("nothing is quoted here at 10.0.0.1", "nothing is quoted here at"),
    ] {
        assert_eq!(longest_fixed_part(message), fixed, "{message}");
    }
}
