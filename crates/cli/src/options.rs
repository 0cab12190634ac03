//! Options that several commands share: as typed, with their conversion to the API's types.

mod audit;
mod bounds;
mod sharing;
mod slowing;
mod storage;
mod stream;

pub(crate) use audit::AuditArg;
pub(crate) use bounds::{BoundsArgs, PriorityArg};
pub(crate) use sharing::{ShareArg, SharingArgs};
pub(crate) use slowing::{OnStallArg, SlowingArgs};
pub(crate) use storage::{StorageArg, StorageArgs};
pub(crate) use stream::{CompressArg, TapArg};
