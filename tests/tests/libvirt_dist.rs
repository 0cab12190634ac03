//! The files in `dist/` for hosts with libvirt are valid for the programs that read them.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use end_to_end::note;
use lab::libvirt::KUBEVIRT_RIGHTS;
use lab::{program, setup};

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

#[test]
fn nft_takes_the_rule_for_doors() {
    let Some(nft) = program::find("nft") else {
        note("the rule in dist/ was not checked: this system has no nft");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let check = |rule: &str| {
        let file = dir.path().join("rule.nft");
        fs::write(&file, rule).unwrap();
        let output = Command::new(&nft).args(["--check", "--file"]).arg(&file).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let ours = dist("nftables/droveway-carry.nft");
    assert!(ours.contains("ip saddr 127.7.0.0/16 "), "agents listen at other addresses");
    assert_eq!(check(&ours), (true, String::new()));
    assert!(!check(&ours.replace("skuid", "skuser")).0, "it takes everything");
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
