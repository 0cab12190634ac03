//! Throttles the VM just enough, and only if necessary: carries out the decisions
//! of `policy::throttle`.

mod vcpus;

use std::sync::Arc;
use std::time::Duration;

use api::{OnStall, Throttle as ThrottleOption, Throttled};
use host::quota;
use policy::throttle::{self, Decision, Ratio, Settings, Throttle, ThrottleInput};

use crate::report_builder::ReportBuilder;
pub(crate) use vcpus::Vcpus;

/// The mechanism that throttles the VM.
enum Means {
    /// None was needed so far.
    Unused,
    Group(quota::Throttled),
    /// None is available.
    Missing,
}

/// The mechanisms for throttling a VM.
pub(crate) struct Brakes {
    /// The vCPUs, or why they can't be measured.
    pub(crate) vcpus: Result<Vcpus, String>,
    /// None: no cgroups are used.
    pub(crate) notes: Option<quota::Notes>,
    pub(crate) report_builder: Arc<ReportBuilder>,
}

pub(crate) struct Throttling {
    brakes: Brakes,
    settings: Settings,
    state: Throttle,
    used_cpus: f64,
    means: Means,
    slowed: Throttled,
    told_late: bool,
    /// The VM has been throttled since the last decision.
    throttled: bool,
    /// The VM is stopped, or the migration has ended.
    lifted: bool,
}

impl Throttling {
    pub(crate) fn new(brakes: Brakes, settings: Settings) -> Self {
        Self {
            brakes,
            settings,
            state: Throttle::default(),
            used_cpus: 0.0,
            means: Means::Unused,
            slowed: Throttled { lowest_share: 1.0, ..Throttled::default() },
            told_late: false,
            throttled: false,
            lifted: false,
        }
    }

    /// Throttles the VM as far as necessary now, and returns the decision.
    pub(crate) fn next(&mut self, input: ThrottleInput) -> Decision {
        let slow = !matches!(self.means, Means::Unused);
        let throttled = self.throttled;
        let vcpus = self.brakes.vcpus.as_mut().ok();
        if let Some(used) = vcpus.and_then(|vcpus| vcpus.look(slow, throttled)) {
            self.used_cpus = used;
        }
        let decision = self.decide(&ThrottleInput { used_cpus: self.used_cpus, ..input });
        if !self.lifted {
            self.apply(&decision);
            self.tell(&decision);
        }
        self.throttled = self.share(&decision) < 1.0;
        decision
    }

    /// Decides for what can be done. Whether the VM can be throttled is not known before it has to
    /// be: if it can't, that decision, and the state that it left, are those of another VM.
    fn decide(&mut self, input: &ThrottleInput) -> Decision {
        let before = self.state.clone();
        let decision = self.state.next(&self.possible(), input);
        let is_first = decision.share < 1.0 && matches!(self.means, Means::Unused);
        if self.lifted || !is_first {
            return decision;
        }
        self.means = self.find_means();
        if !self.is_missing() {
            return decision;
        }
        self.state = before;
        self.state.next(&self.possible(), input)
    }

    /// The settings for what can be done: a VM that can't be throttled keeps all of its CPU time.
    fn possible(&self) -> Settings {
        let floor = if self.is_missing() { 1.0 } else { self.settings.floor };
        Settings { floor, ..self.settings }
    }

    /// Whether no mechanism is available.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self.means, Means::Missing)
    }

    /// The share of its CPU time that the VM keeps now.
    pub(crate) fn share(&self, decided: &Decision) -> f64 {
        if self.lifted || self.is_missing() { 1.0 } else { decided.share }
    }

    /// Ends throttling.
    pub(crate) fn lift(&mut self) {
        if std::mem::replace(&mut self.lifted, true) {
            return;
        }
        // What is missing stays so: nothing has to be found out again.
        let Means::Group(group) = &mut self.means else { return };
        if let Err(error) = group.lift() {
            tracing::error!(%error, "the VM may stay throttled until the agent starts again");
        }
        self.means = Means::Unused;
    }

    /// Permits throttling again: the VM was not stopped for its switchover after all.
    pub(crate) fn permit(&mut self) {
        self.lifted = false;
    }

    fn apply(&mut self, decision: &Decision) {
        let slow = decision.share < 1.0;
        match &mut self.means {
            Means::Unused | Means::Missing => {}
            Means::Group(group) => {
                let Ok(vcpus) = &self.brakes.vcpus else { return };
                // A thread that can't be added does not exempt the others.
                let added = group.add(vcpus.writers());
                let cpus = decision.quota_cpus.filter(|_| slow);
                let wants = |thread| vcpus.wants(thread, decision.share);
                if let Err(error) = group.set(cpus, wants).and(added) {
                    self.brakes
                        .report_builder
                        .note(format!("the VM was not throttled further: {error}"));
                }
            }
        }
    }

    fn find_means(&self) -> Means {
        let Brakes { vcpus, notes, report_builder } = &self.brakes;
        let why = match (notes, vcpus) {
            (_, Err(why)) => why.clone(),
            (None, _) => "the agent is configured not to use cgroups".to_owned(),
            (Some(notes), Ok(vcpus)) => {
                let writers: Vec<u32> = vcpus.writers().collect();
                match quota::Throttled::new(notes, vcpus.pid, &writers) {
                    Ok(group) => return Means::Group(group),
                    Err(error) => error.to_string(),
                }
            }
        };
        report_builder.note(format!("the VM was not throttled: {why}"));
        Means::Missing
    }

    fn tell(&mut self, decision: &Decision) {
        if let Some(when) = decision.misses_deadline
            && !std::mem::replace(&mut self.told_late, true)
        {
            self.brakes.report_builder.note(late(self.settings.deadline.unwrap_or_default(), when));
        }
        let by = match &self.means {
            Means::Unused | Means::Missing => return,
            Means::Group(group) => group.by(),
        };
        let now = self.brakes.report_builder.elapsed_s();
        let slowed = &mut self.slowed;
        if slowed.by.is_empty() {
            (slowed.by, slowed.from_s) = (by, now);
        }
        if decision.share < 1.0 {
            slowed.to_s = now;
        }
        slowed.lowest_share = slowed.lowest_share.min(decision.share);
        slowed.lost_s = decision.work_lost.as_secs_f64();
        slowed.vcpus = self.brakes.vcpus.as_ref().map_or(0, |vcpus| vcpus.writers().count());
        let slowed = slowed.clone();
        self.brakes.report_builder.update(|report| report.slowed = Some(slowed));
    }
}

impl Drop for Throttling {
    fn drop(&mut self) {
        self.lift();
    }
}

/// The operator's settings as the policy's.
pub(crate) fn settings(goal_ms: u64, slowing: &api::Slowing, fixed: Duration) -> Settings {
    Settings {
        goal: Duration::from_millis(goal_ms.max(1)),
        fixed,
        floor: if slowing.throttle == ThrottleOption::Off { 1.0 } else { slowing.floor },
        ratio: match (slowing.throttle, slowing.on_stall) {
            (ThrottleOption::Ratio(ratio), _) => Ratio::Constant(ratio),
            (ThrottleOption::Off, None | Some(OnStall::Keep)) => Ratio::Off,
            // With a floor of all its CPU time the VM isn't throttled either, but
            // failure to converge is detected.
            (ThrottleOption::Off, Some(_)) | (ThrottleOption::Auto, _) => Ratio::Auto,
        },
        deadline: slowing.deadline_s.map(Duration::from_secs),
        on_stall: match slowing.on_stall.unwrap_or(OnStall::Cancel) {
            OnStall::Keep => throttle::OnStall::Keep,
            OnStall::Stop => throttle::OnStall::Stop,
            OnStall::Cancel => throttle::OnStall::Cancel,
        },
    }
}

fn late(deadline: Duration, when: Duration) -> String {
    let asked = deadline.as_secs();
    if when == Duration::MAX {
        return format!(
            "the deadline of {asked} s can't be met: even at its floor the VM writes as fast as \
             its memory is sent"
        );
    }
    format!("the deadline of {asked} s can't be met: it takes about {} s", when.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::Watch;
    use api::{Bounds, Progress, Slowing};
    use throttle::Step;

    /// It is followed as with a floor of 100 %, from the first decision on.
    #[test]
    fn a_vm_that_can_not_be_throttled_keeps_all_of_its_cpu_time() {
        let progress = Progress::new(("deadbeef", "web1"), ("host-a", "host-b"), 0);
        let watch = Arc::new(Watch::new(progress, Bounds::default()));
        let report_builder = Arc::new(ReportBuilder::new(Arc::clone(&watch), 300));
        let brakes = Brakes { vcpus: Err("it has none".to_owned()), notes: None, report_builder };
        let settings = settings(300, &Slowing::default(), Duration::ZERO);
        let mut throttling = Throttling::new(brakes, settings);
        let mut unthrottled = Throttle::default();
        let stall = (0..100).find_map(|nth| {
            let input = ThrottleInput {
                at: Duration::from_secs(nth.into()),
                ram_bytes: 1 << 30,
                left_bytes: 200 << 20,
                delivered_bytes_per_s: Some(100e6),
                dirty_bytes_per_s: Some(200e6),
                counted_at_share: None,
                pass: 2 + nth,
                first_pass_over: true,
                // Its vCPUs can't be measured.
                used_cpus: 0.0,
                wider: false,
            };
            let decision = throttling.next(input);
            let all = Settings { floor: 1.0, ..settings };
            assert_eq!(decision, unthrottled.next(&all, &input), "{nth}");
            match decision.step {
                Step::GiveUp(stall) => Some(stall),
                _ => None,
            }
        });
        assert_eq!(stall.expect("it makes no progress").share, 1.0);
        // Its stop for a switchover that failed changes nothing.
        throttling.lift();
        throttling.permit();
        assert!(throttling.is_missing());
        assert_eq!(watch.progress().1.notes, ["the VM was not throttled: it has none"]);
    }

    #[test]
    fn an_unthrottled_vm_is_given_up_only_on_request() {
        let of = |throttle, on_stall| {
            let slowing = Slowing { throttle, on_stall, ..Slowing::default() };
            let settings = settings(300, &slowing, Duration::ZERO);
            (settings.ratio, settings.floor, settings.on_stall)
        };
        let cancel = throttle::OnStall::Cancel;
        assert_eq!(of(ThrottleOption::Auto, None), (Ratio::Auto, 0.2, cancel));
        assert_eq!(of(ThrottleOption::Ratio(0.7), None), (Ratio::Constant(0.7), 0.2, cancel));
        assert_eq!(of(ThrottleOption::Off, None).0, Ratio::Off);
        let stopped = of(ThrottleOption::Off, Some(OnStall::Stop));
        assert_eq!(stopped, (Ratio::Auto, 1.0, throttle::OnStall::Stop));
    }
}
