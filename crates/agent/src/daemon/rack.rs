//! The rack that an agent's host shares content with.

use std::sync::Arc;
use std::time::Duration;

use dedup::rack::{DirectoryAt, Mate, Rack};
use directory::{
    Directory, DirectoryError, Embedded, HostName, Limits, Redis, RedisSettings, Servers, Terms,
};
use identity::Security;

use crate::config::{Config, DirectoryChoice, PeerEntry};

/// How long a claim lasts.
///
/// Claimed content is delivered by then, even if many VMs share a slow link and much is queued
/// before it.
const CLAIM: Duration = Duration::from_secs(30);
/// Connections to Redis, and so batches in flight.
const REDIS_CONNECTIONS: usize = 4;

/// Why a host can't use its rack's directory.
#[derive(Debug, thiserror::Error)]
pub enum RackError {
    /// The operator names a host that isn't in the rack.
    #[error(
        "directory: the host `{0}` is not in this host's rack, as the peers file has it: name one \
         that is, or use `auto`"
    )]
    NotInRack(String),
    /// Redis can't be used with these settings.
    #[error("directory: {0}")]
    Directory(#[from] DirectoryError),
    /// A thread can't be started.
    #[error("cannot create the rack's directory: {0}")]
    Thread(#[from] std::io::Error),
}

/// This host's rack; none if it has no rack, or the directory is off.
///
/// # Errors
/// If the configured directory can't be used.
pub(crate) fn rack(config: &Config, security: Security) -> Result<Option<Arc<Rack>>, RackError> {
    let Some(rack) = &config.rack else { return Ok(None) };
    let mates: Vec<&PeerEntry> =
        config.peers.iter().filter(|peer| peer.rack.as_ref() == Some(rack)).collect();
    let mut names: Vec<&str> = mates.iter().map(|peer| peer.name.as_str()).collect();
    names.push(&config.name);
    let terms = Terms { claim: CLAIM, ..Terms::default() };
    let kept_by = |keeper: &str| match mates.iter().find(|peer| peer.name == keeper) {
        Some(keeper) => DirectoryAt::At(mate(keeper)),
        None => {
            let limits = Limits { terms, ..Limits::default() };
            DirectoryAt::Here(Arc::new(Embedded::new(limits)))
        }
    };
    let at = match &config.directory {
        DirectoryChoice::Off => return Ok(None),
        DirectoryChoice::Auto => kept_by(names.into_iter().min().unwrap_or(&config.name)),
        DirectoryChoice::Host(host) if names.contains(&host.as_str()) => kept_by(host),
        DirectoryChoice::Host(host) => return Err(RackError::NotInRack(host.clone())),
        DirectoryChoice::Redis(urls) => DirectoryAt::Elsewhere(redis(urls, rack, terms)?),
    };
    let mates = mates.into_iter().map(mate).collect();
    Ok(Some(Rack::new(&config.name, mates, security, at)?))
}

fn redis(urls: &[String], rack: &str, terms: Terms) -> Result<Arc<dyn Directory>, RackError> {
    // A rack may have any name, but a key in Redis may not.
    let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '_' };
    let rack = HostName::new(rack).map_or_else(
        |_| format!("r{}", rack.chars().map(plain).take(60).collect::<String>()),
        |name| name.to_string(),
    );
    let servers = match urls {
        [one] => Servers::One(one.clone()),
        some => Servers::Cluster(some.to_vec()),
    };
    let settings = RedisSettings {
        servers,
        cluster: "cluster".to_owned(),
        rack,
        terms,
        connections: REDIS_CONNECTIONS,
    };
    Ok(Arc::new(Redis::new(&settings)?))
}

fn mate(entry: &PeerEntry) -> Mate {
    Mate { name: entry.name.clone(), address: entry.address }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;

    fn config(directory: &str) -> Config {
        let dir = tempfile::tempdir().unwrap();
        let peers = dir.path().join("peers.toml");
        let host = |name: &str, rack: &str, port: u16| {
            format!("[[host]]\nname = '{name}'\nrack = '{rack}'\naddress = '127.0.0.1:{port}'\n")
        };
        let all = [host("b", "r1", 7001), host("a", "r1", 7002), host("0", "r2", 7003)].concat();
        std::fs::write(&peers, all).unwrap();
        let file = dir.path().join("agent.toml");
        let text = format!("name = 'b'\npeers = 'peers.toml'\ndirectory = '{directory}'\n");
        std::fs::write(&file, text).unwrap();
        Config::new(Settings { config: Some(file), ..Settings::default() }).unwrap()
    }

    #[test]
    fn the_directory_is_where_the_operator_chose_or_at_the_racks_first_host() {
        let rack = |directory| rack(&config(directory), Security::Plaintext);
        let text = |directory| format!("{:?}", rack(directory).unwrap().unwrap());
        assert!(text("auto").contains("the agent of a"), "{}", text("auto"));
        assert!(text("host:b").contains("Embedded"), "{}", text("host:b"));
        assert!(text("redis://127.0.0.1:1").contains("Redis"));
        assert!(rack("off").unwrap().is_none());
        assert!(matches!(rack("host:0"), Err(RackError::NotInRack(_))));
    }
}
