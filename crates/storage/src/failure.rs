//! Failures of storage. They cost nothing but the saving: pages are sent over the
//! network instead.

use std::time::Duration;

/// Why pages were not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The storage reported an error. Other requests may succeed.
    #[error("the storage did not read {bytes} bytes at {offset}: {reason}")]
    Refused {
        /// Where in the image.
        offset: u64,
        /// How much.
        bytes: usize,
        /// Its message.
        reason: String,
    },
    /// The image ends within the range. Other requests may succeed.
    #[error("the storage read only {read} of {bytes} bytes at {offset}")]
    Short {
        /// Where in the image.
        offset: u64,
        /// How much was requested.
        bytes: usize,
        /// How much was read.
        read: usize,
    },
    /// The item is outside the image, most likely by the guest's fault.
    #[error("that is outside the image of {image_bytes} bytes")]
    Outside {
        /// The image's size.
        image_bytes: u64,
    },
    /// The connection to the storage is lost.
    #[error("the connection to the storage broke: {0}")]
    Broken(String),
    /// A request was not answered in time.
    #[error("the storage did not answer for {} s", .0.as_secs_f32())]
    Stalled(Duration),
    /// Too many requests failed.
    #[error("{count} requests to the storage failed; the last one: {last}")]
    Unreliable {
        /// How many, in a row or altogether.
        count: u32,
        /// Why.
        last: String,
    },
    /// Its owner stopped the reader.
    #[error("reading from storage was stopped")]
    Stopped,
    /// The consumer of pages panicked.
    #[error("a thread that reads from storage panicked")]
    Panicked,
}

impl Failure {
    /// Whether one such failure ends the reader.
    pub(crate) fn is_final(&self) -> bool {
        !matches!(self, Self::Refused { .. } | Self::Short { .. } | Self::Outside { .. })
    }
}

/// Why an image can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The image, or the server, can't be reached or used.
    #[error("the image {what} can't be read here: {reason}")]
    Image {
        /// Which.
        what: String,
        /// Why.
        reason: String,
    },
    /// The storage did not answer.
    #[error("the storage of {what} did not answer for {} s", patience.as_secs_f32())]
    Stalled {
        /// Which image.
        what: String,
        /// For how long.
        patience: Duration,
    },
    /// `qemu-nbd`, which serves other formats than raw, can't be started.
    #[error("qemu-nbd can't be started: {0}; is it installed (qemu-utils)?")]
    Program(std::io::Error),
    /// Too many threads of earlier readers still wait for their storage.
    #[error("{threads} threads still wait for storage that does not answer")]
    Abandoned {
        /// How many.
        threads: usize,
    },
    /// A thread or a file can't be created.
    #[error("cannot start reading from storage: {0}")]
    Local(std::io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_worded_and_classified() {
        let stalled = Failure::Stalled(Duration::from_millis(2500));
        assert_eq!(stalled.to_string(), "the storage did not answer for 2.5 s");
        assert!(stalled.is_final());
        assert!(!Failure::Outside { image_bytes: 1 }.is_final());
    }
}
