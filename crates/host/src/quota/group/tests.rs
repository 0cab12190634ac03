use std::cell::Cell;

use super::*;
use crate::quota::{Members, Notes, Throttled};

/// A directory that looks like a version 2 group, with one of our groups in it.
fn version_2(controllers: &str, subtree: &str) -> (tempfile::TempDir, Result<Group, QuotaError>) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("cgroup.controllers"), controllers).unwrap();
    fs::write(dir.path().join("cgroup.subtree_control"), subtree).unwrap();
    fs::write(dir.path().join("cgroup.threads"), "").unwrap();
    let ours = dir.path().join("droveway-slow-7");
    fs::create_dir(&ours).unwrap();
    for file in ["cgroup.type", "cpu.max", "cgroup.threads"] {
        fs::write(ours.join(file), "").unwrap();
    }
    let group = Group::below(dir.path().to_owned(), Version::V2, 7);
    (dir, group)
}

fn said(dir: &Path, file: &str) -> String {
    fs::read_to_string(dir.join(file)).unwrap()
}

#[test]
fn version_2_gets_a_threaded_group() {
    let (parent, group) = version_2("cpuset cpu io\n", "io\n");
    let group = group.unwrap();
    group.make().unwrap();
    group.set(Some(Quota::of(0.25))).unwrap();
    group.add_thread(71).unwrap();
    let ours = parent.path().join("droveway-slow-7");
    assert_eq!(said(&ours, "cgroup.type"), "threaded");
    assert_eq!(said(&ours, "cpu.max"), "2500 10000");
    assert_eq!(said(&ours, "cgroup.threads"), "71");
    assert!(said(parent.path(), "cgroup.subtree_control").starts_with("+cpu"));
    group.set(None).unwrap();
    assert!(said(&ours, "cpu.max").starts_with("max"));
    // Another of our groups still needs the controller.
    group.disable().unwrap();
    assert!(said(parent.path(), "cgroup.subtree_control").starts_with("+cpu"));
    fs::remove_dir_all(ours).unwrap();
    // As the kernel shows it.
    fs::write(parent.path().join("cgroup.subtree_control"), "cpu io\n").unwrap();
    group.disable().unwrap();
    assert!(said(parent.path(), "cgroup.subtree_control").starts_with("-cpu"));
}

#[test]
fn a_group_whose_threads_can_not_be_moved_is_refused_before_anything_is_changed() {
    let (parent, group) = version_2("cpu io\n", "io\n");
    let group = group.unwrap();
    group.check().unwrap();
    fs::remove_file(parent.path().join("cgroup.threads")).unwrap();
    let error = group.check().unwrap_err().to_string();
    assert!(error.contains("cgroup.threads"), "{error}");
    assert_eq!(said(parent.path(), "cgroup.subtree_control"), "io\n");
}

/// In a container whose cgroups are read-only, each write is refused.
#[test]
fn what_was_never_enabled_is_not_disabled() {
    let (parent, group) = version_2("cpu io\n", "io\n");
    fs::remove_dir_all(parent.path().join("droveway-slow-7")).unwrap();
    group.unwrap().lift().unwrap();
    assert_eq!(said(parent.path(), "cgroup.subtree_control"), "io\n");
}

#[test]
fn a_parent_with_the_controller_on_keeps_it() {
    let (parent, group) = version_2("cpu\n", "cpu\n");
    let group = group.unwrap();
    group.make().unwrap();
    fs::remove_dir_all(parent.path().join("droveway-slow-7")).unwrap();
    group.disable().unwrap();
    assert_eq!(said(parent.path(), "cgroup.subtree_control"), "cpu\n");
}

#[test]
fn a_parent_without_the_controller_is_named() {
    let (parent, group) = version_2("io memory\n", "\n");
    let error = group.unwrap_err().to_string();
    assert!(error.contains(&parent.path().display().to_string()), "{error}");
}

#[test]
fn a_group_that_fails_keeps_none_of_the_others_unthrottled() {
    let dirs = [version_2("cpu\n", "cpu\n"), version_2("cpu\n", "cpu\n")];
    let [(broken, first), (whole, second)] = dirs;
    let [broken, whole] = [&broken, &whole].map(|dir| dir.path().join("droveway-slow-7"));
    let members = |group: Result<Group, QuotaError>, thread| Members {
        group: group.unwrap(),
        threads: vec![thread],
        quota: None,
        is_set: true,
        is_made: true,
    };
    let notes = tempfile::tempdir().unwrap();
    let mut slowed = Throttled {
        pid: 7,
        notes: Notes::open(notes.path()).unwrap(),
        groups: vec![members(first, 71), members(second, 72)],
        note: None,
    };
    let wants = |thread: u32| if thread == 71 { 0.75 } else { 0.25 };
    fs::remove_file(broken.join("cpu.max")).unwrap();
    slowed.set(Some(1.0), wants).unwrap_err();
    assert_eq!(said(&whole, "cpu.max"), "2500 10000");
    // It is tried again, and only there.
    fs::write(broken.join("cpu.max"), "").unwrap();
    fs::write(whole.join("cpu.max"), "").unwrap();
    slowed.set(Some(1.0), wants).unwrap();
    assert_eq!(said(&broken, "cpu.max"), "7500 10000");
    assert_eq!(said(&whole, "cpu.max"), "");
    // Also without a limit.
    fs::remove_file(broken.join("cpu.max")).unwrap();
    slowed.set(Some(0.5), wants).unwrap_err();
    fs::write(broken.join("cpu.max"), "").unwrap();
    slowed.set(None, wants).unwrap();
    assert_eq!(said(&broken, "cpu.max"), "max");
}

/// Otherwise it would outlast an agent that is killed.
#[test]
fn a_group_without_a_note_is_not_made() {
    let (_first, first) = version_2("cpu\n", "cpu\n");
    let (_second, second) = version_2("cpu\n", "cpu\n");
    let groups = [first.unwrap(), second.unwrap()];
    let notes = tempfile::tempdir().unwrap();
    let dir = notes.path().join("slowed");
    let notes = Notes::open(&dir).unwrap();
    let mut slowed = Throttled { pid: 7, notes: notes.clone(), groups: Vec::new(), note: None };
    fs::remove_dir(&dir).unwrap();
    slowed.prepare(groups.iter()).unwrap_err();
    assert!(slowed.groups.is_empty() && slowed.note.is_none());
    fs::create_dir(&dir).unwrap();
    slowed.prepare(groups.iter().chain(&groups)).unwrap();
    assert_eq!(slowed.groups.len(), 2);
    let text = fs::read_to_string(dir.join("7.slowed")).unwrap();
    assert!(groups.iter().all(|group| text.contains(group.dir.to_str().unwrap())), "{text}");
}

#[test]
fn lifting_a_missing_group_succeeds() {
    let (parent, group) = version_2("cpu\n", "cpu\n");
    fs::remove_dir_all(parent.path().join("droveway-slow-7")).unwrap();
    group.unwrap().lift().unwrap();
}

#[test]
fn the_last_try_to_remove_a_group_counts_like_the_others() {
    let (parent, group) = version_2("cpu\n", "\n");
    let group = group.unwrap();
    fs::write(parent.path().join("cgroup.subtree_control"), "cpu\n").unwrap();
    let tries = Cell::new(0);
    group
        .remove(|dir| {
            tries.set(tries.get() + 1);
            if tries.get() < REMOVE_TRIES {
                return Err(ErrorKind::ResourceBusy.into());
            }
            fs::remove_dir_all(dir)
        })
        .unwrap();
    assert_eq!(said(parent.path(), "cgroup.subtree_control"), "-cpu");
    group.remove(|_| Err(ErrorKind::ResourceBusy.into())).unwrap_err();
    group.remove(|_| Err(ErrorKind::NotFound.into())).unwrap();
}
