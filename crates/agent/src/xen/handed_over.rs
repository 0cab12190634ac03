//! What xl's transport hands over: an order, and two open files.

use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use api::{DOMAIN_LINE_BYTES_MAX, SendDomain};
use engine::XlPipes;
use rustix::cmsg_space;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// It sends both at once.
const ORDER_MAX: Duration = Duration::from_secs(10);

/// Reads an order, with xl's pipes.
pub(super) fn read(stream: UnixStream) -> io::Result<(SendDomain, XlPipes)> {
    stream.set_read_timeout(Some(ORDER_MAX))?;
    let wrong = |why: &'static str| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut line = vec![0; DOMAIN_LINE_BYTES_MAX];
    let (mut filled, files) = receive(&stream, &mut line)?;
    let end = loop {
        if let Some(end) = line[..filled].iter().position(|byte| *byte == b'\n') {
            break end;
        }
        let count = match line.get_mut(filled..) {
            Some(room) if !room.is_empty() => (&stream).read(room)?,
            _ => return Err(wrong("its order is too long")),
        };
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        filled += count;
    };
    let order = serde_json::from_slice(&line[..end])?;
    let [pipe, answers]: [OwnedFd; 2] =
        files.try_into().map_err(|_| wrong("two open files must come with its order"))?;
    // From now on its end is waited for.
    stream.set_read_timeout(None)?;
    Ok((order, XlPipes::new(pipe, answers, stream)))
}

/// Reads the first bytes, with the files that come with them.
fn receive(stream: &UnixStream, line: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut pieces = [IoSliceMut::new(line)];
    let received = recvmsg(stream, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(handed_over) = message {
            files.extend(handed_over);
        }
    }
    Ok((received.bytes, files))
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write};
    use std::os::fd::{AsFd, BorrowedFd};

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    fn send(stream: &UnixStream, text: &[u8], files: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(files));
        }
        sendmsg(stream, &[IoSlice::new(text)], &mut control, SendFlags::empty()).unwrap();
    }

    #[test]
    fn an_order_comes_with_two_files_in_any_pieces() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (one, other) = UnixStream::pair().unwrap();
        send(&ours, b"{\"to\":", &[one.as_fd(), other.as_fd()]);
        (&ours).write_all(b"\"host-b\"}\n").unwrap();
        let (order, pipes) = read(theirs).unwrap();
        assert_eq!(order.to, "host-b");
        pipes.ended(false, "no");
        let mut answer = [0; 64];
        let count = (&ours).read(&mut answer).unwrap();
        let expected = b"{\"event\":\"ended\",\"moved\":false,\"text\":\"no\"}\n";
        assert_eq!(&answer[..count], expected);
    }

    #[test]
    fn what_is_no_order_is_refused() {
        let (file, _other) = UnixStream::pair().unwrap();
        let long = vec![b' '; DOMAIN_LINE_BYTES_MAX];
        let two = [file.as_fd(), file.as_fd()];
        let order = b"{\"to\":\"b\"}\n";
        let cases: [(&[u8], &[BorrowedFd<'_>]); 6] = [
            (order, &two[..1]),
            (order, &[]),
            (b"{\"to\":\n", &two),
            (b"GET / HTTP/1.1\n", &two),
            (b"{\"to\":\"b\"", &two),
            (&long, &two),
        ];
        for (text, files) in cases {
            let (ours, theirs) = UnixStream::pair().unwrap();
            send(&ours, text, files);
            drop(ours);
            assert!(read(theirs).is_err(), "{}", String::from_utf8_lossy(text));
        }
    }
}
