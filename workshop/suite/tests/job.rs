//! The process around a job reports how the job ended, and the CPU time of all its processes.

use std::process::{Command, Output};

fn job(script: &str) -> Output {
    let mut suite = Command::new(env!("CARGO_BIN_EXE_suite"));
    suite.args(["job", "sh", "-c", script]).output().unwrap()
}

fn cpu_s(output: &Output) -> f64 {
    let said = String::from_utf8_lossy(&output.stdout);
    let line = said.lines().rev().find_map(|line| line.strip_prefix("suite cpu: "));
    line.unwrap_or_else(|| panic!("{said}")).parse().unwrap()
}

#[test]
fn its_exit_code_says_whether_all_went_well() {
    for (script, code) in [("exit 0", 0), ("exit 3", 1), ("kill -9 $$", 1)] {
        assert_eq!(job(script).status.code(), Some(code), "{script}");
    }
}

/// Like a QEMU whose agent was killed.
#[test]
fn cpu_time_of_an_orphan_counts() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let pipe = pipe.display();
    let busy = "echo $$ >&9; i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done";
    // The orphan's parent ends at once; the job ends when the orphan is gone.
    let gone = "read pid <&9; while kill -0 $pid; do sleep 0.05; done";
    let with = cpu_s(&job(&format!("exec 9<>'{pipe}'; (sh -c '{busy}' &); {gone}")));
    let without = cpu_s(&job("exit 0"));
    assert!(with > without + 0.05, "{with} s, and {without} of nothing");
}
