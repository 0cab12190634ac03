//! The holder of a certificate.
//!
//! The certificate has the name as a URI with a scheme of Droveway's, which keeps it
//! exactly: a DNS name would lose upper and lower case, and not every host's name is
//! one. Anything else a certificate says of its holder is for people only.

use std::fmt;
use std::str::FromStr;

/// Most characters in a name.
pub const LETTERS_MAX: usize = 64;
/// The scheme of Droveway's URIs.
const SCHEME: &str = "droveway:";

/// What a person's certificate permits. Each role includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// See VMs and migrations.
    Observe,
    /// And move VMs.
    Migrate,
    /// And everything else.
    Admin,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Observe, Self::Migrate, Self::Admin];

    /// Its name in certificates and on the command line.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Observe => "observe",
            Self::Migrate => "migrate",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|role| role.as_str() == text)
            .ok_or_else(|| "a role is observe, migrate or admin".to_owned())
    }
}

/// The holder of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// An agent's.
    Host(String),
    /// A person's or a program's, for the API.
    Client {
        /// What they may do.
        role: Role,
        /// Their name.
        name: String,
    },
}

/// A text that is not a valid name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a name: use 1 to {LETTERS_MAX} of A-Z a-z 0-9 . _ - and start with a letter or \
     digit"
)]
pub struct NameError(String);

impl Subject {
    /// A host.
    ///
    /// # Errors
    /// If the name is not valid.
    pub fn host(name: &str) -> Result<Self, NameError> {
        check_name(name)?;
        Ok(Self::Host(name.to_owned()))
    }

    /// A user with a role.
    ///
    /// # Errors
    /// If the name is not valid.
    pub fn client(role: Role, name: &str) -> Result<Self, NameError> {
        check_name(name)?;
        Ok(Self::Client { role, name: name.to_owned() })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Host(name) | Self::Client { name, .. } => name,
        }
    }

    /// Its URI in a certificate.
    #[must_use]
    pub fn to_uri(&self) -> String {
        match self {
            Self::Host(name) => format!("{SCHEME}host/{name}"),
            Self::Client { role, name } => format!("{SCHEME}{role}/{name}"),
        }
    }

    /// The holder that a URI names; `None` if it is not one of Droveway's.
    #[must_use]
    pub fn from_uri(uri: &str) -> Option<Self> {
        let (kind, name) = uri.strip_prefix(SCHEME)?.split_once('/')?;
        if kind == "host" {
            return Self::host(name).ok();
        }
        Self::client(kind.parse().ok()?, name).ok()
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(name) => write!(f, "host {name}"),
            Self::Client { role, name } => write!(f, "{name} ({role})"),
        }
    }
}

/// Checks that `name` may name a host, a VM or a person: it becomes a part of paths and URIs, so few
/// characters are permitted.
///
/// # Errors
/// If not, with the rules for names.
pub fn check_name(name: &str) -> Result<(), NameError> {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let good = name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.len() <= LETTERS_MAX
        && name.chars().all(inner);
    if good {
        return Ok(());
    }
    // The text may come from a peer, so only a printable, short part is quoted.
    let shown = name.chars().take(LETTERS_MAX).map(|c| if c.is_control() { '?' } else { c });
    Err(NameError(shown.collect()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn names_round_trip_exactly(name in "[A-Za-z0-9][A-Za-z0-9._-]{0,63}", kind in 0..4_usize) {
            let subject = match Role::ALL.get(kind) {
                Some(role) => Subject::client(*role, &name).unwrap(),
                None => Subject::host(&name).unwrap(),
            };
            prop_assert_eq!(Subject::from_uri(&subject.to_uri()), Some(subject));
        }
    }

    #[test]
    fn other_uris_name_no_holder() {
        for uri in [
            "",
            "droveway:",
            "droveway:host/",
            "droveway:host/../a",
            "droveway:host/a/b",
            "droveway:root/a",
            "Droveway:host/a",
            "https://host/a",
            " droveway:host/a",
        ] {
            assert_eq!(Subject::from_uri(uri), None, "{uri}");
        }
    }

    #[test]
    fn names_are_what_paths_can_hold() {
        for name in ["a", "web1", "9", "a.b_c-d", "A..", &"a".repeat(LETTERS_MAX)] {
            assert_eq!(check_name(name), Ok(()), "{name}");
        }
    }

    #[test]
    fn bad_names_are_refused_in_short_printable_words() {
        let (too_long, endless) = ("a".repeat(LETTERS_MAX + 1), "\n".repeat(100_000));
        for name in [
            "", ".", "..", ".a", "-a", "_a", "a b", "a/b", "../a", "ä", "a\n", "a\0", &too_long,
            &endless,
        ] {
            let said = Subject::host(name).unwrap_err().to_string();
            assert!(said.len() < 300 && !said.contains('\n'), "{said}");
        }
    }

    #[test]
    fn roles_include_those_before_them() {
        assert!(Role::Admin > Role::Migrate && Role::Migrate > Role::Observe);
    }
}
