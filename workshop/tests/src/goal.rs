//! Whether a VM's downtime meets its goal, in bytes instead of time: memory lengthens a downtime by
//! what arrives during it, on a busy machine as well.

use api::Report;

/// Bytes of page bodies that a link of `mbit_per_s` carries in the downtime goal.
#[must_use]
pub fn fits_goal_bytes(report: &Report, mbit_per_s: u32) -> u64 {
    u64::from(mbit_per_s) * 1_000_000 / 8 * report.downtime_goal_ms / 1000
}

/// Fails if more arrived after the VM had stopped than fits its downtime goal.
pub fn assert_fits_goal(report: &Report, mbit_per_s: u32) {
    let (moved, fits) = (report.stopped_bytes, fits_goal_bytes(report, mbit_per_s));
    let (gone_ms, predicted_ms) = (report.downtime_ms, report.predicted_downtime_ms);
    println!(
        "{moved} bytes while it was stopped; gone for {gone_ms:?} ms, {predicted_ms:?} foreseen"
    );
    assert!(gone_ms.is_some(), "it was not stopped");
    assert!(moved <= fits, "{moved} bytes while it was stopped, {fits} fit: {report:?}");
}
