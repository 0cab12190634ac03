use std::fs;
use std::process::Command;

use super::*;

/// The file's byte at an offset.
fn byte(offset: usize) -> u8 {
    u8::try_from((offset / 512 + offset * 3) % 253).unwrap()
}

fn image(bytes: usize) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    fs::write(&path, (0..bytes).map(byte).collect::<Vec<_>>()).unwrap();
    (dir, path)
}

fn read(source: &FileSource, offset: u64, bytes: usize) -> Vec<u8> {
    let mut buffer = Buffer::new(bytes + 2 * ALIGNMENT_MAX);
    buffer.as_mut().fill(0xee);
    let range = source.read(offset, bytes, &mut buffer).unwrap();
    buffer.as_ref()[range].to_vec()
}

#[test]
fn any_range_of_any_part_is_read() {
    let bytes = 300_000 - 188;
    let (_dir, path) = image(bytes);
    for (base, size) in [(0, None), (512, None), (1536, Some(100_352)), (7, Some(10_000_000))] {
        let mut source = FileSource::open(&path, base, size).unwrap();
        let cached = FileSource::opened(&path, base, size, OFlags::empty()).unwrap();
        assert!(!cached.is_direct() && cached.bytes() == source.bytes());
        let room = bytes as u64 - base;
        assert_eq!(source.bytes(), size.unwrap_or(room).min(room));
        let direct = source.direct;
        for direct in [direct, direct.and(Some(4096)), direct.and(Some(64 << 10))] {
            source.direct = direct;
            for (offset, bytes) in
                [(0, 4096), (512, 4096), (3, 1), (65_536, 200_000), (5120, 95_232)]
            {
                let from = usize::try_from(base + offset).unwrap();
                let whole = bytes.min(300_000 - 188 - from);
                let expected: Vec<_> = (from..from + whole).map(byte).collect();
                assert!(read(&source, offset, bytes) == expected, "{base} {offset} {direct:?}");
                assert!(read(&cached, offset, bytes) == expected, "{base} {offset}");
                let span = source.span_bytes(offset, bytes);
                assert!(span >= bytes && span <= bytes + 2 * direct.unwrap_or(0));
            }
        }
    }
}

#[test]
fn holes_are_zeroes_and_a_cut_file_is_short() {
    let (_dir, path) = image(8192);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(1 << 30).unwrap();
    let source = FileSource::open(&path, 0, None).unwrap();
    assert_eq!(read(&source, 512 << 20, 4096), [0; 4096]);
    file.set_len(6000).unwrap();
    assert_eq!(read(&source, 4096, 4096).len(), 6000 - 4096);
    assert!(read(&source, 1 << 20, 4096).is_empty());
    assert!(read(&source, (1 << 20) + 512, 100).is_empty());
}

#[test]
fn files_that_can_t_be_read_are_refused() {
    let (dir, path) = image(4096);
    let refused = |path: &Path, base| FileSource::open(path, base, None).unwrap_err().to_string();
    assert!(refused(&dir.path().join("nosuch"), 0).contains("No such file"));
    assert!(refused(dir.path(), 0).contains("neither a file nor a block device"));
    assert!(refused(&path, 4097).contains("it is too short"));
    let fifo = dir.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    assert!(refused(&fifo, 0).contains("neither a file nor"), "and nobody waits for a writer");
}

#[test]
fn a_file_system_without_direct_reads_is_read_with_its_cache() {
    // tmpfs may support direct reads or not; either way the file is read.
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("image");
    fs::write(&path, (0..10_000).map(byte).collect::<Vec<_>>()).unwrap();
    let source = FileSource::open(&path, 512, None).unwrap();
    let expected: Vec<_> = (1536..9000).map(byte).collect();
    assert!(read(&source, 1024, 9000 - 1536) == expected);
    let _ = source.is_direct();
}

#[test]
fn a_buffer_that_is_too_small_is_not_written_beyond() {
    let (_dir, path) = image(1 << 20);
    let source = FileSource::open(&path, 0, None).unwrap();
    let refused = source.read(0, 1 << 20, &mut Buffer::new(4096)).unwrap_err();
    assert!(refused.to_string().contains("too much for one request"), "{refused}");
}
