//! `droveway init` as typed, with directories as the hosts' roots.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use test_scope::TestDir;

use crate::host::{self, Host, text};

const PACKAGED: &str = include_str!("../../../../dist/agent.toml");
const FILES: [(&str, u32); 6] = [
    ("agent.toml", 0o644),
    ("peers.toml", 0o644),
    ("tls/ca.crt", 0o644),
    ("tls/content.key", 0o600),
    ("tls/droveway.crt", 0o644),
    ("tls/droveway.key", 0o600),
];

/// Runs it with a umask of 0, so that only the command itself restricts modes.
fn init(dir: &Path, line: &str) -> Output {
    Command::new("sh")
        .args(["-c", "umask 0 && exec \"$@\"", "sh", env!("CARGO_BIN_EXE_droveway"), "init"])
        .args(line.split_whitespace())
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn works(dir: &Path, line: &str) -> String {
    let output = init(dir, line);
    assert!(output.status.success(), "{line}: {output:?}");
    let said = text(&output.stdout);
    assert!(!said.contains("PRIVATE") && output.stderr.is_empty(), "{output:?}");
    said
}

fn fails(dir: &Path, line: &str) -> String {
    let output = init(dir, line);
    assert!(!output.status.success() && output.stdout.is_empty(), "{line}: {output:?}");
    text(&output.stderr)
}

/// A file's contents, and the metadata that shows whether it was changed.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    inode: u64,
    changed_at: (i64, i64),
    mode: u32,
    bytes: Vec<u8>,
}

/// Every file below a directory.
fn tree(dir: &Path) -> BTreeMap<PathBuf, Found> {
    let mut tree = BTreeMap::new();
    let mut left = vec![dir.to_owned()];
    while let Some(path) = left.pop() {
        let there = fs::metadata(&path).unwrap();
        let mut bytes = Vec::new();
        if there.is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            bytes = fs::read(&path).unwrap();
        }
        let changed_at = (there.mtime(), there.mtime_nsec());
        let mode = there.mode() & 0o777;
        tree.insert(path, Found { inode: there.ino(), changed_at, mode, bytes });
    }
    tree
}

/// Creates the hosts' roots, the second as the package leaves it.
fn roots(dir: &Path) {
    fs::create_dir_all(dir.join("a")).unwrap();
    fs::create_dir_all(dir.join("b/etc/droveway")).unwrap();
    fs::write(dir.join("b/etc/droveway/agent.toml"), PACKAGED).unwrap();
}

fn port() -> u16 {
    host::port().local_addr().unwrap().port()
}

fn findings(host: &Host, other: &str) -> Vec<serde_json::Value> {
    let output = host.command(&["doctor", other, "--json"]).output().unwrap();
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    found["findings"].as_array().unwrap().clone()
}

#[test]
fn two_agents_talk_with_what_was_made() {
    let dir = TestDir::new();
    let dir = dir.path();
    roots(dir);
    let hosts = format!("host-a=127.0.0.1:{} host-b=127.0.0.1:{}", port(), port());
    works(dir, &hosts);
    let said = works(dir, "--from droveway-ca/host-a.tar --root a");
    assert!(said.contains("systemctl enable --now droveway"), "{said}");
    assert!(said.contains("droveway doctor host-b"), "{said}");
    let said = works(dir, "--from droveway-ca/host-b.tar --root b");
    assert!(said.contains("b/etc/droveway/agent.toml: added name, tls"), "{said}");

    let start = |name: &str, root: &str| {
        let config = dir.join(root).join("etc/droveway/agent.toml");
        let mut host = Host::configured(name, dir.join(root), config);
        host.start();
        host
    };
    let a = start("host-a", "a");
    let mut b = start("host-b", "b");
    let ok = |about: &str, findings: &[serde_json::Value]| {
        findings.iter().any(|found| found["about"] == about && found["severity"] == "ok")
    };
    for (host, other) in [(&a, "host-b"), (&b, "host-a")] {
        let findings = findings(host, other);
        assert!(ok("peer", &findings), "{findings:?}");
    }

    // With files from another CA for the same host, the agent is a stranger.
    b.end("TERM");
    works(dir, &format!("--dir other {hosts}"));
    fs::create_dir(dir.join("c")).unwrap();
    works(dir, "--from other/host-b.tar --root c");
    let _stranger = start("host-b", "c");
    let findings = findings(&a, "host-b");
    assert!(!ok("peer", &findings), "{findings:?}");
}

#[test]
fn files_are_where_they_belong_and_keys_are_for_their_owner() {
    let dir = TestDir::new();
    let dir = dir.path();
    roots(dir);
    let said = works(dir, "host-a=192.0.2.1 host-b=[2001:db8::2]:7900,192.0.2.2");
    for line in [
        "  scp -p droveway-ca/host-a.tar root@192.0.2.1:\n",
        "  ssh root@192.0.2.1 'droveway init --from host-a.tar && rm host-a.tar'\n",
        "  scp -p droveway-ca/host-b.tar 'root@[2001:db8::2]:'\n",
        "TCP port 7800, 7900",
        "Then, on host-a:\n  droveway doctor host-b\n",
        "made  a certificate for operator (admin): droveway-ca/clients/operator\n",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
    for (path, Found { mode, .. }) in tree(&dir.join("droveway-ca")) {
        let is_secret = path.is_dir() || ["key", "tar"].map(Some).contains(&extension(&path));
        assert!(!is_secret || mode & 0o077 == 0, "{} {mode:o}", path.display());
    }
    works(dir, "--from droveway-ca/host-a.tar --root a");
    let there: Vec<_> = tree(&dir.join("a/etc/droveway"))
        .into_iter()
        .filter(|(path, _)| path.is_file())
        .map(|(path, Found { mode, .. })| {
            let path = path.strip_prefix(dir.join("a/etc/droveway")).unwrap();
            (path.to_str().unwrap().to_owned(), mode)
        })
        .collect();
    assert_eq!(there, FILES.map(|(path, mode)| (path.to_owned(), mode)));
    assert_eq!(fs::metadata(dir.join("a/etc/droveway/tls")).unwrap().mode() & 0o777, 0o700);
    works(dir, "--from droveway-ca/host-b.tar --root b");
    let agent = fs::read_to_string(dir.join("b/etc/droveway/agent.toml")).unwrap();
    assert!(agent.contains("\nlisten = \"[::]:7900\"\n"), "{agent}");
}

fn extension(path: &Path) -> Option<&str> {
    path.extension()?.to_str()
}

#[test]
fn a_second_time_nothing_changes() {
    let dir = TestDir::new();
    let dir = dir.path();
    roots(dir);
    let made = "host-a=192.0.2.1 host-b=192.0.2.2";
    works(dir, made);
    works(dir, "--from droveway-ca/host-b.tar --root b");
    let before = tree(dir);
    for line in [made, "", "host-b=192.0.2.2", "--from droveway-ca/host-b.tar --root b"] {
        let said = works(dir, line);
        assert!(!said.contains("made ") && !said.contains("written "), "{line}: {said}");
    }
    assert!(works(dir, "--from droveway-ca/host-b.tar --root b").contains("Nothing was changed."));
    assert_eq!(tree(dir), before);
}

#[test]
fn qemu_has_the_user_that_is_named() {
    let dir = TestDir::new();
    let dir = dir.path();
    roots(dir);
    let hosts = "host-a=192.0.2.1 host-b=192.0.2.2";
    let said = works(dir, hosts);
    assert!(said.contains("No --qemu-user NAME was given"), "{said}");
    let said = works(dir, &format!("{hosts} --qemu-user vms"));
    assert!(said.contains("QEMU runs as vms on these hosts"), "{said}");
    let said = works(dir, "--from droveway-ca/host-b.tar --root b");
    assert!(said.contains("agent.toml: added name, qemu-user, tls"), "{said}");
    let agent = fs::read_to_string(dir.join("b/etc/droveway/agent.toml")).unwrap();
    assert!(agent.contains("\nqemu-user = \"vms\"\n"), "{agent}");
    // An archive without one leaves the setting as it is.
    works(dir, hosts);
    assert!(works(dir, "--from droveway-ca/host-b.tar --root b").contains("Nothing was changed."));
}

#[test]
fn a_host_that_is_added_later_comes_last() {
    let dir = TestDir::new();
    let dir = dir.path();
    roots(dir);
    works(dir, "host-b=192.0.2.2 host-c=192.0.2.3");
    works(dir, "--from droveway-ca/host-b.tar --root b");
    fs::copy(dir.join("droveway-ca/host-b.tar"), dir.join("old.tar")).unwrap();
    let key = dir.join("b/etc/droveway/tls/droveway.key");
    let (old_key, peers) = (fs::read(&key).unwrap(), dir.join("b/etc/droveway/peers.toml"));
    let old_peers = fs::read_to_string(&peers).unwrap();

    let said = works(dir, "host-a=192.0.2.1");
    assert!(said.contains("kept  a certificate for host host-b"), "{said}");
    assert!(said.contains("made  the files of host-b"), "{said}");
    let said = works(dir, "--from droveway-ca/host-b.tar --root b");
    assert!(said.contains("peers.toml: added host-a\n"), "{said}");
    assert!(said.contains("reads the peers file again within half a minute"), "{said}");
    assert!(!said.contains("systemctl restart"), "{said}");
    let new_peers = fs::read_to_string(&peers).unwrap();
    let added = new_peers.strip_prefix(&old_peers).unwrap();
    assert!(added.contains("name = \"host-a\"") && added.matches("name").count() == 1, "{added}");
    assert_eq!(fs::read(&key).unwrap(), old_key);

    // An outdated archive does no harm.
    let said = works(dir, "--from old.tar --root b");
    assert!(said.contains("more hosts than the archive"), "{said}");
    assert_eq!(fs::read_to_string(&peers).unwrap(), new_peers);

    // Settings of its own are read only when it starts.
    fs::write(dir.join("b/etc/droveway/agent.toml"), PACKAGED).unwrap();
    let said = works(dir, "--from droveway-ca/host-b.tar --root b");
    assert!(said.contains("systemctl restart droveway"), "{said}");
}

#[test]
fn what_is_there_is_never_overwritten() {
    let dir = TestDir::new();
    let dir = dir.path();
    roots(dir);
    works(dir, "host-a=192.0.2.1 host-b=192.0.2.2");
    let etc = dir.join("b/etc/droveway");
    fs::create_dir(etc.join("tls")).unwrap();
    let from = "--from droveway-ca/host-b.tar --root b";
    for (file, content, says) in [
        ("tls/droveway.key", "mine", "b/etc/droveway/tls/droveway.key here differ"),
        ("peers.toml", "# mine\n", "b/etc/droveway/peers.toml here differ"),
        ("agent.toml", "name = 'host-a'\n", "has name = \"host-a\""),
    ] {
        let old = fs::read(etc.join(file)).ok();
        fs::write(etc.join(file), content).unwrap();
        let before = tree(&dir.join("b"));
        let said = fails(dir, from);
        assert!(said.contains(says) && said.contains("nothing was changed"), "{said}");
        assert_eq!(tree(&dir.join("b")), before, "{file}");
        match old {
            Some(old) => fs::write(etc.join(file), old).unwrap(),
            None => fs::remove_file(etc.join(file)).unwrap(),
        }
    }
    works(dir, from);
    // A key that others can read is closed to them, and the output says so.
    let open = Command::new("chmod").arg("644").arg(etc.join("tls/droveway.key")).status();
    assert!(open.unwrap().success());
    assert!(works(dir, from).contains("every user of this host could read it"));
    assert_eq!(fs::metadata(etc.join("tls/droveway.key")).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn what_is_wrong_is_said_before_anything_is_written() {
    let dir = TestDir::new();
    let dir = dir.path();
    for (line, says) in [
        ("", "droveway init host-a=10.0.0.1 host-b=10.0.0.2"),
        ("host-a=192.0.2.1", "two hosts or more"),
        ("host-a=192.0.2.1 host-b=192.0.2.1", "the same address"),
        ("host-a=192.0.2.1 host-a=192.0.2.2", "named twice"),
        ("host-a=192.0.2.1 host/b=192.0.2.2", "is not a name"),
        ("host-a=192.0.2.1 host-b=b.example.org", "is not an IP address"),
        ("host-a=192.0.2.1 host-b=192.0.2.2 --operator a/b", "is not a name"),
        ("--from none.tar", "reading none.tar"),
    ] {
        let said = fails(dir, line);
        assert!(said.contains(says), "{line}: {said}");
    }
    assert_eq!(fs::read_dir(dir).unwrap().count(), 0);

    works(dir, "host-a=192.0.2.1 host-b=192.0.2.2");
    fs::remove_file(dir.join("droveway-ca/hosts/host-b/content.key")).unwrap();
    let before = tree(dir);
    let said = fails(dir, "host-c=192.0.2.3");
    assert!(said.contains("droveway ca issue host-b --dir droveway-ca --replace"), "{said}");
    assert!(fails(dir, "host-a=192.0.2.9").contains("has host-a already"));
    assert!(fails(dir, "--from droveway-ca/ca.crt --root .").contains("copy it again"));
    assert!(fails(dir, "--from droveway-ca/host-a.tar --root none").contains("is no directory"));
    assert_eq!(tree(dir), before);
}
