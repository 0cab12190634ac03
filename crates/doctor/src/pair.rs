//! Two hosts: whether VMs can move from `here` to `there`.

mod memory;

use std::time::Duration;

use api::{Finding, Severity};
use qemu::lost_writes;
use qemu::probe::Verdict;

use crate::Findings;
use crate::host::{BLOCKED, of_destination};
use facts::host::{Carries, Facts, Kvm, Program, Tap, Tsc, VmFacts};
use wire::examine::Reached;

/// Beyond this, certificates and logs suffer; guests keep their own time across a move.
const SKEW_MUCH: Duration = Duration::from_secs(2);
/// KVM treats smaller differences as the same frequency (its `tsc_tolerance_ppm`).
const TSC_TOLERANCE_PPM: f64 = 250.0;

/// What one host measured when it contacted another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meeting {
    /// The time from the question to its answer.
    pub round_trip: Duration,
    /// When the question was sent, by this host's clock, since 1970.
    pub asked_at_unix_ms: u64,
    /// The answer.
    pub reached: Reached,
    /// Each path that a lane can take.
    pub lanes: Vec<LaneMet>,
}

/// Why a peer was not met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unmet {
    /// The reason.
    pub why: String,
    /// What to do about it.
    pub advice: &'static str,
}

/// One path that a lane can take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneMet {
    /// The path's two ends.
    pub path: String,
    /// The round trip of a question made of full packets, or why there was no answer.
    pub outcome: Result<Duration, String>,
}

impl Meeting {
    /// How far the peer's clock is ahead, in ms, if it was read in the middle of the round
    /// trip.
    fn ahead_ms(&self) -> i64 {
        let middle = self.asked_at_unix_ms.saturating_add(milliseconds(self.round_trip) / 2);
        let difference = i128::from(self.reached.at_unix_ms) - i128::from(middle);
        i64::try_from(difference).unwrap_or(i64::MAX)
    }

    fn skew(&self) -> Duration {
        let sure = self.ahead_ms().unsigned_abs().saturating_sub(milliseconds(self.round_trip) / 2);
        Duration::from_millis(sure)
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Judges a peer by its greeting alone.
#[must_use]
pub fn of_peer(here: &str, droveway: &str, peer: &str, met: Result<&Meeting, &Unmet>) -> Finding {
    let mut findings = Findings::of(here);
    match met {
        Ok(meeting) => met_one(droveway, peer, meeting, &mut findings),
        Err(Unmet { why, advice }) => {
            findings.warning("peer", format!("{peer} can't be queried: {why}."), advice);
        }
    }
    findings.list.remove(0)
}

fn met_one(droveway: &str, peer: &str, meeting: &Meeting, findings: &mut Findings) {
    let said = &meeting.reached;
    let text = format!(
        "{peer} answers in {:.1} ms: Droveway {}, its clock is {} ms {}.",
        meeting.round_trip.as_secs_f64() * 1e3,
        said.droveway,
        meeting.ahead_ms().unsigned_abs(),
        if meeting.ahead_ms() < 0 { "behind" } else { "ahead" },
    );
    if said.host != peer {
        findings.error(
            "peer",
            format!("At the address of {peer}, {} answers.", said.host),
            "correct the peers file",
        );
    } else if meeting.skew() > SKEW_MUCH {
        findings.warning("peer", text, "synchronize both clocks with the same servers");
    } else if said.droveway != droveway {
        findings.note("peer", text, "run the same version on all hosts");
    } else {
        findings.ok("peer", text);
    }
}

/// Judges whether the VMs of `here` can move to `there`, then adds the problems of `there`.
#[must_use]
pub fn of_pair(here: &Facts, there: &Facts, meeting: &Meeting) -> Vec<Finding> {
    let mut findings = Findings::of(format!("{} -> {}", here.host, there.host));
    met_one(&here.droveway, &there.host, meeting, &mut findings);
    for lane in &meeting.lanes {
        match &lane.outcome {
            Ok(took) => findings.ok(
                "lane",
                format!("{}: full packets go both ways, in {:.1} ms.", lane.path, ms(*took)),
            ),
            Err(why) => findings.error(
                "lane",
                format!("{}: {why}.", lane.path),
                "is that address right, can that card reach it, and do all switches between \
                 forward packets of both cards' MTU?",
            ),
        }
    }
    for vm in &here.vms {
        self::vm(vm, there, &mut findings);
    }
    if here.vms.iter().any(|vm| vm.accelerator == "kvm") {
        tsc(here, there, &mut findings);
    }
    let moves = |carries: &Carries| carries.manager.clone().unwrap_or_else(|| "libvirt".to_owned());
    if let (Some(ours), None) = (&here.carries, &there.carries) {
        // libvirt is led to the agents in any case. For other managers, agents take the place of
        // sockets only if an agent expects the VM.
        let outcome = match ours.manager {
            None => "they fail, and their VMs stay",
            Some(_) => "they bypass the agents",
        };
        findings.warning(
            "carry",
            format!(
                "{} carries migrations of {}, and {} does not: {outcome}.",
                here.host,
                moves(ours),
                there.host
            ),
            "give the agent there a section [carry], with the same `manager`",
        );
    }
    if let (Some(ours), Some(theirs)) = (&here.carries, &there.carries)
        && ours.manager != theirs.manager
    {
        findings.warning(
            "carry",
            format!(
                "{} carries migrations of {}, and {} those of {}: neither can send to the other.",
                here.host,
                moves(ours),
                there.host,
                moves(theirs)
            ),
            "the same `manager` under [carry] on both",
        );
    }
    memory::of_all(here, there, &mut findings);
    let mut list = findings.list;
    let theirs = of_destination(there, &here.vms).into_iter();
    list.extend(theirs.filter(|one| one.severity > Severity::Ok));
    list
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn vm(vm: &VmFacts, there: &Facts, findings: &mut Findings) {
    let before = findings.list.len();
    if there.vms.iter().any(|other| other.name == vm.name) {
        findings.error(
            "vm",
            format!("{}: a VM of that name is already at {}.", vm.name, there.host),
            "stop it, or give one of the two another name",
        );
    }
    if vm.accelerator == "kvm" && !matches!(there.kvm, Kvm::Usable | Kvm::Unknown) {
        findings.error(
            "vm",
            format!("{} runs with KVM, and {} can't use KVM.", vm.name, there.host),
            "make KVM usable there",
        );
    } else if let Some(program) = there.program(&vm.program, &vm.accelerator) {
        qemu(vm, there, program, findings);
    }
    for reason in &vm.blockers {
        findings.error("vm", format!("{} can't be moved: {reason}.", vm.name), BLOCKED);
    }
    if vm.loses_writes {
        findings.error(
            "vm",
            format!("{}: {}.", vm.name, lost_writes::WHY),
            "restart it with QEMU 9.0 or newer, or with KVM; --accept-lost-writes moves it anyway",
        );
    }
    environment(vm, there, findings);
    taps(vm, there, findings);
    memory::of_one(vm, there, findings);
    if findings.list.len() == before {
        let program = there.program(&vm.program, &vm.accelerator);
        let version = program.and_then(|program| Some(program.known.as_ref()?.version_text()));
        let by = version.map_or_else(String::new, |version| format!(", to QEMU {version}"));
        findings.ok("vm", format!("{} can go to {}{by}.", vm.name, there.host));
    }
}

/// Whether the VM's QEMU would find the code that it has here.
fn environment(vm: &VmFacts, there: &Facts, findings: &mut Findings) {
    let lacks = |name: &&String| !there.environment.contains(name);
    let missing: Vec<&str> = vm.environment.iter().filter(lacks).map(String::as_str).collect();
    if !missing.is_empty() {
        findings.note(
            "vm",
            format!(
                "{}: its QEMU was started with {}, and the agent at {} starts QEMU without.",
                vm.name,
                missing.join(", "),
                there.host
            ),
            "if its QEMU needs that, set it for the agents (Environment= in their units)",
        );
    }
}

/// Whether the VM's network cards would be connected. A script may connect others than these.
fn taps(vm: &VmFacts, there: &Facts, findings: &mut Findings) {
    for tap in &vm.taps {
        let (is, or) = match there.tap(tap) {
            Tap::Missing => ("missing", ""),
            Tap::Down => ("down", ", or its bridge is"),
            Tap::Alone => {
                findings.note(
                    "vm",
                    format!(
                        "{}: the tap {tap} is on no bridge at {}, which has no address and no \
                         route there.",
                        vm.name, there.host
                    ),
                    "add it to the VM's bridge, if nothing else connects it",
                );
                continue;
            }
            Tap::Unknown | Tap::Connected => continue,
        };
        findings.error(
            "vm",
            format!("{}: the tap {tap} is {is} at {}{or}.", vm.name, there.host),
            "create it and bring it up on the VM's bridge there, or name another with --set; \
             --accept-missing-taps moves the VM anyway",
        );
    }
}

fn qemu(vm: &VmFacts, there: &Facts, program: &Program, findings: &mut Findings) {
    let Some(known) = &program.known else {
        let why = program.problem.as_deref().unwrap_or("its QEMU there doesn't answer");
        findings.error(
            "vm",
            format!("{}: {why}.", vm.name),
            "install it there, or name the program there with --set",
        );
        return;
    };
    if vm.machine.is_empty() {
        return;
    }
    let cpu = vm.cpu.as_deref();
    let verdict = Verdict { program: &vm.program, known, machine: &vm.machine, cpu };
    if let Err(unfit) = verdict.check() {
        findings.error("vm", format!("{}: {unfit}.", vm.name), "");
        return;
    }
    let here_lacks = verdict.unavailable();
    if !here_lacks.is_empty() {
        findings.note(
            "vm",
            format!(
                "{}: {} of {} are not available at {}: {}.",
                vm.name,
                if here_lacks.len() == 1 { "a feature" } else { "features" },
                cpu.unwrap_or_default(),
                there.host,
                here_lacks.join(", ")
            ),
            "it can go only if it runs without them here too, which a move checks before it starts",
        );
    }
}

/// How guests' time changes after a move if the processors' TSC frequencies differ.
fn tsc(here: &Facts, there: &Facts, findings: &mut Findings) {
    let (Some(ours), Some(theirs)) = (here.tsc, there.tsc) else { return };
    let ratio = f64::from(theirs.khz) / f64::from(ours.khz);
    let mhz = |tsc: Tsc| format!("{:.1} MHz", f64::from(tsc.khz) / 1e3);
    if !(ratio.is_finite() && (ratio - 1.0).abs() * 1e6 > TSC_TOLERANCE_PPM) {
        findings.ok("tsc", format!("{}'s TSC counts as fast, at {}.", there.host, mhz(theirs)));
        return;
    }
    let text = format!("{}'s TSC counts at {}, not {}", there.host, mhz(theirs), mhz(ours));
    if theirs.scales {
        findings.ok("tsc", format!("{text}, and KVM there scales it for guests from here."));
        return;
    }
    let (by, how) = ((ratio - 1.0).abs() * 100.0, if ratio < 1.0 { "slow" } else { "fast" });
    findings.warning(
        "tsc",
        format!(
            "{text}, and KVM there can't scale it: a guest from here whose clock source is tsc \
             has a clock that is {by:.2} % {how} until it boots there."
        ),
        "guests with kvm-clock or Hyper-V's clock are not affected; a VM with tsc-frequency on its \
         command line can't go there",
    );
}

#[cfg(test)]
mod tests {
    use facts::host::Carries;
    use facts::memory::HostMemory;
    use facts::program::{Capabilities, CpuModel, MachineType};

    use super::*;

    fn vm(name: &str, ram_bytes: u64) -> VmFacts {
        VmFacts {
            name: name.to_owned(),
            program: "qemu".to_owned(),
            accelerator: "tcg".to_owned(),
            machine: "pc-q35-7.2".to_owned(),
            cpu: Some("Haswell".to_owned()),
            ram_bytes,
            ..VmFacts::default()
        }
    }

    fn hosts() -> (Facts, Facts) {
        let here = Facts {
            host: "a".to_owned(),
            droveway: "1".to_owned(),
            vms: vec![vm("web1", 1 << 30)],
            ..Facts::default()
        };
        let machine = MachineType { name: "pc-q35-7.2".to_owned(), alias: None, deprecated: false };
        let cpu = CpuModel { name: "Haswell".to_owned(), unavailable: Vec::new() };
        let known = Capabilities {
            version: (9, 2, 0),
            machines: vec![machine],
            cpus: vec![cpu],
            ..Capabilities::default()
        };
        let program = Program {
            name: "qemu".to_owned(),
            accelerator: "tcg".to_owned(),
            known: Some(known),
            problem: None,
        };
        let memory = HostMemory { available_bytes: Some(2 << 30), ..HostMemory::default() };
        let there = Facts {
            host: "b".to_owned(),
            programs: vec![program],
            memory,
            kvm: Kvm::Missing,
            ..Facts::default()
        };
        (here, there)
    }

    fn meeting() -> Meeting {
        Meeting {
            round_trip: Duration::from_millis(4),
            asked_at_unix_ms: 1_000_000,
            reached: Reached {
                host: "b".to_owned(),
                droveway: "1".to_owned(),
                at_unix_ms: 1_000_010,
                ..Reached::default()
            },
            lanes: vec![LaneMet { path: "x -> y".to_owned(), outcome: Ok(Duration::ZERO) }],
        }
    }

    fn with_tap(here: &mut Facts, there: &mut Facts, state: Tap) {
        here.vms[0].taps = vec!["t0".to_owned()];
        there.taps = vec![("t0".to_owned(), state)];
    }

    fn errors(found: &[Finding]) -> Vec<&str> {
        let errors = found.iter().filter(|one| one.severity == Severity::Error);
        errors.map(|one| one.text.as_str()).collect()
    }

    #[test]
    fn a_pair_that_gets_along() {
        let (here, there) = hosts();
        let found = of_pair(&here, &there, &meeting());
        assert!(errors(&found).is_empty(), "{found:#?}");
        assert!(
            found.iter().any(|one| one.text == "web1 can go to b, to QEMU 9.2.0."),
            "{found:#?}"
        );
        assert!(found[0].text.contains("its clock is 8 ms ahead"), "{}", found[0].text);
        assert_eq!(found[0].host, "a -> b");
        // Problems of the other host are reported under its own name.
        assert!(found.iter().any(|one| one.host == "b" && one.about == "kvm"));
    }

    #[test]
    fn what_keeps_a_vm_from_going_is_an_error() {
        type Change = fn(&mut Facts, &mut Facts, &mut Meeting);
        let table: [(Change, &str); 13] = [
            (
                |here, _, _| here.vms[0].blockers = vec!["non-migratable device: x/nvme".into()],
                "web1 can't be moved: non-migratable device: x/nvme.",
            ),
            (
                |here, there, _| with_tap(here, there, Tap::Missing),
                "web1: the tap t0 is missing at b",
            ),
            (|here, there, _| with_tap(here, there, Tap::Down), "web1: the tap t0 is down at b"),
            (
                |here, _, _| here.vms[0].loses_writes = true,
                "web1: under TCG, a QEMU older than 9.0 loses writes",
            ),
            (|_, there, _| there.vms.push(vm("web1", 0)), "a VM of that name is already at b"),
            (|here, _, _| here.vms[0].accelerator = "kvm".to_owned(), "b can't use KVM"),
            (
                |here, _, _| here.vms[0].machine = "pc-q35-10.0".to_owned(),
                "doesn't know the machine type pc-q35-10.0",
            ),
            (
                |here, _, _| here.vms[0].cpu = Some("GraniteRapids".to_owned()),
                "doesn't know the CPU model GraniteRapids",
            ),
            (
                |_, there, _| {
                    there.programs[0].known = None;
                    there.programs[0].problem = Some("there is no qemu on this host".to_owned());
                },
                "web1: there is no qemu on this host",
            ),
            (|here, _, _| here.vms[0].ram_bytes = 3 << 30, "web1 has 3072 MiB of RAM, more than b"),
            (|_, _, met| met.lanes[0].outcome = Err("no route".to_owned()), "x -> y: no route"),
            (|_, _, met| met.reached.host = "c".to_owned(), "At the address of b, c answers"),
            (
                |_, there, _| there.state.free_bytes = Some(0),
                "VMs' records and journals can't be written",
            ),
        ];
        for (change, piece) in table {
            let ((mut here, mut there), mut met) = (hosts(), meeting());
            change(&mut here, &mut there, &mut met);
            let found = of_pair(&here, &there, &met);
            assert!(errors(&found).iter().any(|text| text.contains(piece)), "{piece}: {found:#?}");
        }
    }

    #[test]
    fn possible_obstacles_are_no_errors() {
        let (mut here, mut there) = hosts();
        here.vms[0].taps = vec!["t0".to_owned(), "t1".to_owned(), "t2".to_owned()];
        there.taps = vec![("t0".to_owned(), Tap::Alone), ("t1".to_owned(), Tap::Connected)];
        here.vms.push(vm("web2", 3 << 29));
        here.vms[0].environment = ["LD_A", "QEMU_B"].map(str::to_owned).to_vec();
        there.environment = vec!["LD_A".to_owned()];
        let known = there.programs[0].known.as_mut().unwrap();
        known.cpus[0].unavailable = vec!["hle".to_owned(), "rtm".to_owned()];
        let found = of_pair(&here, &there, &meeting());
        assert!(errors(&found).is_empty(), "{found:#?}");
        assert!(found.iter().any(|one| one.text.contains("not all can go there")), "{found:#?}");
        let text =
            "web1: its QEMU was started with QEMU_B, and the agent at b starts QEMU without.";
        assert!(found.iter().any(|one| one.text == text), "{found:#?}");
        let taps: Vec<&Finding> = found.iter().filter(|one| one.text.contains("tap")).collect();
        assert!(matches!(taps[..], [one] if one.text.contains("t0 is on no bridge")), "{taps:#?}");
        assert!(found.iter().all(|one| one.about != "carry"), "{found:#?}");
        there.carries =
            Some(Carries { manager: Some("KubeVirt".to_owned()), ..Carries::default() });
        here.carries = Some(Carries::default());
        let found = of_pair(&here, &there, &meeting());
        assert!(found.iter().any(|one| one.text.contains("and b those of KubeVirt")), "{found:#?}");
        there.carries = None;
        let found = of_pair(&here, &there, &meeting());
        assert!(
            found.iter().any(|one| one.text.contains("of libvirt, and b does not: they fail")),
            "{found:#?}"
        );
        assert!(found.iter().any(|one| one.text.contains("features of Haswell are not available")));
        let manager = Some("Proxmox VE".to_owned());
        here.carries = Some(Carries { manager, ..Carries::default() });
        let found = of_pair(&here, &there, &meeting());
        let text = "of Proxmox VE, and b does not: they bypass the agents";
        assert!(found.iter().any(|one| one.text.contains(text)), "{found:#?}");
    }

    #[test]
    fn a_different_tsc_frequency_is_reported_for_kvm_guests() {
        let (mut here, mut there) = hosts();
        let said = |here: &Facts, there: &Facts| {
            let found = of_pair(here, there, &meeting());
            found.into_iter().find(|one| one.about == "tsc").map(|one| (one.severity, one.text))
        };
        let tsc = |khz, scales| Some(Tsc { khz, scales });
        (here.tsc, there.tsc) = (tsc(2_000_000, false), tsc(1_900_000, false));
        assert_eq!(said(&here, &there), None, "no VM here has KVM");
        here.vms[0].accelerator = "kvm".to_owned();
        let (severity, text) = said(&here, &there).unwrap();
        assert_eq!(severity, Severity::Warning);
        assert!(text.contains("1900.0 MHz, not 2000.0 MHz"), "{text}");
        assert!(text.contains("5.00 % slow"), "{text}");
        there.tsc = tsc(2_100_000, false);
        assert!(said(&here, &there).unwrap().1.contains("5.00 % fast"));
        there.tsc = tsc(1_900_000, true);
        let (severity, text) = said(&here, &there).unwrap();
        assert!(severity == Severity::Ok && text.contains("scales it"), "{text}");
        there.tsc = tsc(2_000_400, false);
        assert_eq!(said(&here, &there).unwrap().0, Severity::Ok);
        there.tsc = None;
        assert_eq!(said(&here, &there), None);
    }

    #[test]
    fn a_peer_by_itself() {
        let severity = |met: Result<&Meeting, &Unmet>| of_peer("a", "1", "b", met).severity;
        let met = meeting();
        assert_eq!(severity(Ok(&met)), Severity::Ok);
        let unmet = Unmet { why: "no".to_owned(), advice: "ask again" };
        assert_eq!(severity(Err(&unmet)), Severity::Warning);
        assert_eq!(of_peer("a", "1", "b", Err(&unmet)).advice.as_deref(), Some("ask again"));
        let mut other = met.clone();
        other.reached.droveway = "2".to_owned();
        assert_eq!(severity(Ok(&other)), Severity::Note);
        let mut late = met.clone();
        late.reached.at_unix_ms = 0;
        assert_eq!(severity(Ok(&late)), Severity::Warning);
        assert!(of_peer("a", "1", "b", Ok(&late)).text.contains("behind"));
        // A slow answer is no skew.
        late.reached.at_unix_ms = met.asked_at_unix_ms + 9_000;
        late.round_trip = Duration::from_secs(10);
        assert_eq!(severity(Ok(&late)), Severity::Ok);
    }
}
