//! Resuming a gang: what became of its VMs, and which moves are left.
//!
//! A restarted agent does not resume its gangs by itself. It can't know how much time has
//! passed, what the operator has done meanwhile, or whether the gang is still needed; and a
//! host that boots must not begin to move VMs.

use std::collections::{BTreeMap, BTreeSet};

use api::{GangReport, MoveReport, MoveState, VmStatus};

use super::cluster::Cluster;
use crate::parallel::at_once;
use wire::gang::{Census, Counted};

/// The state of a VM of the gang.
enum Found {
    /// It has to be moved, as if its move had never started.
    Waits,
    /// Its migration may still run, or the source agent knows how it ended.
    Started,
    /// It is at its destination.
    Arrived,
    /// Its place can't be determined, or it is lost.
    Lost(String),
}

/// A gang that can be resumed.
pub(super) struct TakenUp {
    pub(super) report: GangReport,
    /// VMs whose migrations are to be watched.
    pub(super) started: Vec<usize>,
}

pub(super) fn taken_up(mut report: GangReport, cluster: &dyn Cluster) -> TakenUp {
    let left = report.moves.iter().filter(|one| one.state != MoveState::Done);
    let hosts: BTreeSet<&String> = left.flat_map(|one| [&one.from, &one.to]).collect();
    let hosts: Vec<String> = hosts.into_iter().cloned().collect();
    let answers = at_once(&hosts, |host| cluster.census(host));
    let known: BTreeMap<String, Result<Census, String>> = hosts.into_iter().zip(answers).collect();
    let mut started = Vec::new();
    for (number, one) in report.moves.iter_mut().enumerate() {
        if one.state == MoveState::Done {
            continue;
        }
        let found = look(one, &known);
        (one.reason, one.in_doubt) = (None, false);
        match found {
            Found::Waits => {
                (one.state, one.migration) = (MoveState::Waiting, None);
                one.limit_bits_per_s = None;
            }
            Found::Started => {
                one.state = MoveState::Moving;
                started.push(number);
            }
            Found::Arrived => (one.state, one.limit_bits_per_s) = (MoveState::Done, None),
            Found::Lost(why) => (one.state, one.reason) = (MoveState::Failed, Some(why)),
        }
    }
    report.outcome = None;
    TakenUp { report, started }
}

fn look(one: &MoveReport, known: &BTreeMap<String, Result<Census, String>>) -> Found {
    let at = |host: &str| -> Result<Option<&Counted>, String> {
        match known.get(host) {
            Some(Ok(census)) => Ok(census.vms.iter().find(|vm| vm.name == one.vm)),
            Some(Err(why)) => Err(format!("the agent of {host} can't be queried: {why}")),
            None => Err(format!("{host} was not queried")),
        }
    };
    let here = match at(&one.from) {
        Ok(here) => here,
        Err(why) => return Found::Lost(why),
    };
    // A move that had ended by the saved report is not watched any more.
    let may_move = one.state == MoveState::Moving && one.migration.is_some();
    match (here, at(&one.to)) {
        (Some(here), _) if here.is_settled() => Found::Waits,
        (Some(here), _) if here.migration.is_some() && here.migration == one.migration => {
            Found::Started
        }
        // If it can't be moved now, the source agent refuses the order with the reason.
        (Some(_), _) => Found::Waits,
        (None, _) if may_move => Found::Started,
        (None, Ok(Some(there))) if there.is_settled() => Found::Arrived,
        (None, Ok(Some(there))) if there.status == VmStatus::Dead => {
            Found::Lost(format!("it is dead at {}", one.to))
        }
        (None, Ok(_)) => Found::Lost(format!("it is neither at {} nor at {}", one.from, one.to)),
        (None, Err(why)) => Found::Lost(format!("it is no longer at {}, and {why}", one.from)),
    }
}

#[cfg(test)]
mod tests {
    use api::{GangOptions, GangOutcome};

    use super::super::sampled::Content;
    use super::*;
    use wire::gang::VmNeeds;

    /// Hosts x and y with these VMs; z does not answer.
    struct Two([Vec<Counted>; 2]);

    impl Cluster for Two {
        fn here(&self) -> &'static str {
            "x"
        }

        fn racks(&self) -> BTreeMap<String, Option<String>> {
            BTreeMap::new()
        }

        fn uplinks(&self) -> BTreeMap<String, api::BitRate> {
            BTreeMap::new()
        }

        fn census(&self, host: &str) -> Result<Census, String> {
            let vms = match host {
                "x" => self.0[0].clone(),
                "y" => self.0[1].clone(),
                _ => return Err("it is off".to_owned()),
            };
            Ok(Census { vms, ..Census::default() })
        }

        fn able(&self, _: &str, needs: Vec<VmNeeds>) -> Result<Vec<Option<String>>, String> {
            Ok(vec![None; needs.len()])
        }

        fn contents(&self, _: &str, vms: &[Counted], _: u32) -> Vec<Result<Content, String>> {
            vec![Err("nobody looks".to_owned()); vms.len()]
        }
    }

    fn vm(status: VmStatus, migration: Option<&str>) -> Vec<Counted> {
        let migration = migration.map(str::to_owned);
        let (ram_bytes, vcpus, needs) = (1, 1, VmNeeds::default());
        vec![Counted {
            name: "v".to_owned(),
            status,
            migration,
            arrives_from: None,
            ram_bytes,
            used_bytes: 1,
            needed_bytes: 1,
            vcpus,
            needs,
            share_domain: String::new(),
            loses_writes: false,
            program_replaced: false,
        }]
    }

    fn kept(from: &str, state: MoveState, migration: Option<&str>) -> GangReport {
        GangReport {
            id: "g00000001".to_owned(),
            started_unix_s: 0,
            total_s: 0.0,
            parallel: 2,
            atomic: false,
            evacuates: None,
            options: GangOptions::default(),
            outcome: Some(GangOutcome::Interrupted),
            moves: vec![MoveReport {
                vm: "v".to_owned(),
                from: from.to_owned(),
                to: "y".to_owned(),
                ram_bytes: 1,
                used_bytes: 1,
                state,
                migration: migration.map(str::to_owned),
                reason: Some("before".to_owned()),
                in_doubt: true,
                limit_bits_per_s: None,
                figures: None,
            }],
            notes: Vec::new(),
        }
    }

    /// The saved state, the VMs at x and y, and the resulting state.
    #[test]
    fn what_is_left_to_do_is_found_out() {
        use MoveState::{Cancelled, Done, Failed, Moving, Waiting};
        use VmStatus::{Arriving, Dead, InDoubt, Running};
        let none = Vec::new;
        for (state, id, at_x, at_y, now, watched) in [
            (Waiting, None, vm(Running, None), none(), Waiting, false),
            (Failed, Some("1"), vm(Running, None), none(), Waiting, false),
            (Cancelled, Some("1"), vm(Running, None), none(), Waiting, false),
            (Moving, Some("1"), vm(Running, None), none(), Waiting, false),
            (Moving, Some("1"), vm(Running, Some("1")), vm(Arriving, Some("1")), Moving, true),
            // Another migration moves it: the source agent will refuse the order.
            (Moving, Some("1"), vm(Running, Some("2")), none(), Waiting, false),
            (Moving, Some("1"), vm(InDoubt, None), none(), Waiting, false),
            (Moving, Some("1"), none(), vm(Running, None), Moving, true),
            (Waiting, None, none(), vm(Running, None), Done, false),
            (Waiting, None, none(), vm(Dead, None), Failed, false),
            (Waiting, None, none(), none(), Failed, false),
            (Done, Some("1"), none(), none(), Done, false),
        ] {
            let shown = format!("{state:?} {id:?} {at_x:?} {at_y:?}");
            let TakenUp { report, started } = taken_up(kept("x", state, id), &Two([at_x, at_y]));
            assert_eq!(report.moves[0].state, now, "{shown}");
            assert_eq!(!started.is_empty(), watched, "{shown}");
            assert_eq!(report.outcome, None);
            let fresh = report.moves[0].reason.as_deref() != Some("before");
            assert!(fresh || now == Done, "{shown}");
            assert_eq!(report.moves[0].in_doubt, !fresh, "{shown}");
        }
        let TakenUp { report, .. } = taken_up(kept("z", Waiting, None), &Two([none(), none()]));
        assert_eq!(report.moves[0].state, Failed);
        assert!(report.moves[0].reason.as_ref().unwrap().contains("it is off"));
    }
}
