//! Hosts, VMs and migrations in a terminal, as they change: what the dashboard shows, for
//! an operator who is logged in to a host.

mod grid;
mod keys;
mod lists;
mod overview;
mod plot;
mod view;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use client::cluster::Cluster;
use client::{Operation, Problem};
use ratatui::DefaultTerminal;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event};
use ratatui::layout::Rect;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::timeout;

use crate::commands::agents::Agents;
use crate::output::print;
use crate::watch::Signals;
use keys::{State, Wish};

/// How long an agent may take to accept a cancellation.
const CANCEL_MAX: Duration = Duration::from_secs(20);
/// The width of the text if `COLUMNS` is not set.
const COLUMNS_DEFAULT: u16 = 120;

/// Shows the cluster until `q` or Ctrl-C is pressed.
pub(crate) async fn watch(agents: Agents) -> Result<(), Problem> {
    let cluster = Arc::new(Cluster::meet(agents.clients).await?);
    let watching = tokio::spawn(Arc::clone(&cluster).watch());
    cluster.refresh().await;
    let mut signals = Signals::new()?;
    let mut terminal = Taken::new()?;
    let mut events = listen();
    let (told, mut answers) = unbounded_channel();
    let mut state = State::new(agents.read_only);
    loop {
        terminal.draw(|area, buffer| view::draw(&cluster.known(), &state, area, buffer))?;
        let wish = tokio::select! {
            event = events.recv() => match event {
                Some(event) => state.take(&event, &cluster.known()),
                // The terminal was closed.
                None => Wish::Leave,
            },
            Some(answer) = answers.recv() => {
                state.say(answer);
                Wish::Nothing
            }
            () = cluster.next_round() => Wish::Nothing,
            () = signals.next() => Wish::Leave,
        };
        match wish {
            Wish::Nothing => {}
            Wish::Leave => break,
            Wish::Cancel { agent, id } => {
                let (cluster, told) = (Arc::clone(&cluster), told.clone());
                tokio::spawn(async move {
                    let answer = cancel(&cluster, agent, &id).await;
                    // After the end, nothing reads it.
                    let _ = told.send(answer);
                });
            }
        }
        cluster.refresh().await;
    }
    watching.abort();
    Ok(())
}

/// Prints the cluster as text on standard output.
pub(crate) async fn once(agents: Agents) -> Result<(), Problem> {
    let cluster = Arc::new(Cluster::meet(agents.clients).await?);
    let watching = tokio::spawn(Arc::clone(&cluster).watch());
    cluster.refresh().await;
    cluster.wait_for_hosts().await;
    watching.abort();
    let columns = std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
    let text = {
        let known = cluster.known();
        let width = columns.unwrap_or(COLUMNS_DEFAULT);
        let area = Rect::new(0, 0, width, overview::height_of_text(&known, width));
        let mut buffer = Buffer::empty(area);
        overview::draw_text(&known, area, &mut buffer);
        lines(&buffer)
    };
    print(format_args!("{text}"))
}

/// The contents of a buffer as text, without colours.
fn lines(buffer: &Buffer) -> String {
    let mut text = String::new();
    for y in 0..buffer.area.height {
        let line: String = (0..buffer.area.width).map(|x| buffer[(x, y)].symbol()).collect();
        text += line.trim_end();
        text.push('\n');
    }
    text
}

async fn cancel(cluster: &Cluster, agent: usize, id: &str) -> String {
    let Some(client) = cluster.agent(agent) else { return "There is no such agent.".to_owned() };
    let answer = timeout(CANCEL_MAX, client.cancel(&Operation::named(id).path())).await;
    cluster.hurry();
    match answer {
        Ok(Ok(())) => format!("{id} is being cancelled."),
        Ok(Err(problem)) => problem.to_string(),
        Err(_) => format!("No answer within {} s.", CANCEL_MAX.as_secs()),
    }
}

/// The terminal, which is restored when this is dropped, and after a panic.
struct Taken(DefaultTerminal);

impl Taken {
    fn new() -> Result<Self, Problem> {
        ratatui::try_init().map(Self).map_err(drawing)
    }

    fn draw(&mut self, draw: impl FnOnce(Rect, &mut Buffer)) -> Result<(), Problem> {
        let drawn = self.0.draw(|frame| draw(frame.area(), frame.buffer_mut()));
        drawn.map(|_| ()).map_err(drawing)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

fn drawing(source: io::Error) -> Problem {
    Problem::Local { what: "drawing in this terminal".to_owned(), source }
}

/// Starts the thread that reads keys and changes of the terminal's size.
///
/// It ends with the program, or when the terminal is closed.
fn listen() -> UnboundedReceiver<Event> {
    let (sender, receiver) = unbounded_channel();
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.send(event).is_err() {
                break;
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests;
