//! What `droveway doctor` found.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How serious a [`Finding`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Worth knowing; nothing to do.
    Note,
    /// Something works less well than it could, or may fail one day.
    Warning,
    /// Something does not work.
    Error,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// The host, or the pair of hosts, that was checked.
    pub host: String,
    /// What was checked.
    pub about: String,
    /// How serious it is.
    pub severity: Severity,
    /// What was found, in one sentence.
    pub text: String,
    /// What to do.
    #[serde(default)]
    pub advice: Option<String>,
}

/// What `GET /v1/doctor` and `GET /v1/doctor/HOST` answer.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Examination {
    /// The host that was examined, or the pair.
    pub of: String,
    /// The findings, in the order of the checks.
    pub findings: Vec<Finding>,
}

impl Examination {
    /// Whether an error is among the findings.
    #[must_use]
    pub fn has_errors(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Error)
    }
}
