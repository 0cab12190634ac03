use std::collections::BTreeMap;

use api::GangOptions;

use super::*;
use crate::gangs::sampled::Content;
use engine::Sample;
use wire::gang::VmNeeds;

const GIB: u64 = 1 << 30;

/// Hosts by name with their answers; a host without one does not answer.
#[derive(Default)]
struct Stage {
    hosts: Vec<(String, Option<String>)>,
    said: BTreeMap<String, Census>,
    unfit: BTreeMap<String, String>,
    /// Hosts that report their VMs, and not what they can run.
    sick: Vec<String>,
    /// By VM; a VM without an entry has not been scanned.
    contents: BTreeMap<String, Content>,
    uplinks: BTreeMap<String, api::BitRate>,
}

impl Stage {
    fn host(mut self, name: &str, free_gib: u64, vms: Vec<Counted>) -> Self {
        let free_bytes = Some(free_gib * GIB);
        let census = Census { free_bytes, vms, ..Census::default() };
        self.hosts.push((name.to_owned(), None));
        self.said.insert(name.to_owned(), census);
        self
    }

    fn silent(mut self, name: &str) -> Self {
        self.hosts.push((name.to_owned(), None));
        self
    }

    /// One host's agent coordinates the evacuation of another.
    fn evacuating(mut self, coordinator: &str, host: &str) -> Self {
        self.said.get_mut(coordinator).unwrap().evacuating.push(host.to_owned());
        self
    }

    fn unfit(mut self, name: &str, why: &str) -> Self {
        self.unfit.insert(name.to_owned(), why.to_owned());
        self
    }

    fn sick(mut self, name: &str) -> Self {
        self.sick.push(name.to_owned());
        self
    }

    /// Sets the content of a VM: a number up to 1000 for each page.
    fn containing(mut self, vm: &str, rounds: u64, contents: &[u32]) -> Self {
        let sample = Sample { one_in: 1, hints: contents.to_vec() };
        let content = Content { rounds, pages: contents.len() as u64, sample };
        self.contents.insert(vm.to_owned(), content);
        self
    }

    fn plan(&self, request: &GangRequest) -> Result<GangPlan, String> {
        plan(request, self).map_err(|denied| denied.to_string())
    }
}

impl Cluster for Stage {
    fn here(&self) -> &'static str {
        "x"
    }

    fn racks(&self) -> BTreeMap<String, Option<String>> {
        self.hosts.iter().cloned().collect()
    }

    fn uplinks(&self) -> BTreeMap<String, api::BitRate> {
        self.uplinks.clone()
    }

    fn census(&self, host: &str) -> Result<Census, String> {
        self.said.get(host).cloned().ok_or_else(|| "nobody is there".to_owned())
    }

    fn able(&self, host: &str, needs: Vec<VmNeeds>) -> Result<Vec<Option<String>>, String> {
        if self.sick.iter().any(|name| name == host) {
            return Err("its disk hangs".to_owned());
        }
        Ok(vec![self.unfit.get(host).cloned(); needs.len()])
    }

    fn contents(&self, _host: &str, vms: &[Counted], one_in: u32) -> Vec<Result<Content, String>> {
        let of = |vm: &Counted| {
            let content = self.contents.get(&vm.name).cloned();
            let mut content = content.ok_or_else(|| "nobody has looked".to_owned())?;
            content.sample = content.sample.thinned(one_in);
            Ok(content)
        };
        vms.iter().map(of).collect()
    }
}

fn vm(name: &str, gib: u64) -> Counted {
    Counted {
        name: name.to_owned(),
        status: VmStatus::Running,
        migration: None,
        arrives_from: None,
        ram_bytes: gib * GIB,
        used_bytes: gib * GIB / 2,
        needed_bytes: gib * GIB,
        vcpus: 1,
        needs: VmNeeds::default(),
        share_domain: String::new(),
        loses_writes: false,
        program_replaced: false,
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
fn a_host_that_does_not_say_what_it_can_run_is_left_out_unless_it_was_named() {
    let stage = Stage::default()
        .host("x", 1, vec![vm("a", 1), vm("b", 1)])
        .host("w", 9, vec![])
        .host("y", 3, vec![])
        .host("z", 3, vec![vm("b", 1)])
        .sick("w");
    let plan = stage.plan(&evacuate()).unwrap();
    // Reasons still belong to their hosts: z has another b.
    assert_eq!(ways(&plan), [("a", "x", "y"), ("b", "x", "y")]);
    assert_eq!(plan.notes, ["w is left out, since it can't be queried: its disk hangs"]);
    let to = |hosts: &str| request(&format!(r#"{{"evacuate":{{"host":"x","to":[{hosts}]}}}}"#));
    let why = stage.plan(&to(r#""w","y""#)).unwrap_err();
    assert!(why.contains("agent of w can't be queried: its disk hangs"), "{why}");
    stage.plan(&to(r#""y""#)).unwrap();
    let dry = GangRequest { dry_run: true, ..named(r#"{"vm":"a","to":"w"}"#) };
    let plan = stage.plan(&dry).unwrap();
    assert_eq!(plan.notes, ["the agent of w can't be queried: its disk hangs"]);
    let alone = Stage::default().host("x", 1, vec![vm("a", 1)]).host("w", 9, vec![]).sick("w");
    let why = alone.plan(&evacuate()).unwrap_err();
    assert!(why.contains("none to choose from"), "{why}");
}

#[test]
fn a_host_that_is_evacuated_too_is_left_out_unless_it_was_named() {
    let stage = Stage::default()
        .host("x", 1, vec![vm("a", 1)])
        .host("y", 9, vec![])
        .host("z", 3, vec![])
        .evacuating("z", "y")
        .evacuating("x", "x");
    let plan = stage.plan(&evacuate()).unwrap();
    assert_eq!(ways(&plan), [("a", "x", "z")]);
    assert_eq!(plan.notes, ["y is left out, it is being evacuated itself"]);
    let noted = ["y is being evacuated itself: VMs that arrive there later stay there"];
    for named in
        [request(r#"{"evacuate":{"host":"x","to":["y","z"]}}"#), named(r#"{"vm":"a","to":"y"}"#)]
    {
        let plan = stage.plan(&named).unwrap();
        assert_eq!(ways(&plan), [("a", "x", "y")]);
        assert_eq!(plan.notes, noted);
    }
    let two = Stage::default().host("x", 1, vec![vm("a", 1)]).host("y", 9, vec![]);
    let why = two.evacuating("y", "y").plan(&evacuate()).unwrap_err();
    assert!(why.contains("no host can have a: y: it is being evacuated itself"), "{why}");
}

/// Both gangs would order the same VMs to move.
#[test]
fn a_host_that_another_agents_gang_evacuates_is_not_evacuated_twice() {
    let stage = Stage::default().host("x", 1, vec![vm("a", 1)]).host("y", 9, vec![]);
    let stage = stage.evacuating("y", "x");
    let already = "x is being evacuated already: `droveway gang` on y shows it, and `droveway \
                   cancel` there ends it";
    assert_eq!(stage.plan(&evacuate()).unwrap_err(), already);
    let plan = stage.plan(&GangRequest { dry_run: true, ..evacuate() }).unwrap();
    assert_eq!(ways(&plan), [("a", "x", "y")]);
    assert!(plan.notes.iter().any(|note| note == already), "{plan:?}");
}

#[test]
fn vms_without_a_place_are_named() {
    let stage = || Stage::default().host("x", 1, vec![vm("a", 1), vm("b", 4)]).host("y", 3, vec![]);
    let why = stage().plan(&evacuate()).unwrap_err();
    assert!(why.contains("no room for b") && why.contains("1024 MiB are missing"), "{why}");
    let options = GangOptions { overcommit_memory: true, ..GangOptions::default() };
    stage().plan(&GangRequest { options, ..evacuate() }).unwrap();
    let why = stage().unfit("y", "it has no KVM").plan(&evacuate()).unwrap_err();
    assert!(why.contains("no host can have b: y: it has no KVM"), "{why}");
    let taken = Stage::default().host("x", 1, vec![vm("a", 1)]).host("y", 9, vec![vm("a", 1)]);
    let why = taken.plan(&evacuate()).unwrap_err();
    assert!(why.contains("there is already a VM `a` there"), "{why}");
}

/// There the next arrival waits until the earlier one has ended, which has what it needs.
#[test]
fn an_earlier_arrival_from_the_same_host_takes_neither_name_nor_memory() {
    let arriving = |status, from: &str| Counted {
        status,
        migration: Some("0a0b0c0d".to_owned()),
        arrives_from: Some(from.to_owned()),
        ..vm("a", 4)
    };
    let stage = |y_gib, there| {
        Stage::default().host("x", 1, vec![vm("a", 4)]).host("y", y_gib, vec![there])
    };
    let dry = GangRequest { dry_run: true, ..named(r#"{"vm":"a","to":"y"}"#) };
    // Its QEMU may have ended already.
    for status in [VmStatus::Arriving, VmStatus::Dead] {
        let stage = stage(1, arriving(status, "x"));
        assert_eq!(ways(&stage.plan(&evacuate()).unwrap()), [("a", "x", "y")]);
        let notes = stage.plan(&dry).unwrap().notes.join("; ");
        assert!(!notes.contains("refused"), "{notes}");
    }
    // From any other host it is another VM.
    let stage = stage(9, arriving(VmStatus::Arriving, "z"));
    let why = stage.plan(&evacuate()).unwrap_err();
    assert!(why.contains("there is already a VM `a` there"), "{why}");
    let notes = stage.plan(&dry).unwrap().notes.join("; ");
    assert!(notes.contains("a would be refused by y: there is already a VM"), "{notes}");
}

#[test]
fn vms_that_lose_writes_move_only_if_that_is_accepted() {
    let losing = |name: &str| Counted { loses_writes: true, ..vm(name, 1) };
    let stage = Stage::default().host("x", 1, vec![vm("a", 1), losing("b")]).host("y", 9, vec![]);
    for request in [evacuate(), named(r#"{"vm":"a","to":"y"},{"vm":"b","to":"y"}"#)] {
        let why = stage.plan(&request).unwrap_err();
        assert!(why.starts_with("b would lose writes: under TCG"), "{why}");
        let options = GangOptions { accept_lost_writes: true, ..GangOptions::default() };
        let plan = stage.plan(&GangRequest { options, ..request }).unwrap();
        assert_eq!(ways(&plan), [("a", "x", "y"), ("b", "x", "y")]);
    }
    stage.plan(&named(r#"{"vm":"a","to":"y"}"#)).unwrap();
    let many = (0..20).map(|number| losing(&number.to_string())).collect();
    let stage = Stage::default().host("x", 1, many).host("y", 99, vec![]);
    let why = stage.plan(&evacuate()).unwrap_err();
    assert!(why.contains(" and 8 more would lose writes"), "{why}");
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
    // Both hosts are queried before either move, which may make room: no refusal yet.
    let tight = stage.plan(&named(r#"{"vm":"b","to":"x"},{"vm":"a","to":"y"}"#)).unwrap();
    assert!(tight.notes.is_empty(), "{:?}", tight.notes);
    let dry = GangRequest { dry_run: true, ..named(r#"{"vm":"a","to":"y"}"#) };
    let old = Stage::default().host("x", 9, vec![vm("a", 1)]).host("y", 9, vec![]);
    let plan = old.unfit("y", "it has no KVM").plan(&dry).unwrap();
    assert_eq!(plan.notes, ["a would be refused by y: it has no KVM"]);
    let small = Stage::default().host("x", 9, vec![vm("a", 4)]).host("y", 3, vec![]);
    let plan = small.plan(&named(r#"{"vm":"a","to":"y"}"#)).unwrap();
    assert!(plan.notes[0].contains("y has 3072 MiB free now"), "{:?}", plan.notes);
}

#[test]
fn invalid_requests_are_refused_with_the_reason() {
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
        (
            request(
                r#"{"evacuate":{"host":"x"},"options":{"downtime_ms":4000,"blackout_max_s":3}}"#,
            ),
            "--blackout-max",
        ),
        (request(r#"{"evacuate":{"host":"x"},"options":{"slowing":{"floor":7}}}"#), "floor"),
        (
            request(r#"{"evacuate":{"host":"x"},"options":{"timeout_s":18446744073709551615}}"#),
            "outside 1 to 86400",
        ),
        (request(r#"{"evacuate":{"host":"x","to":["x"]}}"#), "to itself"),
        (
            request(r#"{"evacuate":{"host":"q"}}"#),
            "no host `q` in the peers file; there is: w, x, y",
        ),
        (request(r#"{"evacuate":{"host":"x","to":["w"]}}"#), "agent of w can't be queried: nobody"),
        (request(r#"{"evacuate":{"host":"w"}}"#), "agent of w can't be queried: nobody"),
        (named(r#"{"vm":"a","to":"y"},{"vm":"a","to":"y"}"#), "twice"),
        (named(r#"{"vm":"a","to":"y"},{"vm":"a","from":"x","to":"y"}"#), "twice"),
        (named(r#"{"vm":"a","from":"x","to":"x"}"#), "at that host already"),
        (named(r#"{"vm":"a","to":"x"}"#), "a is on x already"),
        (named(r#"{"vm":"a","to":"w"}"#), "agent of w can't be queried"),
        (named(r#"{"vm":"q","to":"y"}"#), "no VM `q` on any host (w did not answer)"),
        (named(r#"{"vm":"q","from":"x","to":"y"}"#), "no VM `q` on x"),
        (named(r#"{"vm":"twin","to":"y"}"#), "x and y have a VM `twin` each"),
        (named(r#"{"vm":"c","to":"y"}"#), "c on x is being moved by migration 0a0b0c0d"),
    ] {
        let why = stage.plan(&request).unwrap_err();
        assert!(why.contains(says), "{says:?} is not in: {why}");
    }
}

/// A VM so small that its sample is complete.
fn small(name: &str) -> Counted {
    Counted { ram_bytes: 64 << 20, used_bytes: 32 << 20, needed_bytes: 64 << 20, ..vm(name, 0) }
}

#[test]
fn a_dry_run_says_what_is_shared_and_why() {
    let mut red = small("d");
    red.share_domain = "red".to_owned();
    let stage = Stage::default()
        .host("x", 9, vec![small("a"), small("b"), small("c"), red.clone()])
        .host("y", 9, vec![small("there")])
        .host("z", 9, vec![])
        .containing("there", 4, &[1, 2, 3, 500])
        .containing("a", 2, &[1, 2, 7, 7, 8])
        .containing("b", 0, &[3, 7, 8, 9])
        .containing("d", 1, &[600]);
    let page = 4096;
    let shared = |plan: &GangPlan| -> Vec<Option<[u64; 3]>> {
        let parts = |parts: api::SharedParts| {
            [parts.held_bytes, parts.within_bytes, parts.common_bytes].map(|bytes| bytes / page)
        };
        plan.moves.iter().map(|one| one.shared.map(parts)).collect()
    };
    let asked = |to: &str, share: &str| {
        let options = format!(r#""options":{{"sharing":{share}}},"dry_run":true"#);
        request(&format!(r#"{{"evacuate":{{"host":"x","to":[{to}]}},{options}}}"#))
    };
    let plan = stage.plan(&asked(r#""y""#, r#"{"share":"host"}"#)).unwrap();
    assert_eq!(shared(&plan), [Some([2, 1, 0]), Some([1, 0, 2]), None, Some([0, 0, 0])]);
    assert_eq!(plan.moves[1].shared_bytes, Some(3 * page));
    let notes = plan.notes.join("; ");
    assert!(notes.contains("what c on x contains isn't known: nobody has looked"), "{notes}");
    assert!(notes.contains("b on x has not been scanned completely yet"), "{notes}");
    // z has no VMs.
    let plan = stage.plan(&asked(r#""z""#, r#"{"share":"host"}"#)).unwrap();
    assert_eq!(shared(&plan)[..2], [Some([0, 1, 0]), Some([0, 0, 2])]);
    // Another host of z's rack has it.
    let mut racks = Stage { hosts: stage.hosts.clone(), ..Stage::default() };
    (racks.said, racks.contents) = (stage.said.clone(), stage.contents.clone());
    racks.hosts[1].1 = Some("r".to_owned());
    racks.hosts[2].1 = Some("r".to_owned());
    let plan = racks.plan(&asked(r#""z""#, r#"{"share":"rack"}"#)).unwrap();
    assert_eq!(shared(&plan)[..2], [Some([2, 1, 0]), Some([1, 0, 2])]);
    let plan = racks.plan(&asked(r#""z""#, r#"{"share":"host"}"#)).unwrap();
    assert_eq!(shared(&plan)[..2], [Some([0, 1, 0]), Some([0, 0, 2])]);
    // In another domain their content has other names.
    let plan = stage.plan(&asked(r#""y""#, r#"{"share":"host","domain":"red"}"#)).unwrap();
    assert_eq!(shared(&plan), [None, None, None, Some([0, 0, 0])]);
    assert!(plan.notes.join("; ").contains("what a shares in another domain"));
    // Sharing is off, or it is no dry run.
    let plan = stage.plan(&asked(r#""y""#, r#"{"share":"off"}"#)).unwrap();
    assert_eq!(shared(&plan), [None; 4]);
    let real = GangRequest { dry_run: false, ..asked(r#""y""#, r#"{"share":"host"}"#) };
    assert_eq!(shared(&stage.plan(&real).unwrap()), [None; 4]);
}

/// a and c contain what a VM at y does; b and d are alike, and like nothing there.
fn two_kinds(y_gib: u64) -> Stage {
    let (one, other): (Vec<u32>, Vec<u32>) = ((1..=8).collect(), (21..=28).collect());
    Stage::default()
        .host("x", 9, ["a", "b", "c", "d"].map(small).to_vec())
        .host("y", y_gib, vec![small("there")])
        .host("z", 9, vec![])
        .containing("there", 1, &one)
        .containing("a", 1, &one)
        .containing("b", 1, &other)
        .containing("c", 0, &one)
        .containing("d", 1, &other)
}

fn sharing(share: &str, dry_run: bool) -> GangRequest {
    let options = format!(r#""options":{{"sharing":{{"share":"{share}"}}}}"#);
    request(&format!(r#"{{"evacuate":{{"host":"x"}},{options},"dry_run":{dry_run}}}"#))
}

fn to(plan: &GangPlan) -> Vec<&str> {
    plan.moves.iter().map(|one| one.to.as_str()).collect()
}

#[test]
fn vms_go_where_their_content_is() {
    let chosen = "y is chosen for a, c because more of their content is there, or comes there \
                  with this gang, than at the host with most memory left";
    for share in ["auto", "host"] {
        for dry_run in [false, true] {
            let plan = two_kinds(8).plan(&sharing(share, dry_run)).unwrap();
            assert_eq!(to(&plan), ["y", "z", "y", "z"]);
            assert!(plan.notes.iter().any(|note| note == chosen), "{:?}", plan.notes);
        }
    }
    // Nothing is shared, or y has far less memory than z, or what is there is not known.
    let mut unknown = two_kinds(8);
    unknown.contents.remove("there");
    for (stage, share) in [(two_kinds(8), "off"), (two_kinds(4), "host"), (unknown, "host")] {
        let plan = stage.plan(&sharing(share, false)).unwrap();
        assert_eq!((to(&plan), &plan.notes[..]), (vec!["z"; 4], &[][..]));
    }
}

#[test]
fn in_a_rack_the_content_of_its_hosts_counts() {
    let mut stage = two_kinds(7).host("w", 8, vec![]);
    // The rack of y and w.
    for (name, rack) in &mut stage.hosts {
        if ["w", "y"].contains(&name.as_str()) {
            *rack = Some("r".to_owned());
        }
    }
    let plan = stage.plan(&sharing("rack", false)).unwrap();
    assert_eq!(to(&plan), ["w", "z", "w", "z"]);
    assert!(plan.notes[0].contains("w is chosen for a, c because more of their content is in its"));
    let plan = stage.plan(&sharing("host", false)).unwrap();
    assert_eq!(to(&plan), ["y", "z", "y", "z"]);
}

#[test]
fn a_dry_run_shows_with_which_limits_the_first_vms_start() {
    let rate = |text: &str| text.parse::<api::BitRate>().unwrap();
    let mut stage = Stage::default()
        .host("x", 9, vec![vm("a", 3), vm("b", 2), vm("c", 1)])
        .host("y", 9, vec![])
        .host("z", 9, vec![]);
    let moves = r#"{"vm":"a","to":"y"},{"vm":"b","to":"z"},{"vm":"c","to":"y"}"#;
    let limits = |stage: &Stage, total: Option<&str>, dry_run| -> Vec<Option<api::BitRate>> {
        let limit_total_bits_per_s = total.map(rate);
        let options = GangOptions { limit_total_bits_per_s, ..GangOptions::default() };
        let plan = stage.plan(&GangRequest { options, dry_run, ..named(moves) }).unwrap();
        plan.moves.iter().map(|one| one.limit_bits_per_s).collect()
    };
    let [two, five, eight] = ["2G", "5G", "8G"].map(|text| Some(rate(text)));
    assert_eq!(limits(&stage, Some("10G"), true), [five, five, None]);
    assert_eq!(limits(&stage, None, true), [None; 3]);
    assert_eq!(limits(&stage, Some("10G"), false), [None; 3]);
    // Only b crosses the uplink of z's rack; that of x and y has no limit.
    for (nth, rack) in ["r1", "r1", "r2"].into_iter().enumerate() {
        stage.hosts[nth].1 = Some(rack.to_owned());
    }
    stage.uplinks = [("r2".to_owned(), rate("2G"))].into();
    assert_eq!(limits(&stage, Some("10G"), true), [eight, two, None]);
    assert_eq!(limits(&stage, None, true), [None, two, None]);
}

#[test]
fn large_gangs_are_counted_from_small_samples() {
    let hosts = |vms: usize, gib: u64| {
        let all = (0..vms).map(|nth| vm(&format!("v{nth}"), gib)).collect();
        let stage = Stage::default().host("x", 9, all).host("y", 1 << 20, vec![]);
        let evacuate = r#"{"evacuate":{"host":"x"},"options":{"sharing":{"share":"host"}},"#;
        let request = request(&format!(r#"{evacuate}"dry_run":true}}"#));
        (0..vms)
            .fold(stage, |stage, nth| stage.containing(&format!("v{nth}"), 1, &[1, 2, 3]))
            .plan(&request)
            .unwrap()
    };
    // Three equal pages are counted exactly, whatever the rate of the sample.
    for (vms, gib) in [(1, 1), (3, 512), (200, 64)] {
        let plan = hosts(vms, gib);
        let held = |one: &PlannedMove| one.shared.map(|parts| parts.held_bytes);
        assert!(plan.moves.iter().all(|one| held(one) == Some(0)), "{:?}", plan.moves);
        let common = plan.moves.iter().filter_map(|one| one.shared_bytes).sum::<u64>();
        assert_eq!(common, (vms as u64 - 1) * 3 * 4096);
    }
}
