//! The names of pages wanted of a disk, by the reader's tokens.

use content::Name;

/// The names of items that have not ended. A token is free once its item has ended. So memory is
/// needed for the items wanted at one time, not for all that are ever read of a disk.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// By token. Names of free tokens have no meaning.
    names: Vec<Name>,
    free: Vec<u64>,
}

impl Names {
    /// Adds the name of a wanted item, and returns its token.
    pub(super) fn add(&mut self, name: Name) -> u64 {
        if let Some(token) = self.free.pop()
            && let Some(place) = self.place(token)
        {
            *place = name;
            return token;
        }
        self.names.push(name);
        self.names.len() as u64 - 1
    }

    /// An item has ended. To be called once for each.
    pub(super) fn take(&mut self, token: u64) -> Option<Name> {
        let name = *self.place(token)?;
        self.free.push(token);
        Some(name)
    }

    fn place(&mut self, token: u64) -> Option<&mut Name> {
        self.names.get_mut(usize::try_from(token).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use content::NAME_BYTES;

    use super::*;

    fn name(nth: u8) -> Name {
        Name([nth; NAME_BYTES])
    }

    #[test]
    fn names_take_memory_only_for_wanted_items() {
        let mut names = Names::default();
        let [one, other] = [1, 2].map(|nth| names.add(name(nth)));
        for nth in 3..200 {
            let third = names.add(name(nth));
            assert_eq!(names.take(third), Some(name(nth)));
        }
        assert_eq!((names.names.len(), names.free.len()), (3, 1));
        assert_eq!((names.take(other), names.take(one)), (Some(name(2)), Some(name(1))));
        assert_eq!(names.take(7), None);
    }
}
