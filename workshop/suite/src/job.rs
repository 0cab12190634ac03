//! A job: a program with all of its tests, or one test, run as one process.

use std::io;
use std::num::NonZero;
use std::process::Command;
use std::thread::available_parallelism;

use crate::marks::{self, Mark};
use crate::program::Program;
use crate::{SuiteError, child};

/// A part of the workspace's tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Suite {
    /// All packages but `end-to-end`; each job is a program.
    Unit,
    /// Whole moves; each job is a test, since one may take a minute.
    EndToEnd,
}

/// Nice value of jobs that fill: little, but enough for a guest that boots within two minutes next
/// to jobs that use all CPUs. Fuzzing gets what they leave.
const FILLING: &str = "15";

/// Environment variable with proptest's seed.
const SEED: &str = "PROPTEST_RNG_SEED";

impl Suite {
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "unit" => Some(Self::Unit),
            "end-to-end" => Some(Self::EndToEnd),
            _ => None,
        }
    }

    fn has(self, program: &Program) -> bool {
        (program.package == "end-to-end") == (self == Self::EndToEnd)
    }

    /// How many of its jobs run at a time.
    pub(crate) fn at_once(self) -> Width {
        let told = std::env::var("TOGETHER").ok().and_then(|text| text.parse().ok());
        let cores = available_parallelism().map_or(1, NonZero::get);
        match (told, self) {
            (Some(told), _) => Width { usual: std::cmp::max(told, 1), more: 0 },
            // Unit tests keep cores busy, but all together wait for a third of their time.
            (None, Self::Unit) => Width { usual: cores + 1, more: cores },
            // Most of these tests mostly wait. With more than one job beyond these, guests and
            // links no longer behave as their tests assume.
            (None, Self::EndToEnd) => Width { usual: cores + 1, more: 1 },
        }
    }
}

/// How many jobs run at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Width {
    /// Regardless of load.
    pub(crate) usual: usize,
    /// Additional jobs while CPUs are idle.
    pub(crate) more: usize,
}

/// How a job competes for the CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    Usual,
    /// Only CPU time that other jobs leave.
    Rest,
}

/// One process.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    program: Program,
    test: Option<String>,
    name: String,
    marks: Vec<Mark>,
}

/// The jobs of a suite.
pub(crate) fn list(suite: Suite, programs: &[Program]) -> Result<Vec<Job>, SuiteError> {
    let mut jobs = Vec::new();
    for program in programs.iter().filter(|program| suite.has(program)) {
        match suite {
            Suite::Unit => jobs.push(Job::of_program(program)?),
            Suite::EndToEnd => {
                jobs.extend(program.tests()?.into_iter().map(|test| Job::of_test(program, test)));
            }
        }
    }
    Ok(jobs)
}

impl Job {
    fn of_program(program: &Program) -> Result<Self, SuiteError> {
        let name = format!("{} {}", program.package, program.name);
        let marks = marks::of_program(&program.dir.join("Cargo.toml"), &program.name)?;
        Ok(Self { program: program.clone(), test: None, name, marks })
    }

    pub(crate) fn of_test(program: &Program, test: String) -> Self {
        let name = format!("{} {test}", program.package);
        let marks = marks::of_test(&test);
        Self { program: program.clone(), test: Some(test), name, marks }
    }

    /// Its package, and its program or its test.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn is(&self, mark: Mark) -> bool {
        self.marks.contains(&mark)
    }

    /// The number of tests that must run; unknown for a whole program.
    pub(crate) fn wanted(&self) -> Option<u32> {
        self.test.as_ref().map(|_| 1)
    }

    /// The command that runs it within this program's `job` process.
    pub(crate) fn command(&self, share: Share) -> io::Result<Command> {
        let suite = std::env::current_exe()?;
        let mut command = match share {
            Share::Usual => Command::new(suite),
            Share::Rest => {
                let mut command = Command::new("nice");
                command.args(["-n", FILLING]).arg(suite);
                command
            }
        };
        command.arg(child::WORD).arg(&self.program.path).current_dir(&self.program.dir);
        if let Some(test) = &self.test {
            command.args(["--exact", test, "--test-threads=1"]);
        }
        command.env(SEED, seed());
        Ok(command)
    }

    /// The command line that repeats it.
    pub(crate) fn again(&self) -> String {
        let Program { package, chosen_by, .. } = &self.program;
        let test = self.test.as_ref().map_or(String::new(), |test| format!(" -- --exact {test}"));
        let seed = seed();
        format!("{SEED}={seed} cargo test --package {package} {chosen_by}{test}")
    }
}

/// The seed of property tests. It is the same in each run, so that a failure can be repeated and is
/// due to the tested change. The environment variable overrides it; plain `cargo test` takes a new
/// seed each time.
fn seed() -> String {
    std::env::var(SEED).unwrap_or_else(|_| "1".to_owned())
}
