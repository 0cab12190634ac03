//! `migrate` and `cancel`: start a migration, show it, let Ctrl-C cancel it.

use std::pin::Pin;
use std::process::ExitCode;
use std::time::Duration;

use api::{MigrationStarted, Outcome, Progress, Report};
use hyper::Method;
use serde::de::DeserializeOwned;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::{CancelArgs, MigrateArgs};
use crate::client::{Client, NOTHING, segment};
use crate::line::Display;
use crate::output::print_json;
use crate::problem::Problem;
use crate::{gang, summary};

/// What a shell expects of a command that Ctrl-C ended.
pub(crate) const INTERRUPTED: u8 = 130;
/// Whoever leaves without waiting waits this long for the agent to hear it.
const ASK_MAX: Duration = Duration::from_secs(1);

pub(crate) async fn migrate(client: &Client, args: MigrateArgs) -> Result<ExitCode, Problem> {
    let json = args.json;
    // Heard from now on, so that no signal between here and the first line of
    // progress ends the command and leaves the migration running unseen.
    let mut signals = Signals::new()?;
    let request = args.into_request();
    let started: MigrationStarted =
        client.ask(Method::POST, "/v1/migrations", Some(&request)).await?;
    let mut display = Display::new();
    let path = format!("/v1/migrations/{}", segment(&started.id));
    let followed = follow(client, &path, &mut signals, &mut display).await;
    display.clear();
    let last = match followed? {
        Followed::Ended(last) => last,
        Followed::Left { heard } => {
            let id = started.id;
            eprintln!(
                "droveway: no longer watching. {}",
                if heard {
                    format!(
                        "Migration {id} is being cancelled; `droveway report {id}` says how it ends"
                    )
                } else {
                    format!(
                        "The agent has not answered: migration {id} may go on. `droveway cancel {id}` \
                     asks again"
                    )
                }
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
    print_json(report)?;
    if report.outcome != Outcome::Done {
        eprintln!("droveway: {}", summary::sentences(report));
    }
    Ok(())
}

pub(crate) async fn cancel(client: &Client, args: &CancelArgs) -> Result<ExitCode, Problem> {
    if gang::is_id(&args.id) {
        request_cancel(client, &format!("/v1/gangs/{}", segment(&args.id))).await?;
        println!(
            "Gang {} is being cancelled; VMs that have not moved stay where they are.",
            args.id
        );
        return Ok(ExitCode::SUCCESS);
    }
    request_cancel(client, &format!("/v1/migrations/{}", segment(&args.id))).await?;
    println!("Migration {} is being cancelled; its VM stays where it is.", args.id);
    Ok(ExitCode::SUCCESS)
}

async fn request_cancel(client: &Client, path: &str) -> Result<(), Problem> {
    client.ask(Method::POST, &format!("{path}/cancel"), NOTHING).await
}

/// Something that goes on, and is shown while it does.
pub(crate) trait Shown {
    /// Where it is.
    type State: DeserializeOwned;
    /// What is said when it is told to end.
    const CANCELLING: &str;
    /// What is said when its agent ends before it does.
    const LOST: &str;

    fn show(&mut self, state: &Self::State);
    /// A word between.
    fn say(&self, text: &str);
    fn is_over(state: &Self::State) -> bool;
}

pub(crate) enum Followed<T> {
    /// It has ended, one way or the other.
    Ended(Box<T>),
    /// The person went away, after the agent heard that it is to cancel, or
    /// not.
    Left {
        /// Whether it did.
        heard: bool,
    },
}

/// Shows what goes on at `path` until it ends. The first signal cancels it, the
/// second stops watching, even if the agent has not answered the first.
pub(crate) async fn follow<S: Shown>(
    client: &Client,
    path: &str,
    signals: &mut Signals,
    display: &mut S,
) -> Result<Followed<S::State>, Problem> {
    let mut lines = client.lines(&format!("{path}/progress")).await?;
    let mut asked = false;
    let mut cancelling = std::pin::pin!(None);
    loop {
        tokio::select! {
            line = lines.next::<S::State>() => match line? {
                Some(state) => {
                    display.show(&state);
                    if S::is_over(&state) {
                        return Ok(Followed::Ended(Box::new(state)));
                    }
                }
                None => return Err(Problem::Refused(S::LOST.to_owned())),
            },
            () = signals.next() => {
                if asked {
                    // It is to be heard also if the second press came at once.
                    let asking = cancelling.is_some();
                    let answered = tokio::time::timeout(ASK_MAX, answer(cancelling.as_mut()));
                    return Ok(Followed::Left { heard: !asking || answered.await.is_ok() });
                }
                asked = true;
                display.say(S::CANCELLING);
                cancelling.set(Some(request_cancel(client, path)));
            }
            answer = answer(cancelling.as_mut()) => {
                cancelling.set(None);
                match answer {
                    Ok(()) => {}
                    // Past the point of no return; the VM arrives.
                    Err(Problem::Refused(why)) => display.say(&format!("Not cancelled: {why}")),
                    Err(problem) => return Err(problem),
                }
            }
        }
    }
}

impl Shown for Display {
    type State = Progress;
    const CANCELLING: &str =
        "Cancelling; the VM stays where it is. Ctrl-C again: don't wait for it.";
    const LOST: &str = "the agent ended before the migration did; when it runs again, \
                        `droveway list` says where the VM is";

    fn show(&mut self, state: &Progress) {
        Display::show(self, state);
    }

    fn say(&self, text: &str) {
        Display::say(self, text);
    }

    fn is_over(state: &Progress) -> bool {
        state.outcome.is_some()
    }
}

/// What comes of a request, if there is one.
async fn answer<T>(request: Pin<&mut Option<impl Future<Output = T>>>) -> T {
    match request.as_pin_mut() {
        Some(request) => request.await,
        None => std::future::pending().await,
    }
}

/// Ctrl-C, and the signal that service managers and `timeout` send.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    pub(crate) fn new() -> Result<Self, Problem> {
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
