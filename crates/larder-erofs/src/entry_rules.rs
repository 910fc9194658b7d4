//! Rules of the content of an entry of a layer. They are applied before anything of an entry is written, so that a
//! mount shows what was written: nothing is left to a kernel that would fold, cut or refuse it.
//!
//! | part of an entry | kept | left out, and counted | rejected |
//! |---|---|---|---|
//! | name | up to 255 bytes | | longer ones, zero bytes |
//! | directory path, links resolved | up to 4,096 bytes | | longer ones |
//! | text of a symbolic link | 1 to 4,095 bytes | | others, zero bytes |
//! | owner, group | up to 4294967294 | | 4294967295 |
//! | device number | major up to 4095, minor up to 1048575 | | larger ones |
//! | attribute | `user.` of files and directories, `trusted.`, `security.`, access control lists | other namespaces, `user.overlay.`, names without a rest | |
//! | its name | up to 255 bytes | longer ones, zero bytes | |
//! | its value | up to 65,535 bytes | longer ones | |
//! | `security.capability` | version 2 or 3 in its exact form | others: a file with one could not be executed | |
//! | access control list | what acl(5) allows, sorted | others; of links; default ones of anything but directories | |
//! | all attributes of an inode | 256 KiB, and 63 KiB of names | those beyond, the last by name first | |

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::entry::{ErofsEntry, ErofsEntryKind};
use crate::error::EntryProblem;
use crate::format::{device_number, file_type};
use crate::xattr::{XattrIndex, encoded_size};

/// Longest name of a file, and of an attribute.
pub(crate) const MAX_NAME: usize = 255;
/// Longest text of a symbolic link.
const MAX_SYMLINK: usize = 4095;
/// Longest value of an attribute: the format counts it in 16 bits.
const MAX_VALUE: usize = u16::MAX as usize;
/// Bytes of all encoded attributes of an inode. It counts units of 4 bytes in 16 bits; some are left for overlay marks.
const MAX_XATTRS: usize = 4 * (u16::MAX as usize) - 128;
/// Bytes of all their names: listxattr(2) returns no more than 64 KiB, and overlay marks need some.
const MAX_XATTR_NAMES: usize = 63 << 10;

const CAPABILITY: &[u8] = b"security.capability";
/// The name of the overlay's own attributes behind the namespace.
const OVERLAY: &[u8] = b"overlay.";

/// Namespace and rest of the name of an attribute, as they are stored.
pub(crate) type XattrKey = (XattrIndex, Vec<u8>);

/// Rejects entries that are invalid wherever they are.
pub(crate) fn check_entry(entry: &ErofsEntry<'_>) -> Result<(), EntryProblem> {
    let link = match entry.kind {
        ErofsEntryKind::Symlink { target } if target.is_empty() || target.len() > MAX_SYMLINK => {
            return Err(EntryProblem::SymlinkTarget);
        }
        ErofsEntryKind::Symlink { target } | ErofsEntryKind::HardLink { target } => target,
        ErofsEntryKind::CharDevice { major, minor } | ErofsEntryKind::BlockDevice { major, minor }
            if device_number(major, minor).is_none() =>
        {
            return Err(EntryProblem::Device);
        }
        _ => b"",
    };
    if entry.path.contains(&0) || link.contains(&0) {
        return Err(EntryProblem::ZeroByte);
    }
    if entry.uid == u32::MAX || entry.gid == u32::MAX {
        return Err(EntryProblem::Owner);
    }
    if entry.mtime.nanos >= 1_000_000_000 {
        return Err(EntryProblem::Time);
    }
    Ok(())
}

/// Rejects a name that no directory can have.
pub(crate) fn check_name(name: &[u8]) -> Result<(), EntryProblem> {
    if name.len() > MAX_NAME { Err(EntryProblem::NameTooLong) } else { Ok(()) }
}

/// The attributes of an inode of this type that are kept, and the number of those that are left out. Of equal names the
/// last one counts.
pub(crate) fn kept_xattrs(
    xattrs: &[(Vec<u8>, Vec<u8>)],
    mode: u16,
) -> (BTreeMap<XattrKey, Cow<'_, [u8]>>, u64) {
    let (mut kept, mut skipped) = (BTreeMap::new(), 0);
    for (name, value) in xattrs {
        match key_of(name, mode).zip(value_of(name, value)) {
            Some((key, value)) => drop(kept.insert(key, value)),
            None => skipped += 1,
        }
    }
    let (mut bytes, mut names) = (0, 0);
    let before = kept.len();
    kept.retain(|(index, name), value| {
        let (size, listed) = (encoded_size(name, value), index.prefix().len() + name.len() + 1);
        let fits = bytes + size <= MAX_XATTRS && names + listed <= MAX_XATTR_NAMES;
        if fits {
            (bytes, names) = (bytes + size, names + listed);
        }
        fits
    });
    skipped += (before - kept.len()) as u64;
    (kept, skipped)
}

fn key_of(name: &[u8], mode: u16) -> Option<XattrKey> {
    let kind = mode & file_type::MASK;
    let is_directory = kind == file_type::DIRECTORY;
    match name {
        b"system.posix_acl_access" => {
            return (kind != file_type::SYMLINK).then_some((XattrIndex::AclAccess, Vec::new()));
        }
        b"system.posix_acl_default" => return is_directory.then_some((XattrIndex::AclDefault, Vec::new())),
        _ => {}
    }
    let namespaces = [XattrIndex::User, XattrIndex::Trusted, XattrIndex::Security];
    let found = namespaces.into_iter().find_map(|index| Some((index, name.strip_prefix(index.prefix())?)));
    let (index, rest) = found.filter(|(_, rest)| !rest.is_empty() && !rest.contains(&0))?;
    let stored = match index {
        XattrIndex::User if rest.starts_with(OVERLAY) || !(is_directory || kind == file_type::FILE) => {
            return None;
        }
        // An overlay shows it under its original name.
        XattrIndex::Trusted if rest.starts_with(OVERLAY) => [OVERLAY, rest].concat(),
        _ => rest.to_vec(),
    };
    (index.prefix().len() + stored.len() <= MAX_NAME).then_some((index, stored))
}

fn value_of<'a>(name: &[u8], value: &'a [u8]) -> Option<Cow<'a, [u8]>> {
    match name {
        b"system.posix_acl_access" | b"system.posix_acl_default" => sorted_acl(value).map(Cow::Owned),
        CAPABILITY => is_capability(value).then_some(Cow::Borrowed(value)),
        _ => (value.len() <= MAX_VALUE).then_some(Cow::Borrowed(value)),
    }
}

/// Returns true if the value has the length of its version, 2 or 3, and no unknown flag.
fn is_capability(value: &[u8]) -> bool {
    matches!((value.len(), value), (20, [0 | 1, 0, 0, 2, ..]) | (24, [0 | 1, 0, 0, 3, ..]))
}

/// Tags of the entries of an access control list, in their order.
const USER_OBJECT: u16 = 1;
const USER: u16 = 2;
const GROUP_OBJECT: u16 = 4;
const GROUP: u16 = 8;
const MASK: u16 = 16;
const OTHER: u16 = 32;

/// An access control list as the kernel returns one: its entries in order, and no ID but for named users and groups.
/// `None` for one that acl(5) does not allow.
fn sorted_acl(value: &[u8]) -> Option<Vec<u8>> {
    const VERSION: [u8; 4] = 2u32.to_le_bytes();
    let entries = value.strip_prefix(&VERSION)?;
    if value.len() > MAX_VALUE || entries.len() % 8 != 0 {
        return None;
    }
    let mut sorted = Vec::with_capacity(entries.len() / 8);
    for entry in entries.chunks_exact(8) {
        let tag = u16::from_le_bytes([entry[0], entry[1]]);
        let permissions = u16::from_le_bytes([entry[2], entry[3]]);
        let id = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        let id = match tag {
            USER | GROUP if id != u32::MAX => id,
            USER_OBJECT | GROUP_OBJECT | MASK | OTHER => u32::MAX,
            _ => return None,
        };
        if permissions > 7 {
            return None;
        }
        sorted.push((tag, id, permissions));
    }
    sorted.sort_unstable();
    let count = |wanted: u16| sorted.iter().filter(|(tag, ..)| *tag == wanted).count();
    let is_named = count(USER) + count(GROUP) > 0;
    let is_complete = [USER_OBJECT, GROUP_OBJECT, OTHER].map(count) == [1, 1, 1];
    let is_unique = sorted.windows(2).all(|pair| (pair[0].0, pair[0].1) != (pair[1].0, pair[1].1));
    if !is_complete || !is_unique || count(MASK) < usize::from(is_named) {
        return None;
    }
    let mut acl = VERSION.to_vec();
    for (tag, id, permissions) in sorted {
        acl.extend(tag.to_le_bytes());
        acl.extend(permissions.to_le_bytes());
        acl.extend(id.to_le_bytes());
    }
    Some(acl)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entries of a list: tag, permissions, ID.
    fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut value = 2u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            value.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
            value.extend(id.to_le_bytes());
        }
        value
    }

    const NONE: u32 = u32::MAX;

    #[test]
    fn lists_are_sorted_and_incomplete_ones_left_out() {
        let sorted = acl(&[(1, 6, NONE), (2, 7, 5), (2, 4, 9), (4, 4, NONE), (16, 6, NONE), (32, 0, NONE)]);
        let mixed = acl(&[(16, 6, 1), (2, 4, 9), (32, 0, 0), (1, 6, 0), (2, 7, 5), (4, 4, NONE)]);
        assert_eq!(sorted_acl(&mixed).as_ref(), Some(&sorted));
        assert_eq!(sorted_acl(&sorted).as_ref(), Some(&sorted));
        let minimal = acl(&[(1, 6, NONE), (4, 4, NONE), (32, 0, NONE)]);
        assert_eq!(sorted_acl(&minimal).as_ref(), Some(&minimal));
        for invalid in [
            b"".to_vec(),
            b"\x02\0\0".to_vec(),
            b"\x01\0\0\0".to_vec(),
            acl(&[]),
            acl(&[(1, 6, NONE), (4, 4, NONE)]),
            acl(&[(1, 6, NONE), (4, 4, NONE), (32, 0, NONE), (32, 0, NONE)]),
            acl(&[(1, 6, NONE), (2, 4, 7), (4, 4, NONE), (32, 0, NONE)]),
            acl(&[(1, 6, NONE), (2, 4, 7), (2, 4, 7), (4, 4, NONE), (16, 4, NONE), (32, 0, NONE)]),
            acl(&[(1, 6, NONE), (2, 4, NONE), (4, 4, NONE), (16, 4, NONE), (32, 0, NONE)]),
            acl(&[(1, 8, NONE), (4, 4, NONE), (32, 0, NONE)]),
            acl(&[(1, 6, NONE), (4, 4, NONE), (32, 0, NONE), (64, 0, NONE)]),
            [minimal, vec![0]].concat(),
        ] {
            assert_eq!(sorted_acl(&invalid), None, "{invalid:?}");
        }
    }

    #[test]
    fn attributes_that_the_kernel_would_refuse_are_left_out() {
        let (file, link) = (file_type::FILE, file_type::SYMLINK);
        let v2 = [&[1, 0, 0, 2][..], &[0; 16]].concat();
        let v3 = [&[0, 0, 0, 3][..], &[0; 20]].concat();
        let longest = format!("user.{}", "n".repeat(250)).into_bytes();
        for (name, value, kind, is_kept) in [
            (&b"security.capability"[..], v2.clone(), file, true),
            (b"security.capability", v3.clone(), file, true),
            (b"security.capability", Vec::new(), file, false),
            (b"security.capability", vec![1, 2], file, false),
            (b"security.capability", v2[..12].to_vec(), file, false),
            (b"security.capability", [&[2], &v2[1..]].concat(), file, false),
            (b"security.capability", v3[..20].to_vec(), file, false),
            (b"security.selinux", b"u:object_r:system_file:s0".to_vec(), file, true),
            (b"user.", vec![1], file, false),
            (b"user.a\0b", vec![1], file, false),
            (b"user.a", vec![1], link, false),
            (b"user.overlay.opaque", b"y".to_vec(), file, false),
            (&longest, Vec::new(), file, true),
            (&[&longest[..], b"n"].concat(), Vec::new(), file, false),
            (b"user.a", vec![0; 65_535], file, true),
            (b"user.a", vec![0; 65_536], file, false),
            (b"btrfs.compression", b"zstd".to_vec(), file, false),
            (b"system.posix_acl_access", acl(&[]), file, false),
        ] {
            let xattrs = [(name.to_vec(), value)];
            let (kept, skipped) = kept_xattrs(&xattrs, kind);
            let name = String::from_utf8_lossy(name);
            assert_eq!((kept.len(), skipped), (usize::from(is_kept), u64::from(!is_kept)), "{name}");
        }
    }

    #[test]
    fn attributes_beyond_the_space_of_an_inode_are_left_out() {
        let large: Vec<_> =
            (0..5).map(|number| (format!("user.{number}").into_bytes(), vec![7; 60_000])).collect();
        let (kept, skipped) = kept_xattrs(&large, file_type::FILE);
        assert_eq!((kept.len(), skipped), (4, 1));
        let many: Vec<_> =
            (0..1000).map(|number| (format!("user.{number:0>200}").into_bytes(), Vec::new())).collect();
        let (kept, skipped) = kept_xattrs(&many, file_type::FILE);
        assert_eq!((kept.len() as u64 + skipped, kept.len()), (1000, (63 << 10) / 206));
    }
}
