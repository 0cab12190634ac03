//! `migrate` and `cancel`: start a migration, show it, let Ctrl-C cancel it.

use std::process::ExitCode;

use api::{MigrationStarted, Outcome, Progress, Report};
use hyper::Method;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::{CancelArgs, MigrateArgs};
use crate::client::{Client, NOTHING, segment};
use crate::line::Display;
use crate::problem::Problem;
use crate::{summary, vms};

/// What a shell expects of a command that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

pub(crate) async fn migrate(client: &Client, args: MigrateArgs) -> Result<ExitCode, Problem> {
    let json = args.json;
    // Heard from now on, so that no signal between here and the first line of
    // progress ends the command and leaves the migration running unseen.
    let mut signals = Signals::new()?;
    let request = args.into_request();
    let started: MigrationStarted =
        client.ask(Method::POST, "/v1/migrations", Some(&request)).await?;
    let mut display = Display::new();
    let followed = follow(client, &started.id, &mut signals, &mut display).await;
    display.clear();
    let last = match followed? {
        Followed::Ended(last) => last,
        Followed::Left => {
            eprintln!(
                "droveway: no longer watching. Migration {id} was asked to cancel; \
                 `droveway report {id}` says how it ends",
                id = started.id
            );
            return Ok(ExitCode::from(INTERRUPTED));
        }
    };
    let report: Result<Report, Problem> =
        client.get(&format!("/v1/migrations/{}/report", segment(&started.id))).await;
    match report {
        Ok(report) => tell(&report, json)?,
        // An agent that is told to end cancels its migrations first, and may
        // be gone by now. How it ended is known all the same.
        Err(problem) => {
            eprintln!("droveway: {}", summary::without_report(&last));
            eprintln!("droveway: no report: {problem}");
        }
    }
    Ok(match last.outcome {
        Some(Outcome::Done) => ExitCode::SUCCESS,
        Some(Outcome::Failed(_) | Outcome::Cancelled) | None => ExitCode::FAILURE,
    })
}

fn tell(report: &Report, json: bool) -> Result<(), Problem> {
    if !json {
        println!("{}", summary::sentences(report));
        return Ok(());
    }
    vms::print_json(report)?;
    if report.outcome != Outcome::Done {
        eprintln!("droveway: {}", summary::sentences(report));
    }
    Ok(())
}

pub(crate) async fn cancel(client: &Client, args: &CancelArgs) -> Result<ExitCode, Problem> {
    request_cancel(client, &args.id).await?;
    println!("Migration {} is being cancelled; its VM stays where it is.", args.id);
    Ok(ExitCode::SUCCESS)
}

async fn request_cancel(client: &Client, id: &str) -> Result<(), Problem> {
    let path = format!("/v1/migrations/{}/cancel", segment(id));
    client.ask(Method::POST, &path, NOTHING).await
}

enum Followed {
    /// It has ended, one way or the other.
    Ended(Box<Progress>),
    /// The person went away.
    Left,
}

/// Shows progress until the migration ends. The first signal cancels it, the
/// second stops watching.
async fn follow(
    client: &Client,
    id: &str,
    signals: &mut Signals,
    display: &mut Display,
) -> Result<Followed, Problem> {
    let mut lines = client.lines(&format!("/v1/migrations/{}/progress", segment(id))).await?;
    let mut asked = false;
    loop {
        tokio::select! {
            line = lines.next::<Progress>() => match line? {
                Some(progress) => {
                    display.show(&progress);
                    if progress.outcome.is_some() {
                        return Ok(Followed::Ended(Box::new(progress)));
                    }
                }
                None => return Err(Problem::Refused(format!(
                    "the agent ended before migration {id} did; when it runs again, \
                     `droveway list` says where the VM is"
                ))),
            },
            () = signals.next() => {
                if asked {
                    return Ok(Followed::Left);
                }
                asked = true;
                match request_cancel(client, id).await {
                    Ok(()) => display.say(
                        "Cancelling; the VM stays where it is. Ctrl-C again: don't wait for it."
                    ),
                    // Past the point of no return; the VM arrives.
                    Err(Problem::Refused(why)) => display.say(&format!("Not cancelled: {why}")),
                    Err(problem) => return Err(problem),
                }
            }
        }
    }
}

/// Ctrl-C, and the signal that service managers and `timeout` send.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn new() -> Result<Self, Problem> {
        let listen = |kind| {
            signal(kind).map_err(|source| Problem::Local {
                what: "listening for signals".to_owned(),
                source,
            })
        };
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
