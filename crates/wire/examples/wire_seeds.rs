//! Writes the fuzzers' seeds: `cargo run -p wire --example wire_seeds` fills
//! `workshop/fuzz/corpus/TARGET/` below the current directory.

use std::fs;
use std::path::Path;

use wire::fuzzing::{seed_controls, seed_lanes};

fn main() -> std::io::Result<()> {
    let corpus = Path::new("workshop/fuzz/corpus");
    write(&corpus.join("wire_lane"), &seed_lanes())?;
    write(&corpus.join("wire_control"), &seed_controls())
}

fn write(folder: &Path, seeds: &[Vec<u8>]) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut numbered = seeds.iter().enumerate();
    numbered.try_for_each(|(number, bytes)| fs::write(folder.join(format!("seed-{number}")), bytes))
}
