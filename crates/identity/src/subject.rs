//! Whom a certificate names.
//!
//! The name stands in the certificate as a URI of our own, so that it is kept
//! to the letter: a DNS name would lose upper and lower case, and not every
//! host's name is one. What else a certificate says of its holder is for people.

use std::fmt;
use std::str::FromStr;

/// Letters in a name.
const LETTERS_MAX: usize = 64;
/// The scheme of our URIs.
const SCHEME: &str = "droveway:";

/// What a person's certificate lets him do. Each role may do what those before
/// it may.
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

    /// As it stands in certificates and is typed.
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

/// Whose certificate it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// An agent's.
    Host(String),
    /// A person's or a program's, for the API.
    Client {
        /// What they may do.
        role: Role,
        /// Who they are.
        name: String,
    },
}

/// A text that is no name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a name: use 1 to {LETTERS_MAX} of A-Z a-z 0-9 . _ - and begin with a letter or \
     digit"
)]
pub struct NameError(String);

impl Subject {
    /// A host.
    ///
    /// # Errors
    /// If that is no name.
    pub fn host(name: &str) -> Result<Self, NameError> {
        check(name)?;
        Ok(Self::Host(name.to_owned()))
    }

    /// Somebody with a role.
    ///
    /// # Errors
    /// If that is no name.
    pub fn client(role: Role, name: &str) -> Result<Self, NameError> {
        check(name)?;
        Ok(Self::Client { role, name: name.to_owned() })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Host(name) | Self::Client { name, .. } => name,
        }
    }

    /// As it stands in a certificate.
    #[must_use]
    pub fn to_uri(&self) -> String {
        match self {
            Self::Host(name) => format!("{SCHEME}host/{name}"),
            Self::Client { role, name } => format!("{SCHEME}{role}/{name}"),
        }
    }

    /// Whom a URI names; none if it is not one of ours.
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

fn check(name: &str) -> Result<(), NameError> {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let good = name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.len() <= LETTERS_MAX
        && name.chars().all(inner);
    if good {
        return Ok(());
    }
    let shown = name.chars().take(LETTERS_MAX).map(|c| if c.is_control() { '?' } else { c });
    Err(NameError(shown.collect()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_name_comes_back_to_the_letter(name in "[A-Za-z0-9][A-Za-z0-9._-]{0,63}", kind in 0..4_usize) {
            let subject = match Role::ALL.get(kind) {
                Some(role) => Subject::client(*role, &name).unwrap(),
                None => Subject::host(&name).unwrap(),
            };
            prop_assert_eq!(Subject::from_uri(&subject.to_uri()), Some(subject));
        }
    }

    #[test]
    fn what_is_not_ours_names_nobody() {
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
    fn bad_names_are_refused_in_short_printable_words() {
        for name in ["", ".", "-a", "a b", "a/b", "ä", "a\n", &"a".repeat(65)] {
            let said = Subject::host(name).unwrap_err().to_string();
            assert!(said.len() < 300 && !said.contains('\n'), "{said}");
        }
    }

    #[test]
    fn roles_include_those_before_them() {
        assert!(Role::Admin > Role::Migrate && Role::Migrate > Role::Observe);
    }
}
