//! A gang in simulated time: each step decides which VMs begin, what is named, what each link
//! carries, and what has arrived.

use std::collections::{BTreeMap, VecDeque};

use policy::gang::{Move, Stage, admit};
use serde::Serialize;

use super::content::{Contents, Delivery, Fetch};
use super::cores::Cores;
use super::ground::Ground;
use super::links::{Way, fair};
use super::pace::Pace;
use super::placement::targets;
use super::trace::{BATCH, Trace};
use super::vm::{Parcel, Phase, Vm, take};
use crate::Share;
use lab::error::Result;

/// Bytes of a page's name, its bit of the answer, and its part of the heads around them.
const NAMED_PAGE_BYTES: f64 = 24.0;
const PAGE_BYTES: u64 = 4096;
/// Simulated seconds: times of more than a day are no use for planning.
const TIME_MAX_S: f64 = 86_400.0;

/// The outcome of a gang.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// How far content was shared.
    pub share: Share,
    /// From the first VM's turn until the last one runs; none if that takes more than a day.
    pub total_s: Option<f64>,
    /// Part of it, before the first VM's QEMU was ready.
    pub prepared_s: f64,
    /// CPU time of all cores.
    pub cpu_s: f64,
    /// Part of it, used by guests.
    pub guests_cpu_s: f64,
    /// Bytes on the core: compressed, with headers.
    pub core_bytes: f64,
    /// Bytes of pages that sources sent.
    pub body_bytes: f64,
    /// Bytes of pages of which they sent the name.
    pub named_bytes: f64,
    /// Bytes that targets sent each other, compressed.
    pub peer_bytes: f64,
    /// For each target rack, bytes of pages that were sent to it again though it had them.
    pub rack_duplicate_bytes: Vec<u64>,
    /// Names that the directories were asked about.
    pub lookups: u64,
}

struct Gang<'t> {
    ground: &'t Ground,
    pace: &'t Pace,
    share: Share,
    trace: &'t Trace,
    vms: Vec<Vm>,
    contents: Contents,
    cores: Cores,
    capacities: Vec<f64>,
    /// Content that targets are to send each other.
    fetches: BTreeMap<(usize, usize), VecDeque<Parcel>>,
    now_s: f64,
    outcome: Outcome,
}

/// Runs a gang of all VMs of a trace. The last `residents` of them run at the targets already.
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
    let targets = targets(share, ground, pace.placement, trace, going)?;
    let vm = |nth: usize| {
        let (from, to) = (ground.source_of(nth), targets[nth]);
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
        prepared_s: 0.0,
        cpu_s: 0.0,
        guests_cpu_s: 0.0,
        core_bytes: 0.0,
        body_bytes: 0.0,
        named_bytes: 0.0,
        peer_bytes: 0.0,
        rack_duplicate_bytes: Vec::new(),
        lookups: 0,
    };
    let (vms, capacities) = ((0..going).map(vm).collect(), ground.capacities());
    let cores = Cores::new(pace.machines, ground.hosts());
    let (fetches, now_s) = (BTreeMap::new(), 0.0);
    let gang = Gang {
        ground,
        pace,
        share,
        trace,
        vms,
        contents,
        cores,
        capacities,
        fetches,
        now_s,
        outcome,
    };
    gang.run()
}

impl Gang<'_> {
    fn run(mut self) -> Result<Outcome> {
        let mut changed = true;
        while self.now_s < TIME_MAX_S {
            if changed {
                self.begin_next();
            }
            self.be_there();
            self.carry()?;
            self.name_pages()?;
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
        self.outcome.cpu_s = self.cores.spent_s;
        let grain = self.trace.grain_bytes;
        let repeated = self.contents.repeated().into_iter();
        self.outcome.rack_duplicate_bytes = repeated.map(|grains| grains * grain).collect();
        self.outcome.lookups = self.contents.lookups;
        Ok(self.outcome)
    }

    /// Begins the moves whose turn it is, by the policy of a coordinating agent.
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
            self.vms[number].phase = Phase::Preparing { until_s, work_s: self.pace.costs.start_s };
        }
    }

    /// The number of a target among all hosts.
    fn host_of(&self, target: usize) -> usize {
        self.ground.hosts() - self.ground.target_racks * self.ground.target_hosts + target
    }

    /// Spends the CPU time of VMs that run, start or move.
    fn be_there(&mut self) {
        let (step_s, costs) = (self.pace.step_s, &self.pace.costs);
        self.cores.step(step_s);
        for number in 0..self.vms.len() {
            let (from, to) = (self.vms[number].from, self.host_of(self.vms[number].to));
            let vm = &mut self.vms[number];
            let at = if vm.phase == Phase::Over { to } else { from };
            self.cores.spend(at, (costs.vm_cores + costs.vcpu_cores) * step_s);
            self.outcome.guests_cpu_s += costs.vcpu_cores * step_s;
            match &mut vm.phase {
                Phase::Waiting | Phase::Over => continue,
                Phase::Preparing { work_s, .. } if self.cores.has(to) => {
                    let done_s = work_s.min(step_s);
                    *work_s -= done_s;
                    self.cores.spend(to, done_s);
                }
                _ => {}
            }
            for end in [from, to] {
                self.cores.spend(end, costs.moving_cores * step_s);
            }
        }
    }

    /// Fills the buffers of the VMs that send their memory.
    fn name_pages(&mut self) -> Result<()> {
        let mut room = vec![self.pace.naming_bytes_per_s * self.pace.step_s; self.ground.hosts()];
        let step_bytes = self.pace.vm_bytes_per_s * self.pace.step_s;
        for number in 0..self.vms.len() {
            let mut handed_over = 0.0;
            loop {
                let vm = &self.vms[number];
                let queued_bytes = vm.queued_grains() as f64 * self.trace.grain_bytes as f64;
                let sweeps = matches!(vm.phase, Phase::Passing { pass: 1, .. });
                let host_may = self.share == Share::Off || room[vm.from] > 0.0;
                let may = sweeps
                    && host_may
                    && self.cores.has(vm.from)
                    && vm.next < self.trace.vms[number].contents.len()
                    && queued_bytes < self.pace.pool_bytes
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

    /// Names the VM's next pages, and queues those of them that are sent for its lane.
    fn name_batch(&mut self, number: usize) -> Result<f64> {
        let vm = &mut self.vms[number];
        let grain_bytes = self.trace.grain_bytes as f64;
        let (costs, from) = (&self.pace.costs, vm.from);
        let all = &self.trace.vms[number].contents;
        let batch = &all[vm.next..all.len().min(vm.next + BATCH)];
        vm.next += batch.len();
        self.cores.work(from, batch.len() as f64 * grain_bytes, costs.hand_over_ns);
        let batch: Vec<u64> = batch.iter().copied().filter(|content| *content != 0).collect();
        let mut fetches = Vec::new();
        let deliveries = self.contents.deliver(number, vm.to, &batch, &mut fetches)?;
        let pages = (batch.len() as u64 * self.trace.grain_bytes / PAGE_BYTES) as f64;
        let named = batch.len() as f64 * grain_bytes;
        self.cores.work(from, named, costs.tap_ns);
        if self.share != Share::Off {
            vm.push(pages * NAMED_PAGE_BYTES, None);
            self.cores.work(from, named, costs.name_ns);
        }
        let bodies = deliveries.iter().filter(|delivery| **delivery == Delivery::Body).count();
        let (mut sent, mut found) = (0.0, 0.0);
        for (content, delivery) in batch.iter().zip(deliveries) {
            match delivery {
                Delivery::Body => {
                    vm.push(self.trace.body_bytes(*content, bodies), Some(*content));
                    sent += grain_bytes;
                    continue;
                }
                Delivery::Later => vm.pending += 1,
                Delivery::Held => {}
            }
            found += grain_bytes;
        }
        self.outcome.body_bytes += sent;
        self.outcome.named_bytes += found;
        let to = self.host_of(self.vms[number].to);
        self.cores.work(from, sent, costs.encode_ns);
        self.cores.work(to, found, costs.find_ns);
        self.fetch(&fetches);
        Ok(named)
    }

    /// Queues content that targets send each other: compressed, as sources do.
    fn fetch(&mut self, fetches: &[Fetch]) {
        for Fetch { from, to, content } in fetches.iter().copied() {
            let left_bytes = self.trace.body_bytes(content, fetches.len());
            let line = self.fetches.entry((from, to)).or_default();
            line.push_back(Parcel { left_bytes, content: Some(content) });
        }
    }

    /// Carries what the links can in one step.
    fn carry(&mut self) -> Result<()> {
        let has = |vm: &Vm| self.cores.has(vm.from) && self.cores.has(self.host_of(vm.to));
        let sends = |number: &usize| !self.vms[*number].queue.is_empty() && has(&self.vms[*number]);
        let sending: Vec<usize> = (0..self.vms.len()).filter(sends).collect();
        let can = |target: &usize| self.cores.has(self.host_of(*target));
        let pairs = self.fetches.keys().copied().filter(|(from, to)| can(from) && can(to));
        let pairs: Vec<(usize, usize)> = pairs.collect();
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
            let (from, to) = (vm.from, vm.to);
            self.spend_on(sent, contents.len(), from, self.host_of(to));
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
            let host = self.host_of(from);
            self.spend_on(sent, contents.len(), host, self.host_of(to));
            let raw = contents.len() as f64 * self.trace.grain_bytes as f64;
            self.cores.work(host, raw, self.pace.costs.find_ns + self.pace.costs.encode_ns);
            for content in contents {
                self.has_come(to, content)?;
            }
        }
        Ok(())
    }

    /// Spends the CPU time of carrying so many bytes and grains from host to host.
    fn spend_on(&mut self, bytes: f64, grains: usize, from: usize, to: usize) {
        let costs = &self.pace.costs;
        self.cores.work(from, bytes, costs.wire_ns / 2.0);
        self.cores.work(to, bytes, costs.wire_ns / 2.0);
        self.cores.work(to, grains as f64 * self.trace.grain_bytes as f64, costs.place_ns);
    }

    fn has_come(&mut self, to: usize, content: u64) -> Result<()> {
        let mut fetches = Vec::new();
        for number in self.contents.arrived(to, content, &mut fetches)? {
            self.vms[number].pending -= 1;
        }
        self.fetch(&fetches);
        Ok(())
    }

    /// Continues the VMs' moves. Returns whether others may begin.
    fn go_on(&mut self) -> bool {
        let mut changed = false;
        if self.vms.iter().all(|vm| matches!(vm.phase, Phase::Waiting | Phase::Preparing { .. })) {
            self.outcome.prepared_s = self.now_s;
        }
        for (vm, traced) in self.vms.iter_mut().zip(&self.trace.vms) {
            changed |= vm.go_on(traced, self.now_s, self.pace, self.trace.grain_bytes as f64);
        }
        changed
    }
}

#[cfg(test)]
mod tests;
