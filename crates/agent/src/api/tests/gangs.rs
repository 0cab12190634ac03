//! Gangs that are resumed.

use std::net::TcpListener;
use std::{fs, thread};

use api::{
    GangOptions, GangOutcome, GangReport, GangRequest, MoveReport, MoveState, RunRequest, StopHow,
};

use super::*;
use crate::config::PeerEntry;
use crate::denied::Denied;

const ID: &str = "g0000000a";

/// A gang of VMs that have not moved from these hosts.
fn interrupted(vms: &[(&str, &str)], atomic: bool) -> GangReport {
    let moves = vms.iter().map(|(vm, from)| MoveReport {
        vm: (*vm).to_owned(),
        from: (*from).to_owned(),
        to: "elsewhere".to_owned(),
        ram_bytes: 1,
        used_bytes: 1,
        state: MoveState::Waiting,
        migration: None,
        reason: None,
        in_doubt: false,
        limit_bits_per_s: None,
        figures: None,
    });
    GangReport {
        id: ID.to_owned(),
        started_unix_s: 0,
        total_s: 0.0,
        parallel: 2,
        atomic,
        evacuates: None,
        options: GangOptions::default(),
        outcome: Some(GangOutcome::Interrupted),
        moves: moves.collect(),
        notes: Vec::new(),
    }
}

/// Leaves a gang's report to a host.
fn keep(site: &Site, report: &GangReport) {
    let note = site.api.registry.state().gangs().join(format!("{}.json", report.id));
    fs::write(note, serde_json::to_vec(report).unwrap()).unwrap();
}

/// A host whose agent does not answer.
fn silent_host(site: &Site) -> TcpListener {
    let there = TcpListener::bind("127.0.0.1:0").unwrap();
    site.api.migrations.routes().peers.replace(vec![PeerEntry {
        name: "there".to_owned(),
        rack: None,
        address: there.local_addr().unwrap(),
        nics: Vec::new(),
        carry_address: None,
        carry_ports: None,
        uplink: None,
    }]);
    there
}

#[test]
fn only_one_of_two_requests_resumes_a_gang() {
    let site = Site::new();
    let there = silent_host(&site);
    keep(&site, &interrupted(&[("web1", "there")], false));
    let gangs = &site.api.gangs;
    thread::scope(|scope| {
        let first = scope.spawn(|| gangs.resume(ID));
        // It queries that host, which does not answer; the second request is refused before that.
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
    // The first request has ended, so the gang could be resumed again.
    assert_eq!(gangs.resume(ID).unwrap_err(), Denied::Closing);
}

/// A second one would order the same VMs to move.
#[test]
fn a_host_is_evacuated_by_one_gang_at_a_time() {
    let site = Site::new();
    let there = silent_host(&site);
    let other = "g0000000b";
    for id in [ID, other] {
        let evacuates = Some("there".to_owned());
        let gang = interrupted(&[("web1", "there")], false);
        keep(&site, &GangReport { id: id.to_owned(), evacuates, ..gang });
    }
    let gangs = &site.api.gangs;
    thread::scope(|scope| {
        let first = scope.spawn(|| gangs.resume(ID));
        // It queries that host, which does not answer.
        let asked = there.accept().unwrap();
        let request: GangRequest =
            serde_json::from_str(r#"{"evacuate":{"host":"there"}}"#).unwrap();
        for denied in [gangs.resume(other).unwrap_err(), gangs.start(&request).unwrap_err()] {
            assert_eq!(denied.code(), ErrorCode::GangRunning);
            assert!(denied.to_string().contains("there is being evacuated already"), "{denied}");
        }
        drop((there, asked));
        first.join().unwrap().unwrap();
    });
    gangs.close();
    assert_eq!(gangs.report(ID).unwrap().outcome, Some(GangOutcome::Failed));
}

#[test]
fn an_atomic_gang_of_which_a_vm_is_lost_moves_no_other() {
    let site = Site::new();
    let qemu = std::env::var("DROVEWAY_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".to_owned());
    let rest = "-machine q35,accel=tcg -m 32 -nodefaults -display none -S";
    let run = RunRequest {
        name: "web2".to_owned(),
        argv: std::iter::once(qemu).chain(rest.split(' ').map(str::to_owned)).collect(),
        cwd: "/".to_owned(),
        share_domain: String::new(),
        guest_port: false,
        free_page_hint: false,
        hand_over: false,
    };
    site.api.registry.run(&run, site.api.examiner.probes()).unwrap();
    keep(&site, &interrupted(&[("web1", "gone"), ("web2", "here")], true));
    site.api.gangs.resume(ID).unwrap();
    site.api.gangs.close();
    let report = site.api.gangs.report(ID).unwrap();
    site.api.registry.stop("web2", StopHow { force: true, timeout_s: 0 }).unwrap();
    assert_eq!(report.outcome, Some(GangOutcome::Failed));
    let states = report.moves.iter().map(|one| one.state).collect::<Vec<_>>();
    assert_eq!(states, [MoveState::Failed, MoveState::Cancelled]);
    let why = report.moves[1].reason.as_deref().unwrap();
    assert!(why.starts_with("web1 failed, and this gang moves all or stops"), "{why}");
    assert_eq!(report.moves[1].migration, None);
}
