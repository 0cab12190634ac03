//! Compares two shapes, and describes the differences in sentences.

use super::{Device, Drive, Medium, Node, Shape};
use crate::command_line::overridden;

/// How the VM that waits at the destination differs from the one `here`, in
/// sentences for the operator; empty if it may be loaded. File names of the VM
/// `here` are compared after `overrides` are applied.
#[must_use]
pub fn differences(here: &Shape, there: &Shape, overrides: &[(String, String)]) -> Vec<String> {
    let mut found = Vec::new();
    if here.machine != there.machine {
        found.push(format!(
            "the VM is a {}, the destination's QEMU made a {}: name the machine type with its \
             version (-machine {})",
            here.machine, there.machine, here.machine
        ));
    }
    if here.cpu != there.cpu {
        found.push(format!(
            "the VM's CPU is {}, at the destination it is {}: name it with -cpu",
            here.cpu, there.cpu
        ));
    }
    if here.vcpus != there.vcpus {
        found.push(format!(
            "the VM has {} vCPUs now, its command line gives {}: unplug what was plugged in later, \
             or restart the VM with that number",
            here.vcpus, there.vcpus
        ));
    }
    memory(here, there, &mut found);
    devices(&here.devices, &there.devices, &mut found);
    devices(&here.memory_devices, &there.memory_devices, &mut found);
    drives(here, there, overrides, &mut found);
    nodes(&here.nodes, &there.nodes, overrides, &mut found);
    found
}

fn memory(here: &Shape, there: &Shape, found: &mut Vec<String>) {
    if here.ram_bytes != there.ram_bytes {
        found.push(format!(
            "the VM has {} bytes of RAM, the destination's has {}: give both the same -m",
            here.ram_bytes, there.ram_bytes
        ));
        return;
    }
    let missing = |from: &Shape, to: &Shape| {
        let lacks = |id: &str| !to.memory.iter().any(|other| other.id == id);
        from.memory.iter().find(|one| lacks(&one.id)).map(|one| one.id.clone())
    };
    if let Some(id) = missing(here, there) {
        found.push(format!("the VM has memory `{id}` that its command line doesn't: unplug it"));
    }
    if let Some(id) = missing(there, here) {
        found.push(format!(
            "the destination's QEMU has memory `{id}` that the VM doesn't: give both the same \
             memory backends"
        ));
    }
    for one in &here.memory {
        let other = there.memory.iter().find(|other| other.id == one.id);
        if let Some(other) = other.filter(|other| other.bytes != one.bytes) {
            found.push(format!(
                "memory `{}` has {} bytes in the VM and {} at the destination",
                one.id, one.bytes, other.bytes
            ));
        }
    }
}

/// Devices are matched by id; those without one, by their count per type.
fn devices(here: &[Device], there: &[Device], found: &mut Vec<String>) {
    let mut unmatched: Vec<&Device> = there.iter().collect();
    for device in here {
        match unmatched.iter().position(|other| *other == device) {
            Some(at) => drop(unmatched.swap_remove(at)),
            None => found.push(format!(
                "the VM has {device} that its command line doesn't: it was plugged in later; \
                 unplug it, or restart the VM with it"
            )),
        }
    }
    unmatched.sort_by(|a, b| (&a.id, &a.kind).cmp(&(&b.id, &b.kind)));
    for device in unmatched {
        found.push(format!(
            "the command line has {device} that the VM doesn't: it was unplugged; plug it in \
             again, or restart the VM without it"
        ));
    }
}

fn drives(here: &Shape, there: &Shape, overrides: &[(String, String)], found: &mut Vec<String>) {
    for drive in &here.drives {
        let other = there.drives.iter().find(|other| other.name == drive.name);
        match (other, &drive.medium) {
            (Some(other), _) => found.extend(drive_difference(drive, other, overrides)),
            // Some versions create an empty drive by themselves, others don't.
            (None, None) => {}
            (None, Some(medium)) => found.push(format!(
                "the VM has a drive `{}` with {} that its command line doesn't: it was plugged in \
                 later; unplug it, or restart the VM with it",
                drive.name,
                shown(medium)
            )),
        }
    }
    for other in there.drives.iter().filter(|other| other.medium.is_some()) {
        if !here.drives.iter().any(|drive| drive.name == other.name) {
            found.push(format!(
                "the command line has a drive `{}` that the VM doesn't: it was unplugged",
                other.name
            ));
        }
    }
}

fn drive_difference(here: &Drive, there: &Drive, overrides: &[(String, String)]) -> Option<String> {
    let name = &here.name;
    let (mine, other) = match (&here.medium, &there.medium) {
        (None, None) => return None,
        (Some(medium), None) => {
            return Some(format!(
                "drive `{name}` holds {} in the VM and nothing at the destination",
                shown(medium)
            ));
        }
        (None, Some(medium)) => {
            return Some(format!(
                "drive `{name}` is empty in the VM, its command line puts {} in: it was ejected; \
                 change it back, or --set its file to nothing",
                shown(medium)
            ));
        }
        (Some(mine), Some(other)) => (mine, other),
    };
    // One at a time: a peer lists as many files as it likes.
    let is_other = |(mine, other): (&String, &String)| !is_called(mine, other, overrides);
    if mine.files.len() != other.files.len() || mine.files.iter().zip(&other.files).any(is_other) {
        return Some(format!(
            "drive `{name}` holds {} in the VM and {} at the destination: the medium was changed \
             or a snapshot was taken; give its present file with --set OLD=NEW",
            shown(mine),
            shown(other)
        ));
    }
    if mine.driver != other.driver {
        return Some(format!(
            "drive `{name}` is read as {} in the VM and as {} at the destination",
            mine.driver, other.driver
        ));
    }
    if mine.read_only != other.read_only {
        return Some(format!("drive `{name}` is read-only at one end and writable at the other"));
    }
    (mine.bytes != other.bytes).then(|| {
        format!(
            "drive `{name}` has {} bytes in the VM and {} at the destination: {} is not the same \
             image there",
            mine.bytes,
            other.bytes,
            shown(other)
        )
    })
}

pub(super) fn changed_files(before: &Drive, now: &[Drive]) -> Option<String> {
    let now = now.iter().find(|other| other.name == before.name)?.medium.as_ref()?;
    if before.medium.as_ref().map(files) == Some(files(now)) {
        return None;
    }
    Some(format!(
        "drive `{}` holds other files than when the move started ({} now): a snapshot was taken, a \
         block job ended, or the medium was changed; move the VM again, with its present file in \
         --set OLD=NEW",
        before.name,
        shown(now)
    ))
}

/// The files of a medium. A filter that QEMU has over a file has the file's name.
fn files(medium: &Medium) -> Vec<&String> {
    let mut files: Vec<&String> = medium.files.iter().collect();
    files.dedup();
    files
}

fn nodes(here: &[Node], there: &[Node], overrides: &[(String, String)], found: &mut Vec<String>) {
    for node in here {
        match there.iter().find(|other| other.name == node.name) {
            None => found.push(format!(
                "the VM has a block node `{}` that its command line doesn't: it was added later",
                node.name
            )),
            Some(other) if other.driver != node.driver => found.push(format!(
                "block node `{}` is {} in the VM and {} at the destination",
                node.name, node.driver, other.driver
            )),
            Some(other) if !is_called(&node.file, &other.file, overrides) => found.push(format!(
                "block node `{}` is {} in the VM and {} at the destination: give the present \
                 file with --set OLD=NEW",
                node.name, node.file, other.file
            )),
            Some(_) => {}
        }
    }
    for other in there {
        if !here.iter().any(|node| node.name == other.name) {
            found.push(format!(
                "the command line has a block node `{}` that the VM doesn't: it was removed",
                other.name
            ));
        }
    }
}

/// Whether a file of the VM has this name at the destination.
fn is_called(file: &str, there: &str, overrides: &[(String, String)]) -> bool {
    overridden(file, overrides).is_ok_and(|name| name == there)
}

fn shown(medium: &Medium) -> &str {
    medium.files.first().map_or("(nothing)", String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Memory;

    fn device(id: &str, kind: &str) -> Device {
        Device { id: (!id.is_empty()).then(|| id.to_owned()), kind: kind.to_owned() }
    }

    fn drive(name: &str, file: Option<&str>) -> Drive {
        let medium = file.map(|file| Medium {
            driver: "raw".to_owned(),
            files: vec![file.to_owned()],
            read_only: false,
            bytes: 1 << 20,
        });
        Drive { name: name.to_owned(), removable: true, medium }
    }

    fn vm() -> Shape {
        Shape {
            machine: "pc-q35-7.2".to_owned(),
            cpu: "qemu64-x86_64-cpu".to_owned(),
            vcpus: 2,
            ram_bytes: 1 << 30,
            memory: vec![Memory { id: "pc.ram".to_owned(), bytes: 1 << 30 }],
            devices: vec![device("nic0", "virtio-net-pci"), device("", "virtio-rng-pci")],
            drives: vec![drive("cd", Some("/a.iso")), drive("sd0", None)],
            ..Shape::default()
        }
    }

    /// Each row: a change to the VM at the source, and a piece of its description.
    #[test]
    fn every_drift_is_described() {
        type Change = fn(&mut Shape);
        let table: [(Change, &str); 13] = [
            (|vm| vm.machine = "pc-q35-8.0".to_owned(), "-machine pc-q35-8.0"),
            (|vm| vm.cpu = "EPYC-x86_64-cpu".to_owned(), "CPU is EPYC-x86_64-cpu"),
            (|vm| vm.vcpus = 3, "3 vCPUs now"),
            (|vm| vm.ram_bytes = 5, "5 bytes of RAM"),
            (|vm| vm.memory[0].id = "ram0".to_owned(), "memory `ram0` that its command line"),
            (|vm| vm.memory[0].bytes = 7, "`pc.ram` has 7 bytes"),
            (
                |vm| vm.devices.push(device("nic1", "virtio-net-pci")),
                "the virtio-net-pci device `nic1` that its command line doesn't",
            ),
            (
                |vm| vm.devices.push(device("", "virtio-rng-pci")),
                "a virtio-rng-pci device without id that its command line doesn't",
            ),
            (|vm| drop(vm.devices.remove(0)), "`nic0` that the VM doesn't: it was unplugged"),
            (|vm| vm.drives[0] = drive("cd", Some("/b.iso")), "/b.iso in the VM and /a.iso"),
            (|vm| vm.drives[0] = drive("cd", None), "is empty in the VM"),
            (|vm| vm.drives[0].medium.as_mut().unwrap().bytes = 9, "not the same image"),
            (
                |vm| {
                    vm.nodes.push(Node {
                        name: "late".to_owned(),
                        driver: "raw".to_owned(),
                        file: "/x".to_owned(),
                        read_only: true,
                    });
                },
                "block node `late`",
            ),
        ];
        for (change, piece) in table {
            let mut source = vm();
            change(&mut source);
            let told = differences(&source, &vm(), &[]);
            assert!(told.iter().any(|one| one.contains(piece)), "{piece}: {told:?}");
        }
    }

    #[test]
    fn overrides_order_and_empty_drives_make_no_difference() {
        assert_eq!(differences(&vm(), &vm(), &[]), Vec::<String>::new());
        let mut destination = vm();
        destination.devices.reverse();
        destination.drives = vec![drive("cd", Some("/mnt/a.iso"))];
        let overrides = [("/a.iso".to_owned(), "/mnt/a.iso".to_owned())];
        assert_eq!(differences(&vm(), &destination, &overrides), Vec::<String>::new());
    }

    /// A drive that holds these files, nearest first.
    fn holding(files: Option<&[&str]>) -> [Drive; 1] {
        let mut drive = drive("d0", files.map(|files| files[0]));
        if let (Some(medium), Some(files)) = (&mut drive.medium, files) {
            medium.files = files.iter().map(|&file| file.to_owned()).collect();
        }
        [drive]
    }

    /// Each row: the files of a drive before and now, and whether that matters.
    #[test]
    fn a_drive_with_other_files_is_described() {
        type Files = Option<&'static [&'static str]>;
        let table: [(Files, Files, bool); 9] = [
            (Some(&["/a"]), Some(&["/a"]), false),
            (Some(&["/a"]), Some(&["/snap", "/a"]), true),
            (Some(&["/snap", "/a"]), Some(&["/a"]), true),
            (Some(&["/c", "/b", "/a"]), Some(&["/c", "/a"]), true),
            (Some(&["/a.iso"]), Some(&["/b.iso"]), true),
            (None, Some(&["/a.iso"]), true),
            (Some(&["/a.iso"]), None, false),
            (None, None, false),
            // A backup's filter.
            (Some(&["/b", "/a"]), Some(&["/b", "/b", "/a"]), false),
        ];
        for (before, now, matters) in table {
            let [before] = holding(before);
            let told = changed_files(&before, &holding(now));
            assert_eq!(told.is_some(), matters, "{before:?} {now:?}: {told:?}");
        }
        let [before] = holding(Some(&["/a"]));
        let told = changed_files(&before, &holding(Some(&["/snap", "/a"]))).unwrap();
        assert!(told.starts_with("drive `d0` holds other files than"), "{told}");
        assert!(told.contains("(/snap now)"), "{told}");
        assert_eq!(changed_files(&before, &[]), None, "it was unplugged");
        let mut larger = holding(Some(&["/a"]));
        larger[0].medium.as_mut().unwrap().bytes *= 2;
        assert_eq!(changed_files(&before, &larger), None);
    }

    /// Nothing is plugged before the VM has arrived.
    #[test]
    fn what_is_unplugged_makes_no_difference() {
        let mut waiting = vm();
        waiting.unplugged = vec![Memory { id: "pc.ram".to_owned(), bytes: 1 << 20 }];
        assert_eq!(differences(&vm(), &waiting, &[]), Vec::<String>::new());
    }
}
