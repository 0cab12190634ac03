//! Writes the fuzzers' seeds: `cargo run --bin seeds` fills `workshop/fuzz/corpus/TARGET/` below
//! the current directory.

use std::fs;
use std::io;
use std::path::Path;

use seeds::recording::Recording;

/// Streams of QEMU.
const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/stream/tests/recorded");

/// Streams of xl.
const RECORDED_OF_XL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/recorded");
/// Records of pages that are left of a recorded stream: each is as large as a small one.
const XL_RECORDS: usize = 8;

fn main() -> io::Result<()> {
    write("cachemap_content", &cachemap::fuzzing::seed_contents())?;
    write("cachemap_port", &cachemap::fuzzing::seeds())?;
    write("directory", &directory::fuzzing::seeds())?;
    write("nbd_client", &[nbd::fuzzing::seed_client()])?;
    write("nbd_reader", &[nbd::fuzzing::seed_reader()])?;
    write("nbd_server", &[nbd::fuzzing::seed_server()])?;
    write("qemu_command_line", &qemu::fuzzing::seed_command_lines())?;
    write("qemu_disks", &qemu::fuzzing::seed_disks())?;
    write("qemu_memory", &qemu::fuzzing::seed_memory())?;
    write("stream_main", &main_streams()?)?;
    write("stream_multifd", &[stream::fuzzing::seed_multifd()])?;
    write("switchover_journal", &[switchover::fuzzing::seed_journal()])?;
    write("wire_control", &wire::fuzzing::seed_controls())?;
    write("wire_lane", &wire::fuzzing::seed_lanes())?;
    write("xen_stream", &xen_streams()?)
}

fn write<S: AsRef<[u8]>>(target: &str, seeds: &[S]) -> io::Result<()> {
    let folder = Path::new("workshop/fuzz/corpus").join(target);
    fs::create_dir_all(&folder)?;
    let mut numbered = seeds.iter().enumerate();
    numbered.try_for_each(|(number, seed)| fs::write(folder.join(format!("seed-{number}")), seed))
}

/// Small ones, and those that `make xen-record` has recorded, if any, with few of their pages.
fn xen_streams() -> io::Result<Vec<Vec<u8>>> {
    let mut streams = xen::fuzzing::seeds();
    if !Path::new(RECORDED_OF_XL).exists() {
        return Ok(streams);
    }
    for entry in fs::read_dir(RECORDED_OF_XL)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "xl") {
            let recording = Recording::parse(&fs::read(&path)?);
            let recording = recording.map_err(io::Error::other)?;
            let short = recording.shortened(XL_RECORDS);
            streams.extend((0..4_u8).map(|how| [&[how], &short[..]].concat()));
        }
    }
    Ok(streams)
}

/// Small ones, and recorded ones, each as a seed for both stream kinds, in one piece.
fn main_streams() -> io::Result<Vec<Vec<u8>>> {
    let mut streams: Vec<_> = (0..128).map(stream::fuzzing::seed_main).collect();
    for entry in fs::read_dir(RECORDED)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "stream") {
            let recorded = fs::read(&path)?;
            streams.extend((0..2_u8).map(|how| [&[how], &recorded[..]].concat()));
        }
    }
    Ok(streams)
}
