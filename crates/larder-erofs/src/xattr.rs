//! Extended attributes in the form in which they follow an inode.
//!
//! Attributes that steer overlay mounts are not the archive's to set: `trusted.overlay.NAME` becomes
//! `trusted.overlay.overlay.NAME`, which an overlay shows under the original name, and `user.overlay.NAME` is left out.
//! Left out are also those that a Linux filesystem does not accept: of unknown namespaces, `user.` attributes of anything but
//! files and directories, access control lists of symbolic links, default ones of anything but directories.

use std::collections::BTreeMap;

use crate::error::EntryProblem;
use crate::format::file_type;

/// Full names and values of an inode's attributes.
pub type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

const USER: u8 = 1;
const ACL_ACCESS: u8 = 2;
const ACL_DEFAULT: u8 = 3;
const TRUSTED: u8 = 4;
const SECURITY: u8 = 6;

/// Files with an invalid one cannot be executed, nor copied by an overlay; setxattr(2) rejects it.
const CAPABILITY: &[u8] = b"security.capability";
/// The name of the overlay's own attributes behind `trusted.`.
const OVERLAY: &[u8] = b"overlay.";
/// The mark of an opaque directory, whose value is `y`.
pub(crate) const OPAQUE: &[u8] = b"trusted.overlay.opaque";
/// Before the attributes: a hash, the number of shared ones, and so on; all zero.
const HEADER: usize = 12;
/// The inode counts units of 4 bytes in 16 bits.
const MAX_BYTES: usize = HEADER + 4 * (u16::MAX as usize - 1);

/// The attributes of an entry, encoded; empty if there are none. And the number of those that were left out.
pub(crate) fn encode_xattrs(
    xattrs: &[(Vec<u8>, Vec<u8>)],
    mode: u16,
) -> Result<(Vec<u8>, u64), EntryProblem> {
    let mut skipped = 0;
    let mut accepted = BTreeMap::new();
    for (name, value) in xattrs {
        match accept(name, mode)? {
            None => skipped += 1,
            Some((ACL_ACCESS | ACL_DEFAULT, _)) if !is_acl(value) => return Err(EntryProblem::Xattr),
            Some(_) if name == CAPABILITY && !is_capability(value) => return Err(EntryProblem::Xattr),
            Some(key) => {
                accepted.insert(key, value);
            }
        }
    }
    let mut encoded = Vec::new();
    for ((index, name), value) in accepted {
        push(&mut encoded, index, &name, value)?;
    }
    Ok((encoded, skipped))
}

/// Adds the mark of an opaque directory.
pub(crate) fn mark_opaque(encoded: &mut Vec<u8>) -> Result<(), EntryProblem> {
    push(encoded, TRUSTED, b"overlay.opaque", b"y")
}

/// Adds the mark of a directory with whiteouts. Where only one layer has a directory, overlayfs lists it as it is, whiteouts
/// included, unless it has this attribute, whose value may be empty. mkfs.erofs sets it likewise.
pub(crate) fn mark_whiteouts(encoded: &mut Vec<u8>) -> Result<(), EntryProblem> {
    push(encoded, TRUSTED, b"overlay.origin", b"")
}

/// Full names and values of encoded attributes. `None` if they are damaged.
pub(crate) fn decode_xattrs(encoded: &[u8]) -> Option<Xattrs> {
    // Attributes that inodes share would be listed in the header.
    if *encoded.get(4)? != 0 {
        return None;
    }
    let mut rest = encoded.get(HEADER..)?;
    let mut xattrs = Vec::new();
    while !rest.is_empty() {
        let (entry, behind) = rest.split_first_chunk::<4>()?;
        let (name_len, value_len) =
            (usize::from(entry[0]), usize::from(u16::from_le_bytes([entry[2], entry[3]])));
        let prefix: &[u8] = match entry[1] {
            USER => b"user.",
            ACL_ACCESS => b"system.posix_acl_access",
            ACL_DEFAULT => b"system.posix_acl_default",
            TRUSTED => b"trusted.",
            SECURITY => b"security.",
            _ => return None,
        };
        let (name, value) = behind.get(..name_len + value_len)?.split_at(name_len);
        let is_acl = matches!(entry[1], ACL_ACCESS | ACL_DEFAULT);
        if is_acl != name.is_empty() || name.contains(&0) {
            return None;
        }
        xattrs.push(([prefix, name].concat(), value.to_vec()));
        rest = behind.get((name_len + value_len).next_multiple_of(4)..)?;
    }
    Some(xattrs)
}

/// Turns the name of a stored attribute into that of the archive. Returns false for a mark that the archive does not have.
pub(crate) fn unescape(name: &mut Vec<u8>) -> bool {
    const ESCAPED: &[u8] = b"trusted.overlay.overlay.";
    const OWN: &[u8] = b"trusted.overlay.";
    if name.starts_with(ESCAPED) {
        name.drain(OWN.len()..ESCAPED.len());
        return true;
    }
    !name.starts_with(OWN)
}

/// Namespace and rest of the name.
fn accept(name: &[u8], mode: u16) -> Result<Option<(u8, Vec<u8>)>, EntryProblem> {
    let kind = mode & file_type::MASK;
    let is_directory = kind == file_type::DIRECTORY;
    match name {
        b"system.posix_acl_access" => {
            return Ok((kind != file_type::SYMLINK).then(|| (ACL_ACCESS, Vec::new())));
        }
        b"system.posix_acl_default" => return Ok(is_directory.then(|| (ACL_DEFAULT, Vec::new()))),
        _ => {}
    }
    let namespaces = [(USER, &b"user."[..]), (TRUSTED, b"trusted."), (SECURITY, b"security.")];
    let found = namespaces.iter().find_map(|(index, prefix)| Some((*index, name.strip_prefix(*prefix)?)));
    let Some((index, rest)) = found else { return Ok(None) };
    if rest.is_empty() || rest.contains(&0) {
        return Err(EntryProblem::Xattr);
    }
    let overlay = rest.starts_with(OVERLAY);
    Ok(match index {
        USER if overlay || !(is_directory || kind == file_type::FILE) => None,
        TRUSTED if overlay => Some((index, [OVERLAY, rest].concat())),
        _ => Some((index, rest.to_vec())),
    })
}

/// Whether the kernel can read it: version 2, then entries of 8 bytes with known tags.
fn is_acl(value: &[u8]) -> bool {
    let Some((version, entries)) = value.split_first_chunk::<4>() else { return false };
    let is_known = |entry: &[u8]| matches!((entry[0], entry[1]), (1 | 2 | 4 | 8 | 16 | 32, 0));
    *version == 2u32.to_le_bytes() && entries.len() % 8 == 0 && entries.chunks(8).all(is_known)
}

/// Returns true if the value has the length of its version, 2 or 3.
fn is_capability(value: &[u8]) -> bool {
    matches!((value.len(), value.get(3)), (20, Some(2)) | (24, Some(3)))
}

fn push(encoded: &mut Vec<u8>, index: u8, name: &[u8], value: &[u8]) -> Result<(), EntryProblem> {
    let name_len = u8::try_from(name.len()).map_err(|_| EntryProblem::XattrSpace)?;
    let value_len = u16::try_from(value.len()).map_err(|_| EntryProblem::XattrSpace)?;
    if encoded.is_empty() {
        encoded.resize(HEADER, 0);
    }
    encoded.extend([name_len, index]);
    encoded.extend(value_len.to_le_bytes());
    encoded.extend_from_slice(name);
    encoded.extend_from_slice(value);
    encoded.resize(encoded.len().next_multiple_of(4), 0);
    if encoded.len() > MAX_BYTES { Err(EntryProblem::XattrSpace) } else { Ok(()) }
}
