//! What is run as one process: a program with all of its tests, or one test.

use std::io;
use std::num::NonZero;
use std::process::Command;
use std::thread::available_parallelism;

use crate::program::Program;
use crate::{SuiteError, child};

/// A part of the workspace's tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Suite {
    /// All packages but `end-to-end`; a job is a program.
    Unit,
    /// Whole moves; a job is a test, since each may take a minute.
    EndToEnd,
}

/// Where proptest looks for its seed.
const SEED: &str = "PROPTEST_RNG_SEED";

/// What measures how long something takes, or how well VMs keep up with each other, or
/// changes something of the whole machine, has the machine to itself, except for [`FILLS`]: by
/// the beginnings of their names.
const ALONE: [&str; 17] = [
    "end-to-end backings::huge_pages",
    "end-to-end cache_storage::is_read_once",
    "end-to-end carry_throttle::",
    // A writer as fast as it is told to be, and what is left of it when it stops.
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

/// What runs beside those, with the CPU time that they leave: nobody judges how long it
/// takes, it slows no VM by cgroups, which have shares of their own, and changes nothing
/// of the machine.
const FILLS: [&str; 9] = [
    "agent agent",
    "disk ordering",
    "droveway ",
    "end-to-end cache_",
    "end-to-end holdings::",
    "end-to-end page_cache::",
    "end-to-end rack::",
    "end-to-end relayed::",
    "end-to-end sharing::",
];

/// What runs only when it is asked for: real libvirts that probe QEMUs under TCG take
/// minutes. `make libvirt-test`, `kubevirt-test`, `proxmox-test` and `upgrade-test` do.
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
            // They use all cores by themselves for most of the time, and some wait.
            (None, Self::Unit) => Width { usual: cores, more: cores },
            // Most of them wait most of the time. With more than one beside these, guests and
            // links are not what their tests take them for.
            (None, Self::EndToEnd) => Width { usual: cores + 1, more: 1 },
        }
    }
}

/// How many jobs run at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Width {
    /// Whatever they do.
    pub(crate) usual: usize,
    /// So many more, while CPUs have nothing to do.
    pub(crate) more: usize,
}

/// How a job competes for the CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    Usual,
    /// With what others leave.
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

    /// Whether nothing may run beside it.
    pub(crate) fn is_alone(&self) -> bool {
        ALONE.iter().any(|beginning| self.name.starts_with(beginning))
    }

    /// Whether it may run beside those, with what they leave.
    pub(crate) fn fills(&self) -> bool {
        !self.is_alone() && FILLS.iter().any(|beginning| self.name.starts_with(beginning))
    }

    /// Whether it runs only when somebody asks for it.
    pub(crate) fn is_asked_for(&self) -> bool {
        ASKED.iter().any(|beginning| self.name.starts_with(beginning))
    }

    /// The tests that must run; not known of a whole program.
    pub(crate) fn wanted(&self) -> Option<u32> {
        self.test.as_ref().map(|_| 1)
    }

    /// In a process around it, which is this program.
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

    /// What repeats it, as one would type it.
    pub(crate) fn again(&self) -> String {
        let Program { package, chosen_by, .. } = &self.program;
        let test = self.test.as_ref().map_or(String::new(), |test| format!(" -- --exact {test}"));
        let seed = seed();
        format!("{SEED}={seed} cargo test --package {package} {chosen_by}{test}")
    }
}

/// What properties are tried with is chosen by chance, and here the same in each
/// run: a failure can be repeated, and tells of the change that is tested. Other
/// seeds can be given, and `cargo test` by itself takes another one each time.
fn seed() -> String {
    std::env::var(SEED).unwrap_or_else(|_| "1".to_owned())
}
