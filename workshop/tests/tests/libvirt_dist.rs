//! The files in `dist/` for hosts with libvirt are valid for the programs that read them.

use std::fs;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use end_to_end::note;
use lab::hosts::{Host, Hosts, Link};
use lab::libvirt::{KUBEVIRT_RIGHTS, WAITS_AT};
use lab::{program, setup};
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;

fn dist(name: &str) -> String {
    fs::read_to_string(setup::repository().join("dist").join(name)).unwrap()
}

/// Compiles a profile without loading it.
fn compile(root: &Path, base: &Path, profile: &str) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("profile");
    fs::write(&file, profile).unwrap();
    Command::new(root.join("sbin/apparmor_parser"))
        .args(["--skip-kernel-load", "--skip-cache", "--stdout", "--base"])
        .args([base, &file])
        .output()
        .unwrap()
}

#[test]
fn apparmor_compiles_the_rules_for_vms() {
    let root = setup::apparmor().unwrap();
    // With our lines where libvirt's abstraction includes a site's additions.
    let base = tempfile::tempdir().unwrap();
    let profiles = root.join("etc/apparmor.d");
    let copied = Command::new("cp").arg("-a").arg(profiles.join(".")).arg(base.path()).status();
    assert!(copied.unwrap().success());
    let local = base.path().join("local/abstractions");
    fs::create_dir_all(&local).unwrap();
    fs::write(local.join("libvirt-qemu"), "").unwrap();
    let profile = "#include <tunables/global>\nprofile vm /usr/bin/qemu-system-x86_64 {\n  \
                   #include <abstractions/libvirt-qemu>\n}\n";
    let without = compile(&root, base.path(), profile);
    assert!(without.status.success(), "{}", String::from_utf8_lossy(&without.stderr));

    let ours = dist("apparmor/libvirt-qemu");
    fs::write(local.join("libvirt-qemu"), &ours).unwrap();
    let with = compile(&root, base.path(), profile);
    assert!(with.status.success(), "{}", String::from_utf8_lossy(&with.stderr));
    assert_ne!(with.stdout, without.stdout, "our lines are not in it");

    fs::write(local.join("libvirt-qemu"), ours.replace("owner /", "ownr /")).unwrap();
    assert!(!compile(&root, base.path(), profile).status.success(), "it takes everything");
}

/// `make kubevirt-test` has Kubernetes' own code read the manifests.
#[test]
fn agents_for_kubevirt_have_the_rights_that_tests_use() {
    let line = format!("add: [{}]\n", KUBEVIRT_RIGHTS.join(", "));
    assert!(dist("kubevirt/daemonset.yaml").contains(&line), "{line}");
}

/// KubeVirt's own labels change while a node runs, and that would delete the node's agent.
#[test]
fn agents_for_kubevirt_are_on_nodes_with_a_label_that_only_operators_change() {
    let set = dist("kubevirt/daemonset.yaml");
    let selector =
        "\n      nodeSelector:\n        kubernetes.io/os: linux\n        droveway: \"true\"\n";
    let (_, rest) = set.split_once(selector).unwrap();
    assert!(rest.starts_with("      priorityClassName:"), "there are more labels");
    let guide = fs::read_to_string(setup::repository().join("docs/KUBEVIRT.md")).unwrap();
    assert!(guide.contains("kubectl label nodes -l kubevirt.io/schedulable=true droveway=true"));
}

/// With the former version's tag, nodes would keep the former image.
#[test]
fn files_for_managers_name_this_version() {
    let version = env!("CARGO_PKG_VERSION");
    let guide = fs::read_to_string(setup::repository().join("docs/KUBEVIRT.md")).unwrap();
    for (text, before) in [
        (dist("kubevirt/kustomization.yaml"), "newTag: \""),
        (dist("kubevirt/Containerfile"), "REGISTRY/droveway:"),
        (dist("ansible/inventory.yml"), "packages/droveway_"),
        (guide, "REGISTRY/droveway:"),
    ] {
        let tags: Vec<_> = text.split(before).skip(1).collect();
        assert!(!tags.is_empty(), "{before}");
        assert!(tags.iter().all(|tag| tag.starts_with(version)), "{before}{tags:?}");
    }
}

/// Evaluates the file as needrestart does, and prints what it then chooses for each unit.
const NEEDRESTART: &str = r#"
    use strict; use warnings;
    our %nrconf = (override_rc => { qr(^dbus) => 0 });
    my $file = shift;
    eval do { local (@ARGV, $/) = $file; <> };
    die $@ if $@;
    for my $unit (@ARGV) {
        my ($rule) = grep { $unit =~ /$_/ } keys %{$nrconf{override_rc}};
        print "$unit ", $rule ? $nrconf{override_rc}{$rule} : "default", "\n";
    }
"#;

#[test]
fn needrestart_does_not_restart_agents_by_itself() {
    let file = setup::repository().join("dist/needrestart/droveway.conf");
    let mut perl = Command::new("perl");
    perl.args(["-e", NEEDRESTART]).arg(file);
    perl.args(["droveway.service", "droveway-carry.service", "droveway-guest.service"]);
    let chosen = program::output(perl.arg("dbus.service")).unwrap();
    let expected = "droveway.service 0\ndroveway-carry.service 0\n\
                    droveway-guest.service default\ndbus.service 0\n";
    assert_eq!(chosen, expected);
}

/// Loads rules on a host, twice: the second time they replace the first.
fn load(host: &Host, rules: &str) {
    let nft = setup::nft().unwrap();
    let file = setup::repository().join("dist/nftables").join(rules);
    for _ in 0..2 {
        let mut command = host.command(&nft.program);
        command.env("LD_LIBRARY_PATH", &nft.libraries).arg("--file").arg(&file);
        program::output(&mut command).unwrap();
    }
}

/// What `run` makes belongs to this user of the host.
fn as_user<T: Send>(host: &Host, uid: u32, run: impl FnOnce() -> T + Send) -> T {
    host.within(|| {
        let uid = Uid::from_raw(uid);
        set_thread_res_uid(uid, uid, uid).unwrap();
        run()
    })
}

fn listens(host: &Host, uid: u32, at: &str) -> TcpListener {
    as_user(host, uid, || TcpListener::bind(at).unwrap())
}

fn connects(host: &Host, uid: u32, at: &str) -> Result<(), ErrorKind> {
    let at = at.parse().unwrap();
    let connect = || TcpStream::connect_timeout(&at, SILENCE);
    as_user(host, uid, connect).map(drop).map_err(|error| error.kind())
}

/// How long a connection is tried whose packets are dropped.
const SILENCE: Duration = Duration::from_secs(1);
const ROOT: u32 = 0;
const QEMU: u32 = 64055;
const NOBODY: u32 = 65534;

#[test]
fn only_agents_and_qemus_use_the_addresses_of_migrations() {
    let host = Hosts::new(Link::unshaped()).unwrap().a;
    let (agent, qemu) = ("127.7.0.2:49216", format!("{WAITS_AT}:49152"));
    let (squatter, another) = ("127.7.0.3:49280", "127.0.0.1:49152");
    let _open = [
        listens(&host, ROOT, agent),
        listens(&host, QEMU, &qemu),
        listens(&host, NOBODY, squatter),
        listens(&host, NOBODY, another),
    ];
    let at_each = |uid| [agent, &qemu, squatter, another].map(|at| connects(&host, uid, at));
    for uid in [ROOT, QEMU, NOBODY] {
        assert_eq!(at_each(uid), [Ok(()); 4], "{uid}");
    }
    load(&host, "droveway-carry.nft");
    let (refused, dropped) = (Err(ErrorKind::ConnectionRefused), Err(ErrorKind::TimedOut));
    // The agent and libvirt, which reach QEMUs and agents.
    assert_eq!(at_each(ROOT), [Ok(()), Ok(()), dropped, Ok(())]);
    // A QEMU that makes its connections itself.
    assert_eq!(at_each(QEMU), [Ok(()), refused, dropped, Ok(())]);
    assert_eq!(at_each(NOBODY), [refused, refused, refused, Ok(())]);
    // An agent that is down is seen at once.
    assert_eq!(connects(&host, ROOT, "127.7.0.2:49217"), refused);
}

#[test]
fn other_hosts_do_not_reach_qemus_that_wait() {
    let hosts = Hosts::new(Link::unshaped()).unwrap();
    let address = hosts.b.addresses[0];
    let [waiting, agent] = [49216, 7800].map(|port| SocketAddr::new(address, port).to_string());
    let _open = [listens(&hosts.b, QEMU, &waiting), listens(&hosts.b, ROOT, &agent)];
    assert_eq!(connects(&hosts.a, ROOT, &waiting), Ok(()));
    load(&hosts.b, "droveway-incoming.nft");
    assert_eq!(connects(&hosts.a, ROOT, &waiting), Err(ErrorKind::TimedOut));
    assert_eq!(connects(&hosts.b, ROOT, &waiting), Ok(()));
    assert_eq!(connects(&hosts.a, ROOT, &agent), Ok(()));
}

#[test]
fn systemd_takes_the_units() {
    let Some(analyze) = program::find("systemd-analyze") else {
        note("the unit in dist/ was not checked: this system has no systemd-analyze");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let verify = |unit: &str| {
        let file = dir.path().join("droveway.service");
        fs::write(&file, unit).unwrap();
        let args = ["--recursive-errors=no", "--man=no", "verify"];
        let output = Command::new(&analyze).args(args).arg(&file).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let about_it: String = said.lines().filter(|line| line.contains("droveway")).collect();
        (output.status.success(), about_it)
    };
    // The program is at another path here.
    let [plain, carry] = ["droveway", "droveway-carry"].map(|name| {
        let unit = dist(&format!("systemd/{name}.service"));
        let unit = unit.replace("/usr/bin/droveway", "/bin/true");
        assert_eq!(verify(&unit), (true, String::new()), "{name}");
        let retries = ["\nStartLimitIntervalSec=0\n", "\nRestartSec=2\n"];
        let retries = retries.iter().all(|line| unit.contains(line));
        assert!(retries, "{name}: an address that comes late at boot would leave the agent down");
        unit
    });
    assert!(plain.contains("\nKillMode=process\n"), "a restart of the agent would end all VMs");
    for unit in [&plain, &carry] {
        let is_last = unit.contains("\nBefore=pve-ha-lrm.service\n");
        assert!(is_last, "agents would end while a node's VMs are moved away for its shutdown");
    }
    let (_, said) = verify(&carry.replace("LockPersonality=yes", "LockPersonality=maybe"));
    assert!(said.contains("maybe"), "{said}");
}
