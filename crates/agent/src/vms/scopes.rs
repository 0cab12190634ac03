//! A systemd scope for each QEMU that this agent has started, so that stopping, limiting or
//! killing the agent's unit does not affect VMs.
//!
//! A QEMU starts in the agent's own cgroup, because it inherits open files, and is moved as soon
//! as it was launched. Nothing waits for that. Once it answers, it is checked that it has been
//! moved. A VM whose QEMU can't be moved runs all the same; the unit's `KillMode=process` protects
//! it.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};

/// The slice of all scopes.
const SLICE: &str = "droveway.slice";
/// A scope exists until the last QEMU in it has ended.
///
/// The QEMU of a VM that moved away ends when the VM runs elsewhere, and the VM may return at once.
const TRIES: u32 = 25;
const RETRY: Duration = Duration::from_millis(200);

/// The queue of QEMUs to move; none unless systemd runs this agent as a service.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scopes(Option<Sender<ScopeRequest>>);

#[derive(Debug)]
struct ScopeRequest {
    vm: String,
    pid: u32,
    /// Whether its QEMU answers, so that this is the last request for it.
    answers: bool,
    /// Whether the scope may be that of the VM's former QEMU.
    joins: bool,
    tries_left: u32,
}

/// What precedes the path in `/proc/PID/cgroup`: for systemd's named hierarchy of cgroup v1,
/// and for the only hierarchy of cgroup v2.
const HIERARCHIES: [&str; 2] = [":name=systemd:", UNIFIED];
const UNIFIED: &str = "0::";

/// The agent's own unit.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Unit {
    hierarchy: &'static str,
    cgroup: String,
    name: String,
}

impl Scopes {
    /// Starts the thread that sends requests to systemd, if systemd started this agent.
    pub(crate) fn new() -> Self {
        let is_systemd = Path::new("/run/systemd/system").is_dir();
        if !is_systemd || env::var_os("INVOCATION_ID").is_none() {
            return Self(None);
        }
        let Some(unit) = groups("self").as_deref().and_then(Unit::of) else { return Self(None) };
        let (sender, receiver) = unbounded::<ScopeRequest>();
        let run = move || serve(&receiver, |request| request.take_out_of(&unit));
        match thread::Builder::new().name("scopes".to_owned()).spawn(run) {
            Ok(_) => Self(Some(sender)),
            Err(error) => {
                tracing::warn!(%error, "VMs stay in the agent's unit");
                Self(None)
            }
        }
    }

    /// Has a VM's QEMU moved to its own scope, if it is in the agent's unit.
    pub(crate) fn take(&self, vm: &str, pid: u32) {
        self.request(vm, pid, true, false);
    }

    /// As [`Scopes::take`], for a QEMU that was just launched, and may fail to start.
    pub(crate) fn take_early(&self, vm: &str, pid: u32) {
        self.request(vm, pid, false, false);
    }

    /// As [`Scopes::take`], for a VM's next QEMU, which joins the former one.
    pub(crate) fn join(&self, vm: &str, pid: u32) {
        self.request(vm, pid, true, true);
    }

    /// As [`Scopes::join`], for a QEMU that was just launched, and may fail to start.
    pub(crate) fn join_early(&self, vm: &str, pid: u32) {
        self.request(vm, pid, false, true);
    }

    /// Whether a VM's next QEMU gets into the cgroup of its former one, `pid`: into its scope, or,
    /// where VMs have none, into the agent's group if both are there.
    pub(crate) fn next_joins(&self, vm: &str, pid: u32) -> bool {
        let (Some(its), Some(own)) = (groups(&pid.to_string()), groups("self")) else {
            return false;
        };
        match &self.0 {
            Some(_) => is_in_scope(&its, vm),
            None => within(&its, UNIFIED) == within(&own, UNIFIED),
        }
    }

    fn request(&self, vm: &str, pid: u32, answers: bool, joins: bool) {
        if let Some(sender) = &self.0 {
            let (vm, tries_left) = (vm.to_owned(), TRIES);
            // Sending can't fail: the thread ends with the agent.
            let _ = sender.send(ScopeRequest { vm, pid, answers, joins, tries_left });
        }
    }
}

/// Serves requests until there can be no more. `take` returns one that is to be tried again, which
/// holds up no other.
fn serve<W>(receiver: &Receiver<W>, mut take: impl FnMut(W) -> Option<W>) {
    let mut later: Vec<W> = Vec::new();
    let mut due = Instant::now();
    loop {
        let next = match later.is_empty() {
            true => receiver.recv().map_err(RecvTimeoutError::from),
            false => receiver.recv_deadline(due),
        };
        match next {
            Ok(request) => {
                if later.is_empty() {
                    due = Instant::now() + RETRY;
                }
                later.extend(take(request));
            }
            Err(RecvTimeoutError::Timeout) => {
                later = later.into_iter().filter_map(&mut take).collect();
                due = Instant::now() + RETRY;
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

impl Unit {
    /// Finds the unit by the cgroup that systemd made for it.
    fn of(groups: &str) -> Option<Self> {
        HIERARCHIES.iter().find_map(|hierarchy| {
            let cgroup = within(groups, hierarchy)?;
            let name = cgroup.rsplit('/').next()?;
            let unit = || Self { hierarchy, cgroup: cgroup.to_owned(), name: name.to_owned() };
            name.ends_with(".service").then(unit)
        })
    }

    fn has(&self, pid: u32) -> bool {
        groups(&pid.to_string())
            .is_some_and(|groups| within(&groups, self.hierarchy) == Some(&self.cgroup))
    }
}

/// The cgroups of a process, one line per hierarchy.
fn groups(process: &str) -> Option<String> {
    fs::read_to_string(format!("/proc/{process}/cgroup")).ok()
}

fn within<'g>(groups: &'g str, hierarchy: &str) -> Option<&'g str> {
    groups.lines().find_map(|line| Some(line.split_once(hierarchy)?.1))
}

/// Whether a process in these groups is in the VM's scope.
fn is_in_scope(groups: &str, vm: &str) -> bool {
    let scope = scope_of(vm);
    within(groups, UNIFIED).is_some_and(|group| group.split('/').any(|part| part == scope))
}

fn scope_of(vm: &str) -> String {
    format!("droveway-vm-{vm}.scope")
}

impl ScopeRequest {
    /// Returns the request if it is to be tried again.
    fn take_out_of(self, unit: &Unit) -> Option<Self> {
        // The process may have ended, and its id may be in use again.
        if !unit.has(self.pid) {
            return None;
        }
        let mut asked = ask(&self.call(unit));
        if self.joins && asked.as_ref().is_err_and(|why| why.contains("already")) {
            asked = ask(&self.join_call());
        }
        let why = match asked {
            Ok(()) => return None,
            Err(why) if !why.contains("already") => why,
            Err(_) if self.tries_left == 0 => "another process has its scope".to_owned(),
            Err(_) => return Some(Self { tries_left: self.tries_left - 1, ..self }),
        };
        match self.answers {
            true => tracing::warn!(vm = self.vm, why, "its QEMU stays in the agent's unit"),
            false => tracing::debug!(vm = self.vm, why, "its QEMU is not moved yet"),
        }
        None
    }

    fn scope(&self) -> String {
        scope_of(&self.vm)
    }

    /// To the scope that there is.
    fn join_call(&self) -> Vec<String> {
        let (scope, pid) = (self.scope(), self.pid.to_string());
        // The unit; the cgroup in it, which is its own; how many processes.
        let words = ["AttachProcessesToUnit", "ssau", &scope, "", "1", &pid];
        words.map(str::to_owned).to_vec()
    }

    fn call(&self, unit: &Unit) -> Vec<String> {
        let Self { vm, pid, .. } = self;
        let (pid, scope) = (pid.to_string(), self.scope());
        let description = format!("Virtual machine {vm}");
        let words = [
            // The name; fail if it exists; the properties; no other units.
            &["StartTransientUnit", "ssa(sv)a(sa(sv))", &scope, "fail", "7"][..],
            &["Description", "s", &description],
            &["Slice", "s", SLICE],
            &["PIDs", "au", "1", &pid],
            // The agent makes a cgroup in it for a throttled VM.
            &["Delegate", "b", "true"],
            // At shutdown of the host, the agent stops before this scope.
            &["Before", "as", "1", &unit.name],
            // It stops before the network and network file systems do, which QEMU needs to end.
            &["After", "as", "3", "network.target", "network-online.target", "remote-fs.target"],
            &["CollectMode", "s", "inactive-or-failed"],
            &["0"],
        ];
        words.concat().into_iter().map(str::to_owned).collect()
    }
}

/// Asks systemd through `busctl`.
fn ask(call: &[String]) -> Result<(), String> {
    let mut command = Command::new("busctl");
    command.args(["--system", "call", "org.freedesktop.systemd1"]);
    command.args(["/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager"]);
    command.args(call);
    let output = command.output().map_err(|error| format!("busctl: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(pid: u32) -> ScopeRequest {
        let vm = "web1".to_owned();
        ScopeRequest { vm, pid, answers: true, joins: true, tries_left: TRIES }
    }

    #[test]
    fn the_unit_is_known_by_its_cgroup() {
        let unit = |text: &str| Unit::of(text).map(|unit| unit.name);
        for (text, name) in [
            ("0::/system.slice/droveway.service\n", Some("droveway.service")),
            (
                "4:cpu:/x.service\n1:name=systemd:/system.slice/a@1.service\n0::/b.service\n",
                Some("a@1.service"),
            ),
            // Here systemd uses cgroup v2, despite a v1 hierarchy.
            ("1:name=systemd:/\n0::/system.slice/b.service\n", Some("b.service")),
            ("0::/user.slice/user-0.slice/session-1.scope\n", None),
            ("0::/\n", None),
            ("", None),
        ] {
            assert_eq!(unit(text).as_deref(), name, "{text:?}");
        }
    }

    #[test]
    fn without_systemd_nothing_is_asked_for() {
        let scopes = Scopes::default();
        scopes.take("web1", std::process::id());
        scopes.take_early("web1", std::process::id());
        scopes.join("web1", std::process::id());
        assert!(scopes.0.is_none());
    }

    #[test]
    fn a_scope_stops_after_the_agent_and_before_the_network() {
        let unit = Unit::of("0::/system.slice/a.service\n").unwrap();
        let call = request(7).call(&unit);
        let has = |words: &[&str]| call.windows(words.len()).any(|part| part == words);
        assert!(has(&["Before", "as", "1", "a.service"]), "{call:?}");
        let after = ["After", "as", "3", "network.target", "network-online.target"];
        assert!(has(&after) && has(&["remote-fs.target", "CollectMode"]), "{call:?}");
        // busctl is given how many there are.
        let named = ["Description", "Slice", "PIDs", "Delegate", "Before", "After", "CollectMode"];
        assert_eq!(call[4], named.len().to_string(), "{call:?}");
        assert!(named.iter().all(|name| has(&[*name])), "{call:?}");
    }

    #[test]
    fn the_next_qemu_joins_the_scope_that_there_is() {
        let call = request(7).join_call();
        assert_eq!(call, ["AttachProcessesToUnit", "ssau", "droveway-vm-web1.scope", "", "1", "7"]);
    }

    #[test]
    fn the_next_qemu_gets_into_the_group_of_the_former_one() {
        for (groups, is_there) in [
            ("0::/droveway.slice/droveway-vm-web1.scope\n", true),
            ("1:name=systemd:/\n0::/droveway.slice/droveway-vm-web1.scope/vcpus\n", true),
            ("0::/droveway.slice/droveway-vm-web10.scope\n", false),
            ("0::/machine.slice/web1.scope\n", false),
            ("", false),
        ] {
            assert_eq!(is_in_scope(groups, "web1"), is_there, "{groups:?}");
        }
        // Where VMs have no scopes, both are in the agent's group.
        assert!(Scopes::default().next_joins("web1", std::process::id()));
    }

    #[test]
    fn one_that_is_tried_again_holds_up_no_other() {
        let (sender, receiver) = unbounded();
        for number in [1, 2, 3] {
            sender.send(number).unwrap();
        }
        let (mut sender, mut taken) = (Some(sender), Vec::new());
        serve(&receiver, |number| {
            taken.push(number);
            let is_again = taken.iter().filter(|one| **one == number).count() > 1;
            if is_again {
                // There will be no more requests.
                drop(sender.take());
            }
            (number == 1 && !is_again).then_some(number)
        });
        assert_eq!(taken, [1, 2, 3, 1]);
    }

    #[test]
    fn a_process_that_is_not_in_the_unit_is_left_where_it_is() {
        let unit = Unit::of("0::/none.service\n").unwrap();
        // If it were moved, this would ask systemd, and fail.
        assert!(request(std::process::id()).take_out_of(&unit).is_none());
    }
}
