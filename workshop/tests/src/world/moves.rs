//! Moves from one host to the other, and checks after them.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use api::{Outcome, Progress, Report, VmStatus, VmSummary};
use lab::fatal::{Kind, fatal};
use lab::guest::Guest;
use qemu::qmp::Qmp;

use super::{
    Side, World, assert_arrived, assert_intact, examine, fail_arrived, reached, until, until_gone,
};
use crate::moving::{Moving, complete};

const QMP_TIMEOUT: Duration = Duration::from_secs(60);

impl World {
    /// Begins to move a guest to the other host.
    ///
    /// # Panics
    /// If the command can't be started.
    #[must_use]
    pub fn begin(&self, guest: &Guest, from: Side, args: &[&str]) -> Moving {
        guest.expect_on(self.host(from.other())).unwrap();
        let mut migrate = vec!["migrate", guest.spec.name.as_str(), from.other().name(), "--json"];
        migrate.extend(args);
        complete(&mut migrate);
        Moving::new(self.agent(from).command(self.host(from), &migrate))
    }

    /// Begins to move guests to the other host by a command such as `gang`, given on one of the
    /// two.
    ///
    /// # Panics
    /// If the command can't be started.
    #[must_use]
    pub fn begin_all(&self, guests: &[&Guest], at: Side, from: Side, args: &[&str]) -> Moving {
        for guest in guests {
            guest.expect_on(self.host(from.other())).unwrap();
        }
        Moving::new(self.agent(at).command(self.host(at), args))
    }

    /// Moves a guest to the other host, checks it there, and checks that nothing of it is left
    /// behind.
    #[must_use]
    pub fn migrate(&self, guest: &Guest, from: Side, args: &[&str]) -> Report {
        let moving = self.begin(guest, from, args);
        self.arrive(guest, from, moving)
    }

    /// The migrations that a host's agent runs or has run, the newest first.
    #[must_use]
    pub fn migrations(&self, side: Side) -> Vec<Progress> {
        self.get(side, "/v1/migrations")
    }

    /// Waits for the end of a migration, which must succeed.
    ///
    /// # Panics
    /// If anything is wrong.
    #[must_use]
    pub fn arrive(&self, guest: &Guest, from: Side, moving: Moving) -> Report {
        let ended = moving.wait();
        let log = || {
            let [a, b] = &self.agents;
            format!("host-a: {}\nhost-b: {}", a.log_text(), b.log_text())
        };
        assert_eq!(ended.report.outcome, Outcome::Done, "{}\n{}", ended.said, log());
        assert!(ended.success, "{}", ended.said);
        ended.assert_audited();
        self.assert_moved(guest, from);
        assert_arrived(guest, &self.kit, &ended.report.audit);
        ended.report
    }

    /// Asserts that a guest is on the other host, and only there.
    ///
    /// # Panics
    /// If it isn't.
    pub fn assert_moved(&self, guest: &Guest, from: Side) {
        let vm = self.listed(from.other(), guest);
        self.assert_runs(from.other(), &vm);
        self.assert_nothing_left(from);
        self.assert_only(from.other(), &[vm.pid]);
    }

    /// A guest's VM, which its host's agent must list.
    pub(super) fn listed(&self, side: Side, guest: &Guest) -> VmSummary {
        let name = &guest.spec.name;
        let lost = || fatal(Kind::VmLost, format_args!("{} does not list {name}", side.name()));
        self.vm(side, name).unwrap_or_else(lost)
    }

    /// Asserts that a VM runs, and that no migration of it does.
    ///
    /// # Panics
    /// If not; with the end of its agent's log.
    pub fn assert_runs(&self, side: Side, vm: &VmSummary) {
        assert_eq!(
            (vm.status, vm.migration.as_deref()),
            (VmStatus::Running, None),
            "{vm:?}\n{}",
            self.agent(side).log_text()
        );
    }

    /// Asserts that a guest that did not move goes on at its host, and that nothing of it is on the
    /// other.
    ///
    /// # Panics
    /// If it does not.
    pub fn assert_stayed(&self, guest: &Guest, at: Side, pid: u32) {
        let vm = || self.listed(at, guest);
        // An agent that has just started first settles what its journals record.
        let is_settled = reached(|| vm().status != VmStatus::InDoubt);
        assert!(is_settled, "it is not settled:\n{}", self.agent(at).log_text());
        let vm = vm();
        assert_eq!(vm.pid, pid, "{vm:?}");
        self.assert_runs(at, &vm);
        self.assert_nothing_left(at.other());
        self.assert_only(at, &[pid]);
        assert_intact(guest);
    }

    /// As [`assert_intact`]; for a guest whose last migration has moved it, as [`assert_arrived`].
    ///
    /// # Panics
    /// If it isn't intact.
    pub fn assert_intact(&self, guest: &Guest) {
        let Err(broken) = examine(guest) else { return };
        match self.last_report(guest) {
            Some(last) if last.outcome == Outcome::Done => {
                fail_arrived(&broken, guest, &self.kit, &last.audit)
            }
            _ => fatal(broken.kind, broken.detail),
        }
    }

    /// The report of a guest's last migration, if both agents say what they know of it.
    fn last_report(&self, guest: &Guest) -> Option<Report> {
        let mut known: Vec<Report> = Vec::new();
        for side in [Side::A, Side::B] {
            let listed = self.output(side, &["list", "--migrations", "--json"]).stdout;
            let listed: Vec<Progress> = serde_json::from_slice(&listed).ok()?;
            let Some(last) = listed.iter().find(|one| one.vm == guest.spec.name) else { continue };
            let report = self.output(side, &["report", &last.id, "--json"]).stdout;
            known.push(serde_json::from_slice(&report).ok()?);
        }
        known.into_iter().max_by_key(|report| report.started_unix_s)
    }

    /// Asserts that no VM, no process and no file is left on a host.
    ///
    /// # Panics
    /// If there is.
    pub fn assert_nothing_left(&self, side: Side) {
        until_gone("no VM is left", || self.vms(side).is_empty());
        self.assert_only(side, &[]);
        for dir in ["vms", "run", "slowed"] {
            until_gone(&format!("nothing of the agent's is left in {dir}"), || {
                self.state_files(side, dir).is_empty()
            });
        }
        let known = |name: &str| {
            matches!(name, "agent.log" | "api.sock" | "disk.img" | "state" | "tls")
                // The socket for `xl`, and what runs in place of Xen.
                || matches!(name, "api.xen" | "xen")
                || name.ends_with(".toml")
                || name.ends_with(".console")
                // Guests' sockets: a QEMU that was killed leaves them, and the next one replaces them.
                || name.ends_with(".talk")
                // Disks that both hosts use.
                || name.starts_with("files-")
        };
        let left = || -> Vec<String> {
            let mut names = names(&self.host(side).inside(""));
            names.retain(|name| !known(name));
            names
        };
        if !reached(|| left().is_empty()) {
            let (names, log) = (left(), self.agent(side).log_text());
            fatal(Kind::LeftBehind, format_args!("at {}: {names:?}\n{log}", side.name()));
        }
    }

    /// Removes the sockets that a VM's owner had its QEMU make. QEMU removes them itself unless it
    /// was killed, or ended during its start.
    pub fn remove_own_sockets(&self, side: Side, name: &str) {
        for end in ["talk", "own"] {
            let _ = fs::remove_file(self.host(side).run_dir.join(format!("{name}.{end}")));
        }
    }

    /// Asserts that nothing runs on a host but its agent and these processes.
    ///
    /// # Panics
    /// If something else does.
    pub fn assert_only(&self, side: Side, pids: &[u32]) {
        let agent = self.agent(side).pid();
        let others = || {
            let all = self.host(side).processes().unwrap();
            all.into_iter().filter(|pid| *pid != agent && !pids.contains(pid)).collect::<Vec<_>>()
        };
        until_gone(&format!("{} has no process but its VMs'", side.name()), || others().is_empty());
        until_gone("sockets of the migration are gone", || {
            self.state_files(side, "run").is_empty()
        });
    }

    /// Names in a directory of an agent's state.
    pub(super) fn state_files(&self, side: Side, dir: &str) -> Vec<String> {
        names(&self.host(side).path(self.agent(side).state()).join(dir))
    }

    /// The QMP connection of the VM's owner, on the VM's host.
    ///
    /// # Panics
    /// If QEMU does not answer there.
    #[must_use]
    pub fn own_qmp(&self, side: Side, name: &str) -> Arc<Qmp> {
        let socket = self.host(side).run_dir.join(format!("{name}.own"));
        // The socket exists a moment before QEMU listens on it.
        let mut qmp = None;
        until("QEMU answers at its socket", || {
            qmp = Qmp::connect(&socket, QMP_TIMEOUT).ok();
            qmp.is_some()
        });
        qmp.unwrap()
    }
}

/// Names in a directory.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}
