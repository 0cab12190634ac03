//! Predicts what a migration will take.

mod changes;
mod unused;

use std::fs;
use std::time::Duration;

use api::{Compressed, Outlook, PredictRequest, Prediction};
use page::Encoding;
use policy::pace::content_bytes_per_s;
use policy::precopy::{self, Passes, Vm};
use policy::throttle::forecast;
use qemu::dirty_rate;
use qemu::machine::Machine;
use qemu::outgoing::{self, Hold};

use crate::error::MigrationError;
use crate::host::{Local, SourceVm};
use crate::source::throttle_settings;
use changes::{Changed, Encoded, Seen, part, sent_share};

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
    let sample = |seconds| dirty_rate::sample(&machine.qmp, ram_bytes, seconds);
    let seen = Seen::now(machine);
    let pid = machine.process.pid();
    let used_bytes = used_ram(pid, ram_bytes, seen.present_bytes());
    // Not a share of what is used: QEMU has read much that the guest never did, and found zeros.
    let filled_bytes = seen.filled_bytes().map(|filled| filled.saturating_add(swapped(pid)));
    let filled_bytes = filled_bytes.map_or(used_bytes, |filled| filled.min(used_bytes));
    let short = sample(WATCHED_S[0])?;
    let changed = seen.changed();
    let changed_share = changed.as_ref().map(|changed| changed.share);
    let rates = [short, sample(WATCHED_S[1])?];
    let seconds = WATCHED_S.map(f64::from);
    let (dirty, set) = precopy::working_set(rates, seconds);
    let set = set.filter(|set| *set < used_bytes);
    // A QEMU that can't be held can't chase the guest.
    let is_held = outgoing::hold(machine)? == Hold::Awaited;
    let passes = if is_held { Passes::Quick } else { Passes::Whole };
    let fixed = local.fixed_cost.expected(&request.to);
    let mut settings = throttle_settings(request.downtime_ms, &request.slowing, fixed);
    let first_pass = Duration::from_secs_f64(filled_bytes as f64 / bytes_per_s.max(1.0));
    let free_memory = unused::of(machine, first_pass);
    // Reading time is not part of the model.
    let reading = Duration::from_secs_f64(free_memory.reading_s);
    settings.deadline = settings.deadline.map(|deadline| deadline.saturating_sub(reading));
    // The model counts bytes sent: for a page that is written again, only what changes.
    let sent = sent_share(changed_share.unwrap_or(1.0), ram_bytes, set.unwrap_or(used_bytes));
    // `per_byte`: what a byte that is sent again costs, in bytes of the first pass.
    let at = |rate: f64, per_byte: f64| {
        let sent = sent * per_byte;
        let working_set_bytes = set.map(|set| part(set, sent));
        let sending = Vm { ram_bytes: filled_bytes, working_set_bytes };
        forecast(&settings, sending, rate, dirty * sent, passes)
    };
    // Lanes compress if they wait for the network. If they can't, it takes the longer time.
    let (compressed, per_byte) = compressed(&seen, changed.as_ref(), bytes_per_s)
        .map_or((None, 1.0), |(compressed, per_byte)| (Some(compressed), per_byte));
    let rate = compressed.map_or(bytes_per_s, |one| one.delivered_bytes_per_s);
    let (forecast, uncompressed) = (at(rate, per_byte), at(bytes_per_s, 1.0));
    let throttled = &forecast.throttled;
    let most_s = |most: &precopy::Prediction| {
        most.met.then_some(most.total.as_secs_f64() + free_memory.reading_s)
    };
    let again = |bytes: u64| part(bytes.saturating_sub(filled_bytes), 1.0 / per_byte);
    let later = |outlook: Outlook, most: &precopy::Prediction| Outlook {
        total_s: outlook.total_s + free_memory.reading_s,
        most_s: most_s(most),
        bytes: filled_bytes.saturating_add(again(outlook.bytes)),
        ..outlook
    };
    Ok(Prediction {
        vm: vm.name.clone(),
        to: request.to.clone(),
        downtime_goal_ms: request.downtime_ms,
        used_bytes,
        dirty_bytes_per_s: dirty,
        working_set_bytes: set,
        changed_share,
        delivered_bytes_per_s: bytes_per_s,
        compressed,
        free: later(outlook(&forecast.free, settings.goal), &uncompressed.free),
        slowed: later(
            outlook(&throttled.prediction, settings.goal),
            &uncompressed.throttled.prediction,
        ),
        share: throttled.share,
        lost_s: throttled.work_lost.as_secs_f64(),
        // As much of the path as with the rate above.
        needed_bytes_per_s: forecast.needed_bytes_per_s.map(|needed| needed * bytes_per_s / rate),
        misses_deadline_s: forecast.misses_deadline.map(|least| (least + reading).as_secs_f64()),
        free_memory,
        refused: refused(machine)?,
    })
}

/// Why a move would be refused before it begins, by what its QEMU shows.
fn refused(machine: &Machine) -> Result<Option<String>, MigrationError> {
    if machine.qmp.loses_writes()? {
        return Ok(Some(MigrationError::LosesWrites.to_string()));
    }
    let reasons = outgoing::blockers(&machine.qmp)?;
    Ok((!reasons.is_empty()).then(|| reasons.join("; ")))
}

/// RAM that a VM has touched, if the process at `pid` has `ram_bytes` of it and so many are present.
/// The process has other memory too: under TCG up to 1 GiB of translated code.
fn used_ram(pid: u32, ram_bytes: u64, present_bytes: Option<u64>) -> u64 {
    let present_bytes = present_bytes.map(|present| present.saturating_add(swapped(pid)));
    [used(pid), present_bytes].into_iter().flatten().fold(ram_bytes, u64::min)
}

/// The prediction; its downtime includes the part that is not spent on pages.
fn outlook(prediction: &precopy::Prediction, goal: Duration) -> Outlook {
    Outlook {
        total_s: prediction.total.as_secs_f64(),
        most_s: None,
        bytes: prediction.bytes,
        downtime_ms: prediction.blackout.as_secs_f64() * 1e3,
        met: prediction.met && prediction.blackout <= goal.mul_f64(ROUNDING),
    }
}

/// What compression gains on a path for so many bytes per second, by the best encoding, and by how
/// much less pages shrink that are written again. None if next to nothing is gained.
fn compressed(
    seen: &Seen,
    changed: Option<&Changed>,
    bytes_per_s: f64,
) -> Option<(Compressed, f64)> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let content = seen.content();
    let of = |encoding| {
        let Encoded { share, bytes_per_s: on_one_cpu } = Encoded::of(&content, encoding)?;
        let rate = precopy::encoded_rate(bytes_per_s, share, on_one_cpu * cpus);
        let again = changed.and_then(|changed| Encoded::of(&changed.content, encoding));
        let per_byte = again.map_or(1.0, |again| again.share / share);
        Some((Compressed { share, delivered_bytes_per_s: rate }, per_byte))
    };
    let best = [Encoding::Lz4, Encoding::Zstd].into_iter().filter_map(of);
    let rate = |(one, _): &(Compressed, f64)| one.delivered_bytes_per_s;
    let best = best.max_by(|one, other| rate(one).total_cmp(&rate(other)))?;
    Some(best).filter(|best| rate(best) > bytes_per_s * WORTH)
}

/// A gain below this factor is not reported.
const WORTH: f64 = 1.05;

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
    status(pid, "VmRSS:")?.checked_add(swapped(pid))
}

/// Private memory that a process has touched; none if the kernel doesn't report it.
#[must_use]
pub fn used_private(pid: u32) -> Option<u64> {
    status(pid, "RssAnon:")?.checked_add(swapped(pid))
}

/// Shared memory that a process has touched; none if the kernel doesn't report it.
fn used_shared(pid: u32) -> Option<u64> {
    let more = ["RssFile:", HUGE_PAGES].iter().filter_map(|name| status(pid, name)).sum();
    status(pid, "RssShmem:")?.checked_add(more)
}

/// Memory of a process that is in swap.
fn swapped(pid: u32) -> u64 {
    status(pid, "VmSwap:").unwrap_or(0)
}

/// A size from a process's `status` file, in bytes.
fn status(pid: u32, name: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This process has some MiB of memory, none of which is RAM of a VM.
    #[test]
    fn a_process_has_memory_that_is_no_ram() {
        let pid = std::process::id();
        let rss = used(pid).unwrap();
        let ram = 1 << 40;
        assert_eq!(used_ram(pid, ram, Some(4096)), 4096 + swapped(pid));
        assert!(used_ram(pid, ram, None) >= rss / 2);
        assert!((1..).contains(&used_private(pid).unwrap()));
        assert_eq!(used_private(u32::MAX), None);
        assert_eq!(used_ram(pid, 4096, None), 4096);
    }
}
