//! What a migration has cost at its source, for the report.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use api::Report;

use super::control::stream_state::StreamState;
use super::lanes::{self, Lanes};
use crate::resources::Pools;

/// The costs of a migration whose data goes on lanes.
pub(crate) struct Costs<'m> {
    pub(crate) lanes: &'m Lanes,
    pub(crate) pools: &'m Pools,
    /// Bytes on the control connection.
    pub(crate) control_bytes: u64,
    /// CPU time of the data threads.
    pub(crate) cpu: Duration,
}

impl Costs<'_> {
    pub(crate) fn account(&self, report: &mut Report) {
        let Self { lanes, pools, control_bytes, cpu } = self;
        report.wire_bytes = lanes.wire_bytes() + control_bytes;
        report.cpu_source_s = cpu.as_secs_f64();
        report.pool_high_water_bytes[0] = pools.high_water_bytes();
        report.lanes = lanes::reports(lanes);
    }

    /// As [`Costs::account`], with the pages of a stream that is split.
    pub(crate) fn account_stream(&self, state: &StreamState, report: &mut Report) {
        let (delivered, (body_bytes, fill_bytes)) = (self.lanes.delivered(), state.taken());
        report.ram_bytes = state.ram_bytes().max(report.ram_bytes);
        report.body_bytes = body_bytes;
        report.fill_bytes = fill_bytes;
        report.dropped_bytes = delivered.dropped_bytes;
        report.delta_bytes = self.lanes.delta_bytes();
        report.named_bytes = delivered.found_bytes;
        report.residue_bytes = state.residue_bytes.load(Relaxed);
        self.account(report);
    }
}
