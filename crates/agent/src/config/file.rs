//! The file of `--config`: the flags' names as keys.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::error::ConfigError;
use super::{CpuShare, DirectoryChoice, NicSpeed};

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(super) struct File {
    pub(super) name: Option<String>,
    pub(super) rack: Option<String>,
    pub(super) listen: Option<SocketAddr>,
    pub(super) nic: Option<Vec<IpAddr>>,
    pub(super) nic_speed: Option<Vec<NicSpeed>>,
    pub(super) peers: Option<PathBuf>,
    pub(super) state: Option<PathBuf>,
    pub(super) api: Option<PathBuf>,
    pub(super) api_group: Option<String>,
    pub(super) api_listen: Option<SocketAddr>,
    pub(super) metrics_listen: Option<SocketAddr>,
    pub(super) pool_mib: Option<u32>,
    pub(super) qemu_user: Option<String>,
    pub(super) qemu_programs: Option<Vec<String>>,
    pub(super) tls: Option<PathBuf>,
    pub(super) insecure_plaintext: bool,
    pub(super) cgroups: Option<bool>,
    pub(super) sharing: Option<bool>,
    pub(super) directory: Option<DirectoryChoice>,
    pub(super) directory_file: Option<PathBuf>,
    pub(super) scan_cpu: Option<CpuShare>,
    pub(super) coordinators: Option<Vec<String>>,
    pub(super) waits: engine::Waits,
    pub(super) carry: Option<super::carry::Section>,
    pub(super) webhook: Option<super::webhook::Section>,
}

/// Reads the file; relative paths in it start from its directory.
pub(super) fn read(path: &Path) -> Result<File, ConfigError> {
    let mut file: File = super::parse(path, &super::read(path)?)?;
    let here = path.parent().unwrap_or(Path::new(""));
    let File { peers, state, api, tls, directory_file, .. } = &mut file;
    let paths = [peers, state, api, tls, directory_file];
    for named in paths.into_iter().flatten() {
        *named = here.join(&*named);
    }
    if let Some(webhook) = &mut file.webhook {
        webhook.paths_from(here);
    }
    Ok(file)
}
