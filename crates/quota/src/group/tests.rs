use super::*;

/// A directory that looks like a group of version 2, with one of ours in it.
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
fn version_2_is_told_threads_of_a_threaded_group() {
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
    // Another of ours still needs the controller.
    group.disable().unwrap();
    assert!(said(parent.path(), "cgroup.subtree_control").starts_with("+cpu"));
    fs::remove_dir_all(ours).unwrap();
    group.disable().unwrap();
    assert!(said(parent.path(), "cgroup.subtree_control").starts_with("-cpu"));
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
fn a_group_that_is_not_there_is_lifted() {
    let (parent, group) = version_2("cpu\n", "cpu\n");
    fs::remove_dir_all(parent.path().join("droveway-slow-7")).unwrap();
    group.unwrap().lift().unwrap();
}
