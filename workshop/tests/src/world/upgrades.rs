//! Another QEMU for VMs on the host where they run, and checks after it.

use std::fs;

use api::{Audited, Outcome, Report, UpgradeHow, UpgradePlan};
use lab::fatal::{Kind, fatal};
use lab::guest::Guest;

use super::{Side, World, assert_arrived, until_gone};
use crate::moving::{Moving, audited_deeply};

impl World {
    /// How these VMs can get another QEMU on their host, as `upgrade --dry-run` reports it.
    ///
    /// # Panics
    /// If the command fails.
    #[must_use]
    pub fn upgrade_plans(&self, at: Side, args: &[&str]) -> Vec<UpgradePlan> {
        let text = self.tells(at, &[&["upgrade", "--dry-run", "--json"][..], args].concat());
        serde_json::from_str(&text).unwrap()
    }

    /// Begins to give guests another QEMU on their host. `args` name the VMs.
    ///
    /// # Panics
    /// If the command can't be started.
    #[must_use]
    pub fn begin_upgrade(&self, guests: &[&Guest], at: Side, args: &[&str]) -> Moving {
        for guest in guests {
            // Until the former QEMU has ended, this waits for its turn at the same socket.
            guest.expect_on(self.host(at)).unwrap();
        }
        let mut upgrade = [&["upgrade", "--json"][..], args].concat();
        audited_deeply(&mut upgrade);
        Moving::new(self.agent(at).command(self.host(at), &upgrade))
    }

    /// The QEMU in which a VM is to arrive on a host, from its start on. The one that has the VM
    /// may have started in the same way.
    ///
    /// # Panics
    /// If the host's processes can't be listed.
    #[must_use]
    pub fn arriving_qemu(&self, at: Side, former: u32) -> Option<u32> {
        let waits = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            *pid != former && line.split(|byte| *byte == 0).any(|word| word == b"-incoming")
        };
        self.host(at).processes().unwrap().into_iter().find(waits)
    }

    /// Gives a guest another QEMU on its host in this way, checks it there, and checks that nothing
    /// of the former QEMU is left.
    ///
    /// # Panics
    /// If anything is wrong.
    #[must_use]
    pub fn upgrade(&self, guest: &Guest, at: Side, args: &[&str]) -> Report {
        let args = [&[guest.spec.name.as_str()][..], args].concat();
        let [plan] = self.upgrade_plans(at, &args).try_into().unwrap();
        assert_ne!(plan.how, UpgradeHow::Not, "{plan:?}");
        let former = self.listed(at, guest).pid;
        let moving = self.begin_upgrade(&[guest], at, &args);
        let [report] = self.wait_upgraded(at, moving).try_into().unwrap();
        let is_compared = matches!(report.audit, Audited::Same { pages: 1.., .. });
        assert!(is_compared, "{:?}", report.audit);
        self.assert_upgraded(guest, at, former);
        assert_arrived(guest, &self.kit, &report.audit);
        report
    }

    /// Waits for the end of a command that gives VMs another QEMU, all of which must get it.
    ///
    /// # Panics
    /// If one of them does not.
    #[must_use]
    pub fn wait_upgraded(&self, at: Side, moving: Moving) -> Vec<Report> {
        let (success, output, said) = moving.wait_any();
        assert!(success, "{said}\n{output}\n{}", self.agent(at).log_text());
        let reports: Vec<Report> = serde_json::from_str(&output)
            .unwrap_or_else(|error| panic!("no reports: {error}\n{output}\n{said}"));
        for report in &reports {
            assert_eq!(report.outcome, Outcome::Done, "{said}");
            if let Audited::Differences { .. } = report.audit {
                fatal(Kind::WrongPage, format_args!("{:?}\n{said}", report.audit));
            }
        }
        reports
    }

    /// Asserts that a guest runs in another QEMU than the former one, of which nothing is left.
    ///
    /// # Panics
    /// If not.
    pub fn assert_upgraded(&self, guest: &Guest, at: Side, former: u32) {
        let vm = self.listed(at, guest);
        assert_ne!(vm.pid, former, "{vm:?}\n{}", self.agent(at).log_text());
        self.assert_runs(at, &vm);
        self.assert_nothing_else(at);
        self.assert_nothing_left(at.other());
    }

    /// Asserts that a host has nothing but its VMs: a QEMU, a directory and no journal for each.
    ///
    /// # Panics
    /// If there is something else.
    pub fn assert_nothing_else(&self, at: Side) {
        let vms = || {
            let mut names: Vec<String> = self.vms(at).into_iter().map(|vm| vm.name).collect();
            names.sort();
            names
        };
        until_gone("no directory is left but those of VMs", || {
            let mut dirs = self.state_files(at, "vms");
            dirs.sort();
            dirs == vms()
        });
        // A QEMU's files are in the VM's directory or in its second seat, never in both.
        let has_one_seat = |name: &String| {
            let files = self.state_files(at, &format!("vms/{name}"));
            let has = |file: &str| files.iter().any(|one| one == file);
            !has("next.json") && has("qemu.log") != has("2")
        };
        until_gone("each VM has one seat", || vms().iter().all(has_one_seat));
        until_gone("no journal is left", || self.state_files(at, "journals").is_empty());
        let pids: Vec<u32> = self.vms(at).iter().map(|vm| vm.pid).collect();
        self.assert_only(at, &pids);
    }
}
