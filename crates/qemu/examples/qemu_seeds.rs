//! Writes the seeds of the fuzzers: `cargo run -p qemu --example qemu_seeds` fills
//! `workshop/fuzz/corpus/TARGET/` below the current directory.

use std::fs;
use std::path::Path;

use qemu::fuzzing::{seed_command_lines, seed_disks, seed_memory};

fn main() -> std::io::Result<()> {
    let corpus = Path::new("workshop/fuzz/corpus");
    write(&corpus.join("qemu_memory"), &seed_memory())?;
    write(&corpus.join("qemu_disks"), &seed_disks())?;
    write(&corpus.join("qemu_command_line"), &seed_command_lines())
}

fn write(folder: &Path, seeds: &[&str]) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut numbered = seeds.iter().enumerate();
    numbered.try_for_each(|(number, text)| fs::write(folder.join(format!("seed-{number}")), text))
}
