//! A content's record on a server: which host has or claims it, as readable text. `claim 0
//! host-a`, `hold 3 host-b`: the number is how often that host had been forgotten by then.

use crate::host::HostName;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) is_claim: bool,
    pub(super) generation: u64,
    pub(super) host: HostName,
}

impl Record {
    pub(super) fn to_text(&self) -> String {
        let Self { is_claim, generation, host } = self;
        format!("{} {generation} {host}", if *is_claim { "claim" } else { "hold" })
    }

    /// None if it is not a valid record.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let text = str::from_utf8(bytes).ok()?;
        let (kind, rest) = text.split_once(' ')?;
        let (generation, host) = rest.split_once(' ')?;
        let is_claim = match kind {
            "claim" => true,
            "hold" => false,
            _ => return None,
        };
        let (generation, host) = (generation.parse().ok()?, HostName::new(host).ok()?);
        Some(Self { is_claim, generation, host })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_record_comes_back_and_anything_else_is_none(
            is_claim: bool, generation: u64, host in "[a-z0-9][A-Za-z0-9._-]{0,63}", other: Vec<u8>,
        ) {
            let host = HostName::new(&host).unwrap();
            let record = Record { is_claim, generation, host };
            prop_assert_eq!(Record::parse(record.to_text().as_bytes()), Some(record));
            prop_assert_eq!(Record::parse(&other), None);
        }
    }
}
