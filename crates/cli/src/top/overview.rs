//! The overview: running migrations, hosts, and recent history.

use client::cluster::Known;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Span;
use report::amount;

use super::grid::{Grid, put, put_all, wrong};
use super::keys::State;
use super::{lists, plot};

/// Rows of the recent history.
const LATELY: usize = 5;
/// Rows of the plot, if there is room for it.
const PLOT: u16 = 10;
/// Rows that the plot leaves for hosts and history.
const REST: u16 = 12;

/// The cluster in one line.
pub(super) fn figures(known: &Known) -> String {
    let hosts = amount::counted(known.hosts.len() as u64, "host");
    let vms = amount::counted(known.vm_count() as u64, "VM");
    let moving = known.running().len();
    format!("{hosts} · {vms} · {moving} moving · room {}", amount::size(known.free_bytes()))
}

/// Why migrations may not be shown as they are now, one line for each reason.
pub(super) fn problems(known: &Known) -> Vec<Span<'static>> {
    known.problems().map(|text| wrong(text.to_owned())).collect()
}

/// Parts of the screen, one below the other.
struct Sections {
    problems: Vec<Span<'static>>,
    migrations: Section,
    hosts: Section,
    lately: Section,
}

struct Section {
    title: &'static str,
    /// Lines before the table.
    lines: Vec<Span<'static>>,
    /// None if it would be empty.
    grid: Option<Grid>,
}

impl Section {
    fn new(title: &'static str, grid: Grid, nothing: &'static str) -> Self {
        if grid.rows.is_empty() {
            return Self { title, lines: vec![Span::raw(nothing)], grid: None };
        }
        Self { title, lines: Vec::new(), grid: Some(grid) }
    }

    /// The section's height on a screen of this width, including its title and an empty line below.
    fn height(&self, width: u16) -> u16 {
        let grid = self.grid.as_ref().map_or(0, |grid| grid.height(width));
        height(&self.lines).saturating_add(grid).saturating_add(2)
    }

    fn draw(self, area: Rect, buffer: &mut Buffer) {
        let title =
            Span::styled(self.title, Style::new().fg(Color::Cyan).add_modifier(Modifier::BOLD));
        let mut lines = vec![title];
        lines.extend(self.lines);
        let [above, below] =
            Layout::vertical([Constraint::Length(height(&lines)), Constraint::Fill(1)]).areas(area);
        put_all(&lines, above, buffer);
        if let Some(grid) = self.grid {
            // The last line stays empty, to separate the next section.
            let below = Rect { height: below.height.saturating_sub(1), ..below };
            grid.draw(below, buffer);
        }
    }
}

pub(super) fn height(lines: &[Span<'_>]) -> u16 {
    u16::try_from(lines.len()).unwrap_or(u16::MAX)
}

impl Sections {
    fn of(known: &Known, chosen: Option<usize>) -> Self {
        let grid = Grid { chosen, ..lists::migrations(&known.running()) };
        let mut migrations = Section::new("In progress", grid, "No migration runs.");
        let gangs = known.gangs().filter(|gang| gang.outcome.is_none());
        migrations.lines.extend(gangs.map(|gang| Span::raw(lists::gang(gang))));
        let lately = lists::history(known, LATELY);
        Self {
            problems: problems(known),
            migrations,
            hosts: Section::new("Hosts", lists::hosts(known), "No host is known."),
            lately: Section::new("Lately", lately, "No migration has ended yet."),
        }
    }
}

/// Draws on a terminal, which may be too small for everything.
pub(super) fn draw(known: &Known, state: &State, area: Rect, buffer: &mut Buffer) {
    let running = known.running();
    let chosen = state.chosen(&running);
    let Sections { problems, migrations, hosts, lately } = Sections::of(known, chosen);
    let moving = migrations.height(area.width).min(area.height / 2);
    let has_plot = chosen.is_some() && area.height >= moving + PLOT + REST;
    let [of_problems, of_migrations, of_plot, of_hosts, of_lately] = Layout::vertical([
        Constraint::Length(height(&problems)),
        Constraint::Length(moving),
        Constraint::Length(if has_plot { PLOT } else { 0 }),
        Constraint::Max(hosts.height(area.width)),
        Constraint::Min(lately.height(area.width).min(area.height / 4)),
    ])
    .areas(area);
    put_all(&problems, of_problems, buffer);
    migrations.draw(of_migrations, buffer);
    if let (true, Some(chosen)) = (has_plot, chosen) {
        plot::draw(&running[chosen], of_plot, buffer);
    }
    hosts.draw(of_hosts, buffer);
    lately.draw(of_lately, buffer);
}

/// The height that [`draw_text`] needs with this width.
pub(super) fn height_of_text(known: &Known, width: u16) -> u16 {
    let Sections { problems, migrations, hosts, lately } = Sections::of(known, None);
    let sections = [&migrations, &hosts, &lately].map(|section| section.height(width));
    sections.into_iter().fold(height(&problems) + 2, u16::saturating_add)
}

/// Draws everything.
pub(super) fn draw_text(known: &Known, area: Rect, buffer: &mut Buffer) {
    let Sections { problems, migrations, hosts, lately } = Sections::of(known, None);
    let [top, of_problems, of_migrations, of_hosts, of_lately] = Layout::vertical(
        [
            2,
            height(&problems),
            migrations.height(area.width),
            hosts.height(area.width),
            lately.height(area.width),
        ]
        .map(Constraint::Length),
    )
    .areas(area);
    put(&Span::raw(figures(known)), top, buffer);
    put_all(&problems, of_problems, buffer);
    migrations.draw(of_migrations, buffer);
    hosts.draw(of_hosts, buffer);
    lately.draw(of_lately, buffer);
}
