//! The thread that reads replies and returns tags.

use std::io::{self, BufReader, Read};
use std::net::Shutdown;

use super::Shared;
use super::error::{Failure, Outcome};
use crate::transmission::SimpleReply;

/// Wakes all waiting threads when the reading of replies ends, even by a panic.
struct Ending<'a, T>(&'a Shared<T>);

impl<T> Drop for Ending<'_, T> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        let panicked = Failure::Broken("the thread that reads its replies panicked".to_owned());
        let why = state.ending.get_or_insert(panicked).clone();
        state.ended.get_or_insert(why);
        // Only after a panic are there any.
        let left = state.flight.take_all();
        drop(state);
        drop(left);
        self.0.changed.notify_all();
    }
}

/// Runs the thread that reads replies.
pub(super) fn read<T>(shared: &Shared<T>, mut on_done: impl FnMut(T, Outcome)) {
    let ending = Ending(shared);
    let broken = read_all(shared, &mut on_done);

    let mut state = shared.state.lock();
    let why = state.ending.get_or_insert(broken).clone();
    state.ended = Some(why.clone());
    let left = state.flight.take_all();
    if !left.is_empty() {
        state.first_failure.get_or_insert_with(|| why.clone());
    }
    drop(state);
    let _ = shared.socket.shutdown(Shutdown::Both);
    for tag in left {
        on_done(tag, Err(why.clone()));
    }
    drop(ending);
}

/// Reports outcomes until the connection ends; returns why it did.
fn read_all<T>(shared: &Shared<T>, on_done: &mut impl FnMut(T, Outcome)) -> Failure {
    let mut from = BufReader::with_capacity(4096, &shared.socket);
    let mut bytes = [0; SimpleReply::BYTES];
    loop {
        if let Err(error) = from.read_exact(&mut bytes) {
            return Failure::Broken(match error.kind() {
                io::ErrorKind::UnexpectedEof => "the other end closed it".to_owned(),
                _ => error.to_string(),
            });
        }
        data_threads::point();
        let reply = SimpleReply::parse(&bytes);
        let mut state = shared.state.lock();
        let answered = reply.and_then(|reply| state.flight.answered(reply));
        let finished = match answered {
            Ok(finished) => finished,
            Err(error) => return Failure::Broken(error.to_string()),
        };
        let Some((tag, outcome)) = finished else {
            drop(state);
            shared.changed.notify_all();
            continue;
        };
        if let Err(failure) = &outcome {
            state.first_failure.get_or_insert_with(|| failure.clone());
        }
        drop(state);
        // The place is free: the next request need not wait until the outcome
        // is reported.
        shared.changed.notify_all();
        on_done(tag, outcome);
    }
}
