use std::net::TcpListener;
use std::time::Duration;

use storage::{Endpoint, Failure, Image, OpenError, Opening, Progress, Reader, Settings, open};
use test_scope::TestDir;

use crate::odd::{Do, serve};
use crate::{Got, noise, wanted};

const BYTES: usize = (8 << 20) + 1536;

fn part(content: &[u8], offset: u64, bytes: usize) -> Vec<u8> {
    let from = usize::try_from(offset).unwrap();
    content[from..from + bytes].to_vec()
}

/// Reads the wanted pages of an image, until it fails.
fn read(image: &Image) -> (std::sync::Arc<Got>, Result<(), Failure>, Progress) {
    let dir = TestDir::new();
    let source = open(image, &Opening::new(dir.path())).unwrap().source;
    let got = Got::new();
    let settings =
        Settings { patience: Duration::from_secs(2), in_flight: 4, ..Settings::default() };
    let reader = Reader::start(source, got.clone(), settings).unwrap();
    // One request by itself, before anything fails.
    let items = wanted(BYTES);
    let (first, rest) = items.split_at(1);
    let idle = [first, rest]
        .iter()
        .try_for_each(|items| reader.add(items).and_then(|()| reader.wait_idle()));
    let progress = reader.finish();
    (got, idle, progress)
}

#[test]
fn an_export_is_read_within_its_block_sizes() {
    let content = noise(1, BYTES);
    for (minimum, maximum) in [(1, 32 << 20), (512, 32 << 20), (512, 70_000), (1, 1000)] {
        let served = content.clone();
        let (image, server) = serve(BYTES as u64, minimum, maximum, move |offset, bytes| {
            Do::Give(part(&served, offset, bytes))
        });
        let (got, idle, progress) = read(&image);
        idle.unwrap();
        got.check(&wanted(BYTES), &content);
        assert!(progress.read_bytes >= progress.read_pages * 4096 - 4096);
        server.join().unwrap();
    }
}

#[test]
fn reads_that_fail_cost_their_own_pages() {
    let content = noise(2, BYTES);
    let served = content.clone();
    let mut nth = 0;
    let (image, server) = serve(BYTES as u64, 1, 32 << 20, move |offset, bytes| {
        nth += 1;
        if nth == 3 { Do::Refuse } else { Do::Give(part(&served, offset, bytes)) }
    });
    let (got, idle, _) = read(&image);
    idle.unwrap();
    assert!(got.failed() > 0);
    let text = got.failed.lock().unwrap()[0].1.to_string();
    assert!(text.contains("an input/output error"), "{text}");
    server.join().unwrap();
}

#[test]
fn a_server_with_another_disk_is_read_for_the_consumer_to_notice() {
    let (image, server) = serve(BYTES as u64, 1, 32 << 20, |_, bytes| Do::Give(vec![0xee; bytes]));
    let (got, idle, _) = read(&image);
    idle.unwrap();
    assert!(got.pages.lock().unwrap().values().all(|page| page[..100] == [0xee; 100]));
    server.join().unwrap();
}

#[test]
fn a_faulty_server_ends_the_reader_and_keeps_no_thread() {
    for end in [Do::Leave, Do::Lie, Do::Wait] {
        let words = match end {
            Do::Lie => "not an NBD peer",
            Do::Wait => "did not answer for 2 s",
            _ => "the connection to the NBD server broke",
        };
        let content = noise(3, BYTES);
        let mut nth = 0;
        let (image, server) = serve(BYTES as u64, 1, 32 << 20, move |offset, bytes| {
            nth += 1;
            if nth < 2 { Do::Give(part(&content, offset, bytes)) } else { end.clone() }
        });
        let (got, idle, progress) = read(&image);
        let why = idle.unwrap_err().to_string();
        assert!(why.contains(words), "{why}");
        assert!(got.failed() > 0 && !got.pages.lock().unwrap().is_empty());
        assert_eq!((progress.abandoned_threads, progress.in_flight), (0, 0));
        server.join().unwrap();
    }
}

#[test]
fn a_silent_server_can_t_be_opened() {
    let dir = TestDir::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint::Tcp(listener.local_addr().unwrap().to_string());
    let how = Opening { patience: Duration::from_millis(50), ..Opening::new(dir.path()) };
    let image = Image::Nbd { endpoint, export: "vda".to_owned() };
    let refused = open(&image, &how).unwrap_err();
    assert!(matches!(refused, OpenError::Stalled { .. }), "{refused:?}");
    drop(listener);
    let refused = open(&image, &Opening::new(dir.path())).unwrap_err();
    assert!(refused.to_string().contains("refused"), "{refused}");
}
