//! Writes the fuzzers' seeds: `cargo run -p stream --example stream_seeds` fills
//! `workshop/fuzz/corpus/TARGET/` below the current directory.

use std::fs;
use std::path::Path;

use stream::fuzzing::{seed_main, seed_multifd};

fn main() -> std::io::Result<()> {
    let corpus = Path::new("workshop/fuzz/corpus");
    let main_streams = (0..128).map(|how| (format!("seed-{how}"), seed_main(how)));
    let main_streams = main_streams.chain(recorded()?);
    let channels = [("seed".to_owned(), seed_multifd())];
    write(&corpus.join("stream_main"), main_streams)?;
    write(&corpus.join("stream_multifd"), channels)
}

/// Recorded streams of QEMU, each as a seed for both stream kinds, in one piece.
fn recorded() -> std::io::Result<Vec<(String, Vec<u8>)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recorded"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "stream") {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let stream = fs::read(&path)?;
            found.extend(
                (0..2_u8).map(|how| (format!("{name}-{how}"), [&[how], &stream[..]].concat())),
            );
        }
    }
    Ok(found)
}

fn write(folder: &Path, seeds: impl IntoIterator<Item = (String, Vec<u8>)>) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    seeds.into_iter().try_for_each(|(name, bytes)| fs::write(folder.join(name), bytes))
}
