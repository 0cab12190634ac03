use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::source::{By, Machine, Noted, Phase, Record};
use crate::{Found, Kept, destination};

fn journals(dir: &Path, boot: &str) -> JournalDir {
    JournalDir::open_in_boot(&dir.join("journals"), boot.to_owned()).unwrap()
}

fn opened(id: &str) -> Opened {
    Opened {
        migration: MigrationId::new(id).unwrap(),
        vm: "web1".to_owned(),
        peer: "host-b".to_owned(),
        peer_address: "10.0.0.2:7800".to_owned(),
        run: true,
        qemu: json!({ "pid": 7, "argv": ["-m", "4G\n"] }),
        listed: Some(Listed { id: MigrationId::new("deadbeef").unwrap(), started_unix_s: 7 }),
        handed_over: false,
    }
}

fn only_source(journals: &JournalDir) -> Reopened<Record> {
    match journals.contents().unwrap().pop() {
        Some(Kept::Source(kept)) => kept,
        other => panic!("{other:?}"),
    }
}

fn file(dir: &Path) -> PathBuf {
    dir.join("journals/m1.source")
}

fn records() -> Vec<Record> {
    let reason = "a lock\nis held".into();
    vec![
        Record::Stopped { run: false },
        Record::Committed { run: false },
        Record::Reclaimed { by: By::Destination, reason, runs_there: false },
    ]
}

/// A journal with all of [`records`]; returns where each of them ends.
fn written(dir: &Path) -> Vec<usize> {
    let mut journal = journals(dir, "boot-1").create::<Record>(opened("m1")).unwrap();
    let mut ends = vec![journal.end];
    for record in records() {
        journal.append(&record).unwrap();
        ends.push(journal.end);
    }
    ends
}

/// Operators search the log for the id that `migrate` printed.
#[test]
fn log_lines_have_the_id_of_commands_and_reports() {
    let opened = opened("m1");
    assert_eq!(opened.log_id(), &MigrationId::new("deadbeef").unwrap());
    let of_release_0_1_0 = Opened { listed: None, ..opened };
    assert_eq!(of_release_0_1_0.log_id(), &MigrationId::new("m1").unwrap());
}

#[test]
fn a_journal_is_read_again_and_continued() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path());
    let mut kept = only_source(&journals(dir.path(), "boot-1"));
    assert_eq!(kept.records, records());
    assert_eq!(kept.journal.opened(), &opened("m1"));
    assert!(kept.same_boot && !kept.torn);
    let phase = Phase::Reclaimed(By::Destination);
    assert_eq!(kept.noted(), Noted { phase, run: false });
    kept.journal.append(&Record::Dropped).unwrap();
    assert_eq!(only_source(&journals(dir.path(), "boot-1")).records.len(), 4);
}

/// Its agent may be killed at any time, as those of two hosts.
#[test]
fn a_journal_within_one_host_is_read_again_and_continued() {
    let dir = tempfile::tempdir().unwrap();
    let here = Opened { peer_address: Opened::SAME_HOST.to_owned(), ..opened("m1") };
    assert!(here.is_within_host() && !opened("m1").is_within_host());
    let mut journal = journals(dir.path(), "boot-1").create::<Record>(here.clone()).unwrap();
    for (nth, record) in records().iter().enumerate() {
        journal.append(record).unwrap();
        let kept = only_source(&journals(dir.path(), "boot-1"));
        assert_eq!(kept.records, records()[..=nth]);
        assert_eq!(kept.journal.opened(), &here);
    }
}

#[test]
fn another_boot_is_recognized() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path());
    let mut kept = only_source(&journals(dir.path(), "boot-2"));
    assert!(!kept.same_boot);
    // A record written in the new boot does not make the QEMU one of it.
    kept.journal.append(&Record::Dropped).unwrap();
    assert!(!only_source(&journals(dir.path(), "boot-2")).same_boot);
}

#[test]
fn this_boot_has_a_name() {
    assert_eq!(boot_id().unwrap().len(), 36);
}

#[test]
fn both_sides_of_a_migration_can_be_on_one_host() {
    let dir = tempfile::tempdir().unwrap();
    let journals = journals(dir.path(), "boot-1");
    journals.create::<Record>(opened("m1")).unwrap();
    journals.create::<destination::Record>(opened("m1")).unwrap();
    assert_eq!(journals.contents().unwrap().len(), 2);
}

#[test]
fn a_migration_has_one_journal() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path());
    let error = journals(dir.path(), "boot-1").create::<Record>(opened("m1")).unwrap_err();
    assert!(matches!(error, JournalError::Exists(_)), "{error}");
}

#[test]
fn a_removed_journal_stays_removed() {
    let dir = tempfile::tempdir().unwrap();
    let journals = journals(dir.path(), "boot-1");
    let mut journal = journals.create::<Record>(opened("m1")).unwrap();
    let id = opened("m1").migration;
    assert!(journals.keeps(&id, Side::Source) && !journals.keeps(&id, Side::Destination));
    journal.forget().unwrap();
    journal.forget().unwrap();
    assert!(!journals.keeps(&id, Side::Source));
    assert!(journals.contents().unwrap().is_empty());
}

#[test]
fn a_record_costs_no_block() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = journals(dir.path(), "boot-1").create::<Record>(opened("m1")).unwrap();
    let length = || fs::metadata(file(dir.path())).unwrap().len();
    let before = length();
    for record in records() {
        journal.append(&record).unwrap();
    }
    assert_eq!(length(), before);
}

#[test]
fn a_journal_grows_beyond_its_room() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = journals(dir.path(), "boot-1").create::<Record>(opened("m1")).unwrap();
    let long = Record::Aborted { reason: "x".repeat(1000).into() };
    for _ in 0..40 {
        journal.append(&long).unwrap();
    }
    assert_eq!(only_source(&journals(dir.path(), "boot-1")).records.len(), 40);
}

#[test]
fn a_journal_that_was_never_whole_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    journals(dir.path(), "boot-1");
    fs::write(dir.path().join("journals/m1.source.new"), "abc").unwrap();
    let journals = journals(dir.path(), "boot-1");
    assert!(journals.contents().unwrap().is_empty());
    journals.create::<Record>(opened("m1")).unwrap();
}

/// The next record replaces one that failed, whatever is left of it.
#[test]
fn a_failed_write_leaves_no_record() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = journals(dir.path(), "boot-1").create::<Record>(opened("m1")).unwrap();
    let long = Record::Aborted { reason: "x".repeat(500).into() };
    // As if the flush had failed: the record is written, but not counted.
    journal.write(&long).unwrap();
    journal.append(&Record::Dropped).unwrap();
    let kept = only_source(&journals(dir.path(), "boot-1"));
    assert_eq!(kept.records, [Record::Dropped]);
    assert!(!kept.torn);
}

#[test]
fn a_damaged_journal_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let ends = written(dir.path());
    let mut bytes = fs::read(file(dir.path())).unwrap();
    bytes[ends[0] + 50] ^= 1;
    fs::write(file(dir.path()), &bytes).unwrap();
    match journals(dir.path(), "boot-1").contents().unwrap().pop() {
        Some(Kept::Unreadable(error)) => {
            let text = error.to_string();
            assert!(text.contains("web1") && text.contains("droveway list"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    assert!(journals(dir.path(), "boot-1").keeps(&opened("m1").migration, Side::Source));
}

/// Of a migration within one host, a crash of the host may have lost any record, and it has ended
/// both QEMUs.
#[test]
fn records_that_a_crashed_host_has_lost_need_no_human_if_both_qemus_were_there() {
    for (peer_address, boot, is_moot) in [
        (Opened::SAME_HOST, "boot-2", true),
        (Opened::SAME_HOST, "boot-1", false),
        ("10.0.0.2:7800", "boot-2", false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let of_host = Opened { peer_address: peer_address.to_owned(), ..opened("m1") };
        let mut journal = journals(dir.path(), "boot-1").create::<Record>(of_host).unwrap();
        let first = journal.end;
        records().iter().for_each(|record| journal.append(record).unwrap());
        let mut bytes = fs::read(file(dir.path())).unwrap();
        bytes[first..first + 40].fill(0);
        fs::write(file(dir.path()), &bytes).unwrap();
        let journals = journals(dir.path(), boot);
        match journals.contents().unwrap().pop() {
            Some(Kept::Source(mut kept)) => {
                assert!(is_moot && kept.torn && !kept.same_boot && kept.records.is_empty());
                let id = kept.journal.opened().migration.clone();
                let (machine, _) = Machine::restart(id, kept.noted(), Found::Missing);
                assert!(machine.has_ended());
                kept.journal.append(&Record::Dropped).unwrap();
                assert_eq!(only_source(&journals).records, [Record::Dropped]);
            }
            Some(Kept::Unreadable(JournalError::Damaged { .. })) => assert!(!is_moot),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn another_migrations_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path());
    fs::rename(file(dir.path()), dir.path().join("journals/m2.source")).unwrap();
    let kept = journals(dir.path(), "boot-1").contents().unwrap().pop();
    assert!(matches!(kept, Some(Kept::Unreadable(JournalError::Damaged { .. }))), "{kept:?}");
}

#[test]
fn a_destinations_records_are_not_a_sources() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal =
        journals(dir.path(), "boot-1").create::<destination::Record>(opened("m1")).unwrap();
    journal.append(&destination::Record::Starting { taken_back: false }).unwrap();
    fs::rename(dir.path().join("journals/m1.destination"), file(dir.path())).unwrap();
    let kept = journals(dir.path(), "boot-1").contents().unwrap().pop();
    assert!(matches!(kept, Some(Kept::Unreadable(JournalError::Damaged { .. }))), "{kept:?}");
}

/// As release 0.1.0 has it.
#[derive(Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case", tag = "phase")]
enum First {
    Starting,
    Reclaimed { by: By },
}

#[test]
fn releases_read_the_records_of_each_other() {
    let starting = |taken_back| destination::Record::Starting { taken_back };
    let reclaimed =
        |runs_there| Record::Reclaimed { by: By::Operator, reason: "why".into(), runs_there };
    let said = serde_json::to_string(&starting(false)).unwrap();
    assert_eq!(said, r#"{"phase":"starting"}"#);
    assert_eq!(serde_json::from_str::<destination::Record>(&said).unwrap(), starting(false));
    let said = serde_json::to_string(&reclaimed(false)).unwrap();
    assert_eq!(said, r#"{"phase":"reclaimed","by":"operator","reason":"why"}"#);
    assert_eq!(serde_json::from_str::<Record>(&said).unwrap(), reclaimed(false));
    let said = serde_json::to_string(&starting(true)).unwrap();
    assert_eq!(serde_json::from_str::<First>(&said).unwrap(), First::Starting);
    let said = serde_json::to_string(&reclaimed(true)).unwrap();
    let read = serde_json::from_str::<First>(&said).unwrap();
    assert_eq!(read, First::Reclaimed { by: By::Operator });
}

#[test]
fn a_journal_that_is_too_long_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let journals = journals(dir.path(), "boot-1");
    let mut large = opened("m1");
    large.qemu = json!("x".repeat(2 << 20));
    assert!(matches!(journals.create::<Record>(large), Err(JournalError::TooLong(_))));
    assert!(journals.contents().unwrap().is_empty());
}

#[test]
fn the_fuzzers_seed_is_sound() {
    let file: Vec<u8> =
        crate::fuzzing::seed_journal().lines().flat_map(|line| sealed(line.as_bytes())).collect();
    let contents = read::<Record>(&file).unwrap();
    assert_eq!((contents.records.len(), contents.torn), (3, false));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Wherever a crash cuts the file, its complete records are there, and the journal can be
    /// continued.
    #[test]
    fn a_torn_end_is_dropped(cut in 0usize..600, keep_length in any::<bool>()) {
        let dir = tempfile::tempdir().unwrap();
        let ends = written(dir.path());
        let cut = (ends[0] + cut).min(ends[3]);
        let mut bytes = fs::read(file(dir.path())).unwrap();
        let length = bytes.len();
        bytes.truncate(cut);
        if keep_length {
            bytes.resize(length, 0);
        }
        fs::write(file(dir.path()), &bytes).unwrap();

        let whole = ends[1..].iter().filter(|end| **end <= cut).count();
        let mut kept = only_source(&journals(dir.path(), "boot-1"));
        prop_assert_eq!(&kept.records, &records()[..whole]);
        prop_assert_eq!(kept.torn, !ends.contains(&cut));
        kept.journal.append(&Record::Dropped).unwrap();
        let kept = only_source(&journals(dir.path(), "boot-1"));
        prop_assert_eq!(kept.records.len(), whole + 1);
        prop_assert!(!kept.torn);
    }

    /// A changed byte is never taken for other content: in the last record it makes the record
    /// dropped, and anywhere else it is an error.
    #[test]
    fn a_changed_byte_is_seen(at in 0usize..2000, flip in 1u8..) {
        let dir = tempfile::tempdir().unwrap();
        let ends = written(dir.path());
        let at = at % ends[3];
        let mut bytes = fs::read(file(dir.path())).unwrap();
        bytes[at] ^= flip;
        fs::write(file(dir.path()), &bytes).unwrap();
        match journals(dir.path(), "boot-1").contents().unwrap().pop() {
            Some(Kept::Unreadable(JournalError::Damaged { .. })) => prop_assert!(at < ends[2]),
            Some(Kept::Source(kept)) => {
                prop_assert!(at >= ends[2], "at {at} of {ends:?}");
                prop_assert_eq!(kept.records, &records()[..2]);
            }
            other => prop_assert!(false, "{other:?}"),
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        crate::fuzzing::journal(&bytes);
        crate::fuzzing::messages(&bytes);
    }

    #[test]
    fn any_history_keeps_what_the_machines_promise(
        bytes in prop::collection::vec(0u8..48, 0..200),
    ) {
        crate::fuzzing::events(&bytes);
    }
}
