//! A host of the rack that lies: it claims that it or others have any content, and sends content
//! that was not requested, other content, nothing, or garbage.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use content::{NAME_BYTES, Name};
use directory::protocol::RequestKind;
use directory::{Answer, Directory, DirectoryError, HostName};
use lab::hosts::Host;
use parking_lot::Mutex;
use wire::{ContentRequest, HasHeader, Kind, Preamble, Reply, Versions};

const PORT: u16 = 7999;
const PAGE_BYTES: usize = 4096;

/// Requests to it.
#[derive(Debug, Default)]
pub struct Asked {
    /// Names that were claimed at it as the rack's directory.
    pub claims: AtomicU64,
    /// Contents that were requested.
    pub contents: AtomicU64,
}

/// A lying host, which listens until [`Liar::end`].
#[derive(Debug)]
pub struct Liar {
    address: SocketAddr,
    asked: Arc<Asked>,
    over: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
    accepting: Option<thread::JoinHandle<()>>,
}

/// The liar as a directory.
#[derive(Debug)]
struct Lies {
    hosts: Vec<HostName>,
    was_silent: AtomicBool,
    asked: Arc<Asked>,
}

impl Directory for Lies {
    fn request(
        &self,
        kind: RequestKind,
        _: &HostName,
        names: &[Name],
        answers: &mut Vec<Answer>,
        _: Instant,
    ) -> Result<(), DirectoryError> {
        if kind == RequestKind::Claim {
            self.asked.claims.fetch_add(names.len() as u64, Relaxed);
            answers.extend(names.iter().enumerate().map(|(nth, _)| {
                let host = || self.hosts[nth % self.hosts.len()].clone();
                match nth % 7 {
                    0 => Answer::Yours,
                    1..4 => Answer::Held(host()),
                    _ => Answer::Coming(host()),
                }
            }));
        }
        Ok(())
    }
}

impl Liar {
    /// Its entry in the peers file, if it is on `host` and in that rack.
    #[must_use]
    pub fn entry(host: &Host, rack: &str) -> String {
        let address = host.addresses[0];
        format!("[[host]]\nname = \"liar\"\nrack = \"{rack}\"\naddress = \"{address}:{PORT}\"\n")
    }

    /// Starts it. In its answers it names itself and these hosts, whether they exist or not.
    ///
    /// # Panics
    /// If it can't listen.
    #[must_use]
    pub fn start(host: &Host, speaks_of: &[&str]) -> Self {
        let address = SocketAddr::new(host.addresses[0], PORT);
        let listener = host.within(|| TcpListener::bind(address)).unwrap();
        let hosts = speaks_of.iter().chain(&["liar"]);
        let hosts = hosts.map(|name| HostName::new(name).unwrap()).collect();
        let asked = Arc::new(Asked::default());
        let was_silent = AtomicBool::new(false);
        let lies = Arc::new(Lies { hosts, was_silent, asked: Arc::clone(&asked) });
        let (over, open) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Vec<TcpStream>>>::default());
        let accepting = {
            let (over, open) = (Arc::clone(&over), Arc::clone(&open));
            thread::spawn(move || {
                let mut serving = Vec::new();
                for (number, stream) in listener.incoming().flatten().enumerate() {
                    if over.load(Relaxed) {
                        break;
                    }
                    open.lock().push(stream.try_clone().unwrap());
                    let lies = Arc::clone(&lies);
                    serving.push(thread::spawn(move || lies.serve(stream, number)));
                }
                serving.into_iter().for_each(|thread| drop(thread.join()));
            })
        };
        Self { address, asked, over, open, accepting: Some(accepting) }
    }

    /// Requests so far.
    #[must_use]
    pub fn asked(&self) -> &Asked {
        &self.asked
    }

    /// Ends it; `host` is the host on which it runs.
    ///
    /// # Panics
    /// If one of its threads has panicked.
    pub fn end(mut self, host: &Host) {
        self.over.store(true, Relaxed);
        for stream in self.open.lock().iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let address = self.address;
        drop(host.within(|| TcpStream::connect(address)));
        self.accepting.take().unwrap().join().unwrap();
    }
}

impl Lies {
    /// Serves a connection until the peer closes it, or the liar ends.
    fn serve(&self, mut stream: TcpStream, number: usize) -> Option<()> {
        let mut preamble = [0; Preamble::BYTES];
        stream.read_exact(&mut preamble).ok()?;
        let kind = Preamble::parse(&preamble, Versions::SPOKEN).ok()?.0;
        stream.write_all(&Reply::Welcome.to_bytes(wire::VERSION)).ok()?;
        match kind {
            Kind::Directory => {
                let writer = stream.try_clone().ok()?;
                directory::serve(stream, writer, self, &|_| true).ok()
            }
            Kind::Content => self.mislead(stream, number),
            _ => None,
        }
    }

    /// Answers requests for content, each in another way.
    fn mislead(&self, mut stream: TcpStream, number: usize) -> Option<()> {
        for nth in number.. {
            let mut head = [0; ContentRequest::HEAD_BYTES];
            stream.read_exact(&mut head).ok()?;
            let mut rest = vec![0; ContentRequest::rest_bytes(&head).ok()?];
            stream.read_exact(&mut rest).ok()?;
            let names = ContentRequest::parse(&head, &rest).ok()?.names;
            self.asked.contents.fetch_add(names.len() as u64, Relaxed);
            let mut out = Vec::new();
            let mut has = |here: &[Name], not_here: &[Name]| {
                HasHeader::write_for(here, not_here, 0, here.len() * PAGE_BYTES, &mut out);
                out.resize(out.len() + here.len() * PAGE_BYTES, 0x5a);
            };
            match nth % 6 {
                // Other content.
                0 => has(&names, &[]),
                // Nothing at all, once: each time costs the peer 40 s.
                4 if !self.was_silent.swap(true, Relaxed) => {}
                1 | 4 => has(&[], &names),
                // Content that was not requested, and then that it has nothing.
                2 => {
                    has(&[Name([9; NAME_BYTES])], &[Name([8; NAME_BYTES])]);
                    has(&[], &names);
                }
                // Twice, and as both present and absent.
                3 => {
                    has(&names, &names);
                    has(&names, &[]);
                }
                // Garbage instead of the protocol.
                _ => out.extend_from_slice(&[0xff; 64]),
            }
            stream.write_all(&out).ok()?;
        }
        None
    }
}
