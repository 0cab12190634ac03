//! Tables with columns as wide as their contents, cut to the width of the screen.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Span;

use report::Tone;

/// Blanks between two columns, and before a line that belongs to the row above it.
const GAP: u16 = 2;
/// The end of a text that is cut.
const ELLIPSIS: &str = "…";

#[derive(Clone, Copy)]
pub(super) enum Column {
    Text(&'static str),
    Number(&'static str),
    /// Only on wide terminals.
    Extra(&'static str),
    /// A text of any length, in the last column, or on a line below its row.
    Reason,
}

/// The width from which [`Column::Extra`] is shown.
const WIDE: u16 = 100;
/// With less for [`Column::Reason`], what doesn't fit there has its own lines.
const REASON_MIN: u16 = 40;
/// On a screen that is too narrow for all columns, no text takes more than this part of it.
const TEXT_PART: u16 = 3;

impl Column {
    fn is_shown(self, width: u16) -> bool {
        width >= WIDE || !matches!(self, Self::Extra(_))
    }

    fn head(self) -> &'static str {
        match self {
            Self::Text(head) | Self::Number(head) | Self::Extra(head) => head,
            Self::Reason => "",
        }
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

/// The columns of a table on a screen.
struct Shape {
    /// Those that are shown, by number, with their widths.
    columns: Vec<(usize, u16)>,
    /// The column whose texts have their own lines.
    below: Option<usize>,
}

impl Grid {
    pub(super) fn new(columns: &[Column], rows: Vec<Vec<Span<'static>>>) -> Self {
        Self { columns: columns.to_vec(), rows, chosen: None, above: 0 }
    }

    /// The table's height on a screen of this width, including its heading.
    pub(super) fn height(&self, width: u16) -> u16 {
        let shape = self.shape(width);
        let rows = self.rows.iter().map(|row| shape.height(row));
        rows.fold(1, u16::saturating_add)
    }

    fn shape(&self, width: u16) -> Shape {
        let shown = (0..self.columns.len()).filter(|at| self.columns[*at].is_shown(width));
        let mut columns: Vec<(usize, u16)> = shown.map(|at| (at, self.natural(at))).collect();
        let reason = columns.pop_if(|(at, _)| matches!(self.columns[*at], Column::Reason));
        let taken = |columns: &[(usize, u16)]| {
            let widths = columns.iter().map(|(_, width)| width.saturating_add(GAP));
            widths.fold(0, u16::saturating_add)
        };
        if taken(&columns) > width.saturating_add(GAP) {
            for (at, wide) in &mut columns {
                if matches!(self.columns[*at], Column::Text(_)) {
                    *wide = (*wide).min(width / TEXT_PART);
                }
            }
        }
        let Some((at, natural)) = reason else { return Shape { columns, below: None } };
        let left = width.saturating_sub(taken(&columns));
        if natural > left && left < REASON_MIN {
            return Shape { columns, below: Some(at) };
        }
        columns.push((at, natural.min(left)));
        Shape { columns, below: None }
    }

    /// The width that a column needs.
    fn natural(&self, at: usize) -> u16 {
        let cells = self.rows.iter().map(|row| row[at].width());
        let width = cells.chain([Span::raw(self.columns[at].head()).width()]).max().unwrap_or(0);
        u16::try_from(width).unwrap_or(u16::MAX)
    }

    pub(super) fn draw(self, area: Rect, buffer: &mut Buffer) {
        let shape = self.shape(area.width);
        let heads: Vec<Span<'static>> =
            self.columns.iter().map(|column| Span::raw(column.head())).collect();
        let mut lines = area.rows();
        let Some(line) = lines.next() else { return };
        self.draw_row(&shape, &heads, line, buffer);
        buffer.set_style(line, Modifier::BOLD);
        for (at, row) in self.rows.iter().enumerate().skip(self.first(&shape, area.height - 1)) {
            let Some(line) = lines.next() else { return };
            self.draw_row(&shape, row, line, buffer);
            if self.chosen == Some(at) {
                buffer.set_style(line, Modifier::REVERSED);
            }
            let Some(reason) = shape.below(row) else { continue };
            let Some(line) = lines.next() else { return };
            put(reason, behind(line, GAP), buffer);
        }
    }

    fn draw_row(&self, shape: &Shape, row: &[Span<'static>], line: Rect, buffer: &mut Buffer) {
        let mut from = 0;
        for (at, width) in &shape.columns {
            let cell = &row[*at];
            let indent = match self.columns[*at] {
                Column::Text(_) | Column::Reason => 0,
                Column::Number(_) | Column::Extra(_) => {
                    width.saturating_sub(u16::try_from(cell.width()).unwrap_or(u16::MAX))
                }
            };
            let mut place = behind(line, from);
            place.width = place.width.min(*width);
            put(cell, behind(place, indent), buffer);
            from = from.saturating_add(*width).saturating_add(GAP);
        }
    }

    /// The first row on a screen with this many lines: the one that was scrolled to, or one with
    /// which the chosen row is on the screen.
    fn first(&self, shape: &Shape, lines: u16) -> usize {
        let mut first = self.above.min(self.rows.len().saturating_sub(1));
        if let Some(chosen) = self.chosen {
            first = first.min(chosen);
            let height = |first: usize| {
                let rows = self.rows.iter().take(chosen + 1).skip(first);
                rows.map(|row| shape.height(row)).fold(0, u16::saturating_add)
            };
            while first < chosen && height(first) > lines {
                first += 1;
            }
        }
        first
    }
}

impl Shape {
    /// The text that has a line below its row.
    fn below<'r>(&self, row: &'r [Span<'static>]) -> Option<&'r Span<'static>> {
        self.below.map(|at| &row[at]).filter(|reason| reason.width() > 0)
    }

    fn height(&self, row: &[Span<'static>]) -> u16 {
        1 + u16::from(self.below(row).is_some())
    }
}

/// What is left of a line behind some columns.
fn behind(line: Rect, columns: u16) -> Rect {
    let columns = columns.min(line.width);
    Rect { x: line.x + columns, width: line.width - columns, ..line }
}

/// Draws a text on a line, and cuts it at the line's end.
pub(super) fn put(text: &Span<'_>, line: Rect, buffer: &mut Buffer) {
    if line.is_empty() {
        return;
    }
    let width = usize::from(line.width);
    if text.width() <= width {
        buffer.set_span(line.x, line.y, text, line.width);
        return;
    }
    let (end, y) = buffer.set_stringn(line.x, line.y, &text.content, width - 1, text.style);
    buffer.set_string(end, y, ELLIPSIS, text.style);
}

/// Draws texts on lines, one below the other.
pub(super) fn put_all(texts: &[Span<'_>], area: Rect, buffer: &mut Buffer) {
    texts.iter().zip(area.rows()).for_each(|(text, line)| put(text, line, buffer));
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

/// A text that says what is wrong.
pub(super) fn wrong(text: String) -> Span<'static> {
    Span::styled(text, Style::new().fg(Color::Red))
}

pub(super) fn or_dash(text: Option<String>) -> Span<'static> {
    Span::raw(text.unwrap_or_else(|| "—".to_owned()))
}
