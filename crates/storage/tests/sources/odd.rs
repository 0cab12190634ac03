//! An NBD server whose answers a test decides.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread::{self, JoinHandle};

use nbd::handshake::{
    Answer, BlockSizes, Greeting, Info, OptionCode, OptionHeader, OptionReplyHeader,
};
use nbd::transmission::{Command, RequestHeader, SimpleReply};
use nbd::{Errno, ExportFlags};
use storage::{Endpoint, Image};

/// What it does with a read.
#[derive(Clone)]
pub(crate) enum Do {
    /// Returns these bytes.
    Give(Vec<u8>),
    /// Replies with an error.
    Refuse,
    /// Never replies.
    Wait,
    /// Hangs up.
    Leave,
    /// Sends bytes that are no reply.
    Lie,
}

/// Serves one client over TCP.
pub(crate) fn serve(
    bytes: u64,
    minimum: u32,
    maximum: u32,
    mut answer: impl FnMut(u64, usize) -> Do + Send + 'static,
) -> (Image, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint::Tcp(listener.local_addr().unwrap().to_string());
    let server = thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        greet(&mut socket, bytes, BlockSizes { minimum, preferred: 4096, maximum });
        let mut header = [0; RequestHeader::BYTES];
        while socket.read_exact(&mut header).is_ok() {
            let asked = RequestHeader::parse(&header).unwrap();
            if asked.command != Command::READ {
                break;
            }
            assert!((asked.offset | u64::from(asked.bytes)).is_multiple_of(minimum.into()));
            assert!(asked.bytes <= maximum && asked.offset + u64::from(asked.bytes) <= bytes);
            let reply = |outcome| SimpleReply { cookie: asked.cookie, outcome }.to_bytes().to_vec();
            let said = match answer(asked.offset, asked.bytes as usize) {
                Do::Give(given) => [reply(Ok(())), given].concat(),
                Do::Refuse => reply(Err(Errno::IO)),
                Do::Wait => Vec::new(),
                Do::Leave => return,
                Do::Lie => vec![7; 100],
            };
            if socket.write_all(&said).is_err() {
                return;
            }
        }
    });
    (Image::Nbd { endpoint, export: "vda".to_owned() }, server)
}

fn greet(socket: &mut (impl Read + Write), bytes: u64, sizes: BlockSizes) {
    socket.write_all(&Greeting { flags: 3 }.to_bytes()).unwrap();
    let mut received = [0; 4 + OptionHeader::BYTES + 4 + 3 + 2];
    socket.read_exact(&mut received).unwrap();
    let flags = ExportFlags::HAS_FLAGS | ExportFlags::READ_ONLY;
    let option = OptionCode::GO;
    for info in [Info::Export { bytes, flags }, Info::BlockSizes(sizes)] {
        let mut content = Vec::new();
        info.write(&mut content);
        let bytes = u32::try_from(content.len()).unwrap();
        let header = OptionReplyHeader { option, answer: Answer::INFO, bytes };
        socket.write_all(&header.to_bytes()).unwrap();
        socket.write_all(&content).unwrap();
    }
    let ack = OptionReplyHeader { option, answer: Answer::ACK, bytes: 0 };
    socket.write_all(&ack.to_bytes()).unwrap();
}
