//! Entry points for the fuzzers (`workshop/fuzz/`), and for the seeded runs in this
//! crate's tests.

use crate::journal::{Keeps, read, sealed};
use crate::{Envelope, MigrationId, Resolution, ToDestination, ToSource, destination, source};

/// Reads any bytes as a journal of either side: they are read or refused, and what is read is a
/// prefix of the file. Then the same lines with correct checksums, which random bytes would never
/// have.
pub fn journal(bytes: &[u8]) {
    let lines: Vec<u8> = bytes.split(|byte| *byte == b'\n').flat_map(sealed).collect();
    for file in [bytes, &lines] {
        journal_of::<source::Record>(file);
        journal_of::<destination::Record>(file);
    }
}

/// Lines of a valid journal of either side, to mutate.
#[must_use]
pub fn seed_journal() -> String {
    let line = |n: u32, content: &str| {
        format!(r#"{{"n":{n},"at_unix_ms":1,"boot":"b","migration":"m",{content}}}"#)
    };
    let opened = r#""migration":"m","vm":"v","peer":"p","peer_address":"a","run":true,"qemu":7"#;
    let phases = [
        format!(r#""opened":{{{opened}}}"#),
        r#""record":{"phase":"stopped","run":true}"#.to_owned(),
        r#""record":{"phase":"committed","run":true}"#.to_owned(),
        r#""record":{"phase":"reclaimed","by":"destination","reason":"r"}"#.to_owned(),
    ];
    let lines = (0..).zip(&phases).map(|(n, content)| line(n, content));
    lines.collect::<Vec<_>>().join("\n")
}

fn journal_of<R: Keeps>(bytes: &[u8]) {
    match read::<R>(bytes) {
        Ok(contents) => {
            assert!(contents.end <= bytes.len());
            let whole = read::<R>(&bytes[..contents.end]).expect("what was read is sound");
            assert!(!whole.torn && whole.records.len() == contents.records.len());
        }
        Err(damage) => assert!(damage.at <= bytes.len()),
    }
}

/// Reads any bytes as a peer's message.
pub fn messages(bytes: &[u8]) {
    if let Ok(said) = serde_json::from_slice::<Envelope<ToSource>>(bytes) {
        let again = serde_json::to_vec(&said).expect("it was JSON");
        assert_eq!(serde_json::from_slice::<Envelope<ToSource>>(&again).ok(), Some(said));
    }
    let _ = serde_json::from_slice::<Envelope<ToDestination>>(bytes);
}

/// Runs any bytes as a history: each is an event of one of the sides, in any order, possible or
/// not. In any history, a source that sent `go` resumes its VM only if it received `refused` or
/// an operator's decision, and a destination that has the VM neither runs nor kills it again.
pub fn events(bytes: &[u8]) {
    let Ok(id) = MigrationId::new("m") else { return };
    let mut source = source::Machine::new(id.clone(), true);
    let mut destination = destination::Machine::new(id.clone());
    let mut doing = Vec::new();
    let (mut go_said, mut released) = (false, false);
    for byte in bytes {
        if let Some(event) = source_event(&id, *byte) {
            use source::{Action, Event};
            if matches!(event, Event::JournalFailed { .. }) {
                // The actions after the record were not done.
                let written = |action: &Action| matches!(action, Action::Journal(_));
                doing.truncate(doing.iter().position(written).unwrap_or(doing.len()));
            }
            go_said |= doing.iter().any(says_go);
            released |= match &event {
                Event::Received(said) => matches!(said.message, ToSource::Refused { .. }),
                event => *event == Event::Resolve(Resolution::Here),
            };
            doing = source.step(event);
            let goes_on = doing.iter().any(|action| matches!(action, Action::QemuGoOn { .. }));
            assert!(!(goes_on && go_said && !released), "it goes on after `go`");
        }
        if let Some(event) = destination_event(&id, *byte) {
            use destination::Action::{QemuCont, QemuKill};
            let here = destination.is_here() && !matches!(byte, 45);
            let actions = destination.step(event);
            let touched = actions.contains(&QemuCont) || actions.contains(&QemuKill);
            assert!(!(here && touched), "a VM that is here is left alone");
        }
    }
}

fn says_go(action: &source::Action) -> bool {
    let source::Action::Send(said) = action else { return false };
    matches!(said.message, ToDestination::Go { .. })
}

fn source_event(id: &MigrationId, byte: u8) -> Option<source::Event> {
    use source::Event::{
        ByOwner, CannotGoOn, Completed, ConnectionLost, GiveUp, JournalFailed, NotCompleted,
        QemuExited, Received, Resolve, Stopped, Timeout, WentOn,
    };
    let reason = || "fuzz".into();
    let received = |message| Received(Envelope { migration: id.clone(), message });
    Some(match byte {
        0 => Stopped { run: true },
        1 => Stopped { run: false },
        2 => Completed,
        3 => NotCompleted { reason: reason() },
        4 => received(ToSource::Loaded),
        5 => received(ToSource::Running),
        6 => received(ToSource::Refused { reason: reason() }),
        7 => received(ToSource::Lost { reason: reason() }),
        8 => received(ToSource::Unknown),
        9 => ConnectionLost { reason: reason() },
        10 => GiveUp { reason: reason() },
        11 => Timeout,
        12 => WentOn,
        13 => CannotGoOn { reason: reason() },
        14 => QemuExited,
        15 => JournalFailed { reason: reason() },
        16 => Resolve(Resolution::Here),
        17 => Resolve(Resolution::There),
        18 => ByOwner { run: false },
        19 => ByOwner { run: true },
        _ => return None,
    })
}

fn destination_event(id: &MigrationId, byte: u8) -> Option<destination::Event> {
    use destination::Event::{
        ConnectionLost, ContFailed, GiveUp, JournalFailed, Left, Loaded, QemuExited, Received,
        Resolve, Runs, Timeout,
    };
    let reason = || "fuzz".into();
    let received = |message| Received(Envelope { migration: id.clone(), message });
    Some(match byte {
        32 => Loaded,
        33 => received(ToDestination::Go { run: true }),
        34 => received(ToDestination::Go { run: false }),
        35 => received(ToDestination::Aborted { reason: reason() }),
        36 => received(ToDestination::Unknown),
        37 => ConnectionLost { reason: reason() },
        38 => GiveUp { reason: reason() },
        39 => Timeout,
        40 => Runs,
        41 => ContFailed { reason: reason(), never_ran: true },
        42 => ContFailed { reason: reason(), never_ran: false },
        43 => QemuExited,
        44 => Left,
        45 => JournalFailed { reason: reason() },
        46 => Resolve(Resolution::Here),
        47 => Resolve(Resolution::There),
        _ => return None,
    })
}
