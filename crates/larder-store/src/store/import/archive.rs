//! Iterates over an archive of images: names, kinds and offsets of the entries. Contents are streamed.

use std::io::{self, Read};

use tar_core::HEADER_SIZE;
use tar_core::parse::{Limits, ParseEvent, ParsedEntry, Parser};

use super::error::{ImportError, read};
use crate::unpack::{header_problem, name_at};

/// Most entries that an archive, or a directory's listing, may have.
pub(crate) const MAX_ENTRIES: usize = 100_000;

/// Longest path that an entry may have, in bytes.
const MAX_PATH: u32 = 4096;
/// Most bytes that the extended headers of an entry may have.
const MAX_METADATA: u32 = 64 << 10;
/// Most bytes that are read at once.
const BUFFER: usize = 256 << 10;

/// Kind of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TarEntryKind {
    File,
    /// A link to another entry, as written.
    Symlink(String),
    /// A link to another entry, from the archive's root.
    HardLink(String),
    /// A directory, or something that no archive of images needs.
    Other,
}

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TarEntry {
    /// From the archive's root, without `./` and empty parts; `None` for names that lead out of it, or are not UTF-8.
    pub(super) name: Option<String>,
    pub(super) kind: TarEntryKind,
    /// Bytes of content.
    pub(super) size: u64,
    /// Where the content begins.
    pub(super) at: u64,
}

/// Goes through an archive once.
pub(super) struct TarScanner<R> {
    from: R,
    parser: Parser,
    buffer: Vec<u8>,
    /// Start of the unused part of the buffer.
    start: usize,
    end: usize,
    /// Position of `start` in the archive.
    at: u64,
    /// Remaining bytes of the entry's content, and of the zeros behind it.
    content: u64,
    padding: u64,
    entries: usize,
    /// Name of the entry.
    name: Option<String>,
    skip: SkipBytes<R>,
}

/// Passes over some bytes; says how many it has passed over, fewer when it did not want to.
type SkipBytes<R> = fn(&mut R, u64) -> io::Result<u64>;

impl<R: Read> TarScanner<R> {
    pub(super) fn new(from: R, skip: SkipBytes<R>) -> TarScanner<R> {
        let limits =
            Limits { max_metadata_size: MAX_METADATA, max_path_len: Some(MAX_PATH), ..Limits::default() };
        TarScanner {
            from,
            parser: Parser::new(limits),
            buffer: vec![0; BUFFER],
            start: 0,
            end: 0,
            at: 0,
            content: 0,
            padding: 0,
            entries: 0,
            name: None,
            skip,
        }
    }

    /// The next entry, past whatever is left of the last one's content.
    pub(super) fn next(&mut self) -> Result<Option<TarEntry>, ImportError> {
        self.skip_content()?;
        loop {
            let damaged = |at, reason: &dyn ToString| ImportError::Archive { at, reason: reason.to_string() };
            let input = &self.buffer[self.start..self.end];
            match self.parser.parse(input) {
                Ok(ParseEvent::NeedData { min_bytes }) => {
                    if input.is_empty() && !self.fill(1)? {
                        // Some writers leave out the blocks of zeros at the end.
                        return if self.entries > 0 { Ok(None) } else { Err(damaged(0, &"empty input")) };
                    }
                    if self.end - self.start < min_bytes && !self.fill(min_bytes)? {
                        if self.entries == 0 {
                            return Err(damaged(0, &"no header"));
                        }
                        let at = self.at + (self.end - self.start) as u64;
                        return Err(ImportError::Truncated { at, entry: None });
                    }
                }
                Ok(ParseEvent::Entry { consumed, entry }) => {
                    let (size, mut found) = (content_size(&entry), entry_of(&entry));
                    self.consume(consumed);
                    found.at = self.at;
                    self.content = size;
                    self.padding = size.next_multiple_of(HEADER_SIZE as u64) - size;
                    self.count()?;
                    self.name.clone_from(&found.name);
                    return Ok(Some(found));
                }
                Ok(ParseEvent::GlobalExtensions { consumed, .. }) => {
                    self.consume(consumed);
                    self.count()?;
                }
                Ok(ParseEvent::SparseEntry { .. }) => {
                    return Err(damaged(self.at, &"sparse file not supported in an image archive"));
                }
                Ok(ParseEvent::End { .. }) => return Ok(None),
                Err(error) => {
                    let problem = header_problem(&error);
                    let named = name_at(input).map(|name| format!("entry {}: {problem}", name.display()));
                    return Err(damaged(self.at, &named.unwrap_or(problem)));
                }
            }
        }
    }

    /// Passes all of the entry's content to `take`, piece by piece.
    pub(super) fn read_content(
        &mut self,
        mut take: impl FnMut(&[u8]) -> Result<(), ImportError>,
    ) -> Result<(), ImportError> {
        while self.content > 0 {
            if self.start == self.end && !self.fill(1)? {
                return Err(self.cut());
            }
            let length = usize::try_from(self.content).unwrap_or(usize::MAX).min(self.end - self.start);
            take(&self.buffer[self.start..self.start + length])?;
            self.consume(length);
            self.content -= length as u64;
        }
        Ok(())
    }

    fn skip_content(&mut self) -> Result<(), ImportError> {
        let mut left = self.content + self.padding;
        while left > 0 {
            let length = usize::try_from(left).unwrap_or(usize::MAX).min(self.end - self.start);
            self.consume(length);
            left -= length as u64;
            if left > 0 {
                let skipped = (self.skip)(&mut self.from, left).map_err(read("the archive"))?;
                self.at += skipped;
                left -= skipped.min(left);
                if left > 0 && !self.fill(1)? {
                    // The last entry's padding may be missing.
                    if left > self.padding {
                        return Err(self.cut());
                    }
                    left = 0;
                }
            }
        }
        (self.content, self.padding) = (0, 0);
        Ok(())
    }

    fn cut(&self) -> ImportError {
        ImportError::Truncated { at: self.at, entry: self.name.clone() }
    }

    /// Reads until `wanted` bytes are there; false when the archive ends before.
    fn fill(&mut self, wanted: usize) -> Result<bool, ImportError> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.buffer.len() < wanted {
            self.buffer.resize(wanted, 0); // bounded by MAX_METADATA
        }
        while self.end < wanted {
            match self.from.read(&mut self.buffer[self.end..]) {
                Ok(0) => return Ok(false),
                Ok(length) => self.end += length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(read("the archive")(error)),
            }
        }
        Ok(true)
    }

    fn consume(&mut self, length: usize) {
        self.start += length;
        self.at += length as u64;
    }

    fn count(&mut self) -> Result<(), ImportError> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES { Err(ImportError::TooManyEntries) } else { Ok(()) }
    }
}

/// How many bytes follow the header.
fn content_size(entry: &ParsedEntry<'_>) -> u64 {
    if entry.is_file() || entry.entry_type.is_contiguous() { entry.size } else { 0 }
}

fn entry_of(entry: &ParsedEntry<'_>) -> TarEntry {
    let name = std::str::from_utf8(&entry.path).ok().and_then(normalize_entry_name);
    let target = || entry.link_target_lossy().map(std::borrow::Cow::into_owned).unwrap_or_default();
    let kind = if entry.is_symlink() {
        TarEntryKind::Symlink(target())
    } else if entry.is_hard_link() {
        TarEntryKind::HardLink(target())
    } else if entry.is_file() || entry.entry_type.is_contiguous() {
        TarEntryKind::File
    } else {
        TarEntryKind::Other
    };
    TarEntry { name, kind, size: content_size(entry), at: 0 }
}

/// A name without `.` and empty parts; `None` where it leads out.
pub(super) fn normalize_entry_name(name: &str) -> Option<String> {
    let mut parts = Vec::new();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, content) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            builder.append_data(&mut header, name, *content).unwrap();
        }
        builder.into_inner().unwrap()
    }

    /// Names and contents.
    fn all(bytes: &[u8]) -> Result<Vec<(String, Vec<u8>)>, ImportError> {
        let mut archive = TarScanner::new(bytes, |_, _| Ok(0));
        let mut found = Vec::new();
        while let Some(entry) = archive.next()? {
            let mut content = Vec::new();
            archive.read_content(|piece| {
                content.extend_from_slice(piece);
                Ok(())
            })?;
            assert_eq!(&bytes[usize::try_from(entry.at).unwrap()..][..content.len()], content, "its place");
            found.push((entry.name.unwrap(), content));
        }
        Ok(found)
    }

    #[test]
    fn entries_have_their_contents_and_offsets() {
        let (long, large) = ("d/".repeat(100) + "long", vec![7; 1_000_001]);
        let bytes = archive(&[("./a", b"one"), (&long, b""), ("b", &large), ("c", b"end")]);
        let found = all(&bytes).unwrap();
        assert_eq!(found[0], ("a".into(), b"one".to_vec()));
        assert_eq!(found[1].0, long);
        assert_eq!(found[2].1, large);
        assert_eq!(found[3], ("c".into(), b"end".to_vec()));
    }

    #[test]
    fn contents_may_be_skipped_in_either_way() {
        let bytes = archive(&[("a", &vec![1; 600_000]), ("b", b"two")]);
        for skip in [(|_: &mut &[u8], _| Ok(0)) as SkipBytes<&[u8]>, |from, length| {
            let length = (from.len() as u64).min(length);
            *from = &from[usize::try_from(length).unwrap()..];
            Ok(length)
        }] {
            let mut archive = TarScanner::new(bytes.as_slice(), skip);
            assert_eq!(archive.next().unwrap().unwrap().name.as_deref(), Some("a"));
            let entry = archive.next().unwrap().unwrap();
            assert_eq!(entry.name.as_deref(), Some("b"));
            assert_eq!(&bytes[usize::try_from(entry.at).unwrap()..][..3], b"two");
            assert_eq!(archive.next().unwrap(), None);
        }
    }

    #[test]
    fn a_truncated_archive_is_an_error_with_the_offset() {
        let bytes = archive(&[("a", &[1; 2000]), ("b", &[2; 2000])]);
        for end in (1..bytes.len()).step_by(97) {
            let whole_files = usize::from(end >= 2512) + usize::from(end >= 5072);
            match all(&bytes[..end]) {
                Ok(found) => assert_eq!(found.len(), whole_files, "{end}"),
                Err(ImportError::Archive { at: 0, .. }) => assert!(end < 512, "{end}"),
                Err(ImportError::Truncated { at, entry }) => {
                    assert!(at <= end as u64, "{end}");
                    let name = if end < 2560 { "a" } else { "b" };
                    assert!(entry.is_none_or(|entry| entry == name), "{end}");
                }
                Err(other) => panic!("{end}: {other}"),
            }
        }
        assert!(all(b"").is_err());
        assert!(all(&[7; 5000]).is_err());
    }

    #[test]
    fn names_do_not_leave_the_directory() {
        assert_eq!(normalize_entry_name("./a//b/../c").as_deref(), Some("a/c"));
        assert_eq!(normalize_entry_name("/a").as_deref(), Some("a"));
        assert_eq!(normalize_entry_name("../a"), None);
        assert_eq!(normalize_entry_name("a/../../b"), None);
    }

    #[test]
    fn extended_headers_without_end_are_refused() {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(tar::EntryType::XHeader);
        header.set_size(1 << 30);
        header.set_path("x").unwrap();
        header.set_cksum();
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend(vec![b'1'; 1 << 20]);
        assert!(matches!(all(&bytes), Err(ImportError::Archive { .. })));
    }
}
