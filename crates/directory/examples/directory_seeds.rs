//! Writes the fuzzer's seeds: `cargo run -p directory --example directory_seeds` fills
//! `workshop/fuzz/corpus/directory/` below the current directory.

use std::fs;
use std::path::Path;

fn main() -> std::io::Result<()> {
    let folder = Path::new("workshop/fuzz/corpus/directory");
    fs::create_dir_all(folder)?;
    let seeds = directory::fuzzing::seeds();
    let mut numbered = seeds.iter().enumerate();
    numbered.try_for_each(|(number, bytes)| fs::write(folder.join(format!("seed-{number}")), bytes))
}
