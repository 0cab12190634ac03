//! A compromised host of the cluster tries to have root of another one run a program or make a
//! file, by every order that names one. The agents run QEMU as `nobody`. Programs that can be
//! started write into a directory to which all may write, so that each file there shows who made
//! it.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use end_to_end::hostile::{Caller, hear, say};
use end_to_end::{MIB, Side, World, until};
use identity::Security;
use lab::hosts::{Link, RUN_DIR};
use serde_json::{Value, json};
use wire::{Frame, Kind, Prepare, ToDestination, ToSource, read_frame, read_message};

const USER: &str = "nobody";
/// Directories of the hosts, as agents see them.
const MARKS: &str = "marks";
const EVIL: &str = "evil";
const LISTED: &str = "listed";

/// Host B with an agent that starts QEMU as a user, and directories for the attempts.
struct Prey {
    world: World,
    uid: u32,
}

impl Prey {
    fn new() -> Self {
        let mut world = World::new(Link::unshaped());
        // The lab's own QEMU may lie where that user can't go.
        world.kit.qemu = world.kit.qemu_system.clone();
        let prey = Self { uid: uid_of(USER), world };
        prey.make_places();
        let system = prey.world.kit.qemu.display().to_string();
        let listed = format!("{RUN_DIR}/{LISTED}/qemu-*");
        let told = ["--qemu-user", USER, "--qemu-programs", &system, "--qemu-programs", &listed];
        let Self { mut world, uid } = prey;
        world.restart_agent_with(Side::B, &told);
        Self { world, uid }
    }

    /// Path of a host's directory, as this test sees it.
    fn place(&self, name: &str) -> PathBuf {
        self.world.host(Side::B).run_dir.join(name)
    }

    fn make_places(&self) {
        for (name, mode) in [(MARKS, 0o777), (EVIL, 0o777), (LISTED, 0o755)] {
            let place = self.place(name);
            fs::create_dir(&place).unwrap();
            fs::set_permissions(&place, Permissions::from_mode(mode)).unwrap();
        }
        for program in ["evil/qemu-system-x86_64", "evil/qemu-img", "listed/qemu-ends"] {
            let script = format!("#!/bin/sh\n: >{RUN_DIR}/{MARKS}/$(basename $0).$$\nexit 1\n");
            fs::write(self.place(program), script).unwrap();
            fs::set_permissions(self.place(program), Permissions::from_mode(0o755)).unwrap();
        }
    }

    /// Files that were made, with their owners.
    fn marks(&self) -> Vec<(String, u32)> {
        let marks = fs::read_dir(self.place(MARKS)).unwrap().map(|mark| {
            let mark = mark.unwrap();
            let uid = fs::symlink_metadata(mark.path()).unwrap().uid();
            (mark.file_name().into_string().unwrap(), uid)
        });
        marks.collect()
    }

    /// Asserts that nothing was started that was not listed.
    fn assert_untouched(&self) {
        assert_eq!(self.marks(), []);
        assert!(self.world.vms(Side::B).is_empty());
    }

    /// Asserts that what was started ran as that user, and how often.
    fn assert_theirs(&self, name: &str, times: usize) {
        let marks = self.marks();
        let of_name = marks.iter().filter(|(mark, _)| mark.starts_with(name)).count();
        assert_eq!(of_name, times, "{marks:?}");
        assert!(marks.iter().all(|(_, uid)| *uid == self.uid), "{marks:?}");
    }

    fn caller(&self) -> Caller<'_> {
        Caller::new(&self.world, "host-a", Security::Plaintext)
    }
}

fn uid_of(name: &str) -> u32 {
    let users = fs::read_to_string("/etc/passwd").unwrap();
    let line = users.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap().split(':').nth(1).unwrap().parse().unwrap()
}

fn inside(path: &str) -> String {
    format!("{RUN_DIR}/{path}")
}

/// An order whose QEMU starts, differs from the VM's machine, and so ends again. Meanwhile it makes
/// a file, before it could change its user.
fn making_a_file(caller: &Caller<'_>, name: &str, more: &[&str]) -> Prepare {
    let mut order = caller.order();
    let memory = order.argv.iter().position(|word| word == "64").unwrap();
    order.argv[memory] = "96".to_owned();
    let file = format!("file,id=mark,path={}", inside(&format!("{MARKS}/{name}")));
    order.argv.extend(["-chardev", &file].map(str::to_owned));
    order.argv.extend(more.iter().map(|word| (*word).to_owned()));
    order
}

fn asked(caller: &Caller<'_>, programs: &Value) -> Value {
    let mut control = caller.call(Kind::Control).unwrap();
    let question = json!({ "ask": "facts", "programs": programs });
    say(&mut control, &json!({ "say": "examine", "question": question }));
    match hear(&mut control) {
        Some(ToSource::Examined { answer }) => serde_json::to_value(answer).unwrap(),
        other => panic!("{other:?}"),
    }
}

fn ordered(caller: &Caller<'_>, order: &Value) -> Value {
    let mut connection = caller.call(Kind::Orders).unwrap();
    say(&mut connection, &json!({ "from": "host-a", "order": order }));
    match read_frame(&mut connection).unwrap() {
        Some(Frame::Message(answer)) => read_message(&answer).unwrap(),
        other => panic!("{other:?}"),
    }
}

/// A disk that moves with the VM.
fn disk(path: &str, format: &Value) -> Value {
    json!([{
        "disk": "d0", "format": format, "bytes": MIB, "allocated_bytes": 4096,
        "challenge": { "image": path, "proof": { "by": "network" } },
    }])
}

#[test]
fn a_command_line_does_not_choose_its_user() {
    let prey = Prey::new();
    let caller = prey.caller();
    for (nth, user) in [["-runas", "nobody"], ["-runas", "root"]].iter().enumerate() {
        let why = caller.refused(making_a_file(&caller, &format!("runas-{nth}"), user));
        assert!(why.contains("RAM"), "QEMU came up: {why}");
        prey.assert_theirs("runas", nth + 1);
    }
    for option in [["-chroot", "/"], ["-run-with", "chroot=/"]] {
        let why = caller.refused(making_a_file(&caller, "chroot", &option));
        assert!(why.contains("takes root's rights") && why.contains("qemu-user"), "{why}");
    }
    let why = caller.refused(making_a_file(&caller, "daemon", &["-daemonize"]));
    assert!(why.contains("-daemonize can't be used here"), "{why}");
    prey.assert_theirs("runas", 2);
}

/// The program is asked before for its abilities, which decide how it is to wait for its
/// switchover, and once more afterwards, for a better error.
#[test]
fn a_program_that_ends_is_asked_as_that_user() {
    let prey = Prey::new();
    let caller = prey.caller();
    let refused = |program: &str, cwd: &str| {
        let mut order = caller.order();
        order.argv[0] = program.to_owned();
        order.cwd = cwd.to_owned();
        caller.refused(order)
    };
    let evil = inside("evil/qemu-system-x86_64");
    let linked = prey.place("evil/kvm");
    symlink("qemu-system-x86_64", &linked).unwrap();
    for (program, cwd) in [
        (evil.as_str(), "/"),
        ("./qemu-system-x86_64", &inside(EVIL)),
        (&inside("evil/kvm"), "/"),
        (&inside("listed/../evil/qemu-system-x86_64"), "/"),
        ("/bin/sh", "/"),
        ("sh", "/"),
    ] {
        let why = refused(program, cwd);
        assert!(why.contains("is not in qemu-programs"), "{program}: {why}");
    }
    prey.assert_untouched();
    let why = refused(&inside("listed/qemu-ends"), "/");
    assert!(!why.is_empty());
    prey.assert_theirs("qemu-ends", 3);
    // A mistake of the operator: others could put another program there.
    fs::set_permissions(prey.place(LISTED), Permissions::from_mode(0o777)).unwrap();
    let why = refused(&inside("listed/qemu-ends"), "/");
    assert!(why.contains("other users than root can write to"), "{why}");
    prey.assert_theirs("qemu-ends", 3);
}

#[test]
fn a_tool_beside_a_program_of_theirs_is_not_started() {
    let prey = Prey::new();
    let caller = prey.caller();
    let image = inside("marks/disk.img");
    let qcow2 = json!({
        "cluster_bytes": 65536, "compat": "1.1", "lazy_refcounts": false, "refcount_bits": 16,
        "extended_l2": false,
    });
    for format in [json!("raw"), json!({ "qcow2": qcow2 })] {
        let mut order = caller.order();
        order.argv[0] = inside("evil/qemu-system-x86_64");
        // So that the program isn't needed, and images come first.
        order.incoming_qmp = Some("/nonexistent/qmp".to_owned());
        order.moving = serde_json::from_value(disk(&image, &format)).unwrap();
        let why = caller.refused(order);
        assert!(why.contains("/nonexistent/qmp"), "{why}");
        prey.assert_untouched();
    }
}

#[test]
fn questions_start_what_is_listed_and_only_as_that_user() {
    let prey = Prey::new();
    let caller = prey.caller();
    let (evil, ends) = (inside("evil/qemu-system-x86_64"), inside("listed/qemu-ends"));
    let answer = asked(&caller, &json!([[evil, "tcg"], ["/bin/sh", "tcg"]]));
    let problems = answer.to_string();
    assert_eq!(problems.matches("is not in qemu-programs").count(), 2, "{problems}");
    prey.assert_untouched();

    let dump = format!("tcg,dumpdtb={}", inside("marks/dtb"));
    let system = prey.world.kit.qemu.display().to_string();
    let answer = asked(&caller, &json!([[ends, dump], [system, dump]])).to_string();
    assert_eq!(answer.matches("is not an accelerator").count(), 2, "{answer}");
    prey.assert_untouched();

    drop(asked(&caller, &json!([[ends, "tcg"]])));
    prey.assert_theirs("qemu-ends", 1);

    let want = |program: &str, accelerator: &str| json!({ "program": program, "accelerator": accelerator, "machine": "q35" });
    let able = |wants: Value| ordered(&caller, &json!({ "order": "able", "wants": wants }));
    let wants = json!([want(&evil, "tcg"), want("/bin/sh", "tcg"), want(&ends, &dump)]);
    let answer = able(wants).to_string();
    assert_eq!(answer.matches("is not in qemu-programs").count(), 2, "{answer}");
    assert_eq!(answer.matches("is not an accelerator").count(), 1, "{answer}");
    prey.assert_theirs("qemu-ends", 1);
    drop(able(json!([want(&ends, "tcg")])));
    prey.assert_theirs("qemu-ends", 2);
    // A VM's own command line has an accelerator, too.
    let mut order = making_a_file(&caller, "accelerator", &[]);
    order.argv.extend(["-accel", &format!("tcg,,dumpdtb={dump}")].map(str::to_owned));
    assert!(!caller.refused(order).is_empty());
    assert!(!prey.place("marks/dtb").exists());
}

/// The path of an image leads to changing places.
#[test]
fn images_are_made_where_that_user_may() {
    let prey = Prey::new();
    let caller = prey.caller();
    let closed = prey.place("closed");
    fs::create_dir(&closed).unwrap();
    let refused = |path: &str| {
        let mut order = caller.order();
        order.incoming_qmp = Some("/nonexistent/qmp".to_owned());
        order.moving = serde_json::from_value(disk(path, &json!("raw"))).unwrap();
        caller.refused(order)
    };
    let may_not = "may not make files in its directory";
    let why = refused(&inside("closed/disk.img"));
    assert!(why.contains(may_not), "{why}");
    symlink(inside("closed"), prey.place("marks/link")).unwrap();
    let why = refused(&inside("marks/link/disk.img"));
    assert!(why.contains(may_not), "{why}");
    fs::remove_file(prey.place("marks/link")).unwrap();

    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| swap(&prey, &ended));
        for _ in 0..20 {
            let why = refused(&inside("marks/way/disk.img"));
            assert!(!why.is_empty());
        }
        ended.store(true, Relaxed);
    });
    assert_eq!(fs::read_dir(&closed).unwrap().count(), 0);
}

/// Puts a directory of that user, and a link to one of root's, at the same path in turn.
fn swap(prey: &Prey, ended: &AtomicBool) {
    let [way, own, link] = ["marks/way", "marks/own", "marks/link"].map(|name| prey.place(name));
    fs::create_dir(&own).unwrap();
    fs::set_permissions(&own, Permissions::from_mode(0o777)).unwrap();
    symlink(inside("closed"), &link).unwrap();
    let moved = |from: &Path, to: &Path| fs::rename(from, to).unwrap();
    while !ended.load(Relaxed) {
        for other in [&own, &link] {
            moved(other, &way);
            thread::yield_now();
            moved(&way, other);
        }
    }
}

/// A program that an operator lists can be started, whatever its name and place; what an operator
/// of this host starts need not be listed.
#[test]
fn operators_start_what_they_like() {
    let prey = Prey::new();
    let (world, own) = (&prey.world, prey.place("own-qemu"));
    let system = world.kit.qemu.display();
    fs::write(&own, format!("#!/bin/sh\nexec {system} \"$@\"\n")).unwrap();
    fs::set_permissions(&own, Permissions::from_mode(0o755)).unwrap();
    let own = inside("own-qemu");
    let words = "-machine q35,accel=tcg -m 64 -nodefaults -display none -S";
    let run: Vec<&str> = ["run", "web1", "--", &own].into_iter().chain(words.split(' ')).collect();
    world.says(Side::B, &run);
    assert_eq!(world.vms(Side::B).len(), 1);
    world.says(Side::B, &["stop", "web1", "--force"]);

    let caller = prey.caller();
    let mut order = caller.order();
    order.argv[0] = own;
    let why = caller.refused(order.clone());
    assert!(why.contains("is not in qemu-programs"), "{why}");
    // As an operator of that host would do.
    fs::copy(prey.place("own-qemu"), prey.place("listed/qemu-own")).unwrap();
    order.argv[0] = inside("listed/qemu-own");
    let mut control = caller.call(Kind::Control).unwrap();
    say(&mut control, &ToDestination::Prepare(Box::new(order)));
    assert!(matches!(hear(&mut control), Some(ToSource::Prepared(_))));
    let pid = world.vms(Side::B)[0].pid;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let uids = format!("Uid:\t{0}\t{0}\t{0}\t{0}\n", prey.uid);
    assert!(status.contains(&uids) && status.contains("NoNewPrivs:\t1"), "{status}");
    drop(control);
    until("it is given up", || world.vms(Side::B).is_empty());
}
