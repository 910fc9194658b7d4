//! Compares the recorded mounts with the kernel's mount table when the store is opened.

use super::other_namespaces::MountLocation;
use super::table::{self, MountTable};
use crate::store::db::{DbRead as _, MOUNTS};
use crate::store::error::StoreErrorContext as _;
use crate::store::layout::names_in;
use crate::store::{MountRecord, OpenStore, StoreError};

/// Treatment of a recorded mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MountRecovery {
    /// It is as recorded, or cannot be seen from here.
    Retain,
    /// It is there, and was not noted as made.
    MarkMounted,
    /// It is gone, and so is the use.
    Forget,
    /// It is gone; what was written to it is kept.
    KeepWrites,
}

/// Evidence about a recorded mount.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::struct_excessive_bools, reason = "each is one fact, and all of them are independent")]
struct MountEvidence {
    /// It is in the mount table.
    in_table: bool,
    /// Another mount namespace has it, or may have it.
    elsewhere: bool,
    /// Something was written to it.
    written: bool,
}

fn decide_recovery(mounted: bool, seen: MountEvidence) -> MountRecovery {
    match seen {
        MountEvidence { in_table: true, .. } if mounted => MountRecovery::Retain,
        MountEvidence { in_table: true, .. } => MountRecovery::MarkMounted,
        // It may be there, where this process cannot look.
        MountEvidence { elsewhere: true, .. } if mounted => MountRecovery::Retain,
        MountEvidence { written: true, .. } if mounted => MountRecovery::KeepWrites,
        MountEvidence { written: true, .. } => MountRecovery::Retain,
        MountEvidence { .. } => MountRecovery::Forget,
    }
}

impl OpenStore {
    /// Runs when the store is opened.
    pub(crate) fn recover_mounts(&self) -> Result<(), StoreError> {
        let doing = "compare mounts with the mount table";
        let recorded: Vec<MountRecord> = self.db.read(doing, |reader| reader.all(MOUNTS))?;
        let dirs = names_in(&self.layout.mounts()).context(doing)?;
        if recorded.is_empty() && dirs.is_empty() {
            return self.release_layers();
        }
        let Ok(table) = MountTable::read() else {
            tracing::warn!("cannot read the mount table; all recorded mounts count as in use");
            return Ok(());
        };
        for mut mount in recorded.iter().cloned() {
            let dir = self.layout.mount(&mount.id);
            let in_table = table.has(&dir, &mount.target);
            let is_own = mount.seen_from == table::namespace_id(&*self.disk);
            let seen = MountEvidence {
                in_table,
                elsewhere: !in_table
                    && table::same_boot(&*self.disk, &mount)
                    // Only `umount` inspects the namespaces of mounts that were made in another one.
                    && (!is_own || self.find_mount(&mount) != MountLocation::Nowhere),
                written: names_in(&dir.join("upper")).is_ok_and(|names| !names.is_empty()),
            };
            match decide_recovery(mount.mounted, seen) {
                MountRecovery::Retain => {}
                MountRecovery::Forget => self.forget_mount(&mount.id)?,
                changed @ (MountRecovery::MarkMounted | MountRecovery::KeepWrites) => {
                    mount.mounted = changed == MountRecovery::MarkMounted;
                    self.db.write(doing, |writer| Ok(writer.put(MOUNTS, &mount.id, &mount)?))?;
                }
            }
        }
        for id in dirs {
            let dir = self.layout.mounts().join(&id);
            // What was written to a mount whose record is lost is the user's.
            let written = names_in(&dir.join("upper")).is_ok_and(|names| !names.is_empty());
            if !recorded.iter().any(|mount| mount.id == id) && !table.has_dir(&dir) && !written {
                self.discard(&dir).context(doing)?;
            }
        }
        self.release_layers()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_a_use_until_its_end_is_certain() {
        let here = MountEvidence { in_table: true, elsewhere: false, written: false };
        let ended = MountEvidence { in_table: false, ..here };
        assert_eq!(decide_recovery(true, here), MountRecovery::Retain);
        assert_eq!(
            decide_recovery(false, here),
            MountRecovery::MarkMounted,
            "it died between mounting and noting"
        );
        assert_eq!(decide_recovery(true, ended), MountRecovery::Forget);
        assert_eq!(decide_recovery(false, ended), MountRecovery::Forget, "it died before mounting");
        assert_eq!(
            decide_recovery(true, MountEvidence { elsewhere: true, ..ended }),
            MountRecovery::Retain,
            "another namespace"
        );
        assert_eq!(
            decide_recovery(true, MountEvidence { written: true, ..ended }),
            MountRecovery::KeepWrites
        );
        assert_eq!(
            decide_recovery(false, MountEvidence { written: true, ..ended }),
            MountRecovery::Retain,
            "still kept"
        );
    }
}
