//! The times in requests, and their limits: those of the command's options.

/// The longest bound, timeout or deadline of a request, in seconds: a day.
pub const SECONDS_MAX: u64 = 86_400;
/// The longest downtime goal of a request.
pub const DOWNTIME_MS_MAX: u64 = 60_000;
/// The longest time for a guest to shut down, in seconds.
pub const STOP_S_MAX: u64 = 3600;

/// Whether a time of a request is within its limits.
pub(crate) fn is_in_range(seconds: u64) -> bool {
    (1..=SECONDS_MAX).contains(&seconds)
}

/// Checks a downtime goal.
///
/// # Errors
/// If it is out of range.
pub fn check_downtime(downtime_ms: u64) -> Result<(), String> {
    match downtime_ms {
        0 => Err("a downtime of 0 ms can't be kept: allow 1 at least".to_owned()),
        1..=DOWNTIME_MS_MAX => Ok(()),
        _ => Err(format!("a downtime of {downtime_ms} ms is outside 1 to {DOWNTIME_MS_MAX}")),
    }
}

/// Checks how long a guest may take to shut down.
///
/// # Errors
/// If it is out of range.
pub fn check_stop(timeout_s: u64) -> Result<(), String> {
    if timeout_s > STOP_S_MAX {
        return Err(format!("a timeout of {timeout_s} s is outside 0 to {STOP_S_MAX}"));
    }
    Ok(())
}

/// Checks the downtime goal, the blackout bound and the timeout of a migration, and that the
/// first two fit together.
///
/// # Errors
/// If they do not, or one is out of range, with the reason.
pub fn check_times(
    downtime_ms: u64,
    blackout_max_s: Option<u64>,
    timeout_s: Option<u64>,
) -> Result<(), String> {
    check_downtime(downtime_ms)?;
    for (what, seconds) in [("a blackout bound", blackout_max_s), ("a timeout", timeout_s)] {
        if let Some(seconds) = seconds.filter(|seconds| !is_in_range(*seconds)) {
            return Err(format!("{what} of {seconds} s is outside 1 to {SECONDS_MAX}"));
        }
    }
    match blackout_max_s {
        Some(seconds) if seconds.saturating_mul(1000) < downtime_ms => Err(format!(
            "a move that is taken back after {seconds} s can't have a downtime of {downtime_ms} \
             ms: raise --blackout-max, or lower --downtime-ms"
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_within_what_the_command_permits() {
        for (downtime_ms, blackout_max_s, timeout_s, why) in [
            (300, None, None, ""),
            (1, Some(1), Some(1), ""),
            (DOWNTIME_MS_MAX, Some(SECONDS_MAX), Some(SECONDS_MAX), ""),
            (0, None, None, "a downtime of 0 ms can't be kept"),
            (DOWNTIME_MS_MAX + 1, None, None, "a downtime of 60001 ms is outside 1 to 60000"),
            (300, Some(SECONDS_MAX + 1), None, "a blackout bound of 86401 s is outside 1 to"),
            (300, Some(u64::MAX), None, "a blackout bound of"),
            (300, None, Some(0), "a timeout of 0 s is outside 1 to 86400"),
            (300, None, Some(u64::MAX), "a timeout of"),
            (2000, Some(1), None, "a move that is taken back after 1 s"),
        ] {
            let checked = check_times(downtime_ms, blackout_max_s, timeout_s);
            let said = checked.err().unwrap_or_default();
            assert!(said.starts_with(why) && said.is_empty() == why.is_empty(), "{why}: {said}");
        }
        assert_eq!([0, STOP_S_MAX].map(check_stop), [Ok(()), Ok(())]);
        let said = check_stop(STOP_S_MAX + 1).unwrap_err();
        assert_eq!(said, "a timeout of 3601 s is outside 0 to 3600");
    }
}
