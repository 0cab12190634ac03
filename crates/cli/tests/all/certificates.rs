//! `droveway ca` as typed.

use std::path::Path;
use std::process::{Command, Output};

fn ca(dir: &Path, line: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_droveway"))
        .arg("ca")
        .args(line.split_whitespace())
        .current_dir(dir)
        .output()
        .unwrap()
}

fn works(dir: &Path, line: &str) -> String {
    let output = ca(dir, line);
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn fails(dir: &Path, line: &str) -> String {
    let output = ca(dir, line);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{line}: {output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("droveway: ") && said.lines().count() == 1, "{said}");
    said
}

#[test]
fn certificates_are_made_where_they_are_wanted() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let said = works(dir, "init --days 30");
    assert!(said.contains("valid from 2") && said.contains("keep it secret"), "{said}");
    let said = works(dir, "issue host-a");
    assert!(
        said.contains("droveway-ca/hosts/host-a") && said.contains("expires with its CA"),
        "{said}"
    );
    assert!(said.contains("reads them within half a minute"), "{said}");
    works(dir, "issue host-b --out b --days 3");
    works(dir, "issue --role migrate ann");
    for file in [
        "droveway-ca/hosts/host-a/droveway.key",
        "b/ca.crt",
        "b/droveway.crt",
        "b/droveway.key",
        "droveway-ca/clients/ann/droveway.crt",
    ] {
        assert!(dir.join(file).exists(), "{file}");
    }
    let before = std::fs::read(dir.join("b/droveway.key")).unwrap();
    works(dir, "issue host-b --out b --replace");
    assert_ne!(std::fs::read(dir.join("b/droveway.key")).unwrap(), before);
}

#[test]
fn what_goes_wrong_is_told_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    assert!(fails(dir, "issue a").contains("droveway ca init --dir droveway-ca"));
    works(dir, "init");
    assert!(fails(dir, "init").contains("already exists"));
    works(dir, "issue a");
    assert!(fails(dir, "issue a").contains("--replace"));
    assert!(fails(dir, "issue ../a").contains("is not a name"));
    assert!(fails(dir, "issue b --out /proc/b").contains("writing /proc/b"));
}
