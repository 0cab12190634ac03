//! Which disks move: the operator's choice, applied to a VM.

use std::convert::Infallible;
use std::str::FromStr;

use super::Disk;
use super::list::Stays;
use crate::shape::Shape;

/// Which disks an operator wants moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WhichDisks {
    /// All that are on this host.
    All,
    /// Those of these names.
    Named(Vec<String>),
}

impl FromStr for WhichDisks {
    type Err = Infallible;

    /// Parses `all|NAME,...`.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        if text == "all" {
            return Ok(Self::All);
        }
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        Ok(Self::Named(names.map(str::to_owned).collect()))
    }
}

/// The disks that move, and those that don't.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Those that move.
    pub moving: Vec<Disk>,
    /// The names of the others, and why each stays.
    pub staying: Vec<(String, String)>,
}

/// Why disks can't be moved as the operator chose.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChoiceError {
    /// No disk has that name.
    #[error("the VM has no disk `{name}`; it has {there}")]
    Unknown {
        /// The name.
        name: String,
        /// The VM's disks.
        there: String,
    },
    /// Several disks have that name.
    #[error("`{name}` is the name of several disks of the VM: {there}")]
    Ambiguous {
        /// The name.
        name: String,
        /// The disks.
        there: String,
    },
    /// The disk can't move.
    #[error("disk `{name}` can't move: {reason}")]
    Refused {
        /// Which.
        name: String,
        /// Why.
        reason: String,
    },
}

/// Applies the operator's choice.
///
/// # Errors
/// If a name is unknown or ambiguous, or a chosen disk can't move. `all` does not
/// choose disks that have nothing to move.
pub fn choose(disks: &[Disk], which: &WhichDisks) -> Result<Choice, ChoiceError> {
    let named: Vec<&Disk> = match which {
        WhichDisks::All => Vec::new(),
        WhichDisks::Named(names) => {
            names.iter().map(|name| find(disks, name)).collect::<Result<_, _>>()?
        }
    };
    let mut choice = Choice::default();
    for disk in disks {
        let is_named = named.iter().any(|one| one.name == disk.name);
        match (&disk.stays, which) {
            (None, WhichDisks::All) => choice.moving.push(disk.clone()),
            (None, WhichDisks::Named(_)) if is_named => choice.moving.push(disk.clone()),
            (Some(Stays::Refused(reason)), WhichDisks::All) => return Err(refused(disk, reason)),
            (Some(stays), WhichDisks::Named(_)) if is_named => {
                return Err(refused(disk, stays.reason()));
            }
            (Some(stays), _) => {
                choice.staying.push((disk.name.clone(), stays.reason().to_owned()));
            }
            (None, WhichDisks::Named(_)) => {
                choice.staying.push((disk.name.clone(), "it was not named".to_owned()));
            }
        }
    }
    Ok(choice)
}

fn find<'d>(disks: &'d [Disk], name: &str) -> Result<&'d Disk, ChoiceError> {
    if let Some(disk) = disks.iter().find(|disk| disk.name == name) {
        return Ok(disk);
    }
    let also: Vec<&Disk> =
        disks.iter().filter(|disk| disk.other_names.iter().any(|other| other == name)).collect();
    match also.as_slice() {
        [disk] => Ok(disk),
        [] => Err(ChoiceError::Unknown { name: name.to_owned(), there: shown(disks.iter()) }),
        several => Err(ChoiceError::Ambiguous {
            name: name.to_owned(),
            there: shown(several.iter().copied()),
        }),
    }
}

fn refused(disk: &Disk, reason: &str) -> ChoiceError {
    ChoiceError::Refused { name: disk.name.clone(), reason: reason.to_owned() }
}

fn shown<'d>(disks: impl Iterator<Item = &'d Disk>) -> String {
    let names: Vec<String> = disks
        .map(|disk| {
            if disk.other_names.is_empty() {
                return format!("`{}`", disk.name);
            }
            format!("`{}` (or {})", disk.name, disk.other_names.join(", "))
        })
        .collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// A VM's shape as the destination has to match it when `moving` disks move:
/// without the images that need not be shared, and each of those disks as one
/// image, without backing files.
#[must_use]
pub fn without_moving(shape: &Shape, moving: &[Disk]) -> Shape {
    let mut shape = shape.clone();
    let moves = |name: &str| moving.iter().any(|disk| disk.name == name);
    for drive in &mut shape.drives {
        if let Some(medium) = drive.medium.as_mut().filter(|_| moves(&drive.name)) {
            medium.files.truncate(1);
        }
    }
    let moved =
        |file: &String| moving.iter().any(|disk| disk.file == *file || disk.backing.contains(file));
    // A backing file may be behind a disk that stays, too.
    let staying: Vec<String> = shape
        .drives
        .iter()
        .filter(|drive| !moves(&drive.name))
        .filter_map(|drive| drive.medium.as_ref())
        .flat_map(|medium| medium.files.clone())
        .collect();
    shape.images.retain(|image| !moved(&image.file) || staying.contains(&image.file));
    shape
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::{Drive, Image, Medium};

    fn disk(name: &str, others: &[&str], stays: Option<Stays>) -> Disk {
        Disk {
            name: name.to_owned(),
            other_names: others.iter().map(|&name| name.to_owned()).collect(),
            stays,
            ..Disk::default()
        }
    }

    fn vm() -> Vec<Disk> {
        let by_nature = Some(Stays::ByNature("read-only".to_owned()));
        let refused = Some(Stays::Refused("encrypted".to_owned()));
        vec![
            disk("a", &["disk0", "x"], None),
            disk("b", &["x"], None),
            disk("cd", &[], by_nature),
            disk("e", &[], refused),
        ]
    }

    fn chosen(disks: &[Disk], text: &str) -> Result<Vec<String>, String> {
        let choice = choose(disks, &text.parse().unwrap()).map_err(|error| error.to_string())?;
        assert_eq!(choice.moving.len() + choice.staying.len(), disks.len());
        Ok(choice.moving.into_iter().map(|disk| disk.name).collect())
    }

    #[test]
    fn names_choose_disks_or_are_refused() {
        let vm = vm();
        let table: [(&str, Result<&[&str], &str>); 8] = [
            ("a", Ok(&["a"])),
            ("b, disk0,a", Ok(&["a", "b"])),
            ("", Ok(&[])),
            ("c", Err("the VM has no disk `c`; it has `a` (or disk0, x), `b` (or x), `cd`, `e`")),
            ("x", Err("`x` is the name of several disks of the VM: `a` (or disk0, x), `b` (or x)")),
            ("cd", Err("disk `cd` can't move: read-only")),
            ("e", Err("disk `e` can't move: encrypted")),
            ("all", Err("disk `e` can't move: encrypted")),
        ];
        for (text, expected) in table {
            let expected = expected
                .map(|names| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>())
                .map_err(str::to_owned);
            assert_eq!(chosen(&vm, text), expected, "{text}");
        }
        assert_eq!(chosen(&vm[..3], "all").unwrap(), ["a", "b"]);
        assert!(chosen(&[], "a").unwrap_err().ends_with("it has none"));
    }

    #[test]
    fn moving_disks_need_not_be_shared_and_have_no_backing_files() {
        let medium = |files: &[&str]| Medium {
            driver: "qcow2".to_owned(),
            files: files.iter().map(|&file| file.to_owned()).collect(),
            read_only: false,
            bytes: 1,
        };
        let drive = |name: &str, files: &[&str]| Drive {
            name: name.to_owned(),
            removable: false,
            medium: Some(medium(files)),
        };
        let image = |file: &str| Image {
            driver: "file".to_owned(),
            file: file.to_owned(),
            read_only: false,
            bytes: 0,
        };
        let shape = Shape {
            drives: vec![drive("a", &["top", "mid", "base"]), drive("b", &["own", "base"])],
            images: ["base", "mid", "own", "top"].map(image).to_vec(),
            ..Shape::default()
        };
        let moving = Disk {
            file: "top".to_owned(),
            backing: vec!["mid".to_owned(), "base".to_owned()],
            ..disk("a", &[], None)
        };
        let there = without_moving(&shape, &[moving]);
        let files: Vec<_> = there.images.iter().map(|image| image.file.as_str()).collect();
        assert_eq!(files, ["base", "own"]);
        assert_eq!(there.drives[0].medium.as_ref().unwrap().files, ["top"]);
        assert_eq!(there.drives[1].medium.as_ref().unwrap().files, ["own", "base"]);
        assert_eq!(without_moving(&shape, &[]), shape);
    }
}
