//! Values as JSON, for programs.

use client::Problem;

use super::print_raw;

pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), Problem> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Problem::Typed(format!("can't be shown as JSON: {error}")))?;
    print_raw(format_args!("{text}\n"))
}
