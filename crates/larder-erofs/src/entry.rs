//! Entries that a caller adds to a layer.

/// A point in time: seconds since 1970, possibly negative, and nanoseconds that count upwards from there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ErofsTime {
    /// Whole seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds, below a billion.
    pub nanos: u32,
}

/// One entry of a layer's archive.
#[derive(Debug, Clone, Copy)]
pub struct ErofsEntry<'a> {
    /// As the archive names it: may be absolute, may contain `.` and `..`. The root is `/` or `.`. A last component
    /// with the prefix `.wh.` is a whiteout, `.wh..wh..opq` makes its directory opaque.
    pub path: &'a [u8],
    /// Kind of the entry.
    pub kind: ErofsEntryKind<'a>,
    /// Permission, set-id and sticky bits; all others are ignored.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Time of the last change.
    pub mtime: ErofsTime,
    /// Extended attributes: full names and values. Of equal names the last one counts.
    pub xattrs: &'a [(Vec<u8>, Vec<u8>)],
}

/// Kind of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErofsEntryKind<'a> {
    /// A file. [`ErofsWriter::write_data`](crate::ErofsWriter::write_data) then takes `size` bytes.
    File {
        /// Bytes.
        size: u64,
    },
    /// A file with holes. `write_data` then takes the bytes of all extents, one after the other.
    Sparse {
        /// Bytes, holes included.
        size: u64,
        /// Offset and length of the parts with data, in order and apart from each other.
        extents: &'a [(u64, u64)],
    },
    /// A directory.
    Directory,
    /// A symbolic link; its mode is ignored.
    Symlink {
        /// Its text.
        target: &'a [u8],
    },
    /// Another name of a file; owner, mode, time and attributes are those of the file.
    HardLink {
        /// Path of the file, in the layer or in a lower layer.
        target: &'a [u8],
    },
    /// A named pipe.
    Fifo,
    /// A character device; 0:0 is a whiteout.
    CharDevice {
        /// Major number, below 4096.
        major: u32,
        /// Minor number, below 1048576.
        minor: u32,
    },
    /// A block device.
    BlockDevice {
        /// Major number, below 4096.
        major: u32,
        /// Minor number, below 1048576.
        minor: u32,
    },
}
