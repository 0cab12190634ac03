//! Answers requests, one at a time, forever.

use std::io;
use std::time::{Duration, Instant};

use cachemap::{AnswerKind, Budget, Device, End, Greeting, Query, Reply, Run, VERSION};

use crate::port::{Broken, Port};
use crate::survey::{Sink, Stop, SurveyError, survey};

/// This program's version.
pub const PROGRAM: &str = env!("CARGO_PKG_VERSION");

/// Bytes that are collected before they are sent.
const SEND_BYTES: usize = 64 << 10;
/// The agent gets what is known so far after this time, to start with it.
const SEND_EVERY: Duration = Duration::from_millis(50);
/// Time for sending the rest of an answer beyond the budget's time.
const GRACE: Duration = Duration::from_secs(2);

/// Answers requests until the port fails, which is an error, or until its other end will never come
/// back.
///
/// # Errors
/// The port's.
pub fn serve(port: &mut Port) -> io::Result<()> {
    let mut next = None;
    loop {
        let query = match next.take() {
            Some(query) => query,
            None => match port.wait()? {
                Some(query) => query,
                None => return Ok(()),
            },
        };
        match answer(port, &query) {
            Ok(()) | Err(Broken::Disconnected | Broken::Late) => {}
            Err(Broken::NewRequest(newer)) => next = Some(newer),
            Err(Broken::Failed(error)) => return Err(error),
        }
    }
}

fn answer(port: &mut Port, query: &Query) -> Result<(), Broken> {
    port.meet()?;
    let budget = query.budget.bounded();
    let until = Instant::now() + Duration::from_millis(budget.time_ms.into()) + GRACE;
    if query.answer == AnswerKind::Greeting || query.version != VERSION {
        let program = PROGRAM.to_owned();
        let clears = crate::clearing::clears();
        let greeting = Greeting { version: VERSION, nonce: query.nonce, program, clears };
        return port.send(&greeting.to_bytes(), until);
    }
    let mut answer = Answer::new(port, query, until);
    // Sent before the work, so that the agent knows at once that the helper is there.
    answer.send()?;
    match (survey(budget, &mut answer), answer.broken.take()) {
        (_, Some(broken)) => Err(broken),
        (Ok(summary), None) => {
            let Answer { reply, mut bytes, .. } = answer;
            reply.finish(summary, &mut bytes);
            port.send(&bytes, until)
        }
        (Err(SurveyError::Abandoned), None) => Err(Broken::Disconnected),
        (Err(error), None) => {
            let Answer { reply, mut bytes, .. } = answer;
            reply.refuse(&error.to_string(), &mut bytes);
            port.send(&bytes, until)
        }
    }
}

/// An answer that is being sent.
struct Answer<'a> {
    port: &'a mut Port,
    reply: Reply,
    bytes: Vec<u8>,
    runs_max: u64,
    until: Instant,
    /// When bytes were last sent.
    sent: Instant,
    broken: Option<Broken>,
}

impl<'a> Answer<'a> {
    fn new(port: &'a mut Port, query: &Query, until: Instant) -> Self {
        let mut bytes = Vec::with_capacity(2 * SEND_BYTES);
        let reply = Reply::new(query, PROGRAM, &mut bytes);
        let runs_max = query.runs_max.into();
        Self { port, reply, bytes, runs_max, until, sent: Instant::now(), broken: None }
    }

    fn send(&mut self) -> Result<(), Broken> {
        let sent = self.port.send(&self.bytes, self.until);
        self.bytes.clear();
        self.sent = Instant::now();
        sent
    }

    /// Sends what is known, if nothing was sent for a while.
    fn send_soon(&mut self) -> Result<(), Broken> {
        if self.sent.elapsed() < SEND_EVERY {
            return Ok(());
        }
        self.reply.hand_on(&mut self.bytes);
        self.send()
    }

    fn stop(&mut self, broken: Broken) -> Stop {
        self.broken = Some(broken);
        Stop::Abandoned
    }
}

impl Sink for Answer<'_> {
    fn device(&mut self, device: &Device) -> Result<(), Stop> {
        self.reply.device(device, &mut self.bytes);
        Ok(())
    }

    fn run(&mut self, run: Run) -> Result<(), Stop> {
        // A page that follows the last run would extend it, but whether it does may not be known
        // any more.
        if self.reply.runs() >= self.runs_max {
            return Err(Stop::Enough(End::Runs));
        }
        self.reply.run(run, &mut self.bytes);
        let sent = if self.bytes.len() >= SEND_BYTES { self.send() } else { self.send_soon() };
        sent.map_err(|broken| self.stop(broken))
    }

    fn rest(&mut self, time: Duration) -> Result<(), Stop> {
        // What is ready can be sent while there is nothing to do.
        let sent = self.send_soon().and_then(|()| self.port.rest(time));
        sent.map_err(|broken| self.stop(broken))
    }
}

/// Counts what would be answered, for `--once`.
#[derive(Debug)]
pub struct Counted {
    reply: Reply,
    packed: Vec<u8>,
    /// The disks.
    pub devices: Vec<Device>,
    /// The size of the answer.
    pub bytes: u64,
}

impl Default for Counted {
    fn default() -> Self {
        let mut packed = Vec::new();
        let budget = Budget::default();
        let query = Query {
            version: VERSION,
            nonce: 0,
            answer: AnswerKind::Map,
            budget,
            runs_max: u32::MAX,
        };
        let reply = Reply::new(&query, PROGRAM, &mut packed);
        Self { reply, packed, devices: Vec::new(), bytes: 0 }
    }
}

impl Counted {
    /// Runs and pages so far.
    #[must_use]
    pub fn runs_and_pages(&self) -> (u64, u64) {
        (self.reply.runs(), self.reply.pages())
    }
}

impl Sink for Counted {
    fn device(&mut self, device: &Device) -> Result<(), Stop> {
        self.reply.device(device, &mut self.packed);
        self.devices.push(device.clone());
        Ok(())
    }

    fn run(&mut self, run: Run) -> Result<(), Stop> {
        self.reply.run(run, &mut self.packed);
        self.bytes += self.packed.len() as u64;
        self.packed.clear();
        Ok(())
    }

    fn rest(&mut self, time: Duration) -> Result<(), Stop> {
        std::thread::sleep(time);
        Ok(())
    }
}
