//! Writes the fuzzers' seeds: `cargo run -p switchover --example switchover_seeds` fills
//! `workshop/fuzz/corpus/TARGET/` below the current directory.

use std::fs;
use std::path::Path;

use switchover::fuzzing::seed_journal;

fn main() -> std::io::Result<()> {
    let folder = Path::new("workshop/fuzz/corpus/switchover_journal");
    fs::create_dir_all(folder)?;
    fs::write(folder.join("seed"), seed_journal())
}
