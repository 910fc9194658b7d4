//! Builds tar archives entry by entry, including invalid ones.
//!
//! ```
//! use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
//! let layer = TarBuilder::new()
//!     .with(TarBuilderEntry::dir("etc"))
//!     .with(TarBuilderEntry::file("etc/motd", "hello"))
//!     .finish();
//! assert_eq!(layer.len() % 512, 0);
//! ```

use std::mem;

/// An archive in the making.
#[derive(Debug, Clone, Default)]
pub struct TarBuilder {
    bytes: Vec<u8>,
}

/// One entry. All fields are public, so that a test can write anything.
#[derive(Debug, Clone)]
pub struct TarBuilderEntry {
    /// The name, as written.
    pub path: Vec<u8>,
    /// The type: `b'0'` file, `b'1'` hard link, `b'2'` symbolic link, `b'3'` character device, `b'5'` directory...
    pub kind: u8,
    /// The content.
    pub data: Vec<u8>,
    /// The target of a link.
    pub link: Vec<u8>,
    /// Permission, set-id and sticky bits.
    pub mode: u32,
    /// Owner.
    pub uid: u64,
    /// Group.
    pub gid: u64,
    /// Seconds since 1970.
    pub mtime: u64,
    /// Major and minor number.
    pub device: (u32, u32),
    /// Records of the extended header before it: key and value.
    pub pax: Vec<(String, Vec<u8>)>,
    /// The size in the header, instead of the content's length.
    pub size: Option<u64>,
    /// Long names as GNU tar writes them, and its magic.
    pub gnu: bool,
}

impl TarBuilderEntry {
    /// An entry of any type, owned by root, last changed in 2023.
    pub fn new(kind: u8, path: impl Into<Vec<u8>>) -> TarBuilderEntry {
        TarBuilderEntry {
            path: path.into(),
            kind,
            data: Vec::new(),
            link: Vec::new(),
            mode: 0o644,
            uid: 0,
            gid: 0,
            mtime: 1_700_000_000,
            device: (0, 0),
            pax: Vec::new(),
            size: None,
            gnu: false,
        }
    }

    /// A file with the mode 0644.
    pub fn file(path: impl Into<Vec<u8>>, data: impl Into<Vec<u8>>) -> TarBuilderEntry {
        TarBuilderEntry { data: data.into(), ..TarBuilderEntry::new(b'0', path) }
    }

    /// A directory with the mode 0755.
    pub fn dir(path: impl Into<Vec<u8>>) -> TarBuilderEntry {
        TarBuilderEntry::new(b'5', path).mode(0o755)
    }

    /// A symbolic link.
    pub fn symlink(path: impl Into<Vec<u8>>, target: impl Into<Vec<u8>>) -> TarBuilderEntry {
        TarBuilderEntry { link: target.into(), ..TarBuilderEntry::new(b'2', path) }
    }

    /// A hard link.
    pub fn hard_link(path: impl Into<Vec<u8>>, target: impl Into<Vec<u8>>) -> TarBuilderEntry {
        TarBuilderEntry { link: target.into(), ..TarBuilderEntry::new(b'1', path) }
    }

    /// A named pipe.
    pub fn fifo(path: impl Into<Vec<u8>>) -> TarBuilderEntry {
        TarBuilderEntry::new(b'6', path)
    }

    /// A character device.
    pub fn char_device(path: impl Into<Vec<u8>>, major: u32, minor: u32) -> TarBuilderEntry {
        TarBuilderEntry { device: (major, minor), ..TarBuilderEntry::new(b'3', path) }
    }

    /// Sets the mode.
    #[must_use]
    pub fn mode(self, mode: u32) -> TarBuilderEntry {
        TarBuilderEntry { mode, ..self }
    }

    /// Sets owner and group.
    #[must_use]
    pub fn owner(self, uid: u64, gid: u64) -> TarBuilderEntry {
        TarBuilderEntry { uid, gid, ..self }
    }

    /// Sets the time of the last change.
    #[must_use]
    pub fn mtime(self, mtime: u64) -> TarBuilderEntry {
        TarBuilderEntry { mtime, ..self }
    }

    /// Adds a record to the extended header.
    #[must_use]
    pub fn pax(mut self, key: impl Into<String>, value: impl Into<Vec<u8>>) -> TarBuilderEntry {
        self.pax.push((key.into(), value.into()));
        self
    }

    /// Adds an extended attribute.
    #[must_use]
    pub fn xattr(self, name: &str, value: impl Into<Vec<u8>>) -> TarBuilderEntry {
        self.pax(format!("SCHILY.xattr.{name}"), value)
    }

    /// Sets a wrong size.
    #[must_use]
    pub fn with_false_size(self, size: u64) -> TarBuilderEntry {
        TarBuilderEntry { size: Some(size), ..self }
    }

    /// Writes it as GNU tar does.
    #[must_use]
    pub fn gnu(self) -> TarBuilderEntry {
        TarBuilderEntry { gnu: true, ..self }
    }

    /// The entry as it stands in an archive, with all its headers.
    pub fn into_bytes(mut self) -> Vec<u8> {
        let (mut bytes, mut pax) = (Vec::new(), mem::take(&mut self.pax));
        for (long, kind, key) in [(&self.path, b'L', "path"), (&self.link, b'K', "linkpath")] {
            if long.len() <= 100 {
                continue;
            }
            if self.gnu {
                let name = [&long[..], b"\0"].concat();
                bytes.extend(
                    TarBuilderEntry { data: name, ..TarBuilderEntry::new(kind, "././@LongLink").gnu() }
                        .into_bytes(),
                );
            } else {
                pax.push((key.to_owned(), long.clone()));
            }
        }
        if !pax.is_empty() {
            let data: Vec<u8> =
                pax.iter().flat_map(|(key, value)| pax_record(key.as_bytes(), value)).collect();
            bytes.extend(
                TarBuilderEntry { data, ..TarBuilderEntry::new(b'x', "PaxHeaders/entry") }.into_bytes(),
            );
        }
        bytes.extend(self.header());
        bytes.extend(&self.data);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    }

    /// The header block alone, with a right checksum.
    pub fn header(&self) -> [u8; 512] {
        let mut block = [0; 512];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.path[..self.path.len().min(100)]);
        put(100, &number(self.mode.into(), 8));
        put(108, &number(self.uid, 8));
        put(116, &number(self.gid, 8));
        put(124, &number(self.size.unwrap_or(self.data.len() as u64), 12));
        put(136, &number(self.mtime, 12));
        put(156, &[self.kind]);
        put(157, &self.link[..self.link.len().min(100)]);
        put(257, if self.gnu { b"ustar  \0" } else { b"ustar\x0000" });
        put(329, &number(self.device.0.into(), 8));
        put(337, &number(self.device.1.into(), 8));
        seal(&mut block);
        block
    }
}

/// Writes a header block's checksum.
pub fn seal(block: &mut [u8; 512]) {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

/// One record of an extended header: its own length, key and value.
pub fn pax_record(key: &[u8], value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    [length.to_string().as_bytes(), b" ", key, b"=", value, b"\n"].concat()
}

/// Octal digits and a zero byte if they fit, else binary as GNU tar writes it.
fn number(value: u64, width: usize) -> Vec<u8> {
    let octal = format!("{value:0digits$o}\0", digits = width - 1);
    if octal.len() == width {
        return octal.into_bytes();
    }
    let mut bytes = vec![0; width.saturating_sub(8)];
    bytes.extend(value.to_be_bytes());
    bytes[0] |= 0x80;
    bytes
}

impl TarBuilder {
    /// An archive without entries.
    pub fn new() -> TarBuilder {
        TarBuilder::default()
    }

    /// Adds an entry.
    #[must_use]
    pub fn with(self, entry: TarBuilderEntry) -> TarBuilder {
        let bytes = entry.into_bytes();
        self.raw(&bytes)
    }

    /// Adds several entries.
    #[must_use]
    pub fn extend(self, entries: impl IntoIterator<Item = TarBuilderEntry>) -> TarBuilder {
        entries.into_iter().fold(self, TarBuilder::with)
    }

    /// Adds bytes as they are.
    #[must_use]
    pub fn raw(mut self, bytes: &[u8]) -> TarBuilder {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// The archive, with the two blocks of zeros at its end.
    pub fn finish(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 1024, 0);
        self.bytes
    }

    /// The archive without an end.
    pub fn unfinished(self) -> Vec<u8> {
        self.bytes
    }
}

/// Two layers, the lower one first, with everything that is hard to unpack: whiteouts, opaque directories, links,
/// attributes, set-id bits, holes, long names, a file replaced by a directory, and back.
pub fn edge_case_layers() -> [Vec<u8>; 2] {
    let deep = format!("{}/file", ["deep"; 30].join("/"));
    let long = format!("var/{}", "n".repeat(200));
    let lower = TarBuilder::new()
        .extend(
            ["etc", "etc/keep", "etc/opaque", "usr", "usr/bin", "was-dir", "var"].map(TarBuilderEntry::dir),
        )
        .with(TarBuilderEntry::file("etc/keep/a", "a\n"))
        .with(TarBuilderEntry::file("etc/keep/b", "b\n").owner(1000, 1000).mode(0o600))
        .with(TarBuilderEntry::file("etc/opaque/old", "old\n"))
        .with(TarBuilderEntry::dir("etc/private").owner(7, 8).mode(0o2750).xattr("user.dir", "kept"))
        .with(TarBuilderEntry::file("usr/bin/set", vec![b'x'; 5000]).mode(0o4755))
        .with(TarBuilderEntry::hard_link("usr/bin/hard", "usr/bin/set").mode(0o4755))
        .with(TarBuilderEntry::symlink("usr/bin/soft", "../../etc/keep/a"))
        .with(TarBuilderEntry::symlink("usr/bin/dangling", "/nowhere"))
        .with(TarBuilderEntry::file("was-dir/inner", "1"))
        .with(TarBuilderEntry::file("was-file", "file"))
        .with(TarBuilderEntry::file("var/empty", ""))
        .with(TarBuilderEntry::dir("var/sticky").mode(0o1777))
        .with(TarBuilderEntry::file(long.as_str(), "long name"))
        .with(TarBuilderEntry::file(deep, "deep"))
        .with(TarBuilderEntry::file("var/ünïcode-文件", "utf-8 name"))
        .with(TarBuilderEntry::file("var/xattr", "x").xattr("user.larder", "value"))
        .with(TarBuilderEntry::file("var/nanos", "t").pax("mtime", "1600000000.123456789"))
        .with(TarBuilderEntry::fifo("var/fifo"))
        .with(TarBuilderEntry::char_device("var/null", 1, 3).mode(0o666))
        .with(TarBuilderEntry::file("var/zeros", vec![0; 3_000_000]))
        .with(TarBuilderEntry::symlink("lib", "usr/lib"))
        .with(TarBuilderEntry::dir("usr/lib"))
        .with(TarBuilderEntry::file("usr/lib/first.so", "first"))
        .with(TarBuilderEntry::file(format!("gnu/{}", "g".repeat(150)), "long").gnu())
        .finish();
    let upper = TarBuilder::new()
        .with(TarBuilderEntry::file("etc/keep/.wh.a", ""))
        .with(TarBuilderEntry::dir("etc/opaque"))
        .with(TarBuilderEntry::file("etc/opaque/.wh..wh..opq", ""))
        .with(TarBuilderEntry::file("etc/opaque/new", "new\n"))
        .with(TarBuilderEntry::file("etc/private/more", "in a directory that only the lower layer describes"))
        .with(TarBuilderEntry::file("was-dir", "now a file"))
        .with(TarBuilderEntry::dir("was-file").mode(0o700))
        .with(TarBuilderEntry::file("was-file/inner", "now a directory"))
        .with(TarBuilderEntry::file("usr/bin/.wh.hard", ""))
        .with(TarBuilderEntry::file("lib/second.so", "through a symlinked parent"))
        .with(TarBuilderEntry::file("./dot/prefixed", "dot"))
        .with(TarBuilderEntry::file("var/zeros", "shrunk"))
        .finish();
    [lower, upper]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_tar_reader_agrees() {
        for layer in edge_case_layers() {
            let mut archive = tar::Archive::new(&layer[..]);
            let paths: Vec<_> =
                archive.entries().unwrap().map(|entry| entry.unwrap().path().unwrap().into_owned()).collect();
            assert!(paths.len() > 10);
            assert!(paths.iter().all(|path| !path.as_os_str().is_empty()));
        }
    }
}
