//! Reports as text and as an HTML page.

pub(crate) mod details;
#[cfg(test)]
pub(crate) mod example;
pub(crate) mod gang;
pub(crate) mod html;
mod more;
pub(crate) mod summary;
