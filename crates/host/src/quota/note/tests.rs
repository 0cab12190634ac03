use serde_json::json;

use super::*;

#[test]
fn an_invalid_note_is_named_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    let notes = Notes::open(dir.path()).unwrap();
    for (name, text) in [("1", "{"), ("2", "{\"pid\":2}"), ("3", "")] {
        fs::write(dir.path().join(format!("{name}.slowed")), text).unwrap();
    }
    let huge = File::create(dir.path().join("4.slowed")).unwrap();
    huge.set_len(1 << 30).unwrap();
    fs::write(dir.path().join("5.new"), "half").unwrap();
    let left = notes.left().unwrap();
    assert_eq!(left.len(), 4);
    for note in left {
        let error = note.unwrap_err();
        assert!(error.to_string().contains(".slowed is not a note"), "{error}");
    }
}

/// The note is from the previous version, which made one group.
#[test]
fn a_note_of_one_group_is_still_understood() {
    let dir = tempfile::tempdir().unwrap();
    let notes = Notes::open(dir.path()).unwrap();
    let gone = dir.path().join("gone/droveway-slow-7");
    let text = format!(
        r#"{{"pid":7,"group":{{"version":"V2","parent":"/","dir":"{}","enable":false}}}}"#,
        gone.display()
    );
    fs::write(dir.path().join("7.slowed"), text).unwrap();
    let left = notes.left().unwrap().remove(0).unwrap();
    assert_eq!(left.pid(), 7);
    left.lift().unwrap();
    assert!(notes.left().unwrap().is_empty());
}

/// As libvirt makes them, for a VM with as many vCPUs as QEMU permits.
#[test]
fn a_note_of_a_vm_with_many_vcpus_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let notes = Notes::open(dir.path()).unwrap();
    let scope = format!("/gone/machine.slice/machine-qemu\\x2d1\\x2d{}.scope", "n".repeat(64));
    let group = |vcpu: u32| -> Group {
        let parent = format!("{scope}/libvirt/vcpu{vcpu}");
        let dir = format!("{parent}/droveway-slow-7");
        let group = json!({ "version": "V2", "parent": parent, "dir": dir, "enable": true });
        serde_json::from_value(group).unwrap()
    };
    notes.write(7, (0..4096).map(group).collect()).unwrap();
    notes.left().unwrap().remove(0).unwrap().lift().unwrap();
    assert!(notes.left().unwrap().is_empty());
}
