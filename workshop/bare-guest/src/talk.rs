//! Work of the CPU that speaks: it sends heartbeats, follows commands, and checks all memory. Its
//! lines are those of `lab-guest`.

use core::fmt::Write;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;

use guest_pages::memory::{Area, Checked};
use guest_pages::orders::Orders;

use crate::lines::Line;
use crate::outbox::Outbox;
use crate::{Next, Shared};

const COUNT_EVERY_TICKS: u64 = 10;
/// Pages checked in one turn; heartbeats go on meanwhile.
const CHECK_AT_ONCE: usize = 16;
/// Longest time between two looks for input.
const LISTEN: Duration = Duration::from_millis(10);
/// Pause until a busy port is offered bytes again.
const PORT: Duration = Duration::from_millis(1);

/// The serial port to the lab.
pub trait Port {
    /// The next byte received, if there is one.
    fn receive(&mut self) -> Option<u8>;
    /// Sends the first of these bytes, and returns how many.
    fn send(&mut self, bytes: &[u8]) -> usize;
}

/// How a guest ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It reboots.
    Reboot,
    /// It powers off.
    PowerOff,
}

/// A check of all memory in progress.
struct Check {
    asked: Line,
    area: usize,
    page: usize,
    found: Checked,
}

/// Beats and answers, turn by turn.
pub struct Talk<'s, 'm> {
    shared: &'s Shared<'m>,
    fixed: [Area<'m>; 5],
    boot_id: u64,
    usual_rate: u64,
    fastest: u64,
    period: Duration,
    ticks: u64,
    last_tick: Duration,
    worst_tick: Duration,
    /// Whether the lab has sent anything. Until then it may have missed the greeting, since the
    /// guest boots as fast as the lab begins to listen.
    is_met: bool,
    line: Line,
    out: Outbox,
    check: Option<Check>,
    end: Option<End>,
}

impl<'s, 'm> Talk<'s, 'm> {
    /// Speaks for a guest with this boot ID, with the areas that are not rewritten and the writer's
    /// highest rate.
    #[must_use]
    pub fn new(
        orders: &Orders,
        boot_id: u64,
        shared: &'s Shared<'m>,
        fixed: [Area<'m>; 5],
        fastest: u64,
    ) -> Self {
        let mut talk = Self {
            shared,
            fixed,
            boot_id,
            usual_rate: orders.rate,
            fastest,
            period: orders.tick(),
            ticks: 0,
            last_tick: Duration::ZERO,
            worst_tick: Duration::ZERO,
            is_met: false,
            line: Line::EMPTY,
            out: Outbox::EMPTY,
            check: None,
            end: None,
        };
        talk.greet();
        talk
    }

    /// Sends what is due, and follows commands.
    pub fn turn(&mut self, now: Duration, port: &mut impl Port) -> Next {
        let next_tick = self.last_tick + self.period;
        if now >= next_tick && self.out.has_room() {
            self.beat(now);
        }
        if self.check.is_none() {
            self.hear(port);
        } else {
            self.check_some();
        }
        self.out.drain(|bytes| port.send(bytes));
        if self.check.is_some() {
            return Next::Again;
        }
        let listen = if self.out.is_empty() { LISTEN } else { PORT };
        Next::At((now + listen).min(self.last_tick + self.period))
    }

    /// How a command told the guest to end, if one did.
    #[must_use]
    pub fn end(&self) -> Option<End> {
        self.end
    }

    fn say(&mut self, line: core::fmt::Arguments<'_>) {
        writeln!(self.out, "{line}").expect("there was room for a line");
    }

    fn greet(&mut self) {
        let boot_id = self.boot_id;
        self.say(format_args!("boot {boot_id:x}"));
    }

    fn beat(&mut self, now: Duration) {
        if self.ticks > 0 {
            self.worst_tick = self.worst_tick.max(now.saturating_sub(self.last_tick));
        }
        self.last_tick = now;
        self.ticks += 1;
        let ticks = self.ticks;
        if !ticks.is_multiple_of(COUNT_EVERY_TICKS) {
            return self.say(format_args!(".{ticks:x}"));
        }
        if !self.is_met {
            self.greet();
        }
        let written = self.shared.written.load(Relaxed);
        self.say(format_args!("={ticks:x} {written} 0 0 0"));
    }

    /// Reads no more commands than it can answer.
    fn hear(&mut self, port: &mut impl Port) {
        while self.check.is_none() && self.out.has_room() {
            let Some(byte) = port.receive() else { return };
            self.is_met = true;
            if let Some(line) = self.line.push(byte) {
                self.answer(line);
            }
        }
    }

    fn answer(&mut self, line: Line) {
        let (id, command) = line.text().split_once(' ').unwrap_or((line.text(), ""));
        let (verb, rest) = command.trim().split_once(' ').unwrap_or((command.trim(), ""));
        match verb {
            "hello" => {
                let boot_id = self.boot_id;
                self.say(format_args!("{id} ok boot {boot_id:x}"));
            }
            "check" => {
                self.shared.rests.store(true, Relaxed);
                let found = Checked::default();
                self.check = Some(Check { asked: line, area: 0, page: 0, found });
            }
            "status" => {
                let (ticks, fastest) = (self.ticks, self.fastest);
                let [written, rate] =
                    [&self.shared.written, &self.shared.rate].map(|it| it.load(Relaxed));
                let worst_us = self.worst_tick.as_micros();
                self.say(format_args!(
                    "{id} ok ticks={ticks} written={written} rate={rate} \
                     worst_tick_us={worst_us} fastest={fastest}"
                ));
            }
            "forget" => {
                self.worst_tick = Duration::ZERO;
                self.say(format_args!("{id} ok "));
            }
            "pause" => self.set_rate(id, 0),
            "resume" => self.set_rate(id, self.usual_rate),
            "rate" => match rest.parse() {
                Ok(rate) => self.set_rate(id, rate),
                Err(_) => self.say(format_args!("{id} error {rest:?} is no rate")),
            },
            // A page of the working set.
            "spoil" => match rest.parse() {
                Ok(page) => {
                    self.shared.writer.with(|writer| writer.spoil(page));
                    self.say(format_args!("{id} ok "));
                }
                Err(_) => self.say(format_args!("{id} error {rest:?} is no page")),
            },
            "reboot" => self.end = Some(End::Reboot),
            "poweroff" => self.end = Some(End::PowerOff),
            _ => self.say(format_args!("{id} error unknown command {verb:?}")),
        }
    }

    fn set_rate(&mut self, id: &str, rate: u64) {
        self.shared.rate.store(rate, Relaxed);
        self.say(format_args!("{id} ok rate={rate}"));
    }

    fn check_some(&mut self) {
        let Some(check) = &mut self.check else { return };
        for _ in 0..CHECK_AT_ONCE {
            let (page, working_set) = (check.page, self.fixed.len());
            let (pages, found) = match self.fixed.get(check.area) {
                Some(area) => looked_at(area, page),
                None if check.area == working_set => {
                    self.shared.writer.with(|writer| looked_at(writer.area(), page))
                }
                None => return self.conclude(),
            };
            check.found.add(found);
            check.page += 1;
            if check.page >= pages {
                (check.area, check.page) = (check.area + 1, 0);
            }
        }
    }

    /// Answers the check once there is room for the answer.
    fn conclude(&mut self) {
        if !self.out.has_room() {
            return;
        }
        let Some(Check { asked, mut found, .. }) = self.check.take() else { return };
        found.add(self.shared.writer.with(|writer| writer.wrong()));
        self.shared.rests.store(false, Relaxed);
        let id = asked.text().split(' ').next().unwrap_or_default();
        self.say(format_args!("{id} ok {found}"));
    }
}

/// Pages of an area, and the check of one of them, if it exists.
fn looked_at(area: &Area<'_>, page: usize) -> (usize, Checked) {
    let is_there = page < area.count();
    (area.count(), if is_there { area.check_page(page) } else { Checked::default() })
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::tests::with_shared;

    #[derive(Default)]
    struct Lab {
        told: VecDeque<u8>,
        heard: String,
        is_deaf: bool,
    }

    impl Port for Lab {
        fn receive(&mut self) -> Option<u8> {
            self.told.pop_front()
        }

        fn send(&mut self, bytes: &[u8]) -> usize {
            let count = if self.is_deaf { 0 } else { bytes.len().min(16) };
            self.heard += str::from_utf8(&bytes[..count]).unwrap();
            count
        }
    }

    impl Lab {
        /// The guest's lines since the last call, without heartbeats.
        fn answers(&mut self) -> Vec<String> {
            let lines = self.heard.lines().filter(|line| !line.starts_with(['.', '=']));
            let lines = lines.map(str::to_owned).collect();
            self.heard.clear();
            lines
        }
    }

    fn orders() -> Orders {
        let (text_bytes, working_set_bytes) = (3 << 12, 40 << 12);
        Orders { seed: 5, rate: 77, text_bytes, working_set_bytes, ..Orders::default() }
    }

    /// Takes a turn in each of these milliseconds.
    fn run(talk: &mut Talk<'_, '_>, lab: &mut Lab, ms: std::ops::Range<u64>) {
        for ms in ms {
            talk.turn(Duration::from_millis(ms), lab);
        }
    }

    #[test]
    fn beats_are_numbered_and_every_tenth_counts() {
        with_shared(&orders(), |fixed, shared| {
            let mut talk = Talk::new(&orders(), 0xab, shared, fixed, 0);
            let mut lab = Lab::default();
            shared.written.store(9, Relaxed);
            run(&mut talk, &mut lab, 1000..1051);
            let expected: String = (1..10).map(|tick| format!(".{tick:x}\n")).collect();
            assert_eq!(lab.heard, format!("boot ab\n{expected}boot ab\n=a 9 0 0 0\n.b\n"));
            lab.told.extend(b"\n");
            lab.heard.clear();
            run(&mut talk, &mut lab, 1051..1200);
            assert_eq!(lab.answers(), [""; 0], "no greeting any more");
            lab.told.extend(b"\nq1 hello\n");
            run(&mut talk, &mut lab, 1200..1300);
            assert_eq!(lab.answers(), ["q1 ok boot ab"]);
        });
    }

    #[test]
    fn orders_are_followed() {
        with_shared(&orders(), |fixed, shared| {
            let mut talk = Talk::new(&orders(), 1, shared, fixed, 8);
            let mut lab = Lab::default();
            lab.told.extend(b"q1 rate 12\nq2 rate x\nq3 dance\nq4 status\nq5 resume\n\nq6 pause\n");
            lab.told.extend(b"q7\n");
            run(&mut talk, &mut lab, 0..2);
            let answers = [
                "boot 1",
                "q1 ok rate=12",
                "q2 error \"x\" is no rate",
                "q3 error unknown command \"dance\"",
                "q4 ok ticks=0 written=0 rate=12 worst_tick_us=0 fastest=8",
                "q5 ok rate=77",
                "q6 ok rate=0",
                "q7 error unknown command \"\"",
            ];
            assert_eq!(lab.answers(), answers);
            assert_eq!((shared.rate.load(Relaxed), talk.end()), (0, None));
            lab.told.extend(b"q7 poweroff\n");
            run(&mut talk, &mut lab, 2..3);
            assert_eq!(talk.end(), Some(End::PowerOff));
        });
    }

    #[test]
    fn a_check_looks_at_every_page_while_beats_go_on() {
        with_shared(&orders(), |fixed, shared| {
            let mut talk = Talk::new(&orders(), 1, shared, fixed, 0);
            let mut lab = Lab::default();
            lab.told.extend(b"q1 check\nq2 check\n");
            assert_eq!(talk.turn(Duration::from_millis(1), &mut lab), Next::Again);
            assert!(shared.rests.load(Relaxed));
            run(&mut talk, &mut lab, 2..30);
            assert!(lab.heard.contains(".5"));
            let good = "ok pages=43 wrong=0 first=none";
            assert_eq!(lab.answers(), ["boot 1", &format!("q1 {good}"), &format!("q2 {good}")]);
            assert!(!shared.rests.load(Relaxed));
        });
    }

    #[test]
    fn a_wrong_page_is_reported() {
        with_shared(&orders(), |fixed, shared| {
            let mut talk = Talk::new(&orders(), 1, shared, fixed, 0);
            let mut lab = Lab::default();
            shared.writer.with(|writer| writer.write(100));
            lab.told.extend(b"q1 spoil 7\nq2 spoil 40\nq3 spoil\nq4 check\n");
            run(&mut talk, &mut lab, 0..30);
            let answers = lab.answers();
            assert_eq!(answers[1..4], ["q1 ok ", "q2 ok ", "q3 error \"\" is no page"]);
            let found = &answers[4];
            assert!(found.starts_with("q4 ok pages=43 wrong=1 first=ws-page-7-at-0x"), "{found}");
            assert!(found.ends_with("-holds-other-from-byte-2048"), "{found}");
            // The writer counts it once more when it rewrites it.
            shared.writer.with(|writer| writer.write(1000));
            lab.told.extend(b"q5 check\n");
            run(&mut talk, &mut lab, 30..60);
            assert!(lab.answers()[0].starts_with("q5 ok pages=43 wrong=1 first=ws-page-7-at-0x"));
        });
    }

    /// Beats then go on with the next number.
    #[test]
    fn a_port_that_takes_nothing_holds_beats_up() {
        with_shared(&orders(), |fixed, shared| {
            let mut talk = Talk::new(&orders(), 1, shared, fixed, 0);
            let mut lab = Lab { is_deaf: true, ..Lab::default() };
            run(&mut talk, &mut lab, 0..100_000);
            lab.is_deaf = false;
            run(&mut talk, &mut lab, 100_000..100_010);
            let beats = lab.heard.lines().filter_map(|line| line.strip_prefix(['.', '=']));
            let number = |beat: &str| u64::from_str_radix(beat.split(' ').next().unwrap(), 16);
            let numbers: Vec<u64> = beats.map(|beat| number(beat).unwrap()).collect();
            assert!(numbers.len() > 100);
            assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
        });
    }
}
