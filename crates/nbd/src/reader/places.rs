//! Reads in flight, each with the buffer that its data goes into. No I/O.

use std::ops::Range;

use crate::transmission::SimpleReply;
use crate::{Errno, ProtocolError};

#[derive(Debug)]
enum ReadSlot<B> {
    Free,
    Requested {
        cookie: u64,
        into: Range<usize>,
        buffer: B,
    },
    /// Its buffer is being filled.
    Filling {
        cookie: u64,
    },
    Done {
        buffer: B,
        outcome: Result<(), Errno>,
    },
}

/// Cookies are `serial x places + place`, so that finding a read is a division,
/// and a repeated reply is noticed.
#[derive(Debug)]
pub(crate) struct Places<B> {
    places: Vec<ReadSlot<B>>,
    free: Vec<usize>,
    serial: u64,
}

/// The read that a reply's header answers.
#[derive(Debug)]
pub(crate) struct Answered<B> {
    pub(crate) place: usize,
    /// Where the payload that follows goes; then call [`Places::filled`].
    pub(crate) payload: Option<(Range<usize>, B)>,
}

impl<B> Places<B> {
    pub(crate) fn new(places: usize) -> Self {
        Self {
            places: std::iter::repeat_with(|| ReadSlot::Free).take(places).collect(),
            free: (0..places).rev().collect(),
            serial: 0,
        }
    }

    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Takes a free place, which must exist; returns it with its cookie.
    pub(crate) fn enter(&mut self, into: Range<usize>, buffer: B) -> (usize, u64) {
        let place = self.free.pop().expect("there is room");
        self.serial = self.serial.wrapping_add(1) & u64::from(u32::MAX);
        let cookie = self.serial * self.places.len() as u64 + place as u64;
        self.places[place] = ReadSlot::Requested { cookie, into, buffer };
        (place, cookie)
    }

    pub(crate) fn answered(&mut self, reply: SimpleReply) -> Result<Answered<B>, ProtocolError> {
        let number = usize::try_from(reply.cookie % self.places.len() as u64).unwrap_or(usize::MAX);
        let asked = self.places.get_mut(number).filter(
            |place| matches!(place, ReadSlot::Requested { cookie, .. } if *cookie == reply.cookie),
        );
        let filling = ReadSlot::Filling { cookie: reply.cookie };
        let asked = asked.map(|place| (std::mem::replace(place, filling), place));
        let Some((ReadSlot::Requested { into, buffer, .. }, place)) = asked else {
            let text = format!("a reply to no request: {:#x}", reply.cookie);
            return Err(ProtocolError::Unexpected(text));
        };
        let payload = match reply.outcome {
            Ok(()) => Some((into, buffer)),
            outcome @ Err(_) => {
                *place = ReadSlot::Done { buffer, outcome };
                None
            }
        };
        Ok(Answered { place: number, payload })
    }

    /// Gives a place its buffer back, with the payload if it is `whole`.
    pub(crate) fn filled(&mut self, place: usize, into: Range<usize>, buffer: B, whole: bool) {
        let Some(filling) = self.places.get_mut(place) else { return };
        *filling = match *filling {
            ReadSlot::Filling { cookie } if !whole => ReadSlot::Requested { cookie, into, buffer },
            _ => ReadSlot::Done { buffer, outcome: Ok(()) },
        };
    }

    /// Frees the place and returns its buffer and outcome, if it has been answered.
    pub(crate) fn take(&mut self, place: usize) -> Option<(B, Result<(), Errno>)> {
        let done = self.places.get_mut(place).filter(|it| matches!(it, ReadSlot::Done { .. }))?;
        match std::mem::replace(done, ReadSlot::Free) {
            ReadSlot::Done { buffer, outcome } => {
                self.free.push(place);
                Some((buffer, outcome))
            }
            _ => None,
        }
    }

    /// Frees a place that is not answered and returns its buffer, unless that is being filled.
    pub(crate) fn give_up(&mut self, place: usize) -> Option<B> {
        let asked =
            self.places.get_mut(place).filter(|it| matches!(it, ReadSlot::Requested { .. }))?;
        match std::mem::replace(asked, ReadSlot::Free) {
            ReadSlot::Requested { buffer, .. } => {
                self.free.push(place);
                Some(buffer)
            }
            _ => None,
        }
    }

    /// The next place after this one that waits for its reply.
    pub(crate) fn waiting(&self, place: usize) -> Option<usize> {
        let all = self.places.len();
        let after = (1..all).map(|step| (place + step) % all);
        after.into_iter().find(|other| matches!(self.places[*other], ReadSlot::Requested { .. }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reply(cookie: u64, errno: u32) -> SimpleReply {
        SimpleReply { cookie, outcome: if errno == 0 { Ok(()) } else { Err(Errno(errno)) } }
    }

    proptest! {
        /// Replies in any order reach their places, with their buffers.
        #[test]
        fn each_buffer_comes_back_to_its_place(
            count in 1..8_usize,
            errnos in prop::collection::vec(0..3_u32, 1..60),
            order: Vec<prop::sample::Index>,
        ) {
            let mut order = order.into_iter();
            let mut places = Places::new(count);
            let mut flying = Vec::new();
            let mut answer = |places: &mut Places<usize>, flying: &mut Vec<(usize, u64, usize, u32)>| {
                let at = order.next().map_or(0, |index| index.index(flying.len()));
                let (place, cookie, tag, errno) = flying.swap_remove(at);
                let answered = places.answered(reply(cookie, errno)).unwrap();
                assert_eq!(answered.place, place);
                assert!(places.answered(reply(cookie, 0)).is_err(), "twice");
                if let Some((range, buffer)) = answered.payload {
                    assert_eq!((range.clone(), buffer), (tag..tag + 1, tag));
                    assert!(places.take(place).is_none() && places.give_up(place).is_none());
                    places.filled(place, range, buffer, true);
                }
                let (buffer, outcome) = places.take(place).unwrap();
                assert_eq!((buffer, outcome.is_err()), (tag, errno != 0));
            };
            for (tag, errno) in errnos.into_iter().enumerate() {
                while !places.has_room() {
                    answer(&mut places, &mut flying);
                }
                let (place, cookie) = places.enter(tag..tag + 1, tag);
                prop_assert!(flying.iter().all(|other| other.0 != place && other.1 != cookie));
                flying.push((place, cookie, tag, errno));
                prop_assert_eq!(places.waiting(place).is_some(), flying.len() > 1);
            }
            while !flying.is_empty() {
                answer(&mut places, &mut flying);
            }
        }
    }

    #[test]
    fn a_read_cut_short_can_be_given_up() {
        let mut places = Places::new(2);
        let (place, cookie) = places.enter(0..4, 'a');
        let (range, buffer) = places.answered(reply(cookie, 0)).unwrap().payload.unwrap();
        assert_eq!(places.give_up(place), None);
        places.filled(place, range, buffer, false);
        assert_eq!(places.take(place), None);
        assert_eq!(places.give_up(place), Some('a'));
        assert!(places.answered(reply(cookie, 0)).is_err());
        assert!(places.answered(reply(u64::MAX, 0)).is_err());
        assert_ne!(places.enter(0..1, 'b').1, cookie);
    }
}
