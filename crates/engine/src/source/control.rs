//! Measures while QEMU streams, and decides about pacing, throttling, and
//! holding.

pub(crate) mod bandwidth;
pub(crate) mod by_progress;
mod hold;
pub(crate) mod limit;
pub(crate) mod pacing;
pub(crate) mod sampler;
pub(crate) mod stream_state;
pub(crate) mod throttle;
mod whole;
