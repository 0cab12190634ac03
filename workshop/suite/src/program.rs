//! Test programs, as cargo builds them.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::{Doing, SuiteError};

/// A program that cargo built to test something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// Its package's name.
    pub(crate) package: String,
    /// Its package's directory, in which cargo runs it.
    pub(crate) dir: PathBuf,
    /// The option that selects it for `cargo test`, such as `--test moves`.
    pub(crate) chosen_by: String,
    /// Name of the target; a library has its package's.
    pub(crate) name: String,
    /// Path of the executable.
    pub(crate) path: PathBuf,
}

pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Has cargo build all tests and the programs that they run, even if only some are run: cargo
/// unifies features over the chosen packages, so another choice would compile most of them again.
/// Cargo's messages go to standard error.
pub(crate) fn build() -> Result<Vec<Program>, SuiteError> {
    let mut command = cargo();
    command.args(["test", "--workspace", "--no-run"]);
    command.arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    let mut child = command.spawn().doing("run cargo")?;
    let output = child.stdout.take().into_iter();
    let mut programs = Vec::new();
    for line in output.flat_map(|output| BufReader::new(output).lines()) {
        programs.extend(of_message(&line.doing("read what cargo says")?));
    }
    let status = child.wait().doing("wait for cargo")?;
    if status.success() { Ok(programs) } else { Err(SuiteError::Build) }
}

/// The test program that a line of cargo's output names; most lines name none.
fn of_message(line: &str) -> Option<Program> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message["profile"]["test"] != true {
        return None;
    }
    let path = PathBuf::from(message["executable"].as_str()?);
    let dir = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let package = package(message["package_id"].as_str()?)?.to_owned();
    let target = &message["target"];
    let name = target["name"].as_str()?;
    let chosen_by = match target["kind"][0].as_str()? {
        kind @ ("test" | "bin" | "example" | "bench") => format!("--{kind} {name}"),
        _ => "--lib".to_owned(),
    };
    Some(Program { package, dir, chosen_by, name: name.to_owned(), path })
}

/// `path+file:///there/moves#0.1.0`, or `path+file:///there#moves@0.1.0` where the
/// directory has another name.
fn package(id: &str) -> Option<&str> {
    let (place, version) = id.rsplit_once('#')?;
    match version.split_once('@') {
        Some((name, _)) => Some(name),
        None => place.rsplit('/').next(),
    }
}

impl Program {
    /// The names of its tests.
    pub(crate) fn tests(&self) -> Result<Vec<String>, SuiteError> {
        let mut command = Command::new(&self.path);
        command.args(["--list", "--format", "terse"]).current_dir(&self.dir);
        let output = command.output().doing("run a test program")?;
        if !output.status.success() {
            return Err(SuiteError::List(self.path.clone()));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_found_in_cargos_output() {
        let message = |kind: &str, name: &str, id: &str, test: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","package_id":"{id}",
                "manifest_path":"/there/tests/Cargo.toml","target":{{"kind":["{kind}"],
                "name":"{name}"}},"profile":{{"test":{test}}},"executable":"/there/x-0"}}"#
            )
        };
        let named = "path+file:///there/tests#end-to-end@0.1.0";
        let moves = of_message(&message("test", "moves", named, true)).unwrap();
        assert_eq!(
            (moves.package.as_str(), moves.chosen_by.as_str()),
            ("end-to-end", "--test moves")
        );
        assert_eq!(moves.dir, Path::new("/there/tests"));
        let library = message("lib", "page", "path+file:///there/page#0.1.0", true);
        let library = of_message(&library).unwrap();
        assert_eq!((library.package.as_str(), library.chosen_by.as_str()), ("page", "--lib"));
        assert_eq!(of_message(&message("bin", "droveway", named, false)), None);
        assert_eq!(of_message(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(of_message("no JSON"), None);
    }
}
