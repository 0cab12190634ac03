//! One lane at the source: its connections, and the two threads that use them.

use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use data_threads::DataThreads;
use identity::Connection;
use tracing::Span;
use wire::{Kind, Reply};

use crate::acks::{Acks, receive_all};
use crate::connect::connect;
use crate::error::{LaneError, LanesError};
use crate::flight::Flight;
use crate::meter::thread_cpu;
use crate::outage::{Failure, Outage};
use crate::queue::Sent;
use crate::sender::{Sender, send_all};
use crate::shared::{LanesPlan, Shared};

/// A lane, for the thread that runs it.
#[derive(Debug)]
pub struct Lane<'s, X> {
    pub(crate) shared: &'s Shared<X>,
    pub(crate) number: usize,
}

impl<X: Send + 'static> Lane<'_, X> {
    /// Runs the lane: connects, carries batches, and reconnects, until everything is
    /// delivered.
    ///
    /// On each connection this thread runs `send`, and another runs `receive` for the
    /// destination's replies.
    pub fn run(
        &self,
        send: impl Fn(&mut Sender<'_, X>) -> std::io::Result<Sent>,
        receive: impl Fn(&mut Acks<'_, X>) -> std::io::Result<()> + Sync,
    ) {
        let Self { shared, number } = *self;
        let _fault = EndsOnFault(shared);
        let _member = shared.threads.as_ref().map(DataThreads::join);
        let endpoint = shared.plan.endpoints[number];
        let token = shared.plan.token;
        let kind = Kind::Lane { number: u16::try_from(number).unwrap_or(u16::MAX), token };
        let meter = &shared.meters[number];
        let mut outage = Outage::default();
        loop {
            let LanesPlan { peer, security, .. } = &shared.plan;
            let (failure, error) = match connect(endpoint, peer, security, kind) {
                Ok(mut connection) => {
                    if outage.seems_over() {
                        tracing::info!(lane = number, %endpoint, "lane up again");
                    }
                    match self.carry(&mut connection, &send, &receive) {
                        Ok(()) => break,
                        Err(error @ LaneError::InVain { .. }) => (Failure::InVain, error),
                        Err(error) => (Failure::Lost, error),
                    }
                }
                Err(LaneError::Turned { reply: Reply::UnknownToken, .. }) => {
                    // The destination has ended the migration; the control connection
                    // tells why.
                    break;
                }
                Err(error) => (Failure::NoConnection, error),
            };
            let (is_news, pause) = outage.fails(failure);
            if is_news {
                tracing::warn!(lane = number, %endpoint, %error, "lane down; others carry its batches");
            } else {
                tracing::debug!(lane = number, %endpoint, %error, "lane still down");
            }
            if is_news || failure != Failure::NoConnection {
                meter.deaths.fetch_add(1, Relaxed);
            }
            if !shared.queue.could_not_connect(&error.to_string(), pause) {
                break;
            }
        }
        add_cpu(shared);
    }

    /// Carries batches over one connection, until the queue ends (`Ok`) or the
    /// connection does (`Err`; undelivered batches are handed back).
    fn carry(
        &self,
        connection: &mut Connection,
        send: impl Fn(&mut Sender<'_, X>) -> std::io::Result<Sent>,
        receive: impl Fn(&mut Acks<'_, X>) -> std::io::Result<()> + Sync,
    ) -> Result<(), LaneError> {
        let Self { shared, number } = *self;
        shared.connected(number, connection.closer());
        let (reader, writer) = connection.halves();
        let flight = Flight::default();
        shared.queue.lane_up();
        let span = Span::current();
        let outcome: std::io::Result<()> = thread::scope(|scope| {
            // Without it, a panic here would wait for the other thread, which waits for
            // the destination.
            let _fault = EndsOnFault(shared);
            let acks = thread::Builder::new().name(format!("lane-{number}-ack")).spawn_scoped(
                scope,
                || {
                    let _in = span.enter();
                    let _over = BreaksOff(shared, &flight);
                    let _fault = EndsOnFault(shared);
                    let _member = shared.threads.as_ref().map(DataThreads::join);
                    let outcome = receive(&mut Acks::new(shared, number, reader, &flight));
                    add_cpu(shared);
                    outcome
                },
            )?;
            let mut sender = Sender::new(shared, number, writer, &flight);
            let sent = send(&mut sender);
            // Wakes the acknowledgement thread, however sending ended.
            sender.close();
            let received = acks.join();
            let received =
                received.unwrap_or_else(|_| Err(std::io::Error::other("a fault in the agent")));
            match sent {
                Ok(Sent::All) => Ok(()),
                Ok(Sent::UntilBroken) => Err(received.err().unwrap_or_else(|| {
                    std::io::Error::new(
                        std::io::ErrorKind::ConnectionReset,
                        "closed by the destination",
                    )
                })),
                Err(error) => Err(error),
            }
        });
        let was_in_vain = flight.was_in_vain();
        shared.queue.hand_back(flight.hand_back());
        shared.disconnected(number);
        shared.queue.lane_down();
        let remote = shared.plan.endpoints[number].remote;
        outcome.map_err(|source| {
            if was_in_vain {
                LaneError::InVain { remote, source }
            } else {
                LaneError::Broken { remote, source }
            }
        })
    }
}

/// Runs a lane without a stage between the queue and the lanes.
pub fn run_plain<X: Send + 'static>(lane: &Lane<'_, X>) {
    lane.run(send_all, receive_all);
}

/// Ends all lanes if its thread panics: a lane that has lost one of its threads would
/// look like one that is only slow.
struct EndsOnFault<'s, X>(&'s Shared<X>);

impl<X> Drop for EndsOnFault<'_, X> {
    fn drop(&mut self) {
        if thread::panicking() {
            let thread = thread::current().name().unwrap_or("of a lane").to_owned();
            self.0.end(LanesError::Fault { thread });
        }
    }
}

/// Lets the sender know that no more acknowledgements come, also after a panic: it may wait for
/// room, or for a batch.
struct BreaksOff<'s, X>(&'s Shared<X>, &'s Flight<X>);

impl<X> Drop for BreaksOff<'_, X> {
    fn drop(&mut self) {
        self.1.break_off();
        self.0.queue.wake_lanes();
    }
}

/// Called by each thread of a lane as it ends.
fn add_cpu<X>(shared: &Shared<X>) {
    let used = u64::try_from(thread_cpu().as_nanos()).unwrap_or(u64::MAX);
    shared.cpu_ns.fetch_add(used, Relaxed);
}
