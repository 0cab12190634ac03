//! An example report.

use api::Report;

pub(crate) fn example() -> Report {
    let json = include_str!("example.json");
    serde_json::from_str(json).expect("the example is a report")
}
