//! Facts about this host from Linux.
//!
//! Those that can't be read are left out, so that a host is examined as far as possible.

use std::fs::{self, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use facts::host::{Carries, Cgroups, Kvm, Nic, QemuUser, Reach, State, Tap, Tsc};
use host::nic::{self, LinkState};
use qemu::launch::User;
use rustix::fs::Access;

use crate::config::{Carry, Manager, NicSpeed};

/// The bit of `CAP_SYS_PTRACE` in a set of capabilities.
const PTRACE_BIT: u32 = 19;
const CGROUPS: &str = "/sys/fs/cgroup";
const LIBVIRT: &str = "/etc/libvirt";
/// Proxmox VE's settings for its whole cluster.
const DATACENTER: &str = "/etc/pve/datacenter.cfg";

/// Whether QEMUs that this agent starts as that user can use KVM.
pub(crate) fn kvm(user: Option<&User>) -> Kvm {
    let device = Path::new("/dev/kvm");
    if let (Some(user), Ok(file)) = (user, device.metadata())
        && !may_open(user, file.uid(), file.gid(), file.mode())
    {
        return Kvm::Denied("QEMU's user is not in its group".to_owned());
    }
    match OpenOptions::new().read(true).write(true).open(device) {
        Ok(_) => Kvm::Usable,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Kvm::Missing,
        Err(error) => Kvm::Denied(error.to_string()),
    }
}

/// Whether the kernel has KVM, even if the agent's own `/dev` does not show it, as in a unit with
/// `PrivateDevices=yes` or in a pod.
pub(super) fn kernel_has_kvm() -> bool {
    lists_kvm(&fs::read_to_string("/proc/misc").unwrap_or_default())
}

fn lists_kvm(misc: &str) -> bool {
    misc.lines().any(|line| line.split_whitespace().nth(1) == Some("kvm"))
}

/// When the kernel gives shared memory huge pages by itself.
pub(super) fn shared_huge_pages() -> Option<String> {
    chosen(&line("/sys/kernel/mm/transparent_hugepage/shmem_enabled")?)
}

/// The setting in brackets: `always within_size advise [never] deny force`.
fn chosen(settings: &str) -> Option<String> {
    let (chosen, _) = settings.split_once('[')?.1.split_once(']')?;
    Some(chosen.to_owned())
}

/// The TSC's properties, from KVM by means of a VM that never runs.
#[cfg(target_arch = "x86_64")]
pub(super) fn tsc() -> Option<Tsc> {
    let kvm = kvm_ioctls::Kvm::new().ok()?;
    let scales = kvm.check_extension(kvm_ioctls::Cap::TscControl);
    let vcpu = kvm.create_vm().and_then(|vm| vm.create_vcpu(0)).ok()?;
    let khz = vcpu.get_tsc_khz().ok().filter(|khz| *khz > 0)?;
    Some(Tsc { khz, scales })
}

/// Other architectures have no TSC.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn tsc() -> Option<Tsc> {
    None
}

/// Whether a user may open a file, by the file's mode alone.
fn may_open(user: &User, uid: u32, gid: u32, mode: u32) -> bool {
    let shift = match () {
        () if user.uid == 0 => return true,
        () if user.uid == uid => 6,
        () if user.gid == gid || user.groups.contains(&gid) => 3,
        () => 0,
    };
    mode >> shift & 0o6 == 0o6
}

pub(super) fn qemu_user(user: Option<&User>) -> QemuUser {
    let own = rustix::process::geteuid().is_root();
    QemuUser { root: user.map_or(own, |user| user.uid == 0), chosen: user.is_some() }
}

pub(super) fn kernel() -> String {
    line("/proc/sys/kernel/osrelease").unwrap_or_default()
}

pub(super) fn clock_source() -> Option<String> {
    line("/sys/devices/system/clocksource/clocksource0/current_clocksource")
}

/// What the agent carries, and what keeps migrations from it. Other hosts reach this one by `nics`.
pub(super) fn carries(carry: &Carry, nics: &[Nic]) -> Carries {
    let refused = managers::takeover::can_open_resolved().err().map(|error| error.to_string());
    let missing = match carry.manager {
        Manager::Libvirt => return Carries { refused, ..of_libvirt(carry, nics) },
        Manager::Kubevirt => without_records(managers::kubevirt::Node::default().records()),
        Manager::Proxmox => {
            let settings = fs::read_to_string(DATACENTER).unwrap_or_default();
            without_tunnels(&carry.directory, &settings)
        }
    };
    Carries { manager: Some(carry.manager.to_string()), refused, missing, ..Carries::default() }
}

fn of_libvirt(carry: &Carry, nics: &[Nic]) -> Carries {
    let libvirt = Path::new(LIBVIRT).is_dir();
    // Without a `qemu.conf`, libvirt uses its defaults.
    let said = fs::read_to_string(Path::new(LIBVIRT).join("qemu.conf")).unwrap_or_default();
    Carries {
        directory: carry.directory.display().to_string(),
        qemu_user: (!carry.qemu_users.is_empty()).then(|| carry.qemu_users.join(" and ")),
        libvirt,
        manager: None,
        refused: None,
        open_address: (!carry.address.is_loopback()).then(|| carry.address.to_string()),
        open_ports: open_ports(carry, nics),
        missing: if libvirt { missing(&said, carry) } else { Vec::new() },
    }
}

/// The ports at which QEMUs wait for VMs and that other hosts can connect to.
fn open_ports(carry: &Carry, nics: &[Nic]) -> Vec<u16> {
    let addresses = nics.iter().filter_map(|nic| nic.address.parse().ok());
    let addresses: Vec<IpAddr> = addresses.filter(|at: &IpAddr| !at.is_loopback()).collect();
    let is_open = |port: &u16| {
        let listens = |at: &IpAddr| nic::has_listener((*at, *port).into()).unwrap_or(false);
        addresses.iter().any(listens)
    };
    carry.ports.clone().filter(is_open).collect()
}

/// The lines that a `qemu.conf` lacks.
fn missing(said: &str, carry: &Carry) -> Vec<String> {
    let quoted = |value: String| format!("\"{value}\"");
    let wanted = [
        ("migration_host", carry.stands_for.map(|host| quoted(host.to_string()))),
        ("migration_address", Some(quoted(carry.address.to_string()))),
        ("migration_port_min", Some(carry.ports.start().to_string())),
        ("migration_port_max", Some(carry.ports.end().to_string())),
    ];
    // libvirt takes the first line that sets a key.
    let says = |key: &str, value: &str| {
        let mut settings = said.lines().filter_map(|line| line.trim().split_once('='));
        let first = settings.find(|(known, _)| known.trim() == key);
        first.is_some_and(|(_, found)| found.trim() == value)
    };
    let lacks = |(key, value): (&str, Option<String>)| {
        let value = value.filter(|value| !says(key, value))?;
        Some(format!("{key} = {value}"))
    };
    wanted.into_iter().filter_map(lacks).collect()
}

/// Why VMs of KubeVirt can't be found when they leave.
fn without_records(records: &Path) -> Vec<String> {
    if records.is_dir() {
        return Vec::new();
    }
    vec![format!("virt-handler has not created {}", records.display())]
}

/// Why the agent can't take the place of Proxmox VE's tunnels, whose sockets are in `directory`.
fn without_tunnels(directory: &Path, settings: &str) -> Vec<String> {
    let mut why = Vec::new();
    if let Err(error) = rustix::fs::access(directory, Access::WRITE_OK) {
        why.push(format!("{} can't be written ({error})", directory.display()));
    }
    if is_insecure(settings) {
        why.push(format!("{DATACENTER} has migration: insecure"));
    }
    why
}

/// Whether Proxmox VE makes no tunnels: `migration: insecure`, with or without `type=` and other
/// properties.
fn is_insecure(settings: &str) -> bool {
    let migration = settings.lines().find_map(|line| line.trim().strip_prefix("migration:"));
    let mut properties = migration.unwrap_or_default().split(',').map(str::trim);
    properties.any(|property| matches!(property, "insecure" | "type=insecure"))
}

/// Whether the agent may access other processes' memory.
pub(super) fn reach() -> Reach {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    Reach {
        ptrace: may_trace(&status),
        yama: line("/proc/sys/kernel/yama/ptrace_scope").and_then(|scope| scope.parse().ok()),
    }
}

fn may_trace(status: &str) -> bool {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set >> PTRACE_BIT & 1 == 1)
}

pub(crate) fn tap(name: &str) -> Tap {
    match nic::link_state(name) {
        Ok(LinkState::Missing) => Tap::Missing,
        Ok(LinkState::Down) => Tap::Down,
        Ok(LinkState::Alone) => Tap::Alone,
        Ok(LinkState::Connected) => Tap::Connected,
        Err(error) => {
            tracing::debug!(name, %error, "a tap's state can't be read");
            Tap::Unknown
        }
    }
}

pub(super) fn cgroups() -> Cgroups {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut found = membership(&own);
    let Some(version) = found.version else { return found };
    let mounted = Path::new(CGROUPS);
    let relative = found.path.trim_start_matches('/').to_owned();
    let may_write = |dir: &Path| rustix::fs::access(dir, Access::WRITE_OK).is_ok();
    if version == 2 {
        let dir = mounted.join(relative);
        let controllers = fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
        found.controllers = controllers.split_whitespace().map(str::to_owned).collect();
        found.delegated = may_write(&dir);
    } else {
        found.delegated = may_write(&mounted.join("cpu").join(relative));
    }
    found
}

/// The cgroups of `/proc/self/cgroup`: `0::PATH` with version 2 alone, otherwise one line per
/// hierarchy.
fn membership(text: &str) -> Cgroups {
    let lines: Vec<(&str, &str)> =
        text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':')).collect();
    let first: Vec<&(&str, &str)> =
        lines.iter().filter(|(controllers, _)| !controllers.is_empty()).collect();
    if first.is_empty() {
        let path = lines.first().map(|(_, path)| (*path).to_owned());
        return Cgroups {
            version: path.is_some().then_some(2),
            path: path.unwrap_or_default(),
            ..Cgroups::default()
        };
    }
    let of_cpu = first.iter().find(|(controllers, _)| controllers.split(',').any(|c| c == "cpu"));
    let controllers = first.iter().flat_map(|(controllers, _)| controllers.split(','));
    Cgroups {
        version: Some(1),
        path: of_cpu.or(first.first()).map_or_else(String::new, |(_, path)| (*path).to_owned()),
        controllers: controllers.map(str::to_owned).collect(),
        ..Cgroups::default()
    }
}

pub(super) fn state(path: &Path) -> State {
    let found = rustix::fs::statvfs(path).ok();
    let found = found.as_ref();
    State {
        path: path.display().to_string(),
        free_bytes: found.map(|fs| fs.f_bavail.saturating_mul(fs.f_frsize)),
        total_bytes: found.map_or(0, |fs| fs.f_blocks.saturating_mul(fs.f_frsize)),
    }
}

pub(super) fn nic(address: IpAddr, said: &[NicSpeed]) -> Nic {
    let said = said.iter().find(|said| said.address == address).map(|said| said.rate.bytes_per_s());
    let address_text = address.to_string();
    match nic::describe(address) {
        Ok(described) => Nic {
            address: address_text,
            name: described.name,
            speed_bytes_per_s: said.or(described.speed_bytes_per_s),
            said: said.is_some(),
            mtu: described.mtu,
            problem: None,
        },
        Err(error) => {
            Nic { address: address_text, problem: Some(error.to_string()), ..Nic::default() }
        }
    }
}

fn line(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn carry() -> Carry {
        Carry {
            address: "10.0.0.2".parse().unwrap(),
            stands_for: Some("127.7.0.2".parse().unwrap()),
            ports: 49216..=49279,
            directory: "/run/droveway/migrate".into(),
            sockets: 4,
            qemu_users: Vec::new(),
            request: engine::CarryRequest::default(),
            manager: Manager::Libvirt,
        }
    }

    #[test]
    fn missing_lines_of_qemu_conf_are_found() {
        let carry = carry();
        let all = "user = \"root\"\n migration_host=\"127.7.0.2\"\nmigration_address = \
                   \"10.0.0.2\"\nmigration_port_min = 49216\nmigration_port_max = 49279\n";
        assert_eq!(missing(all, &carry), Vec::<String>::new());
        let other = all.replace("49216", "49152").replace(" migration_host", "#migration_host");
        let lacks = ["migration_host = \"127.7.0.2\"", "migration_port_min = 49216"];
        assert_eq!(missing(&other, &carry), lacks);
        assert_eq!(missing("", &carry).len(), 4);
        let before = format!("migration_host = \"10.0.0.9\"\n{all}");
        assert_eq!(missing(&before, &carry), ["migration_host = \"127.7.0.2\""]);
    }

    #[test]
    fn qemus_that_other_hosts_reach_are_found() {
        let to_others = Nic { address: "192.0.2.77".to_owned(), ..Nic::default() };
        let to_itself = Nic { address: "127.0.0.1".to_owned(), ..Nic::default() };
        let nics = [to_itself, to_others];
        let carries = |address: &str, waiting: &TcpListener| {
            let port = waiting.local_addr().unwrap().port();
            let address = address.parse().unwrap();
            let found = of_libvirt(&Carry { address, ports: port..=port, ..carry() }, &nics);
            (found.open_address, found.open_ports == [port])
        };
        let here = TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(carries("127.6.0.1", &here), (None, false));
        assert_eq!(carries("10.0.0.2", &here), (Some("10.0.0.2".to_owned()), false));
        // At all addresses, which is libvirt's default.
        let everywhere = TcpListener::bind("[::]:0").unwrap();
        assert_eq!(carries("127.6.0.1", &everywhere), (None, true));
    }

    #[test]
    fn what_keeps_other_managers_migrations_from_the_agent_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let none = dir.path().join("none");
        assert_eq!(without_records(dir.path()), Vec::<String>::new());
        let why = without_records(&none);
        assert_eq!(why, [format!("virt-handler has not created {}", none.display())]);

        let secure = "keyboard: de\nmigration: secure,network=10.0.0.0/24\n";
        assert_eq!(without_tunnels(dir.path(), secure), Vec::<String>::new());
        let why = without_tunnels(&none, "migration: insecure\n");
        assert_eq!(why.len(), 2, "{why:?}");
        assert!(why[0].contains("none can't be written (") && why[1].contains(DATACENTER));
        for (settings, expected) in [
            ("", false),
            ("migration_insecure: insecure\n", false),
            ("# migration: insecure\n", false),
            ("migration: type=secure\n", false),
            ("migration: network=10.0.0.0/24,type=insecure\n", true),
            ("console: html5\nmigration: insecure,network=10.0.0.0/24\n", true),
        ] {
            assert_eq!(is_insecure(settings), expected, "{settings}");
        }
    }

    #[test]
    fn the_right_to_trace_is_one_bit() {
        assert!(may_trace("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(may_trace("CapEff:\t0000000000080000\n"));
        assert!(!may_trace("CapEff:\t000001fffff7ffff\nCapPrm:\t000001ffffffffff\n"));
        assert!(!may_trace(""));
    }

    #[test]
    fn a_device_is_for_its_owner_its_group_or_all() {
        let user = User { uid: 7, gid: 8, groups: vec![8, 9] };
        for (uid, gid, mode, expected) in [
            (0, 0, 0o660, false),
            (0, 0, 0o666, true),
            (0, 9, 0o660, true),
            (0, 9, 0o606, false),
            (7, 0, 0o600, true),
        ] {
            assert_eq!(may_open(&user, uid, gid, mode), expected, "{uid} {gid} {mode:o}");
        }
    }

    #[test]
    fn the_kernel_lists_kvm_by_its_name() {
        assert!(lists_kvm("234 btrfs-control\n232 kvm\n183 hw_random\n"));
        assert!(!lists_kvm("234 btrfs-control\n 61 kvm-other\n"));
        assert!(!lists_kvm(""));
    }

    #[test]
    fn the_chosen_setting_is_in_brackets() {
        let settings = "always within_size advise [never] deny force";
        assert_eq!(chosen(settings).as_deref(), Some("never"));
        assert_eq!(chosen("never"), None);
    }

    #[test]
    fn both_versions_of_cgroups_are_told_apart() {
        let second = membership("0::/system.slice/droveway.service\n");
        assert_eq!((second.version, &*second.path), (Some(2), "/system.slice/droveway.service"));
        let first = membership("4:memory:/m\n3:cpu,cpuacct:/c\n1:name=systemd:/s\n0::/s\n");
        assert_eq!((first.version, &*first.path), (Some(1), "/c"));
        assert!(first.controllers.contains(&"memory".to_owned()));
        assert_eq!(membership("").version, None);
    }

    #[test]
    fn this_host_can_be_seen() {
        assert!(!kernel().is_empty());
        let root = state(Path::new("/"));
        assert!(root.free_bytes.is_some_and(|free| free <= root.total_bytes), "{root:?}");
        let loopback = "127.0.0.1".parse().unwrap();
        let said = NicSpeed { address: loopback, rate: "1G".parse().unwrap() };
        let seen = nic(loopback, &[said]);
        assert_eq!((seen.name.as_str(), seen.speed_bytes_per_s), ("lo", Some(125_000_000)));
        assert!(nic("192.0.2.77".parse().unwrap(), &[]).problem.is_some());
    }
}
