//! Owned entries, and layers made of them.

use larder_erofs::{
    ErofsEntry, ErofsEntryKind, ErofsError, ErofsOptions, ErofsSummary, ErofsTime, ErofsWriter,
};

/// Entry that a script makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ScriptKind {
    File(Vec<u8>),
    /// Size; offsets and bytes.
    Sparse(u64, Vec<(u64, Vec<u8>)>),
    Directory,
    Symlink(Vec<u8>),
    HardLink(Vec<u8>),
    Fifo,
    CharDevice(u32, u32),
    BlockDevice(u32, u32),
}

/// An entry with its data.
#[derive(Debug, Clone)]
pub(crate) struct ScriptEntry {
    pub(crate) path: Vec<u8>,
    pub(crate) kind: ScriptKind,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: ErofsTime,
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

pub(crate) fn entry(path: impl Into<Vec<u8>>, kind: ScriptKind) -> ScriptEntry {
    let mode = if kind == ScriptKind::Directory { 0o755 } else { 0o644 };
    let mtime = ErofsTime { seconds: 1_700_000_000, nanos: 123_456_789 };
    ScriptEntry { path: path.into(), kind, mode, uid: 0, gid: 0, mtime, xattrs: Vec::new() }
}

pub(crate) fn file(path: impl Into<Vec<u8>>, data: impl Into<Vec<u8>>) -> ScriptEntry {
    entry(path, ScriptKind::File(data.into()))
}

pub(crate) fn dir(path: impl Into<Vec<u8>>) -> ScriptEntry {
    entry(path, ScriptKind::Directory)
}

pub(crate) fn symlink(path: impl Into<Vec<u8>>, target: impl Into<Vec<u8>>) -> ScriptEntry {
    entry(path, ScriptKind::Symlink(target.into()))
}

pub(crate) fn hard_link(path: impl Into<Vec<u8>>, target: impl Into<Vec<u8>>) -> ScriptEntry {
    entry(path, ScriptKind::HardLink(target.into()))
}

impl ScriptEntry {
    pub(crate) fn mode(self, mode: u32) -> ScriptEntry {
        ScriptEntry { mode, ..self }
    }

    pub(crate) fn owner(self, uid: u32, gid: u32) -> ScriptEntry {
        ScriptEntry { uid, gid, ..self }
    }

    pub(crate) fn mtime(self, seconds: i64, nanos: u32) -> ScriptEntry {
        ScriptEntry { mtime: ErofsTime { seconds, nanos }, ..self }
    }

    pub(crate) fn xattr(mut self, name: &str, value: impl Into<Vec<u8>>) -> ScriptEntry {
        self.xattrs.push((name.into(), value.into()));
        self
    }

    /// Adds the entry, and its data in pieces of `piece` bytes.
    pub(crate) fn add_to(&self, writer: &mut ErofsWriter<Vec<u8>>, piece: usize) -> Result<(), ErofsError> {
        let data = self.begin_in(writer)?;
        data.chunks(piece).try_for_each(|piece| writer.write_data(piece))
    }

    /// Adds the entry, and returns its data.
    pub(crate) fn begin_in(&self, writer: &mut ErofsWriter<Vec<u8>>) -> Result<Vec<u8>, ErofsError> {
        let extents: Vec<(u64, u64)>;
        let (kind, data) = match &self.kind {
            ScriptKind::File(data) => (ErofsEntryKind::File { size: data.len() as u64 }, data.clone()),
            ScriptKind::Sparse(size, parts) => {
                extents = parts.iter().map(|(offset, data)| (*offset, data.len() as u64)).collect();
                let data = parts.iter().flat_map(|(_, data)| data.clone()).collect();
                (ErofsEntryKind::Sparse { size: *size, extents: &extents }, data)
            }
            ScriptKind::Directory => (ErofsEntryKind::Directory, Vec::new()),
            ScriptKind::Symlink(target) => (ErofsEntryKind::Symlink { target }, Vec::new()),
            ScriptKind::HardLink(target) => (ErofsEntryKind::HardLink { target }, Vec::new()),
            ScriptKind::Fifo => (ErofsEntryKind::Fifo, Vec::new()),
            ScriptKind::CharDevice(major, minor) => {
                (ErofsEntryKind::CharDevice { major: *major, minor: *minor }, Vec::new())
            }
            ScriptKind::BlockDevice(major, minor) => {
                (ErofsEntryKind::BlockDevice { major: *major, minor: *minor }, Vec::new())
            }
        };
        writer.add(&ErofsEntry {
            path: &self.path,
            kind,
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            mtime: self.mtime,
            xattrs: &self.xattrs,
        })?;
        Ok(data)
    }
}

/// A writer of a layer in memory.
pub(crate) fn writer() -> ErofsWriter<Vec<u8>> {
    ErofsWriter::new(Vec::new(), ErofsOptions::default()).unwrap()
}

/// The layer of these entries.
pub(crate) fn write(entries: &[ScriptEntry]) -> Result<(Vec<u8>, ErofsSummary), ErofsError> {
    let mut writer = writer();
    for (at, entry) in entries.iter().enumerate() {
        entry.add_to(&mut writer, [usize::MAX, 1 << 16, 4097, 100][at % 4])?;
    }
    writer.finish()
}

/// Bytes that do not repeat.
pub(crate) fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..length).map(|_| next()).collect()
}
