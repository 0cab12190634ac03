//! The screen: tabs above, keys below, and the chosen tab between them.

use client::cluster::Known;
use ratatui::buffer::Buffer;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::Widget;

use super::grid::{Grid, put, put_all, wrong};
use super::keys::{State, Tab};
use super::{lists, overview};

pub(super) fn draw(known: &Known, state: &State, area: Rect, buffer: &mut Buffer) {
    let [top, _, body, bottom] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(area);
    draw_tabs(known, state.tab, top, buffer);
    let mut problems = overview::problems(known);
    let grid = match state.tab {
        Tab::Overview => {
            overview::draw(known, state, body, buffer);
            None
        }
        Tab::Hosts => Some(lists::hosts(known)),
        Tab::Vms => {
            problems.extend(silent_hosts(known));
            Some(lists::vms(known))
        }
        Tab::History => Some(lists::history(known, usize::MAX)),
    };
    if let Some(grid) = grid {
        let lines = Constraint::Length(overview::height(&problems));
        let [above, below] = Layout::vertical([lines, Constraint::Fill(1)]).areas(body);
        put_all(&problems, above, buffer);
        Grid { above: state.above, ..grid }.draw(below, buffer);
    }
    draw_keys(state, bottom, buffer);
}

/// Which hosts' VMs may not be shown as they are now.
fn silent_hosts(known: &Known) -> Option<Span<'static>> {
    let silent: Vec<&str> = known.silent_hosts().collect();
    let text = format!("VMs may have changed meanwhile: no answer from {}", silent.join(", "));
    (!silent.is_empty()).then(|| wrong(text))
}

fn draw_tabs(known: &Known, shown: Tab, area: Rect, buffer: &mut Buffer) {
    let mut spans = vec![Span::styled("Droveway", Modifier::BOLD)];
    for (tab, name) in Tab::ALL {
        let style = if tab == shown { Style::new().reversed() } else { Style::new() };
        spans.extend([Span::raw("  "), Span::styled(name, style)]);
    }
    let tabs = Line::from(spans);
    let figures = Line::from(overview::figures(known)).alignment(Alignment::Right);
    let both = tabs.width() + 2 + figures.width() <= usize::from(area.width);
    tabs.render(area, buffer);
    if both {
        figures.render(area, buffer);
    }
}

fn draw_keys(state: &State, area: Rect, buffer: &mut Buffer) {
    let line = if let Some(question) = &state.question {
        Span::styled(question.text.clone(), Style::new().fg(Color::Yellow).bold())
    } else if let Some(said) = &state.said {
        Span::raw(said.clone())
    } else if state.tab == Tab::Overview && !state.read_only {
        Span::raw("q quit  1-4 tabs  ↑↓ choose  c cancel").dim()
    } else {
        Span::raw("q quit  1-4 tabs  ↑↓ PgUp PgDn scroll").dim()
    };
    put(&line, area, buffer);
}
