//! The VMs that a moving VM shares content with.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Which hosts' VMs may provide pages, so that the source need not send them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Share {
    /// As far as both hosts are configured for it, if it can help: the destination has a rack, or
    /// VMs of the same domain are there or arriving.
    ///
    /// The report does not mention hosts that are not configured.
    #[default]
    Auto,
    /// None.
    Off,
    /// VMs on the destination host, and those that are arriving there.
    Host,
    /// VMs on all hosts of its rack.
    Rack,
}

/// How a moving VM shares content with other VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Sharing {
    /// Which hosts' VMs may provide pages.
    pub share: Share,
    /// The VM's sharing domain from now on; empty is the cluster's default domain, none keeps the
    /// VM's own.
    ///
    /// Only VMs of the same domain share content, because the duration of a migration reveals
    /// whether another VM has the same content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// VMs that may have the same content move at the same time: a gang.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub together: bool,
}

/// The text is not a sharing domain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a sharing domain has at most {} letters, digits, dots, dashes and underscores",
    Sharing::DOMAIN_MAX
)]
pub struct DomainError;

impl Sharing {
    /// The longest domain.
    pub const DOMAIN_MAX: usize = 64;

    /// Checks the domain, if one is given.
    ///
    /// # Errors
    /// As [`check_domain`].
    pub fn check(&self) -> Result<(), DomainError> {
        self.domain.as_deref().map_or(Ok(()), check_domain)
    }
}

/// Checks that the text is a sharing domain.
///
/// # Errors
/// If it is too long, or has a character that is not permitted.
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
