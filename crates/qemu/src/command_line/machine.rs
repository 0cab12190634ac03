//! The accelerator, CPU model and memory on a command line.

use std::path::Path;

use serde_json::Value;

use super::guest_port::value;
use super::{CommandLine, RamFile};

/// A memory backend on a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Its id.
    pub id: String,
    /// Its type, such as `memory-backend-file`.
    pub kind: String,
    /// The file or directory that it maps, if that has a name.
    pub path: Option<String>,
    /// Whether writes to it reach the file.
    pub share: bool,
    /// Whether it has huge pages without a named file.
    pub hugetlb: bool,
    /// The size of its huge pages, if given.
    pub huge_page_bytes: Option<u64>,
    /// Whether all of its huge pages are reserved when QEMU starts.
    pub reserve: bool,
    /// The kind of the file that it maps if the agent makes that.
    pub(crate) made: Option<RamFile>,
}

impl CommandLine {
    /// The accelerator in the form of QEMU's `accel=`: `kvm`, `tcg`, or several
    /// separated by colons, of which QEMU takes the first that works.
    #[must_use]
    pub fn accelerator(&self) -> String {
        let by_option: Vec<String> = self
            .arguments("accel")
            .filter_map(|argument| {
                let first = pieces(argument).into_iter().next()?;
                Some(first.strip_prefix("accel=").unwrap_or(&first).to_owned())
            })
            .collect();
        if !by_option.is_empty() {
            return by_option.join(":");
        }
        let by_machine = self.arguments("machine").flat_map(pieces);
        if let Some(named) =
            by_machine.filter_map(|piece| Some(piece.strip_prefix("accel=")?.to_owned())).last()
        {
            return named;
        }
        if self.has("enable-kvm") {
            return "kvm".to_owned();
        }
        let program = Path::new(self.program()).file_name().unwrap_or_default();
        let kvm = program.to_string_lossy().ends_with("kvm");
        if kvm { "kvm:tcg" } else { "tcg" }.to_owned()
    }

    /// The model that `-cpu` names, without its features; `None` for QEMU's
    /// default.
    #[must_use]
    pub fn cpu_model(&self) -> Option<String> {
        pieces(self.arguments("cpu").last()?).into_iter().next()
    }

    /// The directory or file of `-mem-path`, which holds the base RAM.
    #[must_use]
    pub fn memory_path(&self) -> Option<&str> {
        self.arguments("mem-path").last()
    }

    /// Its memory backends.
    #[must_use]
    pub fn backends(&self) -> Vec<Backend> {
        self.arguments("object").filter_map(backend).collect()
    }
}

pub(super) fn backend(argument: &str) -> Option<Backend> {
    let value = |key: &str| value(argument, key);
    let kind = match argument.trim_start().starts_with('{') {
        true => value("qom-type")?,
        false => pieces(argument).first()?.trim_start_matches("qom-type=").to_owned(),
    };
    if !kind.starts_with("memory-backend-") {
        return None;
    }
    let is_on =
        |key: &str| value(key).is_some_and(|text| matches!(&*text, "on" | "true" | "yes" | "y"));
    let is_off =
        |key: &str| value(key).is_some_and(|text| matches!(&*text, "off" | "false" | "no" | "n"));
    let path = value("mem-path");
    let made = path.as_deref().and_then(RamFile::at);
    let (hugetlb, huge_page_bytes) = match made {
        Some(RamFile::Huge { page_bytes }) => (true, page_bytes),
        _ => (is_on("hugetlb"), value("hugetlbsize").and_then(|text| size(&text))),
    };
    Some(Backend {
        id: value("id")?,
        kind,
        path: path.filter(|_| made.is_none()),
        share: is_on("share"),
        hugetlb,
        huge_page_bytes,
        reserve: !is_off("reserve"),
        made,
    })
}

/// `2M`, `1G`, or plain bytes.
fn size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match text.get(digits.len()..)?.chars().next().map(|unit| unit.to_ascii_uppercase())
    {
        None | Some('B') => 0,
        Some('K') => 10,
        Some('M') => 20,
        Some('G') => 30,
        Some('T') => 40,
        Some(_) => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// An argument with these properties in place of those.
pub(super) fn with_properties(argument: &str, replaced: &[&str], put: &[(&str, Value)]) -> String {
    if let Ok(Value::Object(mut json)) = serde_json::from_str(argument) {
        json.retain(|key, _| !replaced.contains(&key.as_str()));
        json.extend(put.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        return Value::Object(json).to_string();
    }
    let pieces = pieces(argument);
    // An empty one, as after a comma at the end, would make two commas, which are none.
    let kept = pieces.iter().filter(|piece| !piece.is_empty() && !replaced.contains(&key(piece)));
    let mut words: Vec<String> = kept.map(|piece| piece.replace(',', ",,")).collect();
    words.extend(put.iter().map(|(key, value)| match value {
        Value::String(text) => format!("{key}={}", text.replace(',', ",,")),
        Value::Bool(on) => format!("{key}={}", if *on { "on" } else { "off" }),
        other => format!("{key}={other}"),
    }));
    words.join(",")
}

/// The name of a property in a piece of an argument.
pub(super) fn key(piece: &str) -> &str {
    piece.split('=').next().unwrap_or_default()
}

/// The pieces of `a,b=c`, where `,,` is a comma within a piece.
pub(crate) fn pieces(argument: &str) -> Vec<String> {
    let mut pieces = Vec::new();
    let mut piece = String::new();
    let mut letters = argument.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter == ',' && letters.next_if_eq(&',').is_none() {
            pieces.push(std::mem::take(&mut piece));
        } else {
            piece.push(letter);
        }
    }
    pieces.push(piece);
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> CommandLine {
        CommandLine::parse(&line.split_whitespace().collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn the_accelerator_is_the_one_that_qemu_takes() {
        for (line, accelerator) in [
            ("qemu-system-x86_64", "tcg"),
            ("/usr/bin/kvm", "kvm:tcg"),
            ("qemu -enable-kvm", "kvm"),
            ("qemu -accel kvm,kernel-irqchip=split", "kvm"),
            ("qemu -accel kvm -accel accel=tcg,thread=multi", "kvm:tcg"),
            ("qemu -M q35,accel=kvm:tcg", "kvm:tcg"),
            ("qemu -machine q35 -machine accel=tcg,type=pc", "tcg"),
        ] {
            assert_eq!(parse(line).accelerator(), accelerator, "{line}");
        }
    }

    #[test]
    fn the_cpu_model_is_without_its_features() {
        for (line, model) in [
            ("qemu", None),
            ("qemu -cpu host", Some("host")),
            ("qemu -cpu qemu64 -cpu Haswell,+avx2,-hle", Some("Haswell")),
        ] {
            assert_eq!(parse(line).cpu_model().as_deref(), model, "{line}");
        }
    }

    #[test]
    fn memory_backends_are_found_in_both_ways_of_writing() {
        let line = parse(
            "qemu -mem-path /hp -object rng-random,id=r \
             -object memory-backend-file,id=a,mem-path=/dev/hugepages/x,,y,share=on,size=1G \
             -object {\"qom-type\":\"memory-backend-memfd\",\"id\":\"b\",\"hugetlb\":true,\
             \"hugetlbsize\":1073741824,\"reserve\":false} \
             -object memory-backend-memfd,id=c,hugetlb=on,hugetlbsize=2M,reserve=off",
        );
        assert_eq!(line.memory_path(), Some("/hp"));
        let found = line.backends();
        assert_eq!(found.iter().map(|one| one.id.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(found[0].path.as_deref(), Some("/dev/hugepages/x,y"));
        assert_eq!(
            [&found[0].kind, &found[1].kind],
            ["memory-backend-file", "memory-backend-memfd"]
        );
        assert!(found[0].share && !found[0].hugetlb);
        let huge: Vec<_> = found.iter().map(|one| one.huge_page_bytes).collect();
        assert_eq!(huge, [None, Some(1 << 30), Some(2 << 20)]);
        assert!(found[1].hugetlb && found[2].hugetlb);
        assert!(found[0].reserve && !found[1].reserve && !found[2].reserve);
        let file = "memory-backend-file,id=a,mem-path=/ram,share=";
        for (on, share) in [("on", true), ("yes", true), ("y", true), ("n", false)] {
            assert_eq!(backend(&format!("{file}{on}")).unwrap().share, share, "{on}");
        }
    }

    #[test]
    fn sizes_are_parsed_or_refused() {
        assert_eq!(
            (size("1G"), size("4096"), size("2mB")),
            (Some(1 << 30), Some(4096), Some(2 << 20))
        );
        for text in ["", "G", "1X", "99999999999T"] {
            assert_eq!(size(text), None, "{text}");
        }
    }
}
