use std::collections::BTreeMap;

use api::GangOptions;

use super::*;

const GIB: u64 = 1 << 30;

/// Hosts by name with what they say; those without a word are silent.
#[derive(Default)]
struct Stage {
    hosts: Vec<(String, Option<String>)>,
    said: BTreeMap<String, Census>,
    unfit: BTreeMap<String, String>,
}

impl Stage {
    fn host(mut self, name: &str, free_gib: u64, vms: Vec<Counted>) -> Self {
        let census = Census { free_bytes: Some(free_gib * GIB), vms };
        self.hosts.push((name.to_owned(), None));
        self.said.insert(name.to_owned(), census);
        self
    }

    fn silent(mut self, name: &str) -> Self {
        self.hosts.push((name.to_owned(), None));
        self
    }

    fn unfit(mut self, name: &str, why: &str) -> Self {
        self.unfit.insert(name.to_owned(), why.to_owned());
        self
    }

    fn plan(&self, request: &GangRequest) -> Result<GangPlan, String> {
        plan(request, self).map_err(|denied| denied.to_string())
    }
}

impl Cluster for Stage {
    fn hosts(&self) -> Vec<(String, Option<String>)> {
        self.hosts.clone()
    }

    fn census(&self, host: &str) -> Result<Census, String> {
        self.said.get(host).cloned().ok_or_else(|| "nobody is there".to_owned())
    }

    fn able(&self, host: &str, wants: Vec<Want>) -> Result<Vec<Option<String>>, String> {
        Ok(vec![self.unfit.get(host).cloned(); wants.len()])
    }
}

fn vm(name: &str, gib: u64) -> Counted {
    Counted {
        name: name.to_owned(),
        status: VmStatus::Running,
        migration: None,
        ram_bytes: gib * GIB,
        used_bytes: gib * GIB / 2,
        needed_bytes: gib * GIB,
        vcpus: 1,
        want: Want::default(),
    }
}

fn request(json: &str) -> GangRequest {
    serde_json::from_str(json).unwrap()
}

fn evacuate() -> GangRequest {
    request(r#"{"evacuate":{"host":"x"}}"#)
}

fn named(moves: &str) -> GangRequest {
    request(&format!(r#"{{"moves":[{moves}]}}"#))
}

fn ways(plan: &GangPlan) -> Vec<(&str, &str, &str)> {
    plan.moves.iter().map(|one| (one.vm.as_str(), one.from.as_str(), one.to.as_str())).collect()
}

#[test]
fn a_host_is_evacuated_to_where_there_is_room() {
    let mut dead = vm("old", 1);
    dead.status = VmStatus::Dead;
    let stage = Stage::default()
        .host("x", 1, vec![vm("a", 1), vm("b", 4), dead])
        .host("y", 6, vec![])
        .host("z", 3, vec![])
        .silent("w");
    let plan = stage.plan(&evacuate()).unwrap();
    assert_eq!(ways(&plan), [("b", "x", "y"), ("a", "x", "z")]);
    assert_eq!(plan.moves[0].used_bytes, 2 * GIB);
    assert_eq!(
        plan.rooms[0],
        HostRoom { host: "y".into(), free_bytes: 6 * GIB, left_bytes: 2 * GIB }
    );
    let notes = plan.notes.join("; ");
    assert!(notes.contains("old on x is dead") && notes.contains("w is left out"), "{notes}");
    let empty = Stage::default().host("x", 1, vec![]).host("y", 1, vec![]);
    let plan = empty.plan(&evacuate()).unwrap();
    assert!(plan.moves.is_empty() && plan.notes[0].contains("no VM"), "{plan:?}");
}

#[test]
fn what_has_no_place_is_named() {
    let stage = || Stage::default().host("x", 1, vec![vm("a", 1), vm("b", 4)]).host("y", 3, vec![]);
    let why = stage().plan(&evacuate()).unwrap_err();
    assert!(why.contains("no room for b") && why.contains("1024 MiB are missing"), "{why}");
    let options = GangOptions { overcommit_memory: true, ..GangOptions::default() };
    stage().plan(&GangRequest { options, ..evacuate() }).unwrap();
    let why = stage().unfit("y", "it has no KVM").plan(&evacuate()).unwrap_err();
    assert!(why.contains("no host can have b: y: it has no KVM"), "{why}");
    let taken = Stage::default().host("x", 1, vec![vm("a", 1)]).host("y", 9, vec![vm("a", 1)]);
    let why = taken.plan(&evacuate()).unwrap_err();
    assert!(why.contains("there is a VM `a` there already"), "{why}");
}

#[test]
fn vms_by_name_are_found_where_they_are() {
    let stage = Stage::default()
        .host("x", 9, vec![vm("a", 1), vm("twin", 1)])
        .host("y", 1, vec![vm("b", 4), vm("twin", 1)])
        .silent("w");
    let plan = stage
        .plan(&named(
            r#"{"vm":"a","to":"y"},{"vm":"b","to":"x"},{"vm":"twin","from":"y","to":"x"}"#,
        ))
        .unwrap();
    assert_eq!(ways(&plan), [("b", "y", "x"), ("a", "x", "y"), ("twin", "y", "x")]);
    // Both are asked before one comes, which may make room: it is told, not refused.
    let tight = stage.plan(&named(r#"{"vm":"b","to":"x"},{"vm":"a","to":"y"}"#)).unwrap();
    assert!(tight.notes.is_empty(), "{:?}", tight.notes);
    let dry = GangRequest { dry_run: true, ..named(r#"{"vm":"a","to":"y"}"#) };
    let old = Stage::default().host("x", 9, vec![vm("a", 1)]).host("y", 9, vec![]);
    let plan = old.unfit("y", "it has no KVM").plan(&dry).unwrap();
    assert_eq!(plan.notes, ["a would be refused by y: it has no KVM"]);
    let small = Stage::default().host("x", 9, vec![vm("a", 4)]).host("y", 3, vec![]);
    let plan = small.plan(&named(r#"{"vm":"a","to":"y"}"#)).unwrap();
    assert!(plan.notes[0].contains("y has 3072 MiB to give now"), "{:?}", plan.notes);
}

#[test]
fn what_makes_no_sense_is_refused_with_the_reason() {
    let mut moving = vm("c", 1);
    moving.migration = Some("0a0b0c0d".to_owned());
    let stage = Stage::default()
        .host("x", 9, vec![vm("a", 1), vm("twin", 1), moving])
        .host("y", 9, vec![vm("twin", 1)])
        .silent("w");
    for (request, says) in [
        (named(""), "no VM to move"),
        (request(r#"{"moves":[{"vm":"a","to":"y"}],"evacuate":{"host":"x"}}"#), "not both"),
        (request(r#"{"evacuate":{"host":"x"},"parallel":0}"#), "outside 1 to 16"),
        (request(r#"{"evacuate":{"host":"x"},"options":{"downtime_ms":0}}"#), "downtime"),
        (request(r#"{"evacuate":{"host":"x"},"options":{"slowing":{"floor":7}}}"#), "floor"),
        (request(r#"{"evacuate":{"host":"x","to":["x"]}}"#), "to itself"),
        (
            request(r#"{"evacuate":{"host":"q"}}"#),
            "no host `q` in the peers file; there is: w, x, y",
        ),
        (request(r#"{"evacuate":{"host":"x","to":["w"]}}"#), "agent of w can't be asked: nobody"),
        (request(r#"{"evacuate":{"host":"w"}}"#), "agent of w can't be asked: nobody"),
        (named(r#"{"vm":"a","to":"y"},{"vm":"a","to":"y"}"#), "twice"),
        (named(r#"{"vm":"a","to":"y"},{"vm":"a","from":"x","to":"y"}"#), "twice"),
        (named(r#"{"vm":"a","from":"x","to":"x"}"#), "where it is"),
        (named(r#"{"vm":"a","to":"x"}"#), "a is on x already"),
        (named(r#"{"vm":"a","to":"w"}"#), "agent of w can't be asked"),
        (named(r#"{"vm":"q","to":"y"}"#), "no VM `q` on any host (w did not answer)"),
        (named(r#"{"vm":"q","from":"x","to":"y"}"#), "no VM `q` on x"),
        (named(r#"{"vm":"twin","to":"y"}"#), "x and y have a VM `twin` each"),
        (named(r#"{"vm":"c","to":"y"}"#), "c on x is being moved by migration 0a0b0c0d"),
    ] {
        let why = stage.plan(&request).unwrap_err();
        assert!(why.contains(says), "{says:?} is not in: {why}");
    }
}
