//! `[xen]`: domains of Xen that leave this host or arrive here by `xl migrate`.

use std::path::PathBuf;

use serde::Deserialize;

use super::error::ConfigError;

/// The default program.
const XL_DEFAULT: &str = "/usr/sbin/xl";

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct Section {
    xl: Option<PathBuf>,
    accept_from: Vec<String>,
}

/// How domains of Xen leave and arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xen {
    /// The program `xl`.
    pub xl: PathBuf,
    /// The hosts whose domains are accepted: a domain's configuration names disks, kernels and
    /// scripts of this host, so its sender is trusted as root. Domains leave also if this is empty.
    pub accept_from: Vec<String>,
}

impl Default for Xen {
    fn default() -> Self {
        Self { xl: XL_DEFAULT.into(), accept_from: Vec::new() }
    }
}

impl Section {
    /// Checks the section.
    pub(super) fn understood(self) -> Result<Xen, ConfigError> {
        let xl = self.xl.unwrap_or_else(|| XL_DEFAULT.into());
        if !xl.is_absolute() {
            return Err(ConfigError::Xen(format!("xl: {} is not an absolute path", xl.display())));
        }
        for host in &self.accept_from {
            identity::check_name(host)
                .map_err(|error| ConfigError::Xen(format!("accept-from: {error}")))?;
        }
        Ok(Xen { xl, accept_from: self.accept_from })
    }
}
