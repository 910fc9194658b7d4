//! Comparing what is recorded with the kernel's mount table, when the store is opened.

use super::table::{self, MountTable};
use crate::store::db::{MOUNTS, Source as _};
use crate::store::error::Doing as _;
use crate::store::layout::names_in;
use crate::store::{Inner, MountRecord, StoreError};

/// What becomes of a recorded mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It is as recorded, or cannot be seen from here.
    Stays,
    /// It is there, and was not noted as made.
    IsThere,
    /// It is gone, and so is the use.
    Forgotten,
    /// It is gone; what was written to it is kept.
    Kept,
}

/// What a mount was found to be.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::struct_excessive_bools, reason = "each is one fact, and all of them are independent")]
struct Seen {
    /// It is in the mount table.
    in_table: bool,
    /// It was made in the mount namespace that the table is of.
    same_place: bool,
    /// The machine was not started anew since.
    same_boot: bool,
    /// Something was written to it.
    written: bool,
}

fn fate(mounted: bool, seen: Seen) -> Fate {
    match seen {
        Seen { in_table: true, .. } if mounted => Fate::Stays,
        Seen { in_table: true, .. } => Fate::IsThere,
        // It may be there, where this process cannot look.
        Seen { same_place: false, same_boot: true, .. } if mounted => Fate::Stays,
        Seen { written: true, .. } if mounted => Fate::Kept,
        Seen { written: true, .. } => Fate::Stays,
        Seen { .. } => Fate::Forgotten,
    }
}

impl Inner {
    /// Runs when the store is opened.
    pub(crate) fn recover_mounts(&self) -> Result<(), StoreError> {
        let doing = "compare mounts with the mount table";
        let recorded: Vec<MountRecord> = self.db.read(doing, |reader| reader.all(MOUNTS))?;
        let folders = names_in(&self.layout.mounts()).doing(doing)?;
        if recorded.is_empty() && folders.is_empty() {
            return Ok(());
        }
        let Ok(table) = MountTable::read() else {
            tracing::warn!("the mount table cannot be read, so all recorded mounts count as uses");
            return Ok(());
        };
        for mut mount in recorded.iter().cloned() {
            let folder = self.layout.mount(&mount.id);
            let seen = Seen {
                in_table: table.has(&folder, &mount.target),
                same_place: mount.seen_from == table::place(&*self.disk),
                same_boot: table::same_boot(&*self.disk, &mount),
                written: names_in(&folder.join("upper")).is_ok_and(|names| !names.is_empty()),
            };
            match fate(mount.mounted, seen) {
                Fate::Stays => {}
                Fate::Forgotten => self.forget_mount(&mount.id)?,
                changed @ (Fate::IsThere | Fate::Kept) => {
                    mount.mounted = changed == Fate::IsThere;
                    self.db.write(doing, |writer| Ok(writer.put(MOUNTS, &mount.id, &mount)?))?;
                }
            }
        }
        for id in folders {
            let folder = self.layout.mounts().join(&id);
            if !recorded.iter().any(|mount| mount.id == id) && !table.has_folder(&folder) {
                self.discard(&folder).doing(doing)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_a_use_until_it_is_surely_gone() {
        let here = Seen { in_table: true, same_place: true, same_boot: true, written: false };
        let gone = Seen { in_table: false, ..here };
        assert_eq!(fate(true, here), Fate::Stays);
        assert_eq!(fate(false, here), Fate::IsThere, "it died between mounting and noting");
        assert_eq!(fate(true, gone), Fate::Forgotten);
        assert_eq!(fate(false, gone), Fate::Forgotten, "it died before mounting");
        assert_eq!(fate(true, Seen { same_place: false, ..gone }), Fate::Stays, "another namespace");
        let rebooted = Seen { same_place: false, same_boot: false, ..gone };
        assert_eq!(fate(true, rebooted), Fate::Forgotten);
        assert_eq!(fate(true, Seen { written: true, ..rebooted }), Fate::Kept);
        assert_eq!(fate(false, Seen { written: true, ..rebooted }), Fate::Stays, "still kept");
    }
}
