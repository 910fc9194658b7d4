//! Extended attributes in the form in which they follow an inode.
//!
//! Attributes that steer overlay mounts are not the archive's to set: `trusted.overlay.NAME` becomes
//! `trusted.overlay.overlay.NAME`, which an overlay shows under the original name, and `user.overlay.NAME` is left out.
//! `entry_rules.rs` says which others are kept.

use crate::entry_rules::{XattrKey, kept_xattrs};

/// Full names and values of an inode's attributes.
pub type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// A namespace, by its number in the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum XattrIndex {
    User = 1,
    AclAccess = 2,
    AclDefault = 3,
    Trusted = 4,
    Security = 6,
}

impl XattrIndex {
    const ALL: [XattrIndex; 5] = [
        XattrIndex::User,
        XattrIndex::AclAccess,
        XattrIndex::AclDefault,
        XattrIndex::Trusted,
        XattrIndex::Security,
    ];

    /// The beginning of the full name; all of it for access control lists.
    pub(crate) fn prefix(self) -> &'static [u8] {
        match self {
            XattrIndex::User => b"user.",
            XattrIndex::AclAccess => b"system.posix_acl_access",
            XattrIndex::AclDefault => b"system.posix_acl_default",
            XattrIndex::Trusted => b"trusted.",
            XattrIndex::Security => b"security.",
        }
    }
}

/// The mark of an opaque directory, whose value is `y`.
pub(crate) const OPAQUE: &[u8] = b"trusted.overlay.opaque";
/// Before the attributes: a hash, the number of shared ones, and so on; all zero.
const HEADER: usize = 12;
/// Before the name and the value of each.
const ENTRY: usize = 4;

/// The attributes of an entry that are kept, encoded; empty if there are none. And the number of those that were left
/// out.
pub(crate) fn encode_xattrs(xattrs: &[(Vec<u8>, Vec<u8>)], mode: u16) -> (Vec<u8>, u64) {
    let (kept, skipped) = kept_xattrs(xattrs, mode);
    let mut encoded = Vec::new();
    for (key, value) in &kept {
        push(&mut encoded, key, value);
    }
    (encoded, skipped)
}

/// Bytes that an attribute takes.
pub(crate) fn encoded_size(name: &[u8], value: &[u8]) -> usize {
    (ENTRY + name.len() + value.len()).next_multiple_of(4)
}

/// Adds the mark of an opaque directory.
pub(crate) fn mark_opaque(encoded: &mut Vec<u8>) {
    push(encoded, &(XattrIndex::Trusted, b"overlay.opaque".to_vec()), b"y");
}

/// Adds the mark of a directory with whiteouts. Where only one layer has a directory, overlayfs lists it as it is,
/// whiteouts included, unless it has this attribute, whose value may be empty. mkfs.erofs sets it likewise.
pub(crate) fn mark_whiteouts(encoded: &mut Vec<u8>) {
    push(encoded, &(XattrIndex::Trusted, b"overlay.origin".to_vec()), b"");
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
        let index = XattrIndex::ALL.into_iter().find(|index| *index as u8 == entry[1])?;
        let (name, value) = behind.get(..name_len + value_len)?.split_at(name_len);
        let is_acl = matches!(index, XattrIndex::AclAccess | XattrIndex::AclDefault);
        if is_acl != name.is_empty() || name.contains(&0) {
            return None;
        }
        xattrs.push(([index.prefix(), name].concat(), value.to_vec()));
        rest = behind.get((name_len + value_len).next_multiple_of(4)..)?;
    }
    Some(xattrs)
}

/// Turns the name of a stored attribute into that of the archive. Returns false for a mark that the archive does not
/// have.
pub(crate) fn unescape(name: &mut Vec<u8>) -> bool {
    const ESCAPED: &[u8] = b"trusted.overlay.overlay.";
    const OWN: &[u8] = b"trusted.overlay.";
    if name.starts_with(ESCAPED) {
        name.drain(OWN.len()..ESCAPED.len());
        return true;
    }
    !name.starts_with(OWN)
}

/// Adds an attribute, whose lengths the rules for entries have checked.
fn push(encoded: &mut Vec<u8>, (index, name): &XattrKey, value: &[u8]) {
    if encoded.is_empty() {
        encoded.resize(HEADER, 0);
    }
    encoded.extend([u8::try_from(name.len()).unwrap_or(0), *index as u8]);
    encoded.extend(u16::try_from(value.len()).unwrap_or(0).to_le_bytes());
    encoded.extend_from_slice(name);
    encoded.extend_from_slice(value);
    encoded.resize(encoded.len().next_multiple_of(4), 0);
}
