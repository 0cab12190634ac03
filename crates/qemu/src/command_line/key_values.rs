//! `a=1,b=x,,y,flag`: QEMU's way to write options.

/// Keys and values in their order. A comma in a value is written twice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KeyValues(Vec<(String, String)>);

impl KeyValues {
    /// Reads any text. A first value without key belongs to `implied`; later
    /// words without value are switches, `noX` being `X=off`.
    pub(super) fn parse(text: &str, implied: Option<&str>) -> Self {
        let mut pairs = Vec::new();
        for (nth, part) in split(text).into_iter().enumerate() {
            let pair = match (part.split_once('='), implied) {
                (Some((key, value)), _) => (key.to_owned(), value.to_owned()),
                (None, Some(key)) if nth == 0 => (key.to_owned(), part),
                (None, _) => match part.strip_prefix("no") {
                    Some(key) if !key.is_empty() => (key.to_owned(), "off".to_owned()),
                    _ => (part, "on".to_owned()),
                },
            };
            pairs.push(pair);
        }
        Self(pairs)
    }

    /// The last value of a key: it overrides earlier ones.
    pub(super) fn value(&self, key: &str) -> Option<&str> {
        self.0.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    pub(super) fn remove(&mut self, key: &str) {
        self.0.retain(|(name, _)| name != key);
    }

    pub(super) fn push(&mut self, key: &str, value: &str) {
        self.0.push((key.to_owned(), value.to_owned()));
    }

    /// Another's pairs after its own.
    pub(super) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// As QEMU reads it. The first pair's key is left out if it is `implied`.
    pub(super) fn text(&self, implied: &str) -> String {
        let mut text = String::new();
        for (nth, (key, value)) in self.0.iter().enumerate() {
            if nth > 0 {
                text.push(',');
            }
            if nth > 0 || key != implied {
                text.push_str(key);
                text.push('=');
            }
            text.push_str(&value.replace(',', ",,"));
        }
        text
    }
}

/// Parts between single commas, with double ones made single.
fn split(text: &str) -> Vec<String> {
    let mut parts = Vec::new();
    let mut part = String::new();
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter != ',' {
            part.push(letter);
        } else if letters.next_if_eq(&',').is_some() {
            part.push(',');
        } else {
            parts.push(std::mem::take(&mut part));
        }
    }
    if !part.is_empty() {
        parts.push(part);
    }
    parts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keys_switches_and_commas() {
        let read = KeyValues::parse("q35,accel=kvm,usb,nographics,x=a,,b,x=c,", Some("type"));
        let value = |key| read.value(key);
        assert_eq!(value("type"), Some("q35"));
        assert_eq!(value("usb"), Some("on"));
        assert_eq!(value("graphics"), Some("off"));
        assert_eq!(value("x"), Some("c"));
        assert_eq!(read.text("type"), "q35,accel=kvm,usb=on,graphics=off,x=a,,b,x=c");
        assert_eq!(KeyValues::parse("", Some("type")), KeyValues::default());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(
            pairs in prop::collection::vec(("[a-z][a-z-]{0,8}", "[a-z0-9,=/ ]{0,12}"), 0..8)
        ) {
            let written = KeyValues(pairs);
            prop_assert_eq!(&KeyValues::parse(&written.text("-"), None), &written);
        }

        #[test]
        fn any_text_is_read(text in ".{0,60}") {
            let read = KeyValues::parse(&text, Some("type"));
            let _ = read.text("type");
        }
    }
}
