//! A table with a caption for screen readers, which scrolls separately if it is wider than
//! the page.

use maud::{Markup, html};

/// A column with its heading.
#[derive(Clone, Copy)]
pub(super) enum Column {
    Text(&'static str),
    Number(&'static str),
    /// As wide as the page permits.
    Wide(&'static str),
    /// Links and buttons.
    Actions,
}

impl Column {
    fn head(self) -> Markup {
        match self {
            Self::Text(name) => html! { th scope="col" { (name) } },
            Self::Number(name) => html! { th.n scope="col" { (name) } },
            Self::Wide(name) => html! { th.wide scope="col" { (name) } },
            Self::Actions => html! { th scope="col" { span.hidden { "Actions" } } },
        }
    }
}

/// A table whose `rows` have a cell for each column.
pub(super) fn table(
    caption: &str,
    columns: impl IntoIterator<Item = Column>,
    rows: impl Iterator<Item = Markup>,
) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label=(caption) {
            table {
                caption.hidden { (caption) }
                thead { tr { @for column in columns { (column.head()) } } }
                tbody { @for row in rows { (row) } }
            }
        }
    }
}
