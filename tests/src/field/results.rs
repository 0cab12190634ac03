//! Results of the field lab, each in a file of its own, so that a run goes on where the last one
//! has ended.

use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Row, WAYS, Way};

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

/// All results.
pub struct Results {
    dir: PathBuf,
    key: String,
}

/// The part of a path for this.
fn plain(name: &str) -> String {
    let letter = |it: char| if it.is_ascii_alphanumeric() { it } else { '-' };
    name.chars().map(letter).collect()
}

impl Results {
    /// Those in a directory, of what the key says.
    #[must_use]
    pub fn new(dir: PathBuf, key: String) -> Self {
        Self { dir, key }
    }

    fn path(&self, way: Way, moves: u32, row: &Row) -> PathBuf {
        let column = format!("{}-{moves}", plain(&way.name()));
        self.dir.join(column).join(format!("{}.json", plain(row.name)))
    }

    /// What is known, if it was tried.
    #[must_use]
    pub fn of(&self, way: Way, moves: u32, row: &Row) -> Option<Cell> {
        let text = fs::read_to_string(self.path(way, moves, row)).ok()?;
        let cell: Cell = serde_json::from_str(&text).ok()?;
        (cell.key == self.key).then_some(cell)
    }

    /// Keeps a result.
    ///
    /// # Panics
    /// If it can't be written.
    pub fn keep(&self, way: Way, moves: u32, row: &Row, lives: bool, detail: String) {
        let path = self.path(way, moves, row);
        fs::create_dir_all(path.parent().expect("it has one")).unwrap();
        let cell = Cell { key: self.key.clone(), lives, detail };
        fs::write(path, serde_json::to_vec_pretty(&cell).unwrap()).unwrap();
    }

    /// The table, in Markdown: a cell has what came of one, two and three moves.
    #[must_use]
    pub fn table(&self, rows: &[&Row], depths: &[u32]) -> String {
        let mut text = format!("{}\n\n| after the move |", self.key);
        text.extend(WAYS.map(|way| format!(" {} |", way.name())));
        text += "\n| --- |";
        text += &" --- |".repeat(WAYS.len());
        let mut failures = String::new();
        for row in rows {
            text += &format!("\n| {} |", row.name);
            for way in WAYS {
                let cells = depths.iter().map(|moves| (*moves, self.of(way, *moves, row)));
                let (mut shown, mut lived) = (Vec::new(), 0);
                for (moves, cell) in cells {
                    match cell {
                        Some(cell) if cell.lives => lived += 1,
                        Some(cell) => {
                            shown.push(format!("{moves}: **fails**"));
                            let column = way.name();
                            let why = cell.detail.lines().next().unwrap_or_default().to_owned();
                            failures += &format!("- {}, {column}, {moves}: {why}\n", row.name);
                        }
                        None => shown.push(format!("{moves}: not run")),
                    }
                }
                let lived =
                    if lived == depths.len() { "lives".to_owned() } else { shown.join(", ") };
                text += &format!(" {lived} |");
            }
        }
        format!("{text}\n\n{failures}")
    }
}

#[cfg(test)]
mod tests {
    use super::super::ROWS;
    use super::*;

    #[test]
    fn a_run_goes_on_where_the_last_one_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let results = Results::new(dir.path().to_owned(), "this".to_owned());
        let (way, row) = (WAYS[0], &ROWS[0]);
        assert!(results.of(way, 1, row).is_none());
        results.keep(way, 1, row, true, String::new());
        results.keep(way, 2, row, false, "silent\nlog".to_owned());
        assert!(results.of(way, 1, row).unwrap().lives);
        let table = results.table(&[row], &[1, 2, 3]);
        assert!(table.contains("| serial console | 2: **fails**, 3: not run |"), "{table}");
        assert!(table.ends_with("- serial console, own, multifd, 2: silent\n"), "{table}");
        let others = Results::new(dir.path().to_owned(), "other".to_owned());
        assert!(others.of(way, 1, row).is_none());
    }
}
