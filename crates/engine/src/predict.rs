//! Predicts what a migration will take.

mod changes;
mod unused;

use std::fs;
use std::time::Duration;

use api::{Outlook, PredictRequest, Prediction};
use policy::pace::content_bytes_per_s;
use policy::precopy::{self, Passes, Vm};
use policy::throttle::forecast;
use qemu::dirty_rate;
use qemu::outgoing::{self, Hold};

use crate::error::MigrationError;
use crate::host::{Local, SourceVm};
use crate::source::throttle_settings;
use changes::{Seen, part, sent_share};

/// The VM is watched for a short time, and for a longer one: the difference shows what it writes
/// over and over.
const WATCHED_S: [u8; 2] = [1, 3];

/// Predicts moving `vm` if lanes can write this many bytes per second. It takes some seconds, in
/// which QEMU samples the dirty rate.
///
/// # Errors
/// If the VM does not run, or its QEMU can't sample.
pub fn predict(
    local: &Local,
    vm: &SourceVm,
    request: &PredictRequest,
    wire_bytes_per_s: u64,
) -> Result<Prediction, MigrationError> {
    let machine = &vm.machine;
    let bytes_per_s = content_bytes_per_s(wire_bytes_per_s);
    if !outgoing::runs(&machine.qmp)? {
        return Err(MigrationError::Qemu(format!("{} does not run: nothing dirties it", vm.name)));
    }
    let ram_bytes = machine.qmp.ram_bytes()?;
    let used_bytes = used(machine.process.pid()).map_or(ram_bytes, |used| used.min(ram_bytes));
    let sample = |seconds| dirty_rate::sample(&machine.qmp, ram_bytes, seconds);
    let seen = Seen::now(machine);
    let short = sample(WATCHED_S[0])?;
    let changed_share = seen.changed();
    let rates = [short, sample(WATCHED_S[1])?];
    let seconds = WATCHED_S.map(f64::from);
    let (dirty, set) = precopy::working_set(rates, seconds);
    let set = set.filter(|set| *set < used_bytes);
    // A QEMU that can't be held can't chase the guest.
    let is_held = outgoing::hold(machine)? == Hold::Awaited;
    let passes = if is_held { Passes::Quick } else { Passes::Whole };
    let fixed = local.fixed_cost.expected(&request.to);
    let mut settings = throttle_settings(request.downtime_ms, &request.slowing, fixed);
    let first_pass = Duration::from_secs_f64(used_bytes as f64 / bytes_per_s.max(1.0));
    let free_memory = unused::of(machine, first_pass);
    // Reading time is not part of the model.
    let reading = Duration::from_secs_f64(free_memory.reading_s);
    settings.deadline = settings.deadline.map(|deadline| deadline.saturating_sub(reading));
    // The model counts bytes sent: for a page that is written again, only what changes.
    let sent = sent_share(changed_share.unwrap_or(1.0), ram_bytes, set.unwrap_or(used_bytes));
    let sending = Vm { ram_bytes: used_bytes, working_set_bytes: set.map(|set| part(set, sent)) };
    let forecast = forecast(&settings, sending, bytes_per_s, dirty * sent, passes);
    let slowed = &forecast.slowed;
    let later =
        |outlook: Outlook| Outlook { total_s: outlook.total_s + free_memory.reading_s, ..outlook };
    Ok(Prediction {
        vm: vm.name.clone(),
        to: request.to.clone(),
        downtime_goal_ms: request.downtime_ms,
        used_bytes,
        dirty_bytes_per_s: dirty,
        working_set_bytes: set,
        changed_share,
        delivered_bytes_per_s: bytes_per_s,
        free: later(outlook(&forecast.free, settings.goal)),
        slowed: later(outlook(&slowed.prediction, settings.goal)),
        share: slowed.share,
        lost_s: slowed.work_lost.as_secs_f64(),
        misses_deadline_s: forecast.misses_deadline.map(|least| (least + reading).as_secs_f64()),
        free_memory,
    })
}

/// The prediction; its downtime includes the part that is not spent on pages.
fn outlook(prediction: &precopy::Prediction, goal: Duration) -> Outlook {
    Outlook {
        total_s: prediction.total.as_secs_f64(),
        bytes: prediction.bytes,
        downtime_ms: prediction.blackout.as_secs_f64() * 1e3,
        met: prediction.met && prediction.blackout <= goal.mul_f64(ROUNDING),
    }
}

/// Huge pages of hugetlbfs don't count as resident.
const HUGE_PAGES: &str = "HugetlbPages:";
/// A downtime that is planned to the millisecond may exceed the goal by a fraction.
const ROUNDING: f64 = 1.005;

/// Memory that a process has touched; none if the kernel doesn't report it.
#[must_use]
pub fn used(pid: u32) -> Option<u64> {
    used_pages(pid)?.checked_add(status(pid, HUGE_PAGES).unwrap_or(0))
}

/// Ordinary memory that a process has touched; none if the kernel doesn't report it.
#[must_use]
pub fn used_pages(pid: u32) -> Option<u64> {
    status(pid, "VmRSS:")?.checked_add(status(pid, "VmSwap:").unwrap_or(0))
}

/// Shared memory that a process has touched; none if the kernel doesn't report it.
fn used_shared(pid: u32) -> Option<u64> {
    let more = ["RssFile:", HUGE_PAGES].iter().filter_map(|name| status(pid, name)).sum();
    status(pid, "RssShmem:")?.checked_add(more)
}

/// A size from a process's `status` file, in bytes.
fn status(pid: u32, name: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
