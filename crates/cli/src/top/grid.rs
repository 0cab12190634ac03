//! Tables with columns as wide as their contents.

use ratatui::buffer::Buffer;
use ratatui::layout::{Alignment, Constraint, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Row, StatefulWidget, Table, TableState};

use crate::output::Tone;

/// Blanks between two columns.
const GAP: u16 = 2;

#[derive(Clone, Copy)]
pub(super) enum Column {
    Text(&'static str),
    Number(&'static str),
    /// Only on wide terminals.
    Extra(&'static str),
}

/// The width from which [`Column::Extra`] is shown.
const WIDE: u16 = 100;

impl Column {
    fn is_shown(self, width: u16) -> bool {
        width >= WIDE || !matches!(self, Self::Extra(_))
    }

    fn head(self) -> &'static str {
        match self {
            Self::Text(head) | Self::Number(head) | Self::Extra(head) => head,
        }
    }

    fn cell(self, span: Span<'static>) -> Line<'static> {
        let alignment = match self {
            Self::Text(_) => Alignment::Left,
            Self::Number(_) | Self::Extra(_) => Alignment::Right,
        };
        Line::from(span).alignment(alignment)
    }
}

/// A table with its heading.
pub(super) struct Grid {
    pub(super) columns: Vec<Column>,
    pub(super) rows: Vec<Vec<Span<'static>>>,
    /// The row that keys act on.
    pub(super) chosen: Option<usize>,
    /// The rows above the screen.
    pub(super) above: usize,
}

impl Grid {
    pub(super) fn new(columns: &[Column], rows: Vec<Vec<Span<'static>>>) -> Self {
        Self { columns: columns.to_vec(), rows, chosen: None, above: 0 }
    }

    /// The table's height, including its heading.
    pub(super) fn height(&self) -> u16 {
        u16::try_from(self.rows.len()).unwrap_or(u16::MAX).saturating_add(1)
    }

    pub(super) fn draw(self, area: Rect, buffer: &mut Buffer) {
        let Self { columns, rows, chosen, above } = self;
        let shown: Vec<usize> =
            (0..columns.len()).filter(|at| columns[*at].is_shown(area.width)).collect();
        let line = |cells: &[Span<'static>]| {
            Row::new(
                shown.iter().map(|at| columns[*at].cell(cells[*at].clone())).collect::<Vec<_>>(),
            )
        };
        let heads: Vec<Span<'static>> =
            columns.iter().map(|column| Span::raw(column.head())).collect();
        let widths = shown.iter().map(|at| {
            let cells = rows.iter().map(|row| row[*at].width());
            let width = cells.chain([heads[*at].width()]).max().unwrap_or(0);
            Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX))
        });
        let table = Table::new(rows.iter().map(|row| line(row)), widths)
            .header(line(&heads).style(Style::new().add_modifier(Modifier::BOLD)))
            .column_spacing(GAP)
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        let mut state = TableState::new().with_offset(above).with_selected(chosen);
        StatefulWidget::render(table, area, buffer, &mut state);
    }
}

/// A word in the colour of its tone.
pub(super) fn toned((word, tone): (&'static str, Tone)) -> Span<'static> {
    let colour = match tone {
        Tone::Good => Color::Green,
        Tone::Calm => Color::Cyan,
        Tone::Bad => Color::Red,
    };
    Span::styled(word, colour)
}

pub(super) fn or_dash(text: Option<String>) -> Span<'static> {
    Span::raw(text.unwrap_or_else(|| "—".to_owned()))
}
