//! What the helper prints for a person.

use std::process::{Command, Stdio};

/// As with `| head`. `--once` prints by the same function, after it has read what this machine has
/// in its page cache, which takes half a minute.
#[test]
fn a_reader_that_has_closed_the_output_is_no_error() {
    for option in ["--version", "--help"] {
        let (reader, closed) = std::io::pipe().unwrap();
        drop(reader);
        let mut helper = Command::new(env!("CARGO_BIN_EXE_droveway-guest"));
        let output = helper.arg(option).stdout(closed).stderr(Stdio::piped()).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!errors.contains("panicked"), "{option}: {errors}");
    }
}

/// As with `2>&1 | head`.
#[test]
fn a_reader_that_has_closed_the_errors_changes_no_exit_code() {
    let (reader, closed) = std::io::pipe().unwrap();
    drop(reader);
    let mut helper = Command::new(env!("CARGO_BIN_EXE_droveway-guest"));
    let status = helper.arg("--no-such-option").stdout(Stdio::null()).stderr(closed).status();
    assert_eq!(status.unwrap().code(), Some(2));
}
