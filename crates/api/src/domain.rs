//! Messages between `droveway xen-send` and the agent of its host, on the agent's socket for
//! domains of Xen: each is a line of JSON. With the first come two open files, `xl`'s stream and the
//! file from which `xl` reads answers.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::audit::Audit;
use crate::bounds::Bounds;
use crate::migration::{Compress, default_downtime_ms};
use crate::sharing::Sharing;

/// The longest line of JSON.
pub const DOMAIN_LINE_BYTES_MAX: usize = 64 << 10;

/// The agent's socket for domains of Xen, next to that of its API.
#[must_use]
pub fn domain_socket(api: &Path) -> PathBuf {
    api.with_extension("xen")
}

/// Send the domain that `xl` migrates to another host.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SendDomain {
    /// The host, as named in the peers file.
    pub to: String,
    /// The migration for which these files were handed to the agent before, which has restarted
    /// since.
    #[serde(default)]
    pub again: Option<String>,
    /// The number of lanes; by default as for other migrations.
    #[serde(default)]
    pub lanes: Option<u16>,
    /// The downtime goal, which bounds the data in flight.
    #[serde(default = "default_downtime_ms")]
    pub downtime_ms: u64,
    /// How long the domain may be suspended, in seconds, before it is taken back.
    #[serde(default)]
    pub blackout_max_s: Option<u64>,
    /// How long it may take until the domain is given up, in seconds.
    #[serde(default)]
    pub timeout_s: Option<u64>,
    /// How pages are encoded.
    #[serde(default)]
    pub compress: Compress,
    /// How it shares content with other VMs.
    #[serde(default)]
    pub sharing: Sharing,
    /// What is compared before the domain is given up.
    #[serde(default)]
    pub audit: Audit,
    /// The resources that it may use.
    #[serde(default)]
    pub bounds: Bounds,
}

/// A message of the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "event")]
pub enum DomainEvent {
    /// It is sent.
    Began {
        /// The migration's id for commands.
        migration: String,
        /// Its id for [`SendDomain::again`].
        again: String,
        /// The domain's name.
        domain: String,
    },
    /// It has ended.
    Ended {
        /// Whether the domain runs at the other host.
        moved: bool,
        /// For the operator.
        text: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_is_next_to_that_of_the_api() {
        let socket = domain_socket(Path::new("/run/droveway/api.sock"));
        assert_eq!(socket, Path::new("/run/droveway/api.xen"));
    }

    #[test]
    fn an_order_needs_a_host_and_nothing_else() {
        let order: SendDomain = serde_json::from_str(r#"{"to":"host-b"}"#).unwrap();
        assert_eq!((order.to.as_str(), order.downtime_ms, order.again), ("host-b", 300, None));
        assert_eq!(order.sharing, Sharing::default());
        assert!(serde_json::from_str::<SendDomain>(r#"{"to":"host-b","lane":1}"#).is_err());
        let ended = DomainEvent::Ended { moved: true, text: "it runs there".to_owned() };
        let json = serde_json::to_string(&ended).unwrap();
        assert_eq!(json, r#"{"event":"ended","moved":true,"text":"it runs there"}"#);
    }
}
