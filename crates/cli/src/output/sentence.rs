//! Text of others, in sentences.

/// A text as a sentence.
pub(crate) fn full_stop(text: &str) -> String {
    let text = text.trim();
    if text.ends_with(['.', '!', '?', ':']) { text.to_owned() } else { format!("{text}.") }
}
