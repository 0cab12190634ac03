//! Operations that have an id, and their paths in the API.

use crate::segment;

/// An operation of an agent: it has an id, can be watched and cancelled, and leaves a
/// report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A migration, by its id.
    Migration(String),
    /// A gang, by its id.
    Gang(String),
}

impl Operation {
    /// The operation with this id; a migration's id has only hex digits.
    #[must_use]
    pub fn named(id: &str) -> Self {
        let digits = id.strip_prefix('g').unwrap_or_default();
        if digits.len() == 8 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            Self::Gang(id.to_owned())
        } else {
            Self::Migration(id.to_owned())
        }
    }

    /// Its path in the API.
    #[must_use]
    pub fn path(&self) -> String {
        match self {
            Self::Migration(id) => format!("/v1/migrations/{}", segment(id)),
            Self::Gang(id) => format!("/v1/gangs/{}", segment(id)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_gangs_id_names_one() {
        for (id, path) in [
            ("gdeadbeef", "/v1/gangs/gdeadbeef"),
            ("deadbeef", "/v1/migrations/deadbeef"),
            ("gdeadbee", "/v1/migrations/gdeadbee"),
            ("gdeadbeeg", "/v1/migrations/gdeadbeeg"),
            ("g", "/v1/migrations/g"),
            ("a/b", "/v1/migrations/a%2Fb"),
            ("", "/v1/migrations/"),
        ] {
            assert_eq!(Operation::named(id).path(), path);
        }
    }
}
