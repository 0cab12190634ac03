//! An example report, for tests.

use api::Report;

/// A migration that is done.
#[must_use]
pub fn example() -> Report {
    let json = include_str!("example.json");
    serde_json::from_str(json).expect("the example is a report")
}
