//! A request-response pair: one guest sends a request, waits for the answer, and sends the next;
//! another one echoes each request. Both use one TCP connection, which lasts for as long as both
//! run, on whatever hosts.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::random::Random;

const PORT: u16 = 7000;
/// Bytes of a request, and of its answer.
const MESSAGE_BYTES: usize = 128;
/// Pause after a failed or lost connection.
const AGAIN: Duration = Duration::from_millis(100);
const CONNECT_MAX: Duration = Duration::from_secs(1);

/// Answers all requests.
///
/// # Errors
/// If it can't listen.
pub fn answer() -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT))?;
    for stream in listener.incoming() {
        let stream = stream?;
        let answer = move || {
            // This client is gone; others may connect.
            let _ = answer_one(stream);
        };
        thread::Builder::new().name("answer".to_owned()).spawn(answer)?;
    }
    Ok(())
}

fn answer_one(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut message = [0; MESSAGE_BYTES];
    loop {
        stream.read_exact(&mut message)?;
        stream.write_all(&message)?;
    }
}

/// Sends requests to the guest at `address` for ever. Counts right answers, and wrong ones; a
/// connection that ends counts as a wrong one.
pub fn ask(address: Ipv4Addr, answers: &AtomicU64, wrong: &AtomicU64) {
    let address = SocketAddr::from((address, PORT));
    let mut random = Random::new(address.port().into(), 3);
    loop {
        if let Ok(stream) = TcpStream::connect_timeout(&address, CONNECT_MAX) {
            // It returns only with an error.
            let _ = ask_on(stream, &mut random, answers);
            wrong.fetch_add(1, Ordering::Relaxed);
        }
        thread::sleep(AGAIN);
    }
}

fn ask_on(mut stream: TcpStream, random: &mut Random, answers: &AtomicU64) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut answer = [0; MESSAGE_BYTES];
    loop {
        let mut message = [0; MESSAGE_BYTES];
        for bytes in message.as_chunks_mut::<8>().0 {
            *bytes = random.draw().to_le_bytes();
        }
        stream.write_all(&message)?;
        stream.read_exact(&mut answer)?;
        if answer != message {
            return Err(io::Error::other("another answer"));
        }
        answers.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(answering: impl FnOnce(TcpStream) -> io::Result<()> + Send + 'static) -> u64 {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let server = thread::spawn(move || answering(listener.accept().unwrap().0));
        let answers = AtomicU64::new(0);
        let asking = TcpStream::connect(address).unwrap();
        assert!(ask_on(asking, &mut Random::new(1, 1), &answers).is_err());
        let _ = server.join().unwrap();
        answers.into_inner()
    }

    #[test]
    fn right_answers_count_and_a_wrong_one_ends_it() {
        let turns = |mut stream: TcpStream| {
            let mut message = [0; MESSAGE_BYTES];
            for turn in 0..3 {
                stream.read_exact(&mut message)?;
                message[5] ^= u8::from(turn == 2);
                stream.write_all(&message)?;
            }
            // Until the client closes.
            stream.read_exact(&mut message)
        };
        assert_eq!(asked(turns), 2);
        assert_eq!(asked(|stream| stream.shutdown(std::net::Shutdown::Both)), 0);
    }
}
