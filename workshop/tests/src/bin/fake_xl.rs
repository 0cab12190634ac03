//! `fake-xl`, a stand-in for xl: see `end_to_end::fake_xl`.

use std::process::ExitCode;

use end_to_end::fake_xl;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    fake_xl::run(&words)
}
