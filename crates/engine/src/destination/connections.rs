//! How many connections there are, and of which kind: peers that say nothing, or
//! ask for much, take no more of the agent than that.

use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

use parking_lot::Mutex;

/// Connections at a time: 8 arrivals with 64 lanes each are 520.
const ALL_MAX: usize = 1024;
/// Of them, those of which it is not known what they are for: all lanes of two
/// migrations, and the least that strangers must keep open to be in the way.
/// Words about a switchover count as such to their end.
const UNKNOWN_MAX: usize = 128;
/// Of them, those that are to order or ask something, and have not been given
/// what a VM that comes has: each keeps a few messages in memory.
const LEADING_MAX: usize = 32;
/// Of them, those by which other agents have VMs moved: each stays for as long
/// as one VM's migration, and keeps a thread.
const ORDERING_MAX: usize = 64;

/// Of them, those by which other hosts of the rack ask for content, or where it is:
/// each keeps two threads at most. Two of each host.
const SERVING_MAX: usize = 256;

/// The connections of an agent.
#[derive(Debug, Default)]
pub(super) struct Connections(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    open: HashMap<u64, TcpStream>,
    taken_in: u64,
    unknown: usize,
    leading: usize,
    ordering: usize,
    serving: usize,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Unknown,
    Leading,
    Ordering,
    Serving,
    Known,
}

/// One connection among the others, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    connections: Arc<Connections>,
    number: u64,
    counts_as: Use,
}

impl Connections {
    /// One more, if there may be.
    pub(super) fn take_in(self: &Arc<Self>, stream: &TcpStream) -> Option<Place> {
        let mut state = self.0.lock();
        if state.open.len() >= ALL_MAX || state.unknown >= UNKNOWN_MAX {
            return None;
        }
        let number = state.taken_in;
        state.open.insert(number, stream.try_clone().ok()?);
        state.taken_in += 1;
        state.unknown += 1;
        Some(Place { connections: Arc::clone(self), number, counts_as: Use::Unknown })
    }

    /// Breaks all of them off.
    pub(super) fn end_all(&self) {
        for stream in self.0.lock().open.values() {
            // It may be gone.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl State {
    fn count(&mut self, of: Use) -> Option<&mut usize> {
        match of {
            Use::Unknown => Some(&mut self.unknown),
            Use::Leading => Some(&mut self.leading),
            Use::Ordering => Some(&mut self.ordering),
            Use::Serving => Some(&mut self.serving),
            Use::Known => None,
        }
    }
}

impl Place {
    /// It is to order or ask something. False if too many are.
    pub(super) fn leads(&mut self) -> bool {
        let has_room = self.connections.0.lock().leading < LEADING_MAX;
        if has_room {
            self.count_as(Use::Leading);
        }
        has_room
    }

    /// It is to order moves of VMs. False if too many are.
    pub(super) fn orders(&mut self) -> bool {
        let has_room = self.connections.0.lock().ordering < ORDERING_MAX;
        if has_room {
            self.count_as(Use::Ordering);
        }
        has_room
    }

    /// It is for what the hosts of a rack have of one another. False if too many are.
    pub(super) fn serves(&mut self) -> bool {
        let has_room = self.connections.0.lock().serving < SERVING_MAX;
        if has_room {
            self.count_as(Use::Serving);
        }
        has_room
    }

    /// It belongs to something that is bounded by itself.
    pub(super) fn is_known(&mut self) {
        self.count_as(Use::Known);
    }

    fn count_as(&mut self, new: Use) {
        let mut state = self.connections.0.lock();
        let old = std::mem::replace(&mut self.counts_as, new);
        if let Some(count) = state.count(old) {
            *count -= 1;
        }
        if let Some(count) = state.count(new) {
            *count += 1;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.count_as(Use::Known);
        self.connections.0.lock().open.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn each_kind_has_its_bound_and_what_goes_leaves_room() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let connections = Arc::new(Connections::default());
        let take_in = || connections.take_in(&stream);
        let mut unknown: Vec<Place> = (0..UNKNOWN_MAX).map(|_| take_in().unwrap()).collect();
        assert!(take_in().is_none());
        unknown.pop();
        let mut leading: Vec<Place> = Vec::new();
        for _ in 0..LEADING_MAX {
            let mut place = take_in().unwrap();
            assert!(place.leads());
            leading.push(place);
        }
        let mut one_more = take_in().unwrap();
        assert!(!one_more.leads());
        assert!(take_in().is_none(), "it is unknown as before");
        leading.pop();
        assert!(one_more.leads());
        drop(unknown);
        let mut ordering: Vec<Place> = Vec::new();
        for _ in 0..ORDERING_MAX {
            let mut place = take_in().unwrap();
            assert!(place.orders());
            ordering.push(place);
        }
        assert!(!take_in().unwrap().orders());
        drop((leading, one_more, ordering));
        let state = connections.0.lock();
        let counts = (state.open.len(), state.unknown, state.leading, state.ordering);
        assert_eq!(counts, (0, 0, 0, 0));
    }
}
