//! Writes the seeds of the fuzzers: `cargo run -p nbd --example nbd_seeds` fills
//! `workshop/fuzz/corpus/TARGET/` below the current directory.

use std::fs;
use std::path::Path;

use nbd::fuzzing::{seed_client, seed_reader, seed_server};

fn main() -> std::io::Result<()> {
    let corpus = Path::new("workshop/fuzz/corpus");
    let reader = ("nbd_reader", seed_reader());
    for (target, seed) in [("nbd_server", seed_server()), ("nbd_client", seed_client()), reader] {
        let folder = corpus.join(target);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("seed"), seed)?;
    }
    Ok(())
}
