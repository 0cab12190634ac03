//! The section `globalstate`, near the tail's end: in which state the VM was when QEMU
//! stopped it to finish.
//!
//! QEMU tells that nowhere else. A VM that was paused just before is in `finish-migrate`
//! like any other by the time that somebody asks. Sections before it have no length, so
//! it is looked for by its own bytes, from its header to its footer.

use crate::record::{SECTION_BYTES, kind};

/// Behind the section's kind and number: its name, QEMU's number for what it is of, and
/// its version.
const HEADER: [u8; 20] = *b"\x0bglobalstate\0\0\0\0\0\0\0\x01";
/// The state's name, with a zero behind it.
const STATE_BYTES: usize = 100;
/// The whole section. In between is the name's length, with its zero, in four bytes.
const BYTES: usize = SECTION_BYTES + HEADER.len() + 4 + STATE_BYTES + SECTION_BYTES;

/// Reads a tail along, however it is cut, to find it.
#[derive(Debug, Default)]
pub struct GlobalState {
    /// The end of what was read, where a section may have begun.
    rest: Vec<u8>,
    state: Option<String>,
    /// One was found that says something else: a guest may have made it up.
    is_unclear: bool,
}

impl GlobalState {
    /// These bytes came next.
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

    /// QEMU's name for the state, such as `running` or `paused`; none if that was not
    /// found, or not for certain.
    #[must_use]
    pub fn state(&self) -> Option<&str> {
        self.state.as_deref().filter(|_| !self.is_unclear)
    }
}

/// The state that these bytes say, if they are such a section.
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
        // What is left of a longer name.
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
    fn it_is_found_however_the_tail_is_cut() {
        let devices = [kind::FULL; 300];
        let tail = [&devices[..], &section(41, "paused")[..], &devices[..]].concat();
        for cut in 1..=tail.len() {
            assert_eq!(found(&tail, cut).as_deref(), Some("paused"), "{cut}");
        }
    }

    #[test]
    fn a_part_of_it_or_one_that_is_not_whole_is_none() {
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
    fn what_is_said_twice_has_to_be_the_same() {
        let both = |first, second| [section(40, first), section(41, second)].concat();
        assert_eq!(found(&both("paused", "paused"), 50).as_deref(), Some("paused"));
        assert_eq!(found(&both("paused", "running"), 50), None);
    }
}
