//! Requests in flight: operations, as the caller submits them, and their parts,
//! as the server sees them. No I/O; never more parts than there are places.

use super::error::{Failure, Outcome};
use crate::ProtocolError;
use crate::transmission::{Command, SimpleReply};

/// The request of a part, for the message if it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) command: Command,
    pub(crate) offset: u64,
    pub(crate) bytes: u32,
}

/// An operation between [`Flight::begin`] and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operation(usize);

/// Each part has a place. Its cookie is `serial x places + place`, so that
/// finding it is a division, and a repeated reply is noticed.
#[derive(Debug)]
pub(crate) struct Flight<T> {
    places: Vec<Option<Flying>>,
    free_places: Vec<usize>,
    operations: Vec<Option<Started<T>>>,
    serial: u64,
}

#[derive(Debug)]
struct Flying {
    cookie: u64,
    operation: usize,
    part: Part,
}

#[derive(Debug)]
struct Started<T> {
    tag: T,
    in_flight: usize,
    /// Its last part was launched.
    all_launched: bool,
    failure: Option<Failure>,
}

impl<T> Flight<T> {
    pub(crate) fn new(places: usize) -> Self {
        let operations = std::iter::repeat_with(|| None).take(places + 1).collect();
        Self {
            places: std::iter::repeat_with(|| None).take(places).collect(),
            free_places: (0..places).rev().collect(),
            operations,
            serial: 0,
        }
    }

    /// Starts an operation. Only one at a time is being launched; each of the
    /// others has at least one part in flight.
    pub(crate) fn begin(&mut self, tag: T) -> Operation {
        let free = self.operations.iter().position(Option::is_none);
        let operation = free.expect("one operation more than there are places");
        self.operations[operation] =
            Some(Started { tag, in_flight: 0, all_launched: false, failure: None });
        Operation(operation)
    }

    /// Whether a part can be launched now.
    pub(crate) fn has_room(&self) -> bool {
        !self.free_places.is_empty()
    }

    /// Launches a part of an operation that is being launched. Returns the
    /// cookie.
    pub(crate) fn launch(&mut self, operation: Operation, part: Part, last: bool) -> u64 {
        let begun = self.operations[operation.0].as_mut().expect("it has begun");
        begun.in_flight += 1;
        begun.all_launched = last;
        let place = self.free_places.pop().expect("there is room");
        self.serial = self.serial.wrapping_add(1) & u64::from(u32::MAX);
        let cookie = self.serial * self.places.len() as u64 + place as u64;
        self.places[place] = Some(Flying { cookie, operation: operation.0, part });
        cookie
    }

    /// Processes a reply. Returns the operation's tag and outcome, if it was
    /// the last one.
    pub(crate) fn answered(
        &mut self,
        reply: SimpleReply,
    ) -> Result<Option<(T, Outcome)>, ProtocolError> {
        let place = usize::try_from(reply.cookie % self.places.len() as u64).unwrap_or(usize::MAX);
        let flying = self
            .places
            .get_mut(place)
            .and_then(|flying| flying.take_if(|flying| flying.cookie == reply.cookie));
        let Some(Flying { operation, part, .. }) = flying else {
            let text = format!("a reply to no request: {:#x}", reply.cookie);
            return Err(ProtocolError::Unexpected(text));
        };
        self.free_places.push(place);
        let begun = self.operations[operation].as_mut().expect("its part was in flight");
        begun.in_flight -= 1;
        if let Err(errno) = reply.outcome {
            let Part { command, offset, bytes } = part;
            begun.failure.get_or_insert(Failure::Disk { command, offset, bytes, errno });
        }
        if begun.in_flight > 0 || !begun.all_launched {
            return Ok(None);
        }
        let ended = self.operations[operation].take();
        Ok(ended.map(|begun| (begun.tag, begun.failure.map_or(Ok(()), Err))))
    }

    /// Ends all operations, also those that are not launched yet, and returns
    /// their tags.
    pub(crate) fn take_all(&mut self) -> Vec<T> {
        self.free_places = (0..self.places.len()).rev().collect();
        self.places.fill_with(|| None);
        self.operations.iter_mut().filter_map(Option::take).map(|begun| begun.tag).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Errno;

    const PART: Part = Part { command: Command::WRITE, offset: 0, bytes: 1 };

    fn reply(cookie: u64, errno: u32) -> SimpleReply {
        let outcome = if errno == 0 { Ok(()) } else { Err(Errno(errno)) };
        SimpleReply { cookie, outcome }
    }

    proptest! {
        /// Operations of one to four parts, answered in any order, end exactly
        /// once, and fail only if one of their parts does.
        #[test]
        fn every_operation_ends_once_with_its_outcome(
            places in 1..8_usize,
            operations in prop::collection::vec(prop::collection::vec(0..3_u32, 1..5), 1..40),
            order: Vec<prop::sample::Index>,
        ) {
            let mut order = order.into_iter();
            let mut flight = Flight::new(places);
            let mut flying: Vec<(u64, u32)> = Vec::new();
            let mut ended = Vec::new();
            for (tag, errnos) in operations.iter().enumerate() {
                let operation = flight.begin(tag);
                for (number, errno) in errnos.iter().enumerate() {
                    while !flight.has_room() {
                        let at = order.next().map_or(0, |index| index.index(flying.len()));
                        let (cookie, errno) = flying.swap_remove(at);
                        ended.extend(flight.answered(reply(cookie, errno)).unwrap());
                        prop_assert!(flight.answered(reply(cookie, 0)).is_err(), "twice");
                    }
                    let part = Part { offset: u64::from(*errno), ..PART };
                    let last = number + 1 == errnos.len();
                    let cookie = flight.launch(operation, part, last);
                    prop_assert!(flying.iter().all(|(other, _)| *other != cookie));
                    flying.push((cookie, *errno));
                }
                prop_assert!(flying.len() <= places);
            }
            for (cookie, errno) in flying.into_iter().rev() {
                ended.extend(flight.answered(reply(cookie, errno)).unwrap());
            }
            prop_assert_eq!(ended.len(), operations.len());
            ended.sort_by_key(|(tag, _)| *tag);
            for ((tag, outcome), errnos) in ended.into_iter().zip(&operations) {
                prop_assert_eq!(outcome.is_err(), errnos.iter().any(|errno| *errno != 0), "{}", tag);
            }
            prop_assert!(flight.take_all().is_empty());
        }
    }

    #[test]
    fn all_operations_can_be_taken_and_later_replies_are_refused() {
        let mut flight = Flight::new(2);
        let operation = flight.begin('a');
        let cookie = flight.launch(operation, PART, false);
        let other = flight.begin('b');
        assert_eq!(flight.take_all(), ['a', 'b']);
        assert!(flight.has_room());
        assert!(flight.answered(reply(cookie, 0)).is_err());
        assert!(flight.answered(reply(u64::MAX, 0)).is_err());
        let again = flight.begin('c');
        assert_ne!(again, other);
    }
}
