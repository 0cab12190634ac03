//! Whoever types something else is told what can be typed, before anything is
//! built.

use std::process::Command;

#[test]
fn what_can_be_typed_is_said() {
    for words in [&[][..], &["all"], &["unit", "some", "more"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_suite")).args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("usage: suite unit|end-to-end"), "{said}");
    }
}
