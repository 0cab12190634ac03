use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use storage::{Failure, Image, Item, Opening, Pace, Reader, Settings, open};
use test_scope::TestDir;

use crate::{Got, noise, wanted};

const MIB: usize = 1 << 20;

#[test]
fn a_raw_file_is_read_from_where_the_disk_begins() {
    let dir = TestDir::new();
    let path = dir.path().join("image");
    let mut content = noise(1, 16 * MIB + 5632);
    content[4 * MIB..12 * MIB].fill(0);
    // With holes, and an end that is not aligned to pages.
    let file = fs::File::create(&path).unwrap();
    file.write_all_at(&content[..4 * MIB], 0).unwrap();
    file.write_all_at(&content[12 * MIB..], 12 << 20).unwrap();
    for base in [0, 512, 65_536 + 1536] {
        let image = Image::Raw { path: path.clone(), base: base as u64, bytes: None };
        let source = open(&image, &Opening::new(dir.path())).unwrap().source;
        let content = &content[base..];
        assert_eq!(source.bytes(), content.len() as u64);
        let got = Got::new();
        let pace = Arc::new(Pace::default());
        pace.set(Some(200 << 20));
        let settings = Settings { pace, ..Settings::default() };
        let reader = Reader::start(source, got.clone(), settings).unwrap();
        let mut items = wanted(content.len());
        let last = content.len() as u64 / 512 * 512 - 512;
        items.push(Item { offset: last, token: u64::MAX });
        for batch in items.chunks(77) {
            reader.add(batch).unwrap();
        }
        reader.wait_idle().unwrap();
        got.check(&items, content);
        let progress = reader.finish();
        assert_eq!((progress.read_pages, progress.wanted_pages), (items.len() as u64, 0));
    }
}

#[test]
fn a_truncated_file_fails_the_missing_pages() {
    let dir = TestDir::new();
    let path = dir.path().join("image");
    let content = noise(2, 64 * MIB);
    fs::write(&path, &content).unwrap();
    let image = Image::Raw { path: path.clone(), base: 0, bytes: None };
    let source = open(&image, &Opening::new(dir.path())).unwrap().source;
    OpenOptions::new().write(true).open(&path).unwrap().set_len(2 << 20).unwrap();
    let got = Got::new();
    let settings = Settings { in_flight: 1, ..Settings::default() };
    let reader = Reader::start(source, got.clone(), settings).unwrap();
    let items: Vec<_> = (0..64).map(|token| Item { offset: (token << 20) + 512, token }).collect();
    reader.add(&items).unwrap();
    let why = reader.wait_idle().unwrap_err();
    assert!(matches!(why, Failure::Unreliable { .. }), "{why}");
    assert_eq!(got.failed(), 62);
    got.failed.lock().unwrap().clear();
    got.check(&items[..2], &content);
}
