//! Results of the field lab, each in a file of its own, so that a run goes on where the last one
//! has ended.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Row, Way};

/// What came of a row after so many moves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cell {
    /// What was tried: a result of something else doesn't count.
    pub key: String,
    /// Whether the VM lived on.
    pub lives: bool,
    /// Why it did not, or what is worth knowing.
    pub detail: String,
}

/// A failure after which its rows were tried once more, and may have lived.
#[derive(Serialize, Deserialize)]
struct Note {
    key: String,
    rows: String,
    why: String,
}

/// The file of a column's notes, one a line.
const NOTES: &str = "notes";

/// All results.
pub struct Results {
    dir: PathBuf,
    key: String,
    /// The table's columns.
    ways: Vec<Way>,
    /// Of the hosts, if they have packages.
    root: Option<PathBuf>,
}

/// The part of a path for this.
fn plain(name: &str) -> String {
    let letter = |it: char| if it.is_ascii_alphanumeric() { it } else { '-' };
    name.chars().map(letter).collect()
}

impl Results {
    /// Those in a directory, of what the key says, and of VMs that move in these ways, between
    /// hosts with this root if there is one.
    #[must_use]
    pub fn new(dir: PathBuf, key: String, ways: Vec<Way>, root: Option<PathBuf>) -> Self {
        Self { dir, key, ways, root }
    }

    fn column(&self, way: Way, moves: u32) -> PathBuf {
        self.dir.join(format!("{}-{moves}", plain(&way.name())))
    }

    fn path(&self, way: Way, moves: u32, row: &Row) -> PathBuf {
        self.column(way, moves).join(format!("{}.json", plain(row.name)))
    }

    /// What is known, if it was tried.
    #[must_use]
    pub fn of(&self, way: Way, moves: u32, row: &Row) -> Option<Cell> {
        let text = fs::read_to_string(self.path(way, moves, row)).ok()?;
        let cell: Cell = serde_json::from_str(&text).ok()?;
        (cell.key == self.key).then_some(cell)
    }

    /// Whether a run tries a row: it has no result yet, or has failed.
    #[must_use]
    pub fn is_due(&self, way: Way, moves: u32, row: &Row) -> bool {
        row.is_tried(way) && self.of(way, moves, row).is_none_or(|cell| !cell.lives)
    }

    /// How many of these rows are due.
    #[must_use]
    pub fn due(&self, rows: &[&Row], ways: &[Way], depths: &[u32]) -> usize {
        let mut due = 0;
        for &way in ways {
            for &moves in depths {
                due += rows.iter().filter(|row| self.is_due(way, moves, row)).count();
            }
        }
        due
    }

    /// Keeps a failure that its rows are not to blame for yet.
    ///
    /// # Panics
    /// If it can't be written.
    pub fn note(&self, way: Way, moves: u32, rows: &str, why: &str) {
        let dir = self.column(way, moves);
        fs::create_dir_all(&dir).unwrap();
        let note = Note { key: self.key.clone(), rows: rows.to_owned(), why: why.to_owned() };
        let line = format!("{}\n", serde_json::to_string(&note).unwrap());
        // VMs of several machines have a column at a time.
        let mut file = fs::File::options().create(true).append(true).open(dir.join(NOTES)).unwrap();
        file.write_all(line.as_bytes()).unwrap();
    }

    fn notes(&self, way: Way, moves: u32) -> Vec<Note> {
        let text = fs::read_to_string(self.column(way, moves).join(NOTES)).unwrap_or_default();
        let notes = text.lines().filter_map(|line| serde_json::from_str(line).ok());
        notes.filter(|note: &Note| note.key == self.key).collect()
    }

    /// Keeps a result. A run that ends meanwhile leaves none, or one that can't be read and so is
    /// none. A failure that it replaces is noted.
    ///
    /// # Panics
    /// If it can't be written.
    pub fn keep(&self, way: Way, moves: u32, row: &Row, lives: bool, detail: String) {
        if lives && let Some(Cell { lives: false, detail: why, .. }) = self.of(way, moves, row) {
            self.note(way, moves, row.name, &why);
        }
        let path = self.path(way, moves, row);
        fs::create_dir_all(path.parent().expect("it has one")).unwrap();
        let cell = Cell { key: self.key.clone(), lives, detail };
        fs::write(path, serde_json::to_vec_pretty(&cell).unwrap()).unwrap();
    }

    /// The table, in Markdown: a cell has what came of one, two and three moves. Below it is why rows
    /// failed, also those that lived when they were tried once more.
    #[must_use]
    pub fn table(&self, rows: &[Row], depths: &[u32]) -> String {
        let mut text = format!("{}:\n\n| after the move |", self.key);
        text.extend(self.ways.iter().map(|way| format!(" {} |", way.name())));
        text += "\n| --- |";
        text += &" --- |".repeat(self.ways.len());
        let mut failures = String::new();
        for row in rows {
            text += &format!("\n| {} |", row.name);
            for &way in &self.ways {
                text += &format!(" {} |", self.cell(row, way, depths));
                for moves in depths {
                    if let Some(Cell { lives: false, detail, .. }) = self.of(way, *moves, row) {
                        let why = detail.lines().next().unwrap_or_default();
                        failures += &format!("- {}, {}, {moves}: {why}\n", row.name, way.name());
                    }
                }
            }
        }
        for &way in &self.ways {
            for moves in depths {
                for Note { rows, why, .. } in self.notes(way, *moves) {
                    let why = why.lines().next().unwrap_or_default();
                    let name = way.name();
                    failures += &format!("- failed before: {rows}, {name}, {moves}: {why}\n");
                }
            }
        }
        format!("{text}\n\n{failures}")
    }

    fn cell(&self, row: &Row, way: Way, depths: &[u32]) -> String {
        if !row.is_tried(way) {
            return "no domain".to_owned();
        }
        if let Some(missing) = row.lacks(self.root.as_deref()) {
            return missing;
        }
        let known = |moves: &u32| self.of(way, *moves, row).map(|cell| cell.lives);
        let outcomes = [(Some(true), "lives"), (Some(false), "**fails**"), (None, "not run")];
        let parts = outcomes.into_iter().filter_map(|(outcome, shown)| {
            let of_it = depths.iter().filter(|moves| known(moves) == outcome);
            let of_it: Vec<String> = of_it.map(u32::to_string).collect();
            match of_it.len() {
                0 => None,
                all if all == depths.len() => Some(shown.to_owned()),
                _ => Some(format!("{}: {shown}", of_it.join(", "))),
            }
        });
        parts.collect::<Vec<_>>().join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ROWS, WAYS};
    use super::*;

    #[test]
    fn a_run_goes_on_where_the_last_one_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let of =
            |key: &str| Results::new(dir.path().to_owned(), key.to_owned(), WAYS.to_vec(), None);
        let results = of("this");
        let (way, row) = (WAYS[0], &ROWS[0]);
        assert!(results.of(way, 1, row).is_none());
        results.keep(way, 1, row, true, String::new());
        results.keep(way, 2, row, false, "silent\nlog".to_owned());
        assert!(results.of(way, 1, row).unwrap().lives);
        let table = results.table(&ROWS[..1], &[1, 2, 3]);
        let cells = "| serial console | 1: lives; 2: **fails**; 3: not run | not run |";
        assert!(table.contains(cells), "{table}");
        assert!(table.ends_with("- serial console, own, multifd, 2: silent\n"), "{table}");
        // A failure is tried again.
        assert_eq!(results.due(&[row], &[way], &[1, 2, 3]), 2);
        results.keep(way, 2, row, true, String::new());
        assert_eq!(results.due(&[row], &WAYS[..2], &[1, 2, 3]), 4);
        results.keep(way, 3, row, true, String::new());
        assert_eq!(results.due(&[row], &[way], &[1, 2, 3]), 0);
        let table = results.table(&ROWS[..1], &[1, 2, 3]);
        assert!(table.contains("| serial console | lives | not run |"), "{table}");
        let before = "\n- failed before: serial console, own, multifd, 2: silent\n";
        assert!(table.ends_with(before), "{table}");
        results.note(way, 3, "kexec", "a wrong page");
        let table = results.table(&ROWS[..1], &[1, 2, 3]);
        let before = "\n- failed before: kexec, own, multifd, 3: a wrong page\n";
        assert!(table.ends_with(before), "{table}");
        let domains = ROWS.iter().position(|row| row.machine.is_none()).unwrap();
        let table = results.table(&ROWS[domains..=domains], &[1]);
        let cells = "| no domain | no domain | not run | not run | no domain | no domain |";
        assert!(table.contains(cells), "{table}");
        assert_eq!(results.due(&[&ROWS[domains]], &WAYS, &[1]), 2);
        let others = of("other");
        assert!(others.of(way, 1, row).is_none());
        assert!(others.notes(way, 3).is_empty());
    }

    #[test]
    fn what_hosts_with_packages_lack_is_in_the_table() {
        let (dir, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let dir = dir.path().to_owned();
        // Two of agents' own, and a carried one.
        let ways = WAYS[..3].to_vec();
        let results = Results::new(dir, "this".to_owned(), ways, Some(root.path().to_owned()));
        let table = |row: &Row| {
            let row = ROWS.iter().position(|one| one.name == row.name).unwrap();
            results.table(&ROWS[row..=row], &[1])
        };
        let domain = ROWS.iter().find(|row| row.machine.is_none()).unwrap();
        let cells = "| no domain | no domain | no libvirt there |";
        assert!(table(domain).contains(cells), "{}", table(domain));
        let of_a_program = |row: &&Row| row.needs.is_some_and(|file| file.starts_with("/usr/"));
        let row = ROWS.iter().find(of_a_program).unwrap();
        let file = row.needs.unwrap();
        let lacks = format!("| no `{file}` there | no `{file}` there | no `{file}` there |");
        assert!(table(row).contains(&lacks), "{}", table(row));
        let there = root.path().join(file.trim_start_matches('/'));
        fs::create_dir_all(there.parent().unwrap()).unwrap();
        fs::write(there, "").unwrap();
        assert!(table(row).contains("| not run | not run | not run |"), "{}", table(row));
    }
}
