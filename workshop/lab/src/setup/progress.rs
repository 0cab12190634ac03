//! Reports what setup does.

pub(crate) fn say(text: &str) {
    eprintln!("setup: {text}");
}
