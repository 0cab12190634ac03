use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use super::*;
use crate::ExportFlags;
use crate::handshake::{
    Answer, BlockSizes, Greeting, Info, OptionCode, OptionHeader, OptionReplyHeader,
};

const DISK: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(10);

/// The disk's byte at an offset.
fn byte(offset: usize) -> u8 {
    u8::try_from((offset / 256 + offset * 7) % 251).unwrap()
}

/// A server with an export of these block sizes, driven by the test after the negotiation.
struct Odd {
    socket: UnixStream,
}

impl Odd {
    fn new(mut socket: UnixStream, sizes: BlockSizes) -> Self {
        socket.write_all(&Greeting { flags: 3 }.to_bytes()).unwrap();
        let mut received = [0; 4 + OptionHeader::BYTES + 4 + 3 + 2];
        socket.read_exact(&mut received).unwrap();
        let flags = ExportFlags::HAS_FLAGS | ExportFlags::READ_ONLY;
        let option = OptionCode::GO;
        for info in [Info::Export { bytes: DISK as u64, flags }, Info::BlockSizes(sizes)] {
            let mut content = Vec::new();
            info.write(&mut content);
            let bytes = u32::try_from(content.len()).unwrap();
            let header = OptionReplyHeader { option, answer: Answer::INFO, bytes };
            socket.write_all(&header.to_bytes()).unwrap();
            socket.write_all(&content).unwrap();
        }
        let ack = OptionReplyHeader { option, answer: Answer::ACK, bytes: 0 };
        socket.write_all(&ack.to_bytes()).unwrap();
        Self { socket }
    }

    fn next(&mut self) -> Option<RequestHeader> {
        let mut header = [0; RequestHeader::BYTES];
        self.socket.read_exact(&mut header).ok()?;
        let header = RequestHeader::parse(&header).unwrap();
        (header.command == Command::READ).then_some(header)
    }

    fn answer(&mut self, asked: RequestHeader) {
        self.head(asked.cookie, Ok(()));
        let from = usize::try_from(asked.offset).unwrap();
        let payload: Vec<u8> = (from..from + asked.bytes as usize).map(byte).collect();
        self.socket.write_all(&payload).unwrap();
    }

    fn head(&mut self, cookie: u64, outcome: Result<(), Errno>) {
        self.socket.write_all(&SimpleReply { cookie, outcome }.to_bytes()).unwrap();
    }
}

/// A reader, and a server that runs `serve` after the negotiation.
fn reading<R: Send + 'static>(
    places: usize,
    sizes: BlockSizes,
    serve: impl FnOnce(Odd) -> R + Send + 'static,
) -> (Reader<Vec<u8>>, thread::JoinHandle<R>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || serve(Odd::new(theirs, sizes)));
    let reader = Reader::over(Socket::Unix(ours), "vda", places, PATIENCE).unwrap();
    (reader, server)
}

#[test]
fn many_threads_read_and_answers_come_in_any_order() {
    let (reader, server) = reading(4, BlockSizes::default(), |mut odd| {
        let mut kept = Vec::new();
        while let Some(asked) = odd.next() {
            // A read at an odd offset is refused at once; then the kept ones are answered.
            if asked.offset % 2 == 1 {
                odd.head(asked.cookie, Err(Errno::IO));
                kept.drain(..).rev().for_each(|asked| odd.answer(asked));
            } else {
                kept.push(asked);
            }
            if kept.len() == 3 {
                kept.drain(..).rev().for_each(|asked| odd.answer(asked));
            }
        }
    });
    let done = AtomicUsize::new(0);
    thread::scope(|scope| {
        for number in 0..8_usize {
            let (reader, done) = (&reader, &done);
            scope.spawn(move || {
                let mut buffer = vec![0; 10_000];
                for round in 0..100 {
                    let (offset, bytes) = (number * 9973 + round * 101, 1 + round * 90);
                    let read = reader.read(offset as u64, 5..5 + bytes, &mut buffer);
                    assert_eq!(buffer.len(), 10_000, "it is ours again");
                    if offset % 2 == 1 {
                        let text = format!("{bytes} bytes at {offset}: an input/output error");
                        assert!(read.unwrap_err().to_string().ends_with(&text));
                    } else {
                        read.unwrap();
                        assert!(
                            (offset..offset + bytes)
                                .map(byte)
                                .eq(buffer[5..5 + bytes].iter().copied())
                        );
                    }
                }
                done.fetch_add(1, Relaxed);
            });
        }
        // The server keeps the last reads until another one is refused.
        while done.load(Relaxed) < 8 {
            assert!(reader.read(1, 0..1, &mut vec![0]).is_err());
        }
    });
    drop(reader);
    server.join().unwrap();
}

#[test]
fn ranges_that_can_t_be_requested_are_refused() {
    let sizes = BlockSizes { minimum: 512, preferred: 4096, maximum: 70_000 };
    let (reader, server) = reading(1, sizes, |mut odd| odd.next().is_none());
    assert_eq!(reader.bytes_max(), 136 * 512);
    let mut buffer = vec![0; 1 << 20];
    for (offset, into) in [
        (0, 0..0),
        (1, 0..512),
        (0, 0..511),
        (0, 0..137 * 512),
        (0, (1 << 20) - 1..(1 << 20) + 511),
        (DISK as u64, 0..512),
        (u64::MAX - 511, 0..512),
    ] {
        let refused = reader.read(offset, into.clone(), &mut buffer);
        assert!(matches!(refused, Err(ReadError::Unfit { .. })), "{offset} {into:?}");
    }
    drop(reader);
    assert!(server.join().unwrap(), "nothing was asked");
}

/// Checks that three readers get the same error when `break_off` ends the connection.
fn broken(break_off: impl FnOnce(&mut Odd, RequestHeader) + Send + 'static) -> String {
    let (reader, server) = reading(3, BlockSizes::default(), move |mut odd| {
        let first = odd.next().unwrap();
        odd.next().unwrap();
        odd.next().unwrap();
        break_off(&mut odd, first);
        odd
    });
    let whys: Vec<_> = thread::scope(|scope| {
        let read = || {
            let mut buffer = vec![0; 4096];
            let read = reader.read(4096, 0..4096, &mut buffer);
            assert_eq!(buffer.len(), 4096, "it is ours again");
            read.unwrap_err()
        };
        let readers: Vec<_> = std::iter::repeat_with(|| scope.spawn(read)).take(3).collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    let mut buffer = vec![0; 1];
    assert_eq!(reader.read(0, 0..1, &mut buffer), Err(whys[0].clone()), "and later ones");
    drop(server.join().unwrap());
    assert!(whys.iter().all(|why| *why == whys[0]));
    whys[0].to_string()
}

#[test]
fn readers_fail_when_the_server_hangs_up_or_violates_the_protocol() {
    let text = broken(|odd, _| odd.socket.shutdown(std::net::Shutdown::Both).unwrap());
    assert!(text.ends_with("broke: the other end closed it"), "{text}");
    let text = broken(|odd, _| odd.head(12_345, Ok(())));
    assert!(text.contains("a reply to no request"), "{text}");
    let text = broken(|odd, _| odd.socket.write_all(&[7; 100]).unwrap());
    assert!(text.contains("a reply starts with"), "{text}");
    let text = broken(|odd, first| {
        odd.head(first.cookie, Ok(()));
        odd.socket.write_all(&[7; 100]).unwrap();
        odd.socket.shutdown(std::net::Shutdown::Both).unwrap();
    });
    assert!(text.ends_with("the other end closed it"), "{text}");
}

#[test]
fn reads_from_a_silent_server_can_be_stopped() {
    let (reader, server) = reading(2, BlockSizes::default(), |mut odd| {
        let first = odd.next().unwrap();
        odd.next().unwrap();
        // Half a reply.
        odd.head(first.cookie, Ok(()));
        odd.socket.write_all(&[1; 10]).unwrap();
        odd
    });
    thread::scope(|scope| {
        let read = || reader.read(0, 0..100, &mut vec![0; 100]);
        let readers = [scope.spawn(read), scope.spawn(read)];
        let odd = server.join().unwrap();
        reader.stop();
        for reader in readers {
            let why = reader.join().unwrap().unwrap_err();
            assert_eq!(why.to_string(), "the connection to the NBD server broke: it was stopped");
        }
        drop(odd);
    });
}

#[test]
fn an_export_that_is_not_there_is_refused() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let exports = [crate::server::Export { name: "other".to_owned(), bytes: 512 }];
    let server = thread::spawn(move || crate::server::negotiate(theirs, &exports).map(|_| ()));
    let refused = Reader::<Vec<u8>>::over(Socket::Unix(ours), "vda", 1, PATIENCE).unwrap_err();
    assert!(matches!(refused, ClientError::Refused { .. }));
    assert!(server.join().unwrap().is_err());
}
