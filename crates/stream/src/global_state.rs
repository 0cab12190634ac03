//! Finds the section `globalstate` near the tail's end: the VM's state when QEMU stopped
//! it to finish.
//!
//! QEMU reports that state nowhere else. A VM that was paused just before is in
//! `finish-migrate`, like any other, by the time of a query. The sections before it have
//! no length, so it is found by its own bytes, from header to footer.

use crate::record::{SECTION_BYTES, kind};

/// After the section's kind and number: its name, instance id and version.
const HEADER: [u8; 20] = *b"\x0bglobalstate\0\0\0\0\0\0\0\x01";
/// The state's name, zero-terminated.
const STATE_BYTES: usize = 100;
/// The whole section. Between header and name are four bytes: the name's length,
/// including its zero.
const BYTES: usize = SECTION_BYTES + HEADER.len() + 4 + STATE_BYTES + SECTION_BYTES;

/// Scans a tail, in pieces of any size, for the section.
#[derive(Debug, Default)]
pub struct GlobalState {
    /// The last bytes read, where a section may have started.
    rest: Vec<u8>,
    state: Option<String>,
    /// Two sections with different states were found: a guest may have forged one.
    is_unclear: bool,
}

impl GlobalState {
    /// Scans the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.rest.extend_from_slice(bytes);
        let begins = |section: &&[u8]| section.first() == Some(&kind::FULL);
        for state in self.rest.windows(BYTES).filter(begins).filter_map(state_of) {
            self.is_unclear |= self.state.as_ref().is_some_and(|before| before != state);
            self.state = Some(state.to_owned());
        }
        let done = self.rest.len().saturating_sub(BYTES - 1);
        self.rest.drain(..done);
    }

    /// QEMU's name for the state, such as `running` or `paused`; none if it was not
    /// found, or is ambiguous.
    #[must_use]
    pub fn state(&self) -> Option<&str> {
        self.state.as_deref().filter(|_| !self.is_unclear)
    }
}

/// The state in these bytes, if they are such a section.
fn state_of(section: &[u8]) -> Option<&str> {
    let (begin, rest) = section.split_at_checked(SECTION_BYTES)?;
    let (length, rest) = rest.strip_prefix(&HEADER)?.split_first_chunk::<4>()?;
    let (state, end) = rest.split_at_checked(STATE_BYTES)?;
    let (begins, number) = begin.split_first()?;
    let (ends, same) = end.split_first()?;
    if (*begins, *ends) != (kind::FULL, kind::FOOTER) || number != same {
        return None;
    }
    let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
    let (zero, name) = state.get(..length)?.split_last()?;
    std::str::from_utf8(name).ok().filter(|_| *zero == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write::section_header;

    fn section(number: u32, state: &str) -> Vec<u8> {
        let mut out = Vec::new();
        section_header(&mut out, true, number, "globalstate", 1);
        out.extend_from_slice(&u32::try_from(state.len() + 1).unwrap().to_be_bytes());
        let mut content = [0; STATE_BYTES];
        content[..state.len()].copy_from_slice(state.as_bytes());
        // The remains of a longer name.
        content[state.len() + 1..][..4].copy_from_slice(b"rate");
        out.extend_from_slice(&content);
        out.push(kind::FOOTER);
        out.extend_from_slice(&number.to_be_bytes());
        assert_eq!(out.len(), BYTES);
        out
    }

    fn found(tail: &[u8], cut: usize) -> Option<String> {
        let mut global_state = GlobalState::default();
        tail.chunks(cut).for_each(|piece| global_state.push(piece));
        global_state.state().map(str::to_owned)
    }

    #[test]
    fn the_section_is_found_however_the_tail_is_cut() {
        let devices = [kind::FULL; 300];
        let tail = [&devices[..], &section(41, "paused")[..], &devices[..]].concat();
        for cut in 1..=tail.len() {
            assert_eq!(found(&tail, cut).as_deref(), Some("paused"), "{cut}");
        }
    }

    #[test]
    fn a_partial_or_damaged_section_is_not_found() {
        let whole = section(41, "running");
        assert_eq!(found(&whole, 64).as_deref(), Some("running"));
        assert_eq!(found(&whole[..BYTES - 1], 64), None);
        for at in [0, 4, 6, SECTION_BYTES + HEADER.len() + 3, BYTES - 1] {
            let mut other = whole.clone();
            other[at] ^= 1;
            assert_eq!(found(&other, 64), None, "{at}");
        }
    }

    #[test]
    fn sections_that_disagree_yield_no_state() {
        let both = |first, second| [section(40, first), section(41, second)].concat();
        assert_eq!(found(&both("paused", "paused"), 50).as_deref(), Some("paused"));
        assert_eq!(found(&both("paused", "running"), 50), None);
    }
}
