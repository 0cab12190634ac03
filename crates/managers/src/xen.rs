//! Xen's `xl`: lists domains, and receives, renames, runs and destroys one.
//!
//! Runs `xl list -v`, `xl rename ID NAME`, `xl unpause ID`, `xl destroy ID` and
//! `xl migrate-receive`. A domain is identified by its UUID, which it keeps when it moves, and by
//! its name, which shows where it is in its migration: `NAME--incoming` arrives, and
//! `NAME--migratedaway` was released.

mod receiving;

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use host::child::Run;

pub use receiving::Receiving;

/// `xl` queries the hypervisor and xenstored, which answer at once unless they hang.
const SILENT_MAX: Duration = Duration::from_secs(15);
/// `xl destroy` waits for scripts of disks and network cards, and until the hypervisor has freed
/// the memory, which takes a minute for a large domain. If it is killed meanwhile, the rest stays
/// allocated, to a domain that counts as one that is being destroyed.
const DESTROY_MAX: Duration = Duration::from_secs(120);
/// The most of a list, or of an error, that is read.
const OUTPUT_BYTES_MAX: u64 = 1 << 20;
const INCOMING: &str = "--incoming";
const MIGRATED_AWAY: &str = "--migratedaway";
/// What `xl list` prints as the name of a domain whose xenstore entry is not written yet, or is
/// removed already.
const UNNAMED: &str = "(null)";

/// Why `xl` did not do what it was to do.
#[derive(Debug, thiserror::Error)]
pub enum XlError {
    /// It can't be started, or the system refuses an operation.
    #[error("{}: {source}", program.display())]
    System {
        /// The program.
        program: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// It has failed.
    #[error("`xl {command}` has failed: {text}")]
    Failed {
        /// Its arguments.
        command: String,
        /// What it printed.
        text: String,
    },
    /// It does not answer.
    #[error("`xl {command}` has not answered for {} s", limit.as_secs())]
    Silent {
        /// Its arguments.
        command: String,
        /// How long it had for that.
        limit: Duration,
    },
    /// A domain with the UUID is being created or removed.
    #[error("domain {id} has no name at the moment, so its state is not known")]
    Unnamed {
        /// Its number.
        id: u32,
    },
}

/// The program.
#[derive(Clone, Debug)]
pub struct Xl {
    program: PathBuf,
}

/// What a domain does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DomainState {
    /// It runs, or waits for an event.
    Runs,
    /// It is paused.
    Paused,
    /// It is suspended, or has shut down or crashed.
    Stopped,
    /// It is being destroyed: its memory is not free before it is no longer listed.
    Dying,
}

/// A domain of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// Its name.
    pub name: String,
    /// Its number.
    pub id: u32,
    /// What it does.
    pub state: DomainState,
}

/// A domain that moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovingDomain {
    /// Its name when it does not move.
    pub name: String,
    /// Its UUID, in small letters.
    pub uuid: String,
}

impl MovingDomain {
    /// The copy that arrives: with the name that its receiver gave it, or paused with its own name
    /// or none.
    fn arrives_as(&self, domain: &Domain) -> bool {
        let has_name = domain.name == self.name || domain.name == UNNAMED;
        domain.name == format!("{}{INCOMING}", self.name)
            || has_name && domain.state == DomainState::Paused
    }

    /// The domain that leaves: it has not been released, or has.
    fn leaves_as(&self, domain: &Domain) -> bool {
        domain.name == self.name || domain.name == format!("{}{MIGRATED_AWAY}", self.name)
    }
}

impl Xl {
    /// The program at this path.
    #[must_use]
    pub fn new(program: PathBuf) -> Self {
        Self { program }
    }

    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// The copy of a domain that arrives here and does not run; none if there is none.
    ///
    /// # Errors
    /// If it is not known.
    pub fn arriving(&self, domain: &MovingDomain) -> Result<Option<Domain>, XlError> {
        let copies = self.of(domain)?.into_iter().filter(|one| domain.arrives_as(one));
        // One of the domain's own name may be older.
        Ok(copies.min_by_key(|one| one.name == domain.name))
    }

    /// What an earlier migration has left here of a domain that comes again: its copy, or a domain
    /// of its UUID that is being destroyed. None if nothing is left.
    ///
    /// # Errors
    /// If it is not known.
    pub fn left_over(&self, domain: &MovingDomain) -> Result<Option<Domain>, XlError> {
        let is_dying = |one: &Domain| one.state == DomainState::Dying;
        let all = self.with_dying(domain)?.into_iter();
        let left = all.filter(|one| is_dying(one) || domain.arrives_as(one));
        Ok(left.min_by_key(is_dying))
    }

    /// Whether the domain has arrived here: it has its name, and is not paused.
    ///
    /// # Errors
    /// If it is not known.
    pub fn has_arrived(&self, domain: &MovingDomain) -> Result<bool, XlError> {
        let is_here = |one: &Domain| one.name == domain.name && one.state != DomainState::Paused;
        Ok(self.of(domain)?.iter().any(is_here))
    }

    /// The domain that leaves from here; none if there is none.
    ///
    /// # Errors
    /// If it is not known.
    pub fn leaving(&self, domain: &MovingDomain) -> Result<Option<Domain>, XlError> {
        let found = self.of(domain)?;
        if let Some(Domain { id, .. }) = found.iter().find(|one| one.name == UNNAMED) {
            return Err(XlError::Unnamed { id: *id });
        }
        Ok(found.into_iter().find(|one| domain.leaves_as(one)))
    }

    /// Gives the copy that has arrived its name, and runs it.
    ///
    /// # Errors
    /// If `xl` refuses.
    pub fn run(&self, domain: &MovingDomain, copy: &Domain) -> Result<(), XlError> {
        let id = copy.id.to_string();
        if copy.name != domain.name {
            self.call(&["rename", &id, &domain.name])?;
        }
        self.call(&["unpause", &id]).map(drop)
    }

    /// Destroys a domain.
    ///
    /// # Errors
    /// If `xl` refuses.
    pub fn destroy(&self, domain: &Domain) -> Result<(), XlError> {
        self.call_within(&["destroy", &domain.id.to_string()], DESTROY_MAX).map(drop)
    }

    /// Starts a receiver.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn receive(&self) -> Result<Receiving, XlError> {
        Receiving::start(self)
    }

    /// The domains of this UUID that are not being destroyed.
    fn of(&self, domain: &MovingDomain) -> Result<Vec<Domain>, XlError> {
        let mut found = self.with_dying(domain)?;
        found.retain(|one| one.state != DomainState::Dying);
        Ok(found)
    }

    fn with_dying(&self, domain: &MovingDomain) -> Result<Vec<Domain>, XlError> {
        Ok(parse(&self.call(&["list", "-v"])?, &domain.uuid))
    }

    fn system(&self, source: io::Error) -> XlError {
        XlError::System { program: self.program.clone(), source }
    }

    /// Runs it, and returns its output.
    fn call(&self, arguments: &[&str]) -> Result<String, XlError> {
        self.call_within(arguments, SILENT_MAX)
    }

    /// The same for a command that may print nothing for `limit`.
    fn call_within(&self, arguments: &[&str], limit: Duration) -> Result<String, XlError> {
        let command = arguments.join(" ");
        let mut xl = Command::new(&self.program);
        xl.args(arguments).stdin(Stdio::null());
        let mut run = Run::start(xl, limit).map_err(|error| self.system(error))?;
        let silent = || XlError::Silent { command: command.clone(), limit };
        let (out, errors) = run.read(OUTPUT_BYTES_MAX).map_err(|_| silent())?;
        let status = run.status().map_err(|error| self.system(error))?.ok_or_else(silent)?;
        if status.success() {
            return Ok(String::from_utf8_lossy(&out).into_owned());
        }
        let text = String::from_utf8_lossy(&errors);
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        Err(XlError::Failed { command, text: lines.join(" ") })
    }
}

/// The domains with this UUID in what `xl list -v` prints: name, number, memory, vCPUs, state, time,
/// UUID. Its other lines have other words there.
fn parse(list: &str, uuid: &str) -> Vec<Domain> {
    let domain = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, id, _, _, state, _, of, ..] = words[..] else { return None };
        let id = id.parse().ok().filter(|_| of.eq_ignore_ascii_case(uuid))?;
        let has = |letter: char| state.contains(letter);
        let state = match () {
            () if has('d') => DomainState::Dying,
            () if has('s') || has('c') => DomainState::Stopped,
            () if has('p') => DomainState::Paused,
            () => DomainState::Runs,
        };
        Some(Domain { name: name.to_owned(), id, state })
    };
    list.lines().filter_map(domain).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const UUID: &str = "0f2b4c1e-95d8-4f27-9a3e-1c9d0f6a7b42";
    const LIST: &str = "\
Name                                        ID   Mem VCPUs\tState\tTime(s)   UUID
Domain-0                                     0  1024     1     r-----      98.1 00000000-0000-0000-0000-000000000000        -                -
web1--incoming                               5   256     1     --p---       0.0 0f2b4c1e-95d8-4f27-9a3e-1c9d0f6a7b42        -                -
web1                                         4   256     1     -b----       7.5 0F2B4C1E-95D8-4F27-9A3E-1C9D0F6A7B42        -                -
web1--migratedaway                           3   256     1     ---s--       7.5 0f2b4c1e-95d8-4f27-9a3e-1c9d0f6a7b42        2                -
web1                                         2   256     1     --p--d       7.5 0f2b4c1e-95d8-4f27-9a3e-1c9d0f6a7b42        -                -
(null)                                       6     0     0     --ps-d       7.5 0f2b4c1e-95d8-4f27-9a3e-1c9d0f6a7b42        2                -
";

    fn web1() -> MovingDomain {
        MovingDomain { name: "web1".to_owned(), uuid: UUID.to_owned() }
    }

    #[test]
    fn domains_are_found_by_uuid() {
        let found: Vec<_> = parse(LIST, UUID).into_iter().map(|it| (it.id, it.state)).collect();
        let expected = [
            (5, DomainState::Paused),
            (4, DomainState::Runs),
            (3, DomainState::Stopped),
            (2, DomainState::Dying),
            (6, DomainState::Dying),
        ];
        assert_eq!(found, expected);
        assert!(parse(LIST, "0f2b4c1e").is_empty());
    }

    #[test]
    fn domains_that_are_being_destroyed_only_count_as_left_over() {
        let dir = tempfile::tempdir().unwrap();
        let lists = |lines: &str| {
            fs::write(dir.path().join("list"), lines).unwrap();
            program(dir.path(), &format!("cat {}", dir.path().join("list").display()))
        };
        let line = |name: &str, id, state: &str| format!("{name} {id} 256 1 {state} 0.0 {UUID}\n");
        let dying = line("web1", 2, "--p--d") + &line("(null)", 6, "--ps-d");
        let xl = lists(&dying);
        assert_eq!(xl.of(&web1()).unwrap(), []);
        assert!(xl.arriving(&web1()).unwrap().is_none() && xl.leaving(&web1()).unwrap().is_none());
        assert_eq!(xl.left_over(&web1()).unwrap().map(|left| left.id), Some(2));
        let xl = lists(&(dying + &line("web1--incoming", 7, "--p---")));
        let left = xl.left_over(&web1()).unwrap().unwrap();
        assert_eq!((left.id, left.state), (7, DomainState::Paused));
        // Nothing of a migration to here.
        let xl = lists(&(line("web1", 4, "-b----") + &line("web1--migratedaway", 3, "---s--")));
        assert_eq!(xl.left_over(&web1()).unwrap(), None);
    }

    #[test]
    fn a_domain_that_runs_never_counts_as_a_copy_that_arrives() {
        let of = |name: &str, state| Domain { name: name.to_owned(), id: 1, state };
        let arrives = |name, state| web1().arrives_as(&of(name, state));
        assert!(arrives("web1--incoming", DomainState::Paused));
        assert!(arrives("web1", DomainState::Paused));
        assert!(arrives("(null)", DomainState::Paused));
        assert!(!arrives("web1", DomainState::Runs));
        assert!(!arrives("(null)", DomainState::Runs));
        assert!(!arrives("web1--migratedaway", DomainState::Stopped));
        let leaves = |name, state| web1().leaves_as(&of(name, state));
        assert!(leaves("web1", DomainState::Runs));
        assert!(leaves("web1--migratedaway", DomainState::Stopped));
        assert!(!leaves("web1--incoming", DomainState::Paused));
    }

    /// A program in place of `xl`.
    pub(super) fn program(dir: &Path, script: &str) -> Xl {
        let path = dir.join("xl");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Xl::new(path)
    }

    #[test]
    fn xl_is_called_and_its_errors_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let list = dir.path().join("list");
        let calls = dir.path().join("calls");
        fs::write(&list, LIST).unwrap();
        let script = format!(
            "echo $* >> {calls}\ncase $1 in list) cat {list};; destroy) echo no such domain >&2; \
             exit 1;; esac",
            calls = calls.display(),
            list = list.display()
        );
        let xl = program(dir.path(), &script);
        let copy = xl.arriving(&web1()).unwrap().unwrap();
        assert!(xl.has_arrived(&web1()).unwrap());
        xl.run(&web1(), &copy).unwrap();
        let error = xl.destroy(&copy).unwrap_err().to_string();
        assert_eq!(error, "`xl destroy 5` has failed: no such domain");
        let calls = fs::read_to_string(calls).unwrap();
        assert_eq!(calls, "list -v\nlist -v\nrename 5 web1\nunpause 5\ndestroy 5\n");
        let missing = Xl::new(dir.path().join("none"));
        assert!(matches!(missing.leaving(&web1()), Err(XlError::System { .. })));
    }

    #[test]
    fn a_domain_without_a_name_is_not_a_domain_that_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let script = format!("echo '(null) 7 256 1 --p--- 0.0 {UUID} - -'");
        let xl = program(dir.path(), &script);
        assert!(matches!(xl.leaving(&web1()), Err(XlError::Unnamed { id: 7 })));
        assert_eq!(xl.arriving(&web1()).unwrap().map(|copy| copy.id), Some(7));
    }

    #[test]
    fn a_command_that_hangs_is_killed_and_reported() {
        let dir = tempfile::tempdir().unwrap();
        let xl = program(dir.path(), "exec sleep 600");
        let hung = xl.call_within(&["list", "-v"], Duration::from_millis(1)).unwrap_err();
        assert_eq!(hung.to_string(), "`xl list -v` has not answered for 0 s");
        let xl = program(dir.path(), "exec sleep 600 > /dev/null 2> /dev/null");
        let hung = xl.call_within(&["list", "-v"], Duration::from_millis(500)).unwrap_err();
        assert!(matches!(hung, XlError::Silent { .. }), "{hung}");
    }
}
