//! With whom a VM that moves shares content.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where pages may come from that the source need not send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Share {
    /// As far as both hosts are configured for it, if there is anything to find: the
    /// destination has a rack, or has or gets VMs of the same domain. Where they are
    /// not, nothing is said of it.
    #[default]
    Auto,
    /// From nowhere.
    Off,
    /// From VMs on the destination host, and those on their way there.
    Host,
    /// From those of all hosts of its rack.
    Rack,
}

/// What content a VM has in common with others, and with which.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Sharing {
    /// How far.
    pub share: Share,
    /// Only VMs of the same domain share content: how long a migration takes tells
    /// whether somebody has the same. Empty is the cluster's own; none is that of
    /// the VM. It is the VM's from then on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Others move at the same time that may have the same content: a gang.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub together: bool,
}

/// It is no domain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a sharing domain has at most {} letters, digits, dots, dashes and underscores",
    Sharing::DOMAIN_MAX
)]
pub struct DomainError;

impl Sharing {
    /// The longest domain.
    pub const DOMAIN_MAX: usize = 64;

    /// Whether it can be meant so.
    ///
    /// # Errors
    /// As [`check_domain`].
    pub fn check(&self) -> Result<(), DomainError> {
        self.domain.as_deref().map_or(Ok(()), check_domain)
    }
}

/// Whether it is a sharing domain.
///
/// # Errors
/// If it is too long, or has other characters in it.
pub fn check_domain(domain: &str) -> Result<(), DomainError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    let right = domain.len() <= Sharing::DOMAIN_MAX && domain.bytes().all(plain);
    if right { Ok(()) } else { Err(DomainError) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_is_a_short_plain_word() {
        let check = |domain: &str| {
            let sharing = Sharing { domain: Some(domain.to_owned()), ..Sharing::default() };
            sharing.check().is_ok()
        };
        assert!(Sharing::default().check().is_ok());
        assert!(check("") && check("tenant-7.prod_a") && check(&"a".repeat(64)));
        assert!(!check("a b") && !check("ü") && !check(&"a".repeat(65)) && !check("a/b"));
    }
}
