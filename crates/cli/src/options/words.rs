//! Options whose values are words, which are those of the API's types.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::de::DeserializeOwned;

/// The words of an option, each with what it means.
pub(crate) type Words = &'static [(&'static str, &'static str)];

pub(crate) const AUDIT: Words = &[
    ("off", "Nothing"),
    ("on", "Each page as it was placed, with what QEMU handed over"),
    ("deep", "Also the destination's RAM, read back"),
];

pub(crate) const COMPRESS: Words = &[
    ("auto", "Whatever delivers more"),
    ("off", "Never"),
    ("lz4", "Always with lz4, except for content that doesn't shrink"),
    ("zstd", "Always with zstd, except for content that doesn't shrink"),
];

pub(crate) const ON_STALL: Words = &[
    ("keep", "Keep trying"),
    ("stop", "Stop it and move what is left, however long the downtime"),
    ("cancel", "Cancel the move; the VM stays where it is"),
];

pub(crate) const PRIORITY: Words = &[
    ("low", "Lower than VMs and other programs"),
    ("normal", "The same as other programs"),
    ("high", "Higher than other programs; the agents must be allowed to raise it"),
];

pub(crate) const SHARE: Words = &[
    (
        "auto",
        "As far as both hosts are configured for it, if it can help: with a rack, or VMs of the \
         same domain at the destination",
    ),
    ("off", "None"),
    ("host", "Those on the destination host, and those that are arriving there"),
    ("rack", "Those on all hosts of its rack"),
];

pub(crate) const STORAGE: Words = &[
    ("auto", "Where the guest has a helper and the disks can be read"),
    ("off", "Never"),
    ("on", "As auto, and the report has the reason if pages were not read"),
];

pub(crate) const TAP: Words = &[
    ("auto", "Multifd where QEMU and the VM's devices allow it"),
    ("multifd", "Multifd, or the move fails"),
    ("classic", "The classic stream"),
];

/// A value of the API's type, by one of its words.
pub(crate) fn one_of<T: DeserializeOwned + Clone + Send + Sync + 'static>(
    words: Words,
) -> impl TypedValueParser<Value = T> {
    let values = words.iter().map(|&(word, means)| PossibleValue::new(word).help(means));
    PossibleValuesParser::new(values)
        .try_map(|word| serde_json::from_value::<T>(serde_json::Value::String(word)))
}
