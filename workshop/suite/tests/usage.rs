//! Wrong arguments print the usage, before anything is built.

use std::process::Command;

#[test]
fn wrong_arguments_print_the_usage() {
    for words in [&[][..], &["all"], &["unit", "some", "more"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_suite")).args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("usage: suite unit|end-to-end"), "{said}");
    }
}
