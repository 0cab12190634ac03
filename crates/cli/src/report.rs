//! Reports: what they are to a person, as text and as a page.

pub(crate) mod details;
#[cfg(test)]
pub(crate) mod example;
pub(crate) mod gang;
pub(crate) mod html;
mod more;
pub(crate) mod summary;
