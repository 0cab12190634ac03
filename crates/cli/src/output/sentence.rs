//! Texts from elsewhere, formatted as sentences.

/// The text with a full stop, unless it ends like a sentence.
pub(crate) fn full_stop(text: &str) -> String {
    let text = text.trim();
    if text.ends_with(['.', '!', '?', ':']) { text.to_owned() } else { format!("{text}.") }
}
