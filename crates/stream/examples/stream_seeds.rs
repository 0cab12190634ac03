//! Writes what the fuzzers start from: `cargo run -p stream --example stream_seeds`
//! fills `fuzz/corpus/TARGET/` below the current directory.

use std::fs;
use std::path::Path;

use stream::fuzzing::{seed_main, seed_multifd};

fn main() -> std::io::Result<()> {
    let corpus = Path::new("fuzz/corpus");
    let main_streams = (0..32).map(|how| (format!("seed-{how}"), seed_main(how)));
    let channels = [("seed".to_owned(), seed_multifd())];
    write(&corpus.join("stream_main"), main_streams)?;
    write(&corpus.join("stream_multifd"), channels)
}

fn write(folder: &Path, seeds: impl IntoIterator<Item = (String, Vec<u8>)>) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    seeds.into_iter().try_for_each(|(name, bytes)| fs::write(folder.join(name), bytes))
}
