//! The `droveway` command.
fn main() {}
