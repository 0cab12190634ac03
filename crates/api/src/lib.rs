//! Types of the agent's HTTP API, shared by the agent and the command.
//!
//! They are also the format of a saved report. `domain` has the messages of a socket of its own.

mod audit;
mod bounds;
mod domain;
mod error;
mod event;
mod finding;
mod gang;
mod helper_budget;
mod host;
mod migration;
mod prediction;
mod report;
mod sharing;
mod slowing;
mod storage;
mod times;
mod upgrade;
mod vm;

pub use audit::{Audit, Audited};
pub use bounds::{BitRate, BitRateError, Bounds, BoundsChange, BoundsChanged};
pub use data_threads::{CpuFloor, Cpus, Priority};
pub use domain::{DOMAIN_LINE_BYTES_MAX, DomainEvent, SendDomain, domain_socket};
pub use error::{ErrorBody, ErrorCode};
pub use event::{Event, GapReason, Happening, MigrationResult};
pub use finding::{Examination, Finding, Severity};
pub use gang::{
    Evacuation, Figures, GangOptions, GangOutcome, GangPlan, GangProgress, GangReport, GangRequest,
    GangStarted, GangTotals, HostRoom, MoveProgress, MoveReport, MoveState, PARALLEL_DEFAULT,
    PARALLEL_MAX, PlannedMove, RequestedMove, SharedParts,
};
pub use helper_budget::{HelperBudget, HelperBudgetError};
pub use host::{HostCensus, HostInfo, HostVm, PeerInfo};
pub use migration::{
    Compress, Limit, MigrateRequest, MigrationStarted, Outcome, Phase, Progress, TapChoice,
};
pub use prediction::{Compressed, FreeMemory, Outlook, PredictRequest, Prediction};
pub use report::{DiskReport, FromOthers, LaneReport, PhaseTime, Report, Sample, Throttled};
pub use sharing::{DomainError, Share, Sharing, check_domain};
pub use slowing::{OnStall, Slowing, SlowingError, Throttle, ThrottleError};
pub use storage::{FromStorage, ReadDisks};
pub use times::{
    DOWNTIME_MS_MAX, SECONDS_MAX, STOP_S_MAX, check_downtime, check_stop, check_times,
};
pub use upgrade::{PlanUpgradeRequest, UpgradeHow, UpgradePlan, UpgradeRequest};
pub use vm::{
    AttachRequest, GuestHelper, KnownContent, ResolveRequest, ResolveSide, RunRequest, StopEnd,
    StopHow, Stopped, VmStatus, VmSummary,
};
