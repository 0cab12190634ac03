//! A guest's orders on its kernel's command line. The lab writes them, the guest reads them; both
//! use this file.

use core::fmt;
use core::time::Duration;

/// Default time between two heartbeats.
pub const TICK_MS: u64 = 5;

/// In which order the writer visits its working set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Any page may be next.
    #[default]
    Random,
    /// From the first to the last, and again.
    Sequential,
}

/// How a guest uses the files in its page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Use {
    /// There are none.
    #[default]
    None,
    /// Static files of the same size, read at random.
    Web,
    /// Files that are made, read, appended to and deleted.
    Mail,
    /// A few big files, read and written at random.
    Database,
    /// One file, read from its beginning to its end, and again.
    Reading,
    /// One file that is never read.
    Big,
    /// Files of one page that are never read.
    Small,
}

/// Indexed by their numbers.
const USES: [Use; 7] =
    [Use::None, Use::Web, Use::Mail, Use::Database, Use::Reading, Use::Big, Use::Small];

impl Use {
    /// Its number in orders.
    #[must_use]
    pub fn number(self) -> u64 {
        self as u64
    }

    /// The use with this number.
    #[must_use]
    pub fn of(number: u64) -> Option<Self> {
        USES.get(usize::try_from(number).ok()?).copied()
    }
}

/// A guest's orders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orders {
    /// Makes this guest's content different from that of others.
    pub seed: u64,
    /// Bytes filled once with content that doesn't shrink, the same in every guest with the same
    /// `common_seed`.
    pub common_bytes: u64,
    /// Bytes filled once with content that shrinks as text does, shared in the same way.
    pub common_text_bytes: u64,
    /// Selects the content of both.
    pub common_seed: u64,
    /// Bytes filled once with content that doesn't shrink.
    pub random_bytes: u64,
    /// Bytes filled once with content that shrinks as text does.
    pub text_bytes: u64,
    /// Bytes that hold zeros, in pages that were written.
    pub zero_bytes: u64,
    /// Bytes that are written once, then freed to the guest's kernel.
    pub freed_bytes: u64,
    /// Bytes of content that doesn't shrink and is rewritten.
    pub working_set_bytes: u64,
    /// Bytes rewritten per second.
    pub rate: u64,
    /// Minimum milliseconds that the writer sleeps between pages, so that it writes several at
    /// once; 0 for single pages, as evenly as it can.
    pub write_step_ms: u64,
    /// Bytes that the writer rewrites in all before it rests; 0 for no end.
    pub write_max_bytes: u64,
    /// The order in which the writer visits pages.
    pub order: Order,
    /// Whether the writer uses a whole CPU, so that half a CPU halves its rate. Otherwise it writes
    /// what is due and sleeps.
    pub burn: bool,
    /// Milliseconds for which the writer alternately writes and rests; 0 to never rest.
    pub swing_ms: u64,
    /// The CPU to which the writer is pinned, counted from 1; 0 for any.
    pub writer_cpu: u64,
    /// The CPU, counted from 1, that a thread keeps busy without writing; 0 for no such thread.
    pub compute_cpu: u64,
    /// Whether pages that don't shrink hold one repeated random word instead, which is cheap where
    /// each instruction is emulated.
    pub repeated: bool,
    /// Whether a rewrite changes 64 bytes of a page instead of all.
    pub parts: bool,
    /// Milliseconds between two heartbeats; 0 for [`TICK_MS`].
    pub tick_ms: u64,
    /// The last part of the address of the guest's NIC; 0 for no NIC.
    pub address: u8,
    /// Whether it answers other guests' requests.
    pub answers: bool,
    /// The last part of the address of the guest to which it sends requests, one after the other; 0
    /// for none.
    pub asks: u8,
    /// Bytes that a server in the guest keeps for its clients; 0 for no server.
    pub serve_bytes: u64,
    /// Bytes of a file in memory that is filled, and rewritten in random order.
    pub file_bytes: u64,
    /// Bytes of that file rewritten per second.
    pub file_rate: u64,
    /// Bytes of files made on the file system of each disk; 0 if no disk has one. If set, the
    /// helper is started, which reports where they are.
    pub files_bytes: u64,
    /// Bytes of further files, which change in every way on request.
    pub churn_bytes: u64,
    /// Use of the files that the lab has made on the first disk's file system and that the guest
    /// has in its page cache. If set, the helper is started, too.
    pub cache: Use,
    /// Bytes of these files.
    pub cache_bytes: u64,
    /// Bytes of these files that are read and written per second.
    pub cache_rate: u64,
    /// Bytes of the first disk that are filled, and rewritten in random order.
    pub disk_bytes: u64,
    /// Bytes of the disk rewritten per second.
    pub disk_rate: u64,
    /// Maximum pages of one disk write, whose sizes are mixed; 0 or 1 for single pages.
    pub disk_run: u64,
    /// Bytes written to the disk between two flushes; 0 for never.
    pub disk_flush: u64,
}

impl Orders {
    /// Time between two heartbeats.
    #[must_use]
    pub fn tick(&self) -> Duration {
        Duration::from_millis(if self.tick_ms == 0 { TICK_MS } else { self.tick_ms })
    }
}

/// A word of a kernel command line that should be an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadOrder<'l>(pub &'l str);

impl fmt::Display for BadOrder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the order {:?} is not of the form lab.NAME=NUMBER", self.0)
    }
}

const PREFIX: &str = "lab.";

impl fmt::Display for Orders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = [
            ("seed", self.seed),
            ("common", self.common_bytes),
            ("common_text", self.common_text_bytes),
            ("common_seed", self.common_seed),
            ("random", self.random_bytes),
            ("text", self.text_bytes),
            ("zero", self.zero_bytes),
            ("freed", self.freed_bytes),
            ("ws", self.working_set_bytes),
            ("rate", self.rate),
            ("write_step_ms", self.write_step_ms),
            ("write_max", self.write_max_bytes),
            ("sequential", u64::from(self.order == Order::Sequential)),
            ("burn", u64::from(self.burn)),
            ("swing_ms", self.swing_ms),
            ("writer_cpu", self.writer_cpu),
            ("compute_cpu", self.compute_cpu),
            ("repeated", u64::from(self.repeated)),
            ("parts", u64::from(self.parts)),
            ("tick_ms", self.tick_ms),
            ("address", self.address.into()),
            ("answers", u64::from(self.answers)),
            ("asks", self.asks.into()),
            ("serve", self.serve_bytes),
            ("file", self.file_bytes),
            ("file_rate", self.file_rate),
            ("files", self.files_bytes),
            ("churn", self.churn_bytes),
            ("cache", self.cache.number()),
            ("cache_bytes", self.cache_bytes),
            ("cache_rate", self.cache_rate),
            ("disk", self.disk_bytes),
            ("disk_rate", self.disk_rate),
            ("disk_run", self.disk_run),
            ("disk_flush", self.disk_flush),
        ];
        for (index, (name, number)) in numbers.into_iter().enumerate() {
            let space = if index == 0 { "" } else { " " };
            write!(f, "{space}{PREFIX}{name}={number}")?;
        }
        Ok(())
    }
}

impl Orders {
    /// Reads a whole kernel command line; words without the prefix are ignored.
    ///
    /// # Errors
    /// With the first word that has the prefix and is no order.
    pub fn read(line: &str) -> Result<Self, BadOrder<'_>> {
        let mut orders = Self::default();
        for word in line.split_whitespace() {
            let Some(order) = word.strip_prefix(PREFIX) else { continue };
            let bad = || BadOrder(word);
            let (name, number) = order.split_once('=').ok_or_else(bad)?;
            let number: u64 = number.parse().map_err(|_| bad())?;
            match name {
                "seed" => orders.seed = number,
                "common" => orders.common_bytes = number,
                "common_text" => orders.common_text_bytes = number,
                "common_seed" => orders.common_seed = number,
                "random" => orders.random_bytes = number,
                "text" => orders.text_bytes = number,
                "zero" => orders.zero_bytes = number,
                "freed" => orders.freed_bytes = number,
                "ws" => orders.working_set_bytes = number,
                "rate" => orders.rate = number,
                "write_step_ms" => orders.write_step_ms = number,
                "write_max" => orders.write_max_bytes = number,
                "burn" => orders.burn = number == 1,
                "swing_ms" => orders.swing_ms = number,
                "writer_cpu" => orders.writer_cpu = number,
                "compute_cpu" => orders.compute_cpu = number,
                "repeated" => orders.repeated = number == 1,
                "parts" => orders.parts = number == 1,
                "tick_ms" => orders.tick_ms = number,
                "address" => orders.address = u8::try_from(number).map_err(|_| bad())?,
                "answers" => orders.answers = number == 1,
                "asks" => orders.asks = u8::try_from(number).map_err(|_| bad())?,
                "serve" => orders.serve_bytes = number,
                "file" => orders.file_bytes = number,
                "file_rate" => orders.file_rate = number,
                "files" => orders.files_bytes = number,
                "churn" => orders.churn_bytes = number,
                "cache" => orders.cache = Use::of(number).ok_or_else(bad)?,
                "cache_bytes" => orders.cache_bytes = number,
                "cache_rate" => orders.cache_rate = number,
                "disk" => orders.disk_bytes = number,
                "disk_rate" => orders.disk_rate = number,
                "disk_run" => orders.disk_run = number,
                "disk_flush" => orders.disk_flush = number,
                "sequential" if number == 1 => orders.order = Order::Sequential,
                "sequential" => orders.order = Order::Random,
                _ => return Err(bad()),
            }
        }
        Ok(orders)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let orders = Orders {
            seed: 1,
            common_bytes: 15,
            common_text_bytes: 24,
            common_seed: 16,
            random_bytes: 2,
            text_bytes: 3,
            zero_bytes: 4,
            freed_bytes: 27,
            working_set_bytes: 5,
            rate: 6,
            write_step_ms: 26,
            write_max_bytes: 17,
            order: Order::Sequential,
            burn: true,
            swing_ms: 11,
            writer_cpu: 12,
            compute_cpu: 13,
            repeated: true,
            parts: true,
            tick_ms: 20,
            address: 21,
            answers: true,
            asks: 22,
            serve_bytes: 14,
            file_bytes: 18,
            file_rate: 19,
            files_bytes: 23,
            churn_bytes: 24,
            cache: Use::Database,
            cache_bytes: 25,
            cache_rate: 26,
            disk_bytes: 7,
            disk_rate: 8,
            disk_run: 9,
            disk_flush: 10,
        };
        let line = format!("console=ttyS0 quiet {orders} panic=0");
        assert_eq!(Orders::read(&line), Ok(orders));
    }

    #[test]
    fn wrong_orders_are_named() {
        for wrong in
            ["lab.seed", "lab.seed=x", "lab.rate=-1", "lab.colour=1", "lab.asks=256", "lab.cache=7"]
        {
            assert_eq!(Orders::read(wrong), Err(BadOrder(wrong)));
        }
    }
}
