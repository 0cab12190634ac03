//! Defaults and bounds of settings.

use api::CpuFloor;

/// The default path of the API's socket, for the agent and the command.
pub const API_DEFAULT: &str = "/run/droveway/api.sock";
/// The default state directory.
pub const STATE_DEFAULT: &str = "/var/lib/droveway";
/// The default directory of an agent's certificate.
pub const TLS_DEFAULT: &str = "/etc/droveway/tls";
/// Buffers of all migrations in one direction.
///
/// A single migration fills no more than its link has in flight, and a dozen migrations share this
/// well.
pub const POOL_MIB_DEFAULT: u32 = 128;
/// Data threads are never restricted to idle CPUs: how much longer migrations take with a lower
/// floor depends on what else runs on the hosts.
pub(super) const CPU_FLOOR_DEFAULT: CpuFloor = CpuFloor::ALL;
/// The minimum suffices for seven migrations at a time, or three with disks.
///
/// More than the maximum wastes memory: no link has that much in flight.
pub(super) const POOL_MIB: std::ops::RangeInclusive<u32> = 16..=16_384;
