//! The watch thread, which notices requests without an answer, and cleans up at the end.

use std::time::{Duration, Instant};

use super::{Shared, State, abandon};
use crate::Failure;

/// How long requests may take at the end, when they are no longer needed.
const PARTING: Duration = Duration::from_secs(1);

/// Wakes all waiting threads when the watch ends, even by a panic.
struct Ending<'a>(&'a Shared);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        self.0.end(&mut state, Failure::Panicked);
        state.ended = true;
        drop(state);
        drop(self.0.consumer.lock().take());
        self.0.quiet.notify_all();
    }
}

/// Runs the watch thread.
pub(super) fn watch(shared: &Shared) {
    let _ending = Ending(shared);
    let why = wait_over(shared);
    shared.source.interrupt();
    give_back_wanted(shared, &why);
    clear_desks(shared, &why);
    if let Some(consumer) = shared.consumer() {
        consumer.ended(&why);
    }
}

/// When the first request that is not answered is due.
fn first_due(state: &State) -> Option<Instant> {
    state.desks.iter().filter_map(|desk| Some(desk.request.as_ref()?.due)).min()
}

fn wait_over(shared: &Shared) -> Failure {
    let mut state = shared.state.lock();
    loop {
        if let Some(why) = &state.over {
            return why.clone();
        }
        match first_due(&state) {
            None => {
                state.watch_rests = true;
                shared.watched.wait(&mut state);
                state.watch_rests = false;
            }
            Some(due) if due <= Instant::now() => {
                shared.end(&mut state, Failure::Stalled(shared.settings.patience));
            }
            // Requests that start meanwhile are due later.
            Some(due) => drop(shared.watched.wait_until(&mut state, due)),
        }
    }
}

fn give_back_wanted(shared: &Shared, why: &Failure) {
    loop {
        // A statement of its own, so that the lock is released before the consumer is called.
        let items = shared.state.lock().requested.take_any();
        let Some(items) = items else { return };
        shared.give_back(&items, why);
    }
}

/// Gives back the items of requests that are due, and waits until the threads
/// have ended; those that wait for the storage longer than [`PARTING`] are left behind.
fn clear_desks(shared: &Shared, why: &Failure) {
    let parting = Instant::now() + PARTING;
    let mut state = shared.state.lock();
    while state.live > 0 {
        let now = Instant::now();
        let late = state
            .desks
            .iter_mut()
            .find_map(|desk| desk.request.take_if(|request| request.due.min(parting) <= now));
        if let Some(request) = late {
            drop(state);
            shared.give_back(&request.items, why);
            state = shared.state.lock();
        } else if state.desks.iter().any(|desk| desk.asks && !desk.abandoned) {
            if now >= parting {
                leave_behind(&mut state);
                continue;
            }
            let due = first_due(&state).map_or(parting, |due| due.min(parting));
            let _ = shared.watched.wait_until(&mut state, due);
        } else {
            // The other threads are about to end by themselves.
            shared.watched.wait(&mut state);
        }
    }
}

/// Leaves behind all threads that still wait for the storage; they notice when it answers.
fn leave_behind(state: &mut State) {
    for desk in state.desks.iter_mut().filter(|desk| desk.asks && !desk.abandoned) {
        desk.abandoned = true;
        state.live -= 1;
        state.progress.abandoned_threads += 1;
        abandon();
    }
}
