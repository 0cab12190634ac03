//! How fast a running VM dirties memory, as QEMU measures it by samples. The VM
//! is not disturbed: QEMU reads some of its pages twice.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::qmp::{Qmp, QmpError};

/// Pages sampled in all: more would take long and add little.
const PAGES: u64 = 16_384;
/// The number of samples per GiB that QEMU accepts.
const PAGES_PER_GIB: std::ops::RangeInclusive<u64> = 128..=16_384;
/// The interval of queries, since QEMU doesn't report when it is done.
const ASK_AGAIN: Duration = Duration::from_millis(50);
/// How much longer than requested it may take, to read its samples.
const LATE_MAX: Duration = Duration::from_secs(20);

/// Bytes dirtied per second, measured over `seconds`; a page dirtied twice counts
/// once.
///
/// # Errors
/// If QEMU doesn't answer, or is sampling for another client.
pub fn sample(qmp: &Qmp, ram_bytes: u64, seconds: u8) -> Result<f64, QmpError> {
    let gib = (ram_bytes >> 30).max(1);
    let pages = (PAGES / gib).clamp(*PAGES_PER_GIB.start(), *PAGES_PER_GIB.end());
    qmp.execute("calc-dirty-rate", json!({ "calc-time": seconds, "sample-pages": pages }))?;
    let until = Instant::now() + Duration::from_secs(seconds.into()) + LATE_MAX;
    std::thread::sleep(Duration::from_secs(seconds.into()));
    loop {
        let answer = qmp.execute("query-dirty-rate", json!({}))?;
        if answer["status"] == "measured" {
            let mib = answer["dirty-rate"].as_f64().unwrap_or(0.0);
            return Ok(mib.max(0.0) * f64::from(1 << 20));
        }
        if Instant::now() >= until {
            return Err(QmpError::Migration("it does not finish its samples of memory".to_owned()));
        }
        std::thread::sleep(ASK_AGAIN);
    }
}
