//! A job: a program with all of its tests, or one test, run as one process.

use std::io;
use std::num::NonZero;
use std::process::Command;
use std::thread::available_parallelism;

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

/// Environment variable with proptest's seed.
const SEED: &str = "PROPTEST_RNG_SEED";

/// Jobs that have the machine to themselves, except for [`FILLS`], as prefixes of their names. They
/// measure how long something takes or how well VMs keep up with each other, or change something of
/// the whole machine.
const ALONE: [&str; 17] = [
    "end-to-end backings::huge_pages",
    "end-to-end cache_storage::is_read_once",
    "end-to-end carry_throttle::",
    // These depend on the rate that the guest's writer reaches, and what is left when it stops.
    "end-to-end chase::a_guest_that_is_faster",
    "end-to-end chase::a_guest_that_stops",
    "end-to-end chase::a_guest_that_writes",
    "end-to-end kvm::throttled",
    "end-to-end memory::huge_pages",
    "end-to-end throttle::a_guest_that_can",
    "end-to-end throttle::a_guest_that_is",
    "end-to-end throttle::a_guest_that_may_not",
    "end-to-end throttle::a_migration_is_predicted",
    "end-to-end throttle::a_vcpu_that_idles",
    "end-to-end throttle::an_agent_that_was_killed",
    "end-to-end throttle::two_at_once",
    "lab burn",
    "quota real",
];

/// Jobs that run beside those, with the CPU time that they leave. No test judges how long these
/// take; they throttle no VM by cgroups, which have shares of their own, and change nothing of the
/// machine.
const FILLS: [&str; 13] = [
    "agent agent",
    "disk ordering",
    "droveway ",
    "end-to-end cache_",
    "end-to-end carry_lanes::",
    "end-to-end carry_storage::",
    "end-to-end holdings::",
    "end-to-end managers::",
    "end-to-end page_cache::",
    "end-to-end panics::",
    "end-to-end rack::",
    "end-to-end relayed::",
    "end-to-end sharing::",
];

/// Jobs that run only on request, by the make targets `libvirt-test`, `kubevirt-test`,
/// `proxmox-test` and `upgrade-test`: real libvirts that probe QEMUs under TCG take minutes.
const ASKED: [&str; 9] = [
    "end-to-end kubevirt::a_vm_comes_with_its_disk",
    "end-to-end kubevirt::an_agent_that_starts_again",
    "end-to-end libvirt::by_virsh",
    "end-to-end libvirt::from_",
    "end-to-end libvirt_callers::",
    "end-to-end libvirt_faults::",
    "end-to-end libvirt_native::",
    "end-to-end proxmox::with_openssh",
    "end-to-end upgrade::",
];

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
            // Unit tests keep all cores busy most of the time, and some of them wait.
            (None, Self::Unit) => Width { usual: cores, more: cores },
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
}

/// The jobs of a suite.
pub(crate) fn list(suite: Suite, programs: &[Program]) -> Result<Vec<Job>, SuiteError> {
    let mut jobs = Vec::new();
    for program in programs.iter().filter(|program| suite.has(program)) {
        match suite {
            Suite::Unit => jobs.push(Job::new(program, None)),
            Suite::EndToEnd => {
                jobs.extend(program.tests()?.into_iter().map(|test| Job::new(program, Some(test))));
            }
        }
    }
    let gone = |beginning: &&&str| {
        let its = beginning.starts_with("end-to-end ") == (suite == Suite::EndToEnd);
        its && !jobs.iter().any(|job| job.name.starts_with(**beginning))
    };
    ALONE
        .iter()
        .chain(&ASKED)
        .chain(&FILLS)
        .find(gone)
        .map_or(Ok(()), |gone| Err(SuiteError::Gone(gone)))?;
    Ok(jobs)
}

impl Job {
    fn new(program: &Program, test: Option<String>) -> Self {
        let name = test.as_ref().unwrap_or(&program.name);
        let name = format!("{} {name}", program.package);
        Self { program: program.clone(), test, name }
    }

    /// Its package, and its program or its test.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether it has the machine to itself, apart from jobs that fill.
    pub(crate) fn is_alone(&self) -> bool {
        ALONE.iter().any(|beginning| self.name.starts_with(beginning))
    }

    /// Whether it may run beside those, with the CPU time that they leave.
    pub(crate) fn fills(&self) -> bool {
        !self.is_alone() && FILLS.iter().any(|beginning| self.name.starts_with(beginning))
    }

    /// Whether it runs only on request.
    pub(crate) fn is_asked_for(&self) -> bool {
        ASKED.iter().any(|beginning| self.name.starts_with(beginning))
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
                let mut command = Command::new("chrt");
                command.args(["--idle", "0"]).arg(suite);
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
