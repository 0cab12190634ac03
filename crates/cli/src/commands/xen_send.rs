//! `xen-send`: hand the domain that `xl` migrates to this host's agent.
//!
//! It is `xl`'s transport: one process, whose standard input and output are `xl`'s stream and what
//! `xl` reads. The agent gets both as open files. They stay open here too, and are handed over
//! again if the agent restarts: `xl` would not resume its domain otherwise.

use std::io::{self, BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use agent::config::API_DEFAULT;
use api::{
    Audit, BitRate, Bounds, Compress, CpuFloor, Cpus, DomainEvent, Priority, SendDomain, Share,
    Sharing, domain_socket,
};
use clap::Args as ClapArgs;
use client::Problem;
use rustix::cmsg_space;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::options::words::{self, one_of};
use crate::output::eprint_line;

/// How often a lost agent is tried again.
const RETRY: Duration = Duration::from_millis(500);
const DOWNTIME_MS_DEFAULT: u64 = 300;

#[derive(Debug, ClapArgs)]
pub(crate) struct XenSendArgs {
    /// The host to move the domain to
    host: String,
    /// Data connections [default: one per core up to 8, at least one per network card]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    lanes: Option<u16>,
    /// The downtime goal, in milliseconds, which bounds the data in flight [default: 300]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    downtime_ms: Option<u64>,
    /// How long the domain may be suspended before it is taken back, in seconds [default: ten
    /// times --downtime-ms, at least 60]
    #[arg(long, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    blackout_max: Option<u64>,
    /// How long it may take until the domain is given up, in seconds; after that it stays
    /// [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: Option<u64>,
    /// How memory is compressed [default: auto]
    #[arg(long, value_parser = one_of::<Compress>(words::COMPRESS))]
    compress: Option<Compress>,
    /// The most that it sends, headers included, in bits per second, such as 200M or 1.5G
    /// [default: what others leave of the network cards]
    #[arg(long, value_name = "RATE")]
    limit: Option<BitRate>,
    /// What it gets even if others want everything, in bits per second
    #[arg(long, value_name = "RATE")]
    reserve: Option<BitRate>,
    /// The scheduling priority of its data threads [default: low]
    #[arg(long, value_parser = one_of::<Priority>(words::PRIORITY))]
    priority: Option<Priority>,
    /// The percentage of the CPU time that its data threads need which they get among other
    /// threads, until xl has sent most of memory once; beyond it they run on idle CPUs only. 100:
    /// always among others [default: the agent's --cpu-floor]
    #[arg(long, value_name = "PERCENT")]
    cpu_floor: Option<CpuFloor>,
    /// The CPUs that its data threads run on, at both hosts, such as 0-3,8
    #[arg(long, value_name = "LIST")]
    cpus: Option<Cpus>,
    /// Whether pages that VMs at the destination, or in its rack, already have are left out
    /// [default: auto]
    #[arg(long, value_parser = one_of::<Share>(words::SHARE))]
    share: Option<Share>,
    /// The sharing domain: only VMs of the same one share content [default: the cluster's own]
    #[arg(long, value_name = "LABEL")]
    share_domain: Option<String>,
    /// What is compared before the domain is given up [default: on]
    #[arg(long, value_parser = one_of::<Audit>(words::AUDIT))]
    audit: Option<Audit>,
}

impl XenSendArgs {
    fn into_order(self) -> SendDomain {
        SendDomain {
            to: self.host,
            again: None,
            lanes: self.lanes,
            downtime_ms: self.downtime_ms.unwrap_or(DOWNTIME_MS_DEFAULT),
            blackout_max_s: self.blackout_max,
            timeout_s: self.timeout,
            compress: self.compress.unwrap_or_default(),
            sharing: Sharing {
                share: self.share.unwrap_or_default(),
                domain: self.share_domain,
                together: false,
            },
            audit: self.audit.unwrap_or_default(),
            bounds: Bounds {
                limit_bits_per_s: self.limit,
                reserve_bits_per_s: self.reserve,
                priority: self.priority.unwrap_or_default(),
                cpu_floor: self.cpu_floor,
                cpus: self.cpus,
                ..Bounds::default()
            },
        }
    }
}

/// Waits until the migration has ended. Standard output is what `xl` reads, so nothing is printed
/// there.
pub(crate) fn run(args: XenSendArgs, api: Option<PathBuf>) -> Result<ExitCode, Problem> {
    let api = api.unwrap_or_else(|| PathBuf::from(API_DEFAULT));
    let socket = domain_socket(&api);
    let mut order = args.into_order();
    let mut last = None;
    loop {
        let problem = match hand_over(&socket, &mut order) {
            Ok((moved, text)) => {
                eprint_line(format_args!("droveway: {text}"));
                return Ok(if moved { ExitCode::SUCCESS } else { ExitCode::FAILURE });
            }
            // xl has its domain, and resumes it when this process ends.
            Err(problem) if order.again.is_none() => return Err(problem),
            Err(problem) => problem.to_string(),
        };
        if last.as_ref() != Some(&problem) {
            eprint_line(format_args!(
                "droveway: {problem}. Waiting for the agent, which knows what becomes of the domain"
            ));
            last = Some(problem);
        }
        thread::sleep(RETRY);
    }
}

/// Hands `xl`'s files to the agent, and returns whether the domain has moved, in words too.
fn hand_over(socket: &Path, order: &mut SendDomain) -> Result<(bool, String), Problem> {
    let at = || socket.display().to_string();
    let lost = |why: String| Problem::Lost { at: at(), why };
    let stream = UnixStream::connect(socket).map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => Problem::NotAllowed(at()),
        _ => Problem::Refused(format!(
            "no agent accepts domains of Xen at {} ({source}): it needs [xen] in its file, and a \
             restart after that",
            socket.display()
        )),
    })?;
    let mut line = serde_json::to_vec(order).map_err(|error| lost(error.to_string()))?;
    line.push(b'\n');
    send(&stream, &line).map_err(|error| lost(error.to_string()))?;
    for line in BufReader::new(stream).lines() {
        let line = line.map_err(|error| lost(error.to_string()))?;
        match serde_json::from_str(&line).map_err(|error| lost(error.to_string()))? {
            DomainEvent::Began { migration, again, domain } => {
                if order.again.is_none() {
                    eprint_line(format_args!(
                        "droveway: migration {migration}: {domain} to {}",
                        order.to
                    ));
                }
                order.again = Some(again);
            }
            DomainEvent::Ended { moved, text } => return Ok((moved, text)),
        }
    }
    Err(lost("it closed the connection".to_owned()))
}

/// Sends the order, with standard input and output.
fn send(mut stream: &UnixStream, line: &[u8]) -> io::Result<()> {
    let (stdin, stdout) = (io::stdin(), io::stdout());
    let files = [stdin.as_fd(), stdout.as_fd()];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&files));
    let sent = sendmsg(stream, &[IoSlice::new(line)], &mut control, SendFlags::empty())?;
    stream.write_all(&line[sent..])
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn order() -> SendDomain {
        serde_json::from_str(r#"{"to":"host-b"}"#).unwrap()
    }

    /// Answers one order with these lines, and returns it.
    fn agent(listener: &UnixListener, lines: &[&str]) -> SendDomain {
        let (mut stream, _) = listener.accept().unwrap();
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        stream.write_all(lines.concat().as_bytes()).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    #[test]
    fn the_outcome_is_the_agents_and_a_lost_agent_is_tried_again_for_the_same_migration() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api.xen");
        let mut order = order();
        let error = hand_over(&socket, &mut order).unwrap_err().to_string();
        assert!(error.contains("[xen]") && order.again.is_none(), "{error}");
        let listener = UnixListener::bind(&socket).unwrap();
        let began = r#"{"event":"began","migration":"m1","again":"a1","domain":"web1"}"#;
        let ended = r#"{"event":"ended","moved":true,"text":"it runs at host-b"}"#;
        let (orders, outcome) = thread::scope(|scope| {
            let agents = scope.spawn(|| {
                let first = agent(&listener, &[began, "\n"]);
                [first, agent(&listener, &[began, "\n", ended, "\n"])]
            });
            let lost = hand_over(&socket, &mut order).unwrap_err();
            assert!(matches!(lost, Problem::Lost { .. }), "{lost}");
            let outcome = hand_over(&socket, &mut order).unwrap();
            (agents.join().unwrap(), outcome)
        });
        assert_eq!(orders.map(|order| order.again), [None, Some("a1".to_owned())]);
        assert_eq!(outcome, (true, "it runs at host-b".to_owned()));
    }
}
