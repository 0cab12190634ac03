//! What breaks, and when.

use std::fmt;
use std::time::Duration;

use lab_guest::random::Random;

/// One end of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// The VM's host.
    Source,
    /// The host to which the VM moves.
    Destination,
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// An agent is killed, and started again later.
    KillAgent(End),
    /// Both agents are killed, as in a power failure that QEMUs happen to survive.
    KillBothAgents,
    /// A QEMU is killed, as by the kernel when memory runs out.
    KillQemu(End),
    /// An agent is frozen for a while.
    FreezeAgent(End),
    /// A QEMU is frozen for a while.
    FreezeQemu(End),
    /// The network between the hosts is down for a while.
    Cut,
    /// Packets of one end are lost for a while.
    CutOneWay(End),
    /// All connections break once.
    Reset,
    /// Packets take seconds for a while.
    Slow,
    /// All bytes are delayed for a while, by varying times: those of one connection overtake those
    /// of another.
    Late,
    /// Bytes of one end arrive after a while, all at once.
    HeldUp(End),
    /// An agent and its VM get no more memory for a while.
    MemoryFull(End),
    /// Writes to an agent's disk fail for a while.
    DiskFull(End),
    /// The file system with an agent's state has no space left for a while.
    NoSpace(End),
    /// An agent can open no more file descriptors for a while.
    NoDescriptors(End),
    /// Bytes of one end arrive as a KiB every five seconds for a while.
    Trickle(End),
    /// A QEMU is frozen, and goes on only when the migration has ended.
    HangQemu(End),
    /// The storage of the VM's disks, which both hosts share, is frozen for a while.
    FreezeStorage,
    /// A thread that carries data panics when it looks for this: its name, or the beginning of it.
    Panic(&'static str),
    /// An agent is killed, and its record of the VM is damaged before it starts again. Later the
    /// record is restored, and the agent starts once more.
    DamageRecord(End),
    /// The same with its journal of the migration.
    DamageJournal(End),
}

/// When it breaks, by the progress of the migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Moment {
    /// Before the first page.
    Preparing,
    /// While pages are sent.
    FirstPass,
    /// The VM is stopped; the rest takes as long as the journals do.
    Stopped,
}

/// How the VM gets into another QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// It moves to the other host.
    Move,
    /// It stays on its host, whose agent is at both ends.
    Upgrade {
        /// Whether its RAM is in files of the agent's, not QEMU's own.
        in_files: bool,
    },
}

/// One fault, and its moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What.
    pub fault: Fault,
    /// During what.
    pub way: Way,
    /// When.
    pub moment: Moment,
    /// How long after that moment.
    pub delay: Duration,
    /// How long it lasts.
    pub lasts: Duration,
    /// Additional delay of each note in a journal, which spreads the steps of a switchover.
    pub slow_notes: Duration,
    /// Whether agents have certificates.
    pub secured: bool,
    /// Whether pages are sent by name.
    pub share: bool,
    /// Whether pages are read from the VM's disks.
    pub storage: bool,
    /// Whether the VM is moved once more before anything else breaks.
    pub once_more: bool,
}

/// Every fault.
pub(super) const FAULTS: [Fault; 43] = [
    Fault::KillAgent(End::Source),
    Fault::KillAgent(End::Destination),
    Fault::KillBothAgents,
    Fault::KillQemu(End::Source),
    Fault::KillQemu(End::Destination),
    Fault::FreezeAgent(End::Source),
    Fault::FreezeAgent(End::Destination),
    Fault::FreezeQemu(End::Source),
    Fault::FreezeQemu(End::Destination),
    Fault::Cut,
    Fault::CutOneWay(End::Source),
    Fault::CutOneWay(End::Destination),
    Fault::Reset,
    Fault::Slow,
    Fault::Late,
    Fault::HeldUp(End::Source),
    Fault::HeldUp(End::Destination),
    Fault::MemoryFull(End::Source),
    Fault::MemoryFull(End::Destination),
    Fault::DiskFull(End::Source),
    Fault::DiskFull(End::Destination),
    Fault::NoSpace(End::Source),
    Fault::NoSpace(End::Destination),
    Fault::NoDescriptors(End::Source),
    Fault::NoDescriptors(End::Destination),
    Fault::Trickle(End::Source),
    Fault::Trickle(End::Destination),
    Fault::HangQemu(End::Source),
    Fault::HangQemu(End::Destination),
    Fault::FreezeStorage,
    Fault::Panic("tap-"),
    Fault::Panic("ahead"),
    Fault::Panic("lane-0-send"),
    Fault::Panic("lane-0-ack"),
    Fault::Panic("peer-"),
    Fault::Panic("storage-"),
    Fault::Panic("nbd-replies"),
    Fault::Panic("late"),
    Fault::Panic("feeder"),
    Fault::DamageRecord(End::Source),
    Fault::DamageRecord(End::Destination),
    Fault::DamageJournal(End::Source),
    Fault::DamageJournal(End::Destination),
];

impl Fault {
    /// Whether a proxy between the agents causes it.
    pub(super) fn by_proxy(self) -> bool {
        matches!(self, Self::Late | Self::HeldUp(_) | Self::Trickle(_))
    }

    /// Whether it lasts until the migration has ended.
    pub(super) fn outlasts(self) -> bool {
        matches!(self, Self::HangQemu(_))
    }

    /// Whether it can break a migration within a host, which uses no network.
    fn is_within_a_host(self) -> bool {
        let is_between = matches!(self, Self::Cut | Self::CutOneWay(_) | Self::Reset | Self::Slow);
        !is_between && !self.by_proxy()
    }

    /// Whether the VM's own QEMU may die by it.
    pub(super) fn kills(self) -> bool {
        matches!(self, Self::KillQemu(_) | Self::MemoryFull(_))
    }
}

impl Plan {
    /// A fault at this delay after the VM's stop, between agents with certificates, with pages by
    /// name and from disks. Each step of the switchover takes 200 ms.
    #[must_use]
    pub fn at_a_step(fault: Fault, delay_ms: u64, lasts: Duration) -> Self {
        Self {
            fault,
            way: Way::Move,
            moment: Moment::Stopped,
            delay: Duration::from_millis(delay_ms),
            lasts,
            slow_notes: Duration::from_millis(200),
            secured: true,
            share: true,
            storage: true,
            once_more: true,
        }
    }

    /// A random plan, the same for the same seed and number.
    #[must_use]
    pub fn random(seed: u64, number: u64) -> Self {
        let mut random = Random::new(seed, number);
        let mut below = |ms: usize| Duration::from_millis(random.below(ms) as u64);
        let fault = FAULTS[usize::try_from(number).unwrap_or(0) % FAULTS.len()];
        // Most of them during the switchover, where the VM's owner is at stake.
        let moment = match below(10).as_millis() {
            0 => Moment::Preparing,
            1..=3 => Moment::FirstPass,
            _ => Moment::Stopped,
        };
        let slow_notes = if moment == Moment::Stopped && below(4).as_millis() > 0 {
            Duration::from_millis(150)
        } else {
            Duration::ZERO
        };
        let delay = match moment {
            Moment::Preparing => below(250),
            Moment::FirstPass => below(600),
            Moment::Stopped if slow_notes.is_zero() => below(30),
            Moment::Stopped => below(750),
        };
        // One in eight lasts longer than connections do.
        let lasts = if below(8).is_zero() {
            Duration::from_millis(13_000)
        } else {
            Duration::from_millis(200) + below(1500)
        };
        // In most plans.
        let [secured, share, storage] = [4, 5, 5].map(|times| !below(times).is_zero());
        let once_more = below(3).is_zero();
        // Last, so that a seed's other plans are those from before there were upgrades.
        let [is_upgrade, in_files] = [4, 2].map(|times| below(times).is_zero());
        let way = if is_upgrade && fault.is_within_a_host() {
            Way::Upgrade { in_files }
        } else {
            Way::Move
        };
        Self { fault, way, moment, delay, lasts, slow_notes, secured, share, storage, once_more }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
        })
    }
}

/// What is added to the fault.
impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Move => "",
            Self::Upgrade { in_files: true } => " (upgrade, RAM in files)",
            Self::Upgrade { in_files: false } => " (upgrade)",
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KillAgent(end) => write!(f, "{end}'s agent killed"),
            Self::KillBothAgents => f.write_str("both agents killed"),
            Self::KillQemu(end) => write!(f, "{end}'s QEMU killed"),
            Self::FreezeAgent(end) => write!(f, "{end}'s agent frozen"),
            Self::FreezeQemu(end) => write!(f, "{end}'s QEMU frozen"),
            Self::Cut => f.write_str("network cut"),
            Self::CutOneWay(end) => write!(f, "{end}'s packets lost"),
            Self::Reset => f.write_str("connections reset"),
            Self::Slow => f.write_str("network slow"),
            Self::Late => f.write_str("all late and out of order"),
            Self::HeldUp(end) => write!(f, "{end}'s bytes held up"),
            Self::MemoryFull(end) => write!(f, "{end}'s memory full"),
            Self::DiskFull(end) => write!(f, "{end}'s disk full"),
            Self::NoSpace(end) => write!(f, "{end}'s state has no space"),
            Self::NoDescriptors(end) => write!(f, "{end}'s agent out of descriptors"),
            Self::Trickle(end) => write!(f, "{end}'s bytes trickle"),
            Self::HangQemu(end) => write!(f, "{end}'s QEMU hangs"),
            Self::FreezeStorage => f.write_str("storage hangs"),
            Self::Panic(thread) => write!(f, "thread {thread} panics"),
            Self::DamageRecord(end) => write!(f, "{end}'s record damaged"),
            Self::DamageJournal(end) => write!(f, "{end}'s journal damaged"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_faults_again_and_all_of_them() {
        let plans = |seed| (0..129).map(|number| Plan::random(seed, number)).collect::<Vec<_>>();
        assert_eq!(plans(1), plans(1));
        assert_ne!(plans(1), plans(2));
        let all = plans(3);
        assert!(FAULTS.iter().all(|fault| all.iter().any(|plan| plan.fault == *fault)));
        for in_files in [false, true] {
            assert!(all.iter().any(|plan| plan.way == Way::Upgrade { in_files }));
        }
        let mut upgrades = all.iter().filter(|plan| plan.way != Way::Move);
        assert!(upgrades.all(|plan| plan.fault.is_within_a_host()));
    }
}
