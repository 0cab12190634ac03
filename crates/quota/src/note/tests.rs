use super::*;

#[test]
fn a_note_that_is_none_is_named_and_stays() {
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
