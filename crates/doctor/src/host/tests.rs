use facts::memory::{HostMemory, HugePages};
use facts::program::Capabilities;

use super::*;
use facts::host::{Cgroups, Network, Program, Reach, State, VmFacts};

fn healthy() -> Facts {
    let known = Capabilities { version: (9, 2, 1), ..Capabilities::default() };
    Facts {
        host: "host-a".to_owned(),
        clock_source: Some("tsc".to_owned()),
        kvm: Kvm::Usable,
        cgroups: Cgroups { version: Some(2), delegated: true, ..Cgroups::default() },
        reach: Reach { ptrace: true, yama: Some(1) },
        nics: vec![Nic {
            address: "10.0.0.1".to_owned(),
            name: "eth0".to_owned(),
            speed_bytes_per_s: Some(125_000_000),
            mtu: Some(1500),
            ..Nic::default()
        }],
        memory: HostMemory {
            total_bytes: 64 << 30,
            available_bytes: Some(32 << 30),
            huge: vec![HugePages { page_bytes: 2 << 20, total: 16, free: 4 }],
            ..HostMemory::default()
        },
        state: State { path: "/s".to_owned(), free_bytes: Some(50 << 30), total_bytes: 2000 << 30 },
        network: Network { listen: "10.0.0.1:7800".to_owned(), ..Network::default() },
        programs: vec![Program {
            name: "qemu-system-x86_64".to_owned(),
            accelerator: "kvm".to_owned(),
            known: Some(known),
            problem: None,
        }],
        vms: vec![VmFacts {
            name: "web1".to_owned(),
            program: "qemu-system-x86_64".to_owned(),
            qemu: (9, 2, 1),
            accelerator: "kvm".to_owned(),
            ..VmFacts::default()
        }],
        ..Facts::default()
    }
}

#[test]
fn a_healthy_host_has_nothing_to_do() {
    let mut healthy = healthy();
    healthy.shared_huge_pages = Some("advise".to_owned());
    healthy.carries = Some(Carries { directory: "/d".to_owned(), ..Carries::default() });
    let found = of_host(&healthy);
    assert!(found.iter().any(|one| one.text.contains("of the user root, with sockets in /d")));
    assert!(found.iter().all(|one| one.severity == Severity::Ok), "{found:#?}");
    assert!(found.iter().any(|one| one.text.contains("4 of 16 huge pages of 2048 KiB")));
    assert!(found.iter().any(|one| one.text.contains("1000 Mbit/s, MTU 1500")));
    assert!(found.iter().all(|one| one.host == "host-a" && one.text.ends_with('.')));
    let manager = Some("KubeVirt".to_owned());
    healthy.carries = Some(Carries { manager, ..Carries::default() });
    let found = of_host(&healthy);
    assert!(found.iter().any(|one| one.text == "Migrations of KubeVirt are carried."));
    assert!(found.iter().all(|one| one.severity == Severity::Ok), "{found:#?}");
}

/// Each change to a healthy host, the severity of its finding, and a part of its text.
#[test]
fn every_problem_is_reported() {
    type Change = fn(&mut Facts);
    let table: [(Change, Severity, &str); 38] = [
        (
            |f| f.vms[0].blockers = vec!["non-migratable device: x/nvme".to_owned()],
            Severity::Warning,
            "web1 can't be moved: non-migratable device: x/nvme.",
        ),
        (
            |f| {
                let open_address = Some("10.0.0.2".to_owned());
                f.carries = Some(Carries { open_address, ..Carries::default() });
            },
            Severity::Warning,
            "wait for VMs at 10.0.0.2, where other hosts reach them",
        ),
        (
            |f| {
                let open_ports = vec![49216, 49217];
                f.carries = Some(Carries { open_ports, ..Carries::default() });
            },
            Severity::Warning,
            "at port 49216, 49217, where other hosts reach it",
        ),
        (
            |f| {
                let refused = Some("the system refuses `openat2`".to_owned());
                f.carries = Some(Carries { refused, ..Carries::default() });
            },
            Severity::Error,
            "unix sockets fail here: the system refuses `openat2`",
        ),
        (
            |f| f.vms[0].may_crash_at_reset = true,
            Severity::Warning,
            "web1: an earlier Droveway moved it here",
        ),
        (
            |f| f.left_over = vec!["An upgrade of web1 left a QEMU".to_owned()],
            Severity::Warning,
            "An upgrade of web1 left a QEMU.",
        ),
        (
            |f| {
                let missing = vec!["migration_port_min = 49216".to_owned()];
                f.carries = Some(Carries { libvirt: true, missing, ..Carries::default() });
            },
            Severity::Warning,
            "qemu.conf lacks migration_port_min = 49216",
        ),
        (
            |f| {
                let manager = Some("Proxmox VE".to_owned());
                let missing = vec!["/run/qemu-server can't be written (no)".to_owned()];
                f.carries = Some(Carries { manager, missing, ..Carries::default() });
            },
            Severity::Warning,
            "Proxmox VE from here bypass the agents: /run/qemu-server can't",
        ),
        (|f| f.qemu_user.root = true, Severity::Note, "started as root"),
        (|f| f.vms[0].runs_as_root = true, Severity::Warning, "The QEMU of web1 runs as root"),
        (
            |f| f.exposed = vec!["every user of this host can read agent.toml".to_owned()],
            Severity::Warning,
            "every user of this host can read agent.toml",
        ),
        (|f| f.kvm = Kvm::Missing, Severity::Warning, "no /dev/kvm"),
        (|f| f.kvm = Kvm::Denied("no".to_owned()), Severity::Warning, "can't be opened (no)"),
        (
            |f| f.programs[0].known.as_mut().unwrap().version = (10, 0, 2),
            Severity::Note,
            "QEMU 10.0.2 may hang",
        ),
        (
            |f| f.programs[0].known.as_mut().unwrap().version = (7, 2, 22),
            Severity::Note,
            "web1 runs with QEMU 9.2.1, and qemu-system-x86_64 is QEMU 7.2.22 now",
        ),
        (
            |f| f.vms[0].program_replaced = true,
            Severity::Note,
            "The QEMU of web1 runs a program that was replaced on disk",
        ),
        (
            |f| {
                f.kvm = Kvm::Missing;
                f.programs[0].known.as_mut().unwrap().version = (7, 2, 22);
            },
            Severity::Warning,
            "QEMU 7.2.22 loses track of pages",
        ),
        (
            |f| {
                f.programs[0].known = None;
                f.programs[0].problem = Some("there is none".to_owned());
            },
            Severity::Warning,
            "(kvm, web1) doesn't answer: there is none",
        ),
        (|f| f.reach.yama = Some(3), Severity::Warning, "ptrace_scope is 3"),
        (
            |f| f.reach = Reach { ptrace: false, yama: Some(2) },
            Severity::Warning,
            "denies the agent access",
        ),
        (
            |f| f.reach = Reach { ptrace: false, yama: None },
            Severity::Note,
            "QEMUs of its own user",
        ),
        (
            |f| f.vms[0].unreached = Some("RAM `pc.ram` is placed inline".to_owned()),
            Severity::Note,
            "web1: RAM `pc.ram`",
        ),
        (|f| f.vms[0].shared_bytes = 8 << 30, Severity::Note, "all 8192 MiB of its shared memory"),
        (
            |f| {
                f.vms[0].shared_bytes = 8 << 30;
                f.vms[0].huge_bytes = vec![(2 << 20, 4 << 30)];
                f.shared_huge_pages = Some("never".to_owned());
            },
            Severity::Note,
            "web1: its 4096 MiB of shared memory have no huge pages, since shmem_enabled is",
        ),
        (|f| f.cgroups.delegated = false, Severity::Note, "may not make groups"),
        (|f| f.cgroups.version = None, Severity::Note, "There are no control groups"),
        (|f| f.cgroups.forbidden = true, Severity::Note, "`cgroups = false`"),
        (
            |f| f.vms[0].unthrottled = Some("the cgroup /a has no cpu controller".to_owned()),
            Severity::Note,
            "web1 can't be throttled: the cgroup /a has no cpu controller.",
        ),
        (|f| f.clock_source = Some("hpet".to_owned()), Severity::Warning, "from hpet"),
        (|f| f.memory.available_bytes = Some(1 << 30), Severity::Warning, "1024 MiB of 64 GiB"),
        (|f| f.state.free_bytes = Some(1 << 20), Severity::Error, "/s has 1 MiB free"),
        (
            |f| f.state.free_bytes = Some(7 << 30),
            Severity::Warning,
            "/s has 7168 MiB of 2000 GiB free",
        ),
        (
            |f| (f.state.free_bytes, f.state.total_bytes) = (Some(4 << 30), 100 << 30),
            Severity::Warning,
            "/s has 4096 MiB of 100 GiB free",
        ),
        (|f| f.nics[0].speed_bytes_per_s = None, Severity::Note, "doesn't report its speed"),
        (
            |f| f.nics[0].problem = Some("nobody has it".to_owned()),
            Severity::Error,
            "10.0.0.1 can't be used: nobody has it",
        ),
        (|f| f.network.plaintext = true, Severity::Warning, "--insecure-plaintext"),
        (
            |f| {
                f.network.certificate = Some("it has expired on 2020-01-01".to_owned());
                f.network.certificate_refused = true;
            },
            Severity::Error,
            "refuse this one: it has expired",
        ),
        (
            |f| f.network.certificate = Some("it expires on 2030-01-01".to_owned()),
            Severity::Warning,
            "expires on 2030-01-01",
        ),
    ];
    for (change, severity, piece) in table {
        let mut facts = healthy();
        change(&mut facts);
        let found = of_host(&facts);
        let told = found.iter().any(|one| one.severity == severity && one.text.contains(piece));
        assert!(told, "{piece}: {found:#?}");
    }
}

/// Notes about QEMU of a host to which a VM of this program may come.
fn notes(facts: &Facts, program: &str) -> Vec<String> {
    let coming = VmFacts { program: program.to_owned(), ..facts.vms[0].clone() };
    let found = of_destination(facts, &[coming]).into_iter();
    let found = found.filter(|one| one.about == "qemu" && one.severity > Severity::Ok);
    found.map(|one| one.text).collect()
}

#[test]
fn problems_of_versions_are_reported_once_and_where_a_vm_uses_them() {
    let mut facts = healthy();
    let program = |name: &str, version| Program {
        name: name.to_owned(),
        accelerator: "kvm".to_owned(),
        known: Some(Capabilities { version, ..Capabilities::default() }),
        problem: None,
    };
    let missing = Program { known: None, ..program("/opt/missing", (0, 0, 0)) };
    facts.programs.push(program("/usr/bin/qemu-system-x86_64", (9, 2, 1)));
    facts.programs.push(program("/opt/old", (8, 2, 0)));
    facts.programs.push(missing);
    let ends = "QEMU 8.2.0 ends when it can't load";
    assert_eq!(notes(&facts, "qemu-system-x86_64"), [""; 0]);
    // The VM itself says what is missing.
    assert_eq!(notes(&facts, "/opt/missing"), [""; 0]);
    let [only] = &notes(&facts, "/opt/old")[..] else { panic!() };
    assert!(only.starts_with(ends), "{only}");
    // The same version once more, and a VM that runs with it.
    facts.programs.push(program("/opt/also-old", (8, 2, 0)));
    facts.vms.push(VmFacts { program: "/opt/also-old".to_owned(), ..facts.vms[0].clone() });
    facts.vms[1].qemu = (8, 2, 0);
    let [only] = &notes(&facts, "/opt/old")[..] else { panic!() };
    assert!(only.starts_with(ends), "{only}");
    // Where there is no VM, the program that the first one would have.
    facts.vms.clear();
    facts.programs = vec![program("qemu-system-x86_64", (8, 2, 0))];
    assert!(of_host(&facts).iter().any(|one| one.text.starts_with(ends)));
}

#[test]
fn vms_on_replaced_programs_are_counted_once() {
    let mut facts = healthy();
    facts.vms.push(VmFacts { name: "web2".to_owned(), ..facts.vms[0].clone() });
    facts.vms.iter_mut().for_each(|vm| vm.program_replaced = true);
    facts.programs[0].known.as_mut().unwrap().version = (9, 2, 4);
    let found = of_host(&facts);
    let notes: Vec<_> = found.iter().filter(|one| one.severity > Severity::Ok).collect();
    let [only] = &notes[..] else { panic!("{notes:#?}") };
    assert!(only.text.starts_with("The QEMUs of web1 and 1 more run programs"), "{only:?}");
}

#[test]
fn where_kvm_is_not_known_no_lack_of_it_is_reported() {
    let mut facts = healthy();
    facts.kvm = Kvm::Unknown;
    facts.programs[0].known.as_mut().unwrap().version = (7, 2, 22);
    for vms in [facts.vms.clone(), Vec::new()] {
        facts.vms = vms;
        let found = of_host(&facts);
        let says = |piece: &str| found.iter().any(|one| one.text.contains(piece));
        assert!(!says("KVM") && !says("/dev/kvm") && !says("loses track"), "{found:#?}");
    }
}

#[test]
fn what_is_little_room_depends_on_the_file_system() {
    for (total_gib, little_gib) in [(0, 1), (4, 1), (20, 1), (100, 5), (160, 8), (9000, 8)] {
        assert_eq!(state_little(total_gib << 30), little_gib << 30, "{total_gib} GiB");
    }
}

#[test]
fn empty_facts_give_no_warnings() {
    let found = of_host(&Facts::default());
    assert!(found.iter().all(|one| one.severity < Severity::Warning), "{found:#?}");
}
