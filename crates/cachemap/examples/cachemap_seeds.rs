//! Writes the fuzzers' seeds: `cargo run -p cachemap --example cachemap_seeds` fills
//! `workshop/fuzz/corpus/TARGET/` below the current directory.

use std::fs;
use std::path::Path;

use cachemap::fuzzing::{seed_contents, seeds};

fn main() -> std::io::Result<()> {
    let corpus = Path::new("workshop/fuzz/corpus");
    write(&corpus.join("cachemap_port"), &seeds())?;
    write(&corpus.join("cachemap_content"), &seed_contents())
}

fn write(folder: &Path, seeds: &[Vec<u8>]) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut numbered = seeds.iter().enumerate();
    numbered.try_for_each(|(number, bytes)| fs::write(folder.join(format!("seed-{number}")), bytes))
}
