//! Two hosts with a libvirtd each, and an administrator's commands to them.

pub mod carried;
pub mod virt_handlers;

use std::time::Duration;

use lab::guest::Guest;
use lab::hosts::{Host, Hosts, Link};
use lab::libvirt::{Domain, Ended, Libvirtd, Migrating, Migration};
use lab::setup::{self, Kit, Qemu, Version};

use crate::{Side, assert_intact, until};

/// Longest time that a migration may take, on a busy machine too.
const MIGRATION_MAX: Duration = Duration::from_secs(180);

/// An older libvirt may not know the current QEMU.
const KNOWS_CURRENT: Version = Version { major: 11, minor: 0, patch: 0 };

/// From this release on, libvirt has QEMU wait until its destination says that it may stop the VM.
const HAS_QEMU_WAIT: Version = Version { major: 10, minor: 0, patch: 0 };
/// The first and the last QEMU that do so.
const WAITS: [Version; 2] =
    [Version { major: 8, minor: 1, patch: 0 }, Version { major: 11, minor: 0, patch: u32::MAX }];

/// Two hosts, a libvirtd on each.
pub struct LibvirtWorld {
    daemons: [Libvirtd; 2],
    /// The hosts.
    pub hosts: Hosts,
    /// What guests need.
    pub kit: Kit,
    made_of: setup::Libvirt,
}

impl LibvirtWorld {
    /// Makes it, with this link between the hosts.
    ///
    /// # Panics
    /// If that fails; all functions of this file panic on failure.
    #[must_use]
    pub fn new(link: Link) -> Self {
        Self::with(link, |_, _| String::new())
    }

    /// The same, with these additional lines in a host's `qemu.conf`.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn with(link: Link, qemu_conf: impl Fn(&Hosts, &Host) -> String) -> Self {
        let kit = setup::ensure().unwrap();
        let made_of = setup::libvirt(&kit).unwrap();
        Self::of(link, kit, [made_of.clone(), made_of], qemu_conf)
    }

    /// The same, with the newest libvirt available.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn newest(link: Link, qemu_conf: impl Fn(&Hosts, &Host) -> String) -> Self {
        let kit = setup::ensure().unwrap();
        let newest = setup::libvirts(&kit).unwrap().pop().unwrap();
        Self::of(link, kit, [newest.clone(), newest], qemu_conf)
    }

    /// The same, with the distribution's libvirt on A, and the current one on B.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn of_two_releases(link: Link, qemu_conf: impl Fn(&Hosts, &Host) -> String) -> Self {
        let kit = setup::ensure().unwrap();
        let all = setup::libvirts(&kit).unwrap();
        let made_of = [all.first(), all.last()].map(|one| one.unwrap().clone());
        Self::of(link, kit, made_of, qemu_conf)
    }

    fn of(
        link: Link,
        kit: Kit,
        made_of: [setup::Libvirt; 2],
        qemu_conf: impl Fn(&Hosts, &Host) -> String,
    ) -> Self {
        let hosts = Hosts::new(link).unwrap();
        let start =
            |host, made_of| Libvirtd::start(&hosts, host, made_of, &qemu_conf(&hosts, host));
        let daemons =
            [start(&hosts.a, &made_of[0]).unwrap(), start(&hosts.b, &made_of[1]).unwrap()];
        let [made_of, _] = made_of;
        Self { daemons, hosts, kit, made_of }
    }

    /// The same, with both libvirtds in KubeVirt's pods of the VM with this UID.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn in_pods(link: Link, uid: &str) -> Self {
        let kit = setup::ensure().unwrap();
        let made_of = setup::libvirt(&kit).unwrap();
        let hosts = Hosts::new(link).unwrap();
        let daemons = [&hosts.a, &hosts.b]
            .map(|host| Libvirtd::start_in_pod(&hosts, host, &made_of, uid).unwrap());
        Self { daemons, hosts, kit, made_of }
    }

    /// Processes on a host, or in its pod.
    fn processes(&self, side: Side) -> Vec<u32> {
        let host = self.host(side);
        let pod = self.daemon(side).pod();
        pod.map_or_else(|| host.processes(), |pod| pod.processes(host)).unwrap()
    }

    /// The distribution's QEMU, one that is correct with the accelerator at hand (often the same),
    /// and the current one if libvirt knows it.
    #[must_use]
    pub fn qemus(&self) -> Vec<Qemu> {
        let kit = &self.kit;
        let system = self.made_of.system_qemu.clone();
        let mut all = vec![
            Qemu { program: system, version: kit.qemu_system_version },
            Qemu { program: kit.qemu.clone(), version: kit.qemu_version },
        ];
        if self.made_of.version >= KNOWS_CURRENT {
            all.extend(setup::qemus(kit).unwrap().pop());
        }
        all.dedup_by_key(|qemu| qemu.version);
        all
    }

    /// Whether this QEMU waits until its destination says that it may stop the VM, when libvirt
    /// migrates it here.
    #[must_use]
    pub fn has_qemu_wait(&self, qemu: &Qemu) -> bool {
        let [first, last] = WAITS;
        self.made_of.version >= HAS_QEMU_WAIT && (first..=last).contains(&qemu.version)
    }

    /// A host.
    #[must_use]
    pub fn host(&self, side: Side) -> &Host {
        side.of(&self.hosts)
    }

    /// A host's libvirtd.
    #[must_use]
    pub fn daemon(&self, side: Side) -> &Libvirtd {
        &self.daemons[side as usize]
    }

    /// Kills a host's libvirtd, as a crash would.
    pub fn kill_daemon(&mut self, side: Side) {
        self.daemons[side as usize].kill();
    }

    /// Starts a killed libvirtd again.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn start_daemon(&mut self, side: Side) {
        let daemon = Libvirtd::start_again(&self.hosts, self.host(side)).unwrap();
        self.daemons[side as usize] = daemon;
    }

    /// Starts a domain on A.
    ///
    /// # Panics
    /// If libvirt refuses it, or the guest stays silent.
    #[must_use]
    pub fn start(&self, domain: &Domain, qemu: &Qemu) -> Guest {
        let guest = domain.start(self.daemon(Side::A), &self.hosts.a, &self.kit, qemu);
        domain.bring(&self.hosts.b, &self.kit).unwrap();
        guest.unwrap_or_else(|error| panic!("{error}\n{}", self.qemu_log(Side::A, domain)))
    }

    /// The log of a host's QEMU for a domain.
    #[must_use]
    pub fn qemu_log(&self, side: Side, domain: &Domain) -> String {
        let path = format!("/var/log/libvirt/qemu/{}.log", domain.guest.name);
        std::fs::read_to_string(self.host(side).path(&path)).unwrap_or_default()
    }

    /// The output of `virsh`, which must succeed.
    ///
    /// # Panics
    /// If it fails.
    #[must_use]
    pub fn virsh(&self, side: Side, args: &[&str]) -> String {
        self.daemon(side).tells(self.host(side), args).unwrap()
    }

    /// The state of a domain; none if libvirt doesn't know it.
    #[must_use]
    pub fn state(&self, side: Side, name: &str) -> Option<String> {
        let told = self.daemon(side).tells(self.host(side), &["domstate", name]);
        told.ok().map(|state| state.trim().to_owned())
    }

    /// Begins to move a guest to the other host.
    ///
    /// # Panics
    /// If `virsh` can't be started.
    #[must_use]
    pub fn begin(&self, guest: &Guest, from: Side, how: &Migration) -> Migrating {
        let to = from.other();
        guest.expect_on(self.host(to)).unwrap();
        let name = &guest.spec.name;
        how.begin(name, self.daemon(from), self.host(from), self.daemon(to)).unwrap()
    }

    /// Waits for the end of a migration, successful or not.
    ///
    /// # Panics
    /// If it does not end in time.
    #[must_use]
    pub fn end(&self, migrating: Migrating) -> Ended {
        migrating.wait(MIGRATION_MAX).unwrap()
    }

    /// Moves a guest to the other host, which must succeed, and has it check itself.
    ///
    /// # Panics
    /// If anything is wrong.
    pub fn migrate(&self, guest: &Guest, from: Side, how: &Migration) {
        let ended = self.end(self.begin(guest, from, how));
        assert!(ended.success, "{how:?}: {}", ended.said);
        self.assert_only_at(guest, from.other());
        assert_intact(guest);
    }

    /// Asserts that a guest runs on one host, and that the other has neither a domain of it nor a
    /// QEMU.
    ///
    /// # Panics
    /// If it doesn't.
    pub fn assert_only_at(&self, guest: &Guest, side: Side) {
        let name = &guest.spec.name;
        assert_eq!(self.state(side, name).as_deref(), Some("running"));
        until("the other libvirtd has forgotten it", || self.state(side.other(), name).is_none());
        until("no QEMU is left there", || self.processes(side.other()).into_iter().all(is_no_qemu));
    }
}

fn is_no_qemu(pid: u32) -> bool {
    let said = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    !said.starts_with("qemu")
}
