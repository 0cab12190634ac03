//! Gangs that are resumed.

use std::net::TcpListener;
use std::{fs, thread};

use api::{GangOptions, GangOutcome, GangReport, MoveReport, MoveState};

use super::*;

const ID: &str = "g0000000a";

/// One VM, which has not moved from `there`.
fn interrupted() -> GangReport {
    GangReport {
        id: ID.to_owned(),
        started_unix_s: 0,
        total_s: 0.0,
        parallel: 2,
        atomic: false,
        options: GangOptions::default(),
        outcome: Some(GangOutcome::Interrupted),
        moves: vec![MoveReport {
            vm: "web1".to_owned(),
            from: "there".to_owned(),
            to: "here".to_owned(),
            ram_bytes: 1,
            used_bytes: 1,
            state: MoveState::Waiting,
            migration: None,
            reason: None,
            in_doubt: false,
            figures: None,
        }],
        notes: Vec::new(),
    }
}

#[test]
fn only_one_of_two_requests_resumes_a_gang() {
    let site = Site::new();
    let there = TcpListener::bind("127.0.0.1:0").unwrap();
    site.api.migrations.routes().peers.replace(vec![PeerEntry {
        name: "there".to_owned(),
        rack: None,
        address: there.local_addr().unwrap(),
        nics: Vec::new(),
        carry_address: None,
        carry_ports: None,
    }]);
    let note = site.api.registry.state().gangs().join(format!("{ID}.json"));
    fs::write(note, serde_json::to_vec(&interrupted()).unwrap()).unwrap();
    let gangs = &site.api.gangs;
    thread::scope(|scope| {
        let first = scope.spawn(|| gangs.resume(ID));
        // It asks that host, which does not answer; the second request is refused before that.
        let asked = there.accept().unwrap();
        drop(there);
        let denied = gangs.resume(ID).unwrap_err();
        assert_eq!(denied.code(), ErrorCode::GangRunning);
        assert!(denied.to_string().contains("is being resumed already"), "{denied}");
        drop(asked);
        first.join().unwrap().unwrap();
    });
    gangs.close();
    let report = gangs.report(ID).unwrap();
    assert_eq!(report.outcome, Some(GangOutcome::Failed));
    // The first request is over, so the gang could be resumed again.
    assert_eq!(gangs.resume(ID).unwrap_err(), Denied::Closing);
}
