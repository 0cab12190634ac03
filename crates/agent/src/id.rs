//! Ids of migrations and gangs.

use std::fs::File;
use std::io::{self, Read};

/// Hex digits of an id.
const DIGITS: usize = 8;

/// A random id, short enough to type.
pub(crate) fn random_id() -> io::Result<String> {
    let mut bytes = [0; DIGITS / 2];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("{:08x}", u32::from_be_bytes(bytes)))
}

/// Whether the text may be an id.
pub(crate) fn is_id(text: &str) -> bool {
    text.len() == DIGITS && text.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_short_and_differ() {
        let ids: std::collections::HashSet<String> =
            (0..64).map(|_| random_id().unwrap()).collect();
        assert!(ids.len() > 60 && ids.iter().all(|id| is_id(id)));
    }
}
