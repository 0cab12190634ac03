//! An agent's configuration: flags, a TOML file with the same keys, and the peers file.
//!
//! Flags override the file, and the file overrides this host's own entry in the peers file.

pub mod carry;
mod defaults;
mod directory;
mod error;
pub mod file;
mod nic_speed;
mod peers;
mod percent;
mod secrets;
mod settings;
pub(crate) mod webhook;
mod xen;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

pub use carry::{Carry, Manager};
pub use defaults::{API_DEFAULT, POOL_MIB_DEFAULT, STATE_DEFAULT, TLS_DEFAULT};
pub use directory::{DirectoryChoice, DirectoryChoiceError};
pub use error::ConfigError;
pub use nic_speed::{NicSpeed, NicSpeedError};
pub(crate) use peers::read as read_peers;
pub use peers::{PeerEntry, parse as parse_peers};
pub use percent::{CpuShare, CpuShareError};
pub use secrets::Password;
pub use settings::Settings;
pub use webhook::Webhook;
pub use xen::Xen;

use api::CpuFloor;
use qemu::programs::USUAL;

use defaults::{CPU_FLOOR_DEFAULT, POOL_MIB};

/// The configuration, checked and with all defaults.
#[derive(Clone, Debug)]
pub struct Config {
    /// This host's name.
    pub name: String,
    /// The rack it stands in.
    pub rack: Option<String>,
    /// The address at which other agents reach this one.
    pub listen: SocketAddr,
    /// Addresses of the NICs that carry data; empty means that routing decides.
    pub nics: Vec<IpAddr>,
    /// The speeds of NICs that don't report theirs.
    pub nic_speeds: Vec<NicSpeed>,
    /// The other hosts.
    pub peers: Vec<PeerEntry>,
    /// This host's own entry in the peers file.
    pub own: Option<PeerEntry>,
    /// The peers file.
    pub peers_file: Option<PathBuf>,
    /// The state directory.
    pub state: PathBuf,
    /// The API's socket.
    pub api: PathBuf,
    /// The group that may use that socket; none: only the agent's user.
    pub api_group: Option<String>,
    /// The address at which the API is served over TCP too, to people with certificates.
    pub api_listen: Option<SocketAddr>,
    /// The address at which metrics are served, without authentication.
    pub metrics_listen: Option<SocketAddr>,
    /// Buffers of all migrations in one direction.
    pub pool_bytes: usize,
    /// The user that QEMUs run as; none: the agent's own user.
    pub qemu_user: Option<String>,
    /// The programs that other hosts may start here.
    pub qemu_programs: Vec<String>,
    /// The directory with this host's certificate and key; none: peers are not authenticated,
    /// and nothing is encrypted.
    pub tls: Option<PathBuf>,
    /// Guest memory may cross the network unencrypted.
    pub insecure_plaintext: bool,
    /// Whether VMs are throttled by cgroups, where the host has them; only in the file.
    pub cgroups: bool,
    /// Whether arriving VMs share content with others; only in the file.
    pub sharing: bool,
    /// The location of the rack's directory.
    pub directory: DirectoryChoice,
    /// The share of one CPU that scanning VMs may take.
    pub scan_cpu: CpuShare,
    /// The CPU floor of data threads of migrations that request none.
    pub cpu_floor: CpuFloor,
    /// The hosts whose agents may order moves of this host's VMs; none: all of the peers file.
    ///
    /// Only in the file.
    pub coordinators: Option<Vec<String>>,
    /// The timeouts of migrations; only in the file.
    pub waits: engine::Waits,
    /// How migrations that others command are carried; none: they are not.
    ///
    /// Only in the file.
    pub carry: Option<Carry>,
    /// How domains of Xen leave and arrive; none: they don't.
    ///
    /// Only in the file.
    pub xen: Option<Xen>,
    /// The receiver of events, if there is one; only in the file.
    pub webhook: Option<Webhook>,
    /// Settings that have passwords.
    pub passwords: Vec<Password>,
}

impl Config {
    /// Reads the files and checks everything that can be checked without access to the host.
    ///
    /// # Errors
    /// If something is wrong, with its place and what to do.
    pub fn new(typed: Settings) -> Result<Self, ConfigError> {
        Self::with_tls_default(typed, Path::new(TLS_DEFAULT))
    }

    fn with_tls_default(typed: Settings, tls_default: &Path) -> Result<Self, ConfigError> {
        let file = match &typed.config {
            Some(path) => settings::read(path)?,
            None => Settings::default(),
        };
        let Protection { tls, insecure_plaintext } = choose_protection(&typed, &file, tls_default)?;
        let passwords = passwords(&typed, &file);
        let name = typed
            .name
            .or(file.name)
            .ok_or(ConfigError::Missing { what: "name for this host", flag: "name" })?;
        identity::check_name(&name)?;

        let peers_file = typed.peers.or(file.peers);
        let (own, peers) = match &peers_file {
            Some(path) => peers::read(path, &name)?,
            None => Default::default(),
        };

        let listen = typed
            .listen
            .or(file.listen)
            .or(own.as_ref().map(|own| own.address))
            .ok_or(ConfigError::Missing { what: "address to listen at", flag: "listen" })?;
        let nics = typed.nic.or(file.nic);
        let qemu_user = typed.qemu_user.or(file.qemu_user);
        let carry = file.carry.map(|carry| carry.understood(own.as_ref(), qemu_user.as_ref()));
        let pool_mib = typed.pool_mib.or(file.pool_mib).unwrap_or(POOL_MIB_DEFAULT);
        let config = Self {
            rack: typed.rack.or(file.rack).or(own.as_ref().and_then(|o| o.rack.clone())),
            nics: nics.or(own.as_ref().map(|own| own.nics.clone())).unwrap_or_default(),
            nic_speeds: typed.nic_speed.or(file.nic_speed).unwrap_or_default(),
            name,
            listen,
            peers_file,
            own,
            peers,
            state: typed.state.or(file.state).unwrap_or_else(|| STATE_DEFAULT.into()),
            api: typed.api.or(file.api).unwrap_or_else(|| API_DEFAULT.into()),
            api_group: typed.api_group.or(file.api_group),
            api_listen: typed.api_listen.or(file.api_listen),
            metrics_listen: typed.metrics_listen.or(file.metrics_listen),
            pool_bytes: (pool_mib as usize) << 20,
            qemu_user,
            qemu_programs: typed
                .qemu_programs
                .or(file.qemu_programs)
                .unwrap_or_else(|| USUAL.map(str::to_owned).to_vec()),
            tls,
            insecure_plaintext,
            cgroups: file.cgroups.unwrap_or(true),
            sharing: file.sharing.unwrap_or(true),
            directory: choose_directory(
                typed.directory,
                file.directory,
                file.directory_file.as_deref(),
            )?,
            scan_cpu: typed.scan_cpu.or(file.scan_cpu).unwrap_or_default(),
            cpu_floor: typed.cpu_floor.or(file.cpu_floor).unwrap_or(CPU_FLOOR_DEFAULT),
            coordinators: file.coordinators,
            waits: file.waits,
            carry: carry.transpose()?,
            xen: file.xen.map(xen::Section::understood).transpose()?,
            webhook: file.webhook.map(webhook::Section::understood).transpose()?,
            passwords,
        };
        if !POOL_MIB.contains(&pool_mib) {
            return Err(ConfigError::Pool(pool_mib));
        }
        config.check_network()?;
        Ok(config)
    }

    /// Whether lanes may use this NIC; if none are named, routing decides.
    fn has(&self, nic: IpAddr) -> bool {
        self.nics.is_empty() || self.nics.contains(&nic)
    }

    fn check_network(&self) -> Result<(), ConfigError> {
        if self.listen.port() == 0 {
            return Err(ConfigError::Port(self.listen));
        }
        // A peer that can reach the port can start a VM here, and so run a program of its choice.
        // Without certificates only loopback is safe.
        let is_open = self.tls.is_none() && !self.insecure_plaintext;
        if is_open && !self.listen.ip().is_loopback() {
            let (listen, name) = (self.listen, self.name.clone());
            return Err(ConfigError::Plaintext { listen, name });
        }
        if self.api_listen.is_some() && self.tls.is_none() {
            return Err(ConfigError::ApiWithoutTls(self.name.clone()));
        }
        if let Some(speed) = self.nic_speeds.iter().find(|speed| !self.has(speed.address)) {
            return Err(ConfigError::NicSpeed(speed.address));
        }
        for &nic in &self.nics {
            let listens = self.listen.ip().is_unspecified() || self.listen.ip() == nic;
            if !listens {
                let any: IpAddr = if nic.is_ipv4() {
                    std::net::Ipv4Addr::UNSPECIFIED.into()
                } else {
                    std::net::Ipv6Addr::UNSPECIFIED.into()
                };
                return Err(ConfigError::NicNotListened {
                    nic,
                    listen: self.listen,
                    any: SocketAddr::new(any, self.listen.port()),
                });
            }
        }
        Ok(())
    }
}

/// The location of the rack's directory: the flag's, or that of the file or of a file for it alone.
fn choose_directory(
    typed: Option<DirectoryChoice>,
    in_file: Option<DirectoryChoice>,
    own_file: Option<&Path>,
) -> Result<DirectoryChoice, ConfigError> {
    match (typed, in_file, own_file) {
        (_, Some(_), Some(_)) => Err(ConfigError::Twice("directory")),
        (Some(typed), ..) => Ok(typed),
        (None, _, Some(file)) => Ok(secrets::read_private(file)?.trim().parse()?),
        (None, in_file, None) => Ok(in_file.unwrap_or_default()),
    }
}

/// The settings that have passwords where others may read them.
fn passwords(typed: &Settings, file: &Settings) -> Vec<Password> {
    let has = |directory: &Option<DirectoryChoice>| {
        directory.as_ref().is_some_and(DirectoryChoice::has_password)
    };
    let mut found = Vec::new();
    if has(&typed.directory) {
        found.push(Password::new("directory", None));
    }
    if has(&file.directory) {
        found.push(Password::new("directory", typed.config.clone()));
    }
    if file.webhook.as_ref().is_some_and(webhook::Section::has_password) {
        found.push(Password::new("url under [webhook]", typed.config.clone()));
    }
    found
}

/// The directory of the certificate, or the choice to use none.
struct Protection {
    tls: Option<PathBuf>,
    insecure_plaintext: bool,
}

/// Flags override the file, and both override a default directory that happens to exist.
fn choose_protection(
    typed: &Settings,
    file: &Settings,
    tls_default: &Path,
) -> Result<Protection, ConfigError> {
    let typed = (&typed.tls, typed.insecure_plaintext);
    let in_file = (&file.tls, file.insecure_plaintext);
    let (tls, insecure_plaintext) = if typed == (&None, false) { in_file } else { typed };
    let tls = match (tls, insecure_plaintext) {
        (Some(_), true) => return Err(ConfigError::Contradiction),
        (None, true) => None,
        (Some(dir), false) => Some(dir.clone()),
        (None, false) => tls_default.is_dir().then(|| tls_default.to_owned()),
    };
    Ok(Protection { tls, insecure_plaintext })
}

#[cfg(test)]
mod tests;
