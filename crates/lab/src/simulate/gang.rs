//! A gang in simulated time: step after step, who begins, what is named, what each
//! link carries, and what has arrived.

use std::collections::{BTreeMap, VecDeque};

use policy::gang::{Move, Stage, admit, is_landing};
use serde::Serialize;

use super::content::{Contents, Delivery, Fetch};
use super::ground::Ground;
use super::links::{Way, fair};
use super::trace::{Trace, TracedVm};
use crate::contender::gang::Share;
use crate::error::Result;

/// Grains that are named together.
const BATCH: usize = 128;
/// A page's name, its bit of the answer and its part of the heads around them.
const NAMED_PAGE_BYTES: f64 = 24.0;
const PAGE_BYTES: u64 = 4096;
/// A VM that still doesn't fit after so many passes is stopped nevertheless.
const PASSES_MAX: u32 = 30;
/// Simulated seconds: longer than a day is nothing to plan with.
const TIME_MAX_S: f64 = 86_400.0;

/// What of it is not the network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// VMs that leave a host, and arrive at one, at a time.
    pub parallel: usize,
    /// From a VM's turn to its first page.
    pub prepare_s: f64,
    /// From its last page to its running.
    pub switchover_s: f64,
    /// What each may be gone for.
    pub goal_s: f64,
    /// What a migration's buffers hold.
    pub pool_bytes: f64,
    /// What a host can hash of the VMs that leave it.
    pub naming_bytes_per_s: f64,
    /// What one VM's pages come with at most.
    pub vm_bytes_per_s: f64,
    /// How long a step is.
    pub step_s: f64,
}

/// What a gang came to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// How far content was shared.
    pub share: Share,
    /// From the first VM's turn to the last one's running; none: it took more than a
    /// day.
    pub total_s: Option<f64>,
    /// What crossed the core, compressed, with what is around it.
    pub core_bytes: f64,
    /// Pages that sources sent.
    pub body_bytes: f64,
    /// Pages of which they sent the name.
    pub named_bytes: f64,
    /// Pages that targets sent each other.
    pub peer_bytes: f64,
    /// For each target rack, pages that came to it again though it had them.
    pub rack_duplicate_bytes: Vec<u64>,
    /// Names that the directories were asked about.
    pub lookups: u64,
}

/// How far a VM is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Waiting,
    Preparing {
        until_s: f64,
    },
    /// It sends its memory, or what it has written since.
    Passing {
        began_s: f64,
        pass: u32,
    },
    /// It stands still; the rest is sent.
    Stopped,
    Loading {
        until_s: f64,
    },
    Over,
}

/// What waits for its lane.
struct Parcel {
    left_bytes: f64,
    /// A page that is not only written again.
    content: Option<u64>,
}

struct Vm {
    name: String,
    from: usize,
    to: usize,
    way: Way,
    phase: Phase,
    /// The next grain that QEMU hands over.
    next: usize,
    queue: VecDeque<Parcel>,
    queued_bytes: f64,
    /// Grains that come from elsewhere.
    pending: u64,
    sent_bytes: f64,
    rate: f64,
    landing: bool,
}

struct Gang<'t> {
    ground: &'t Ground,
    pace: &'t Pace,
    share: Share,
    trace: &'t Trace,
    vms: Vec<Vm>,
    contents: Contents,
    capacities: Vec<f64>,
    /// What targets are to send each other.
    fetches: BTreeMap<(usize, usize), VecDeque<Parcel>>,
    now_s: f64,
    outcome: Outcome,
}

/// Runs a gang of all VMs of a trace. The last `residents` of them are at the
/// targets already.
///
/// # Errors
/// If there are more target hosts than a directory can know.
pub fn run(
    share: Share,
    ground: &Ground,
    pace: &Pace,
    trace: &Trace,
    residents: usize,
) -> Result<Outcome> {
    let going = trace.vms.len().saturating_sub(residents);
    let grains = trace.vms.iter().map(|vm| vm.contents.len()).sum();
    let mut contents = Contents::new(share, ground, grains)?;
    for (nth, vm) in trace.vms[going..].iter().enumerate() {
        let to = ground.target_of(nth);
        for content in vm.contents.iter().filter(|content| **content != 0) {
            contents.arrived(to, *content, &mut Vec::new())?;
        }
    }
    let vm = |nth: usize| {
        let (from, to) = (ground.source_of(nth), ground.target_of(nth));
        Vm {
            name: format!("v{nth}"),
            from,
            to,
            way: ground.way(from, to),
            phase: Phase::Waiting,
            next: 0,
            queue: VecDeque::new(),
            queued_bytes: 0.0,
            pending: 0,
            sent_bytes: 0.0,
            rate: 0.0,
            landing: false,
        }
    };
    let outcome = Outcome {
        share,
        total_s: None,
        core_bytes: 0.0,
        body_bytes: 0.0,
        named_bytes: 0.0,
        peer_bytes: 0.0,
        rack_duplicate_bytes: Vec::new(),
        lookups: 0,
    };
    let (vms, capacities) = ((0..going).map(vm).collect(), ground.capacities());
    let (fetches, now_s) = (BTreeMap::new(), 0.0);
    Gang { ground, pace, share, trace, vms, contents, capacities, fetches, now_s, outcome }.run()
}

impl Gang<'_> {
    fn run(mut self) -> Result<Outcome> {
        let mut changed = true;
        while self.now_s < TIME_MAX_S {
            if changed {
                self.begin_next();
            }
            self.name_pages()?;
            self.carry()?;
            self.now_s += self.pace.step_s;
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "at most a day"
            )]
            self.contents.at((self.now_s * 1e9) as u64);
            changed = self.go_on();
            if self.vms.iter().all(|vm| vm.phase == Phase::Over) {
                self.outcome.total_s = Some(self.now_s);
                break;
            }
        }
        let grain = self.trace.grain_bytes;
        let repeated = self.contents.repeated().into_iter();
        self.outcome.rack_duplicate_bytes = repeated.map(|grains| grains * grain).collect();
        self.outcome.lookups = self.contents.lookups;
        Ok(self.outcome)
    }

    /// Those whose turn it is, as an agent that coordinates has it.
    fn begin_next(&mut self) {
        let hosts: Vec<String> = (0..self.ground.hosts()).map(|nth| format!("h{nth}")).collect();
        let sources = hosts.len() - self.ground.target_racks * self.ground.target_hosts;
        let stage = |vm: &Vm| match vm.phase {
            Phase::Waiting => Stage::Waiting,
            Phase::Over => Stage::Over,
            _ if vm.landing => Stage::Landing,
            _ => Stage::Flying,
        };
        let moves: Vec<Move<'_>> = self
            .vms
            .iter()
            .zip(&self.trace.vms)
            .map(|(vm, traced)| Move {
                vm: &vm.name,
                from: &hosts[vm.from],
                to: &hosts[sources + vm.to],
                bytes: traced.contents.len() as u64 * self.trace.grain_bytes,
                stage: stage(vm),
            })
            .collect();
        let until_s = self.now_s + self.pace.prepare_s;
        for number in admit(&moves, self.pace.parallel) {
            self.vms[number].phase = Phase::Preparing { until_s };
        }
    }

    /// Fills the buffers of those that send their memory.
    fn name_pages(&mut self) -> Result<()> {
        let mut room = vec![self.pace.naming_bytes_per_s * self.pace.step_s; self.ground.hosts()];
        let step_bytes = self.pace.vm_bytes_per_s * self.pace.step_s;
        for number in 0..self.vms.len() {
            let mut handed_over = 0.0;
            loop {
                let vm = &self.vms[number];
                let sweeps = matches!(vm.phase, Phase::Passing { pass: 1, .. });
                let host_may = self.share == Share::Off || room[vm.from] > 0.0;
                let may = sweeps
                    && host_may
                    && vm.next < self.trace.vms[number].contents.len()
                    && vm.queued_bytes < self.pace.pool_bytes
                    && handed_over < step_bytes;
                if !may {
                    break;
                }
                let batch_bytes = self.name_batch(number)?;
                handed_over += batch_bytes;
                room[self.vms[number].from] -= batch_bytes;
            }
        }
        Ok(())
    }

    /// The VM's next pages: what of them is sent waits for its lane.
    fn name_batch(&mut self, number: usize) -> Result<f64> {
        let vm = &mut self.vms[number];
        let grain_bytes = self.trace.grain_bytes as f64;
        let all = &self.trace.vms[number].contents;
        let batch = &all[vm.next..all.len().min(vm.next + BATCH)];
        vm.next += batch.len();
        let batch: Vec<u64> = batch.iter().copied().filter(|content| *content != 0).collect();
        let mut fetches = Vec::new();
        let deliveries = self.contents.deliver(number, vm.to, &batch, &mut fetches)?;
        let pages = (batch.len() as u64 * self.trace.grain_bytes / PAGE_BYTES) as f64;
        if self.share != Share::Off {
            vm.push(pages * NAMED_PAGE_BYTES, None);
        }
        for (content, delivery) in batch.iter().zip(deliveries) {
            match delivery {
                Delivery::Body => {
                    vm.push(self.trace.body_bytes(*content), Some(*content));
                    self.outcome.body_bytes += grain_bytes;
                    continue;
                }
                Delivery::Later => vm.pending += 1,
                Delivery::Held => {}
            }
            self.outcome.named_bytes += grain_bytes;
        }
        self.fetch(fetches);
        Ok(batch.len() as f64 * grain_bytes)
    }

    fn fetch(&mut self, fetches: Vec<Fetch>) {
        let left_bytes = self.trace.grain_bytes as f64;
        for Fetch { from, to, content } in fetches {
            let line = self.fetches.entry((from, to)).or_default();
            line.push_back(Parcel { left_bytes, content: Some(content) });
        }
    }

    /// What the links carry in one step.
    fn carry(&mut self) -> Result<()> {
        let sending: Vec<usize> =
            (0..self.vms.len()).filter(|number| !self.vms[*number].queue.is_empty()).collect();
        let pairs: Vec<(usize, usize)> = self.fetches.keys().copied().collect();
        let mut ways: Vec<Way> = sending.iter().map(|number| self.vms[*number].way).collect();
        ways.extend(pairs.iter().map(|(from, to)| self.ground.way_within(*from, *to)));
        let rates = fair(&self.capacities, &ways);
        let (of_vms, of_pairs) = rates.split_at(sending.len());
        for (number, rate) in sending.into_iter().zip(of_vms) {
            let vm = &mut self.vms[number];
            let (sent, contents) = take(&mut vm.queue, rate * self.pace.step_s);
            vm.queued_bytes -= sent;
            vm.sent_bytes += sent;
            vm.rate = *rate;
            self.outcome.core_bytes += Ground::on_wire(sent);
            let to = vm.to;
            for content in contents {
                self.contents.sent(to, content);
                self.has_come(to, content)?;
            }
        }
        for ((from, to), rate) in pairs.into_iter().zip(of_pairs) {
            let Some(line) = self.fetches.get_mut(&(from, to)) else { continue };
            let (sent, contents) = take(line, rate * self.pace.step_s);
            if line.is_empty() {
                self.fetches.remove(&(from, to));
            }
            self.outcome.peer_bytes += sent;
            for content in contents {
                self.has_come(to, content)?;
            }
        }
        Ok(())
    }

    fn has_come(&mut self, to: usize, content: u64) -> Result<()> {
        let mut fetches = Vec::new();
        for number in self.contents.arrived(to, content, &mut fetches)? {
            self.vms[number].pending -= 1;
        }
        self.fetch(fetches);
        Ok(())
    }

    /// What follows. Says whether others may begin.
    fn go_on(&mut self) -> bool {
        let mut changed = false;
        for (vm, traced) in self.vms.iter_mut().zip(&self.trace.vms) {
            changed |= vm.go_on(traced, self.now_s, self.pace, self.trace.grain_bytes as f64);
        }
        changed
    }
}

impl Vm {
    fn push(&mut self, bytes: f64, content: Option<u64>) {
        self.queued_bytes += bytes;
        self.queue.push_back(Parcel { left_bytes: bytes, content });
    }

    /// Says whether others may begin for it.
    fn go_on(&mut self, traced: &TracedVm, now_s: f64, pace: &Pace, grain_bytes: f64) -> bool {
        match self.phase {
            Phase::Waiting | Phase::Over => false,
            Phase::Preparing { until_s } => {
                if until_s <= now_s {
                    self.phase = Phase::Passing { began_s: now_s, pass: 1 };
                }
                false
            }
            Phase::Passing { began_s, pass } => {
                let is_swept = self.next == traced.contents.len() && self.queue.is_empty();
                if is_swept && self.pending == 0 {
                    self.next_pass(traced, now_s, began_s, pass, pace);
                }
                let left_bytes =
                    (traced.contents.len() - self.next) as f64 * grain_bytes + self.queued_bytes;
                let lands = is_landing(false, (self.rate > 0.0).then(|| left_bytes / self.rate));
                let news = lands && !self.landing;
                self.landing |= lands;
                news
            }
            Phase::Stopped => {
                if self.queue.is_empty() {
                    self.phase = Phase::Loading { until_s: now_s + pace.switchover_s };
                }
                false
            }
            Phase::Loading { until_s } => {
                let is_over = until_s <= now_s;
                if is_over {
                    self.phase = Phase::Over;
                }
                is_over
            }
        }
    }

    /// What it has written meanwhile is sent again, or is the last that is.
    fn next_pass(&mut self, traced: &TracedVm, now_s: f64, began_s: f64, pass: u32, pace: &Pace) {
        let passed_s = now_s - began_s;
        let written = traced.dirty_bytes_per_s as f64 * passed_s;
        let dirty = written.min(traced.working_set_bytes as f64);
        let fits = dirty <= self.rate * pace.goal_s || pass >= PASSES_MAX;
        if dirty > 0.0 {
            self.push(dirty, None);
        }
        self.phase =
            if fits { Phase::Stopped } else { Phase::Passing { began_s: now_s, pass: pass + 1 } };
    }
}

/// Takes so many bytes off a line. Says how many those were, and what is through.
fn take(line: &mut VecDeque<Parcel>, mut bytes: f64) -> (f64, Vec<u64>) {
    let (mut taken, mut through) = (0.0, Vec::new());
    while let Some(first) = line.front_mut() {
        if bytes < first.left_bytes {
            first.left_bytes -= bytes;
            return (taken + bytes, through);
        }
        bytes -= first.left_bytes;
        taken += first.left_bytes;
        through.extend(first.content);
        line.pop_front();
    }
    (taken, through)
}

#[cfg(test)]
mod tests {
    use super::super::trace::Mix;
    use super::*;

    const MIB: u64 = 1 << 20;

    fn ground() -> Ground {
        Ground {
            source_racks: 2,
            source_hosts: 2,
            target_racks: 1,
            target_hosts: 2,
            edge_bits_per_s: 250e6,
            core_bits_per_s: 1e9,
        }
    }

    fn pace() -> Pace {
        Pace {
            parallel: 16,
            prepare_s: 0.5,
            switchover_s: 0.1,
            goal_s: 0.3,
            pool_bytes: 8e6,
            naming_bytes_per_s: 1e9,
            vm_bytes_per_s: 600e6,
            step_s: 0.01,
        }
    }

    fn mix() -> Mix {
        Mix {
            vms: 8,
            systems: 1,
            system_bytes: 32 * MIB,
            common_bytes: 32 * MIB,
            repeated_bytes: 4 * MIB,
            own_bytes: 16 * MIB,
            dirty_bytes_per_s: 0,
            working_set_bytes: 0,
        }
    }

    fn near(figure: f64, expected: f64) -> bool {
        (figure - expected).abs() <= expected * 0.03
    }

    fn runs(trace: &Trace, residents: usize) -> [Outcome; 3] {
        let run = |share| run(share, &ground(), &pace(), trace, residents).unwrap();
        [Share::Off, Share::Host, Share::Rack].map(run)
    }

    #[test]
    fn each_page_crosses_the_core_as_often_as_it_is_to() {
        let [off, host, rack] = runs(&mix().trace(), 0);
        let mib = |bytes: f64| bytes / MIB as f64;
        assert!(near(mib(off.body_bytes), 8.0 * 84.0), "{off:?}");
        // All of one host come once: the system, what is common, a page, their own.
        assert!(near(mib(host.body_bytes), 2.0 * 64.0 + 8.0 * 16.0), "{host:?}");
        assert!(near(mib(rack.body_bytes), 64.0 + 8.0 * 16.0), "{rack:?}");
        assert!(near(mib(rack.peer_bytes), 64.0), "{rack:?}");
        for one in [&off, &host, &rack] {
            assert!(near(one.body_bytes + one.named_bytes, off.body_bytes), "{one:?}");
            assert!(one.core_bytes > one.body_bytes && one.core_bytes < one.body_bytes * 1.1);
        }
        assert_eq!(rack.rack_duplicate_bytes, [0]);
        assert!(off.rack_duplicate_bytes[0] > host.rack_duplicate_bytes[0]);
        assert!(near(mib(host.rack_duplicate_bytes[0] as f64), 64.0), "{host:?}");
        // Two edges of the target rack are what limits it.
        let edge = 250e6 / 8.0 / 1.046;
        let expected_s = off.body_bytes / (2.0 * edge) + 0.6;
        assert!(near(off.total_s.unwrap(), expected_s), "{off:?}, not {expected_s}");
        // And they limit what is shared in the rack too: what one gets from the other
        // crosses their edges as well.
        let [off_s, host_s, rack_s] = [off, host, rack].map(|one| one.total_s.unwrap());
        assert!(host_s < off_s / 1.5 && rack_s < host_s * 1.1, "{off_s} {host_s} {rack_s}");
    }

    #[test]
    fn what_is_in_the_rack_need_not_come() {
        let trace = mix().trace().repeated(9);
        let [_, _, rack] = runs(&trace, 1);
        // The resident is like the first one, so that one has nothing of its own.
        assert!(near(rack.body_bytes / MIB as f64, 7.0 * 16.0), "{rack:?}");
        assert_eq!(rack.rack_duplicate_bytes, [0]);
    }

    #[test]
    fn a_vm_that_writes_goes_round_until_it_fits_or_is_stopped() {
        let mix =
            Mix { vms: 1, dirty_bytes_per_s: 10_000_000, working_set_bytes: 64 * MIB, ..mix() };
        let trace = mix.trace();
        let busy = run(Share::Off, &ground(), &pace(), &trace, 0).unwrap();
        assert!(busy.core_bytes > busy.body_bytes * 1.2, "{busy:?}");
        let faster = Mix { dirty_bytes_per_s: 1_000_000_000, ..mix };
        let never = run(Share::Off, &ground(), &pace(), &faster.trace(), 0).unwrap();
        let passes = (never.core_bytes / 1.046 - never.body_bytes) / (64 * MIB) as f64;
        assert!(near(passes, f64::from(PASSES_MAX)), "{passes} passes");
    }

    #[test]
    fn as_many_at_a_time_as_may() {
        let one_by_one = Pace { parallel: 1, ..pace() };
        let ground = Ground { source_racks: 1, source_hosts: 1, target_hosts: 1, ..ground() };
        let trace = Mix { vms: 3, ..mix() }.trace();
        let alone = run(Share::Off, &ground, &one_by_one, &trace, 0).unwrap();
        // The next is prepared while one lands.
        let edge = 250e6 / 8.0 / 1.046;
        let sending_s = alone.body_bytes / edge;
        let total_s = alone.total_s.unwrap();
        assert!(total_s > sending_s + 0.6 && total_s < sending_s + 3.0 * 0.6, "{total_s}");
    }
}
