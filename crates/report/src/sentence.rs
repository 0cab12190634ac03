//! Texts from elsewhere, formatted as sentences.

/// The text with a full stop, unless it ends like a sentence.
#[must_use]
pub fn full_stop(text: &str) -> String {
    let text = text.trim();
    if text.ends_with(['.', '!', '?', ':']) { text.to_owned() } else { format!("{text}.") }
}
