//! Parses tar archives: the only module that knows the format. Turns uncompressed bytes into [`LayerEntry`]s and
//! content.
//!
//! It reads archives as Go's `archive/tar` does, since the container runtimes interpret images with it: entries whose
//! type has no content have none, whatever their size field; a name that ends in `/` is a directory in old archives;
//! global headers are skipped; an end of input between two entries ends the archive. Headers are parsed in place; only
//! one that spans two buffers is copied first.

use std::io::Write;
use std::path::PathBuf;

use tar_core::parse::{Limits as TarLimits, ParseError, ParseEvent, ParsedEntry, Parser};
use tar_core::{EntryType, HEADER_SIZE, Header, HeaderError, PaxExtensions};

use larder_erofs::{EntryProblem, ErofsTime, sparse_content};

use super::error::named;
use super::options::MAX_LAYER_BYTES;
use super::pax::{PaxValues, strict_pax};
use super::stream::{BufferSource, TarStream, admit};
use super::{EntryRefusal, UnpackError, UnpackLimits, UnpackOptions};
use crate::disk::DiskSpace;

/// Disk usage of an entry beside its content, at most a little more.
const FILE_BYTES: u64 = 4096;

/// A part of a sparse file that has data: offset and length.
pub(crate) type SparseExtent = (u64, u64);

/// Kind of an entry in a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LayerEntryKind {
    /// A file; its content follows.
    File,
    /// A file with holes; the extents' bytes follow, one after the other.
    Sparse(Vec<SparseExtent>),
    Directory,
    Symlink,
    HardLink,
    Fifo,
    CharDevice,
    BlockDevice,
}

/// One entry with all its extended headers applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LayerEntry {
    /// As written: may be absolute, may contain `.` and `..`; never empty, no zero byte.
    pub(crate) path: Vec<u8>,
    pub(crate) kind: LayerEntryKind,
    /// Target of a link, as written.
    pub(crate) link: Vec<u8>,
    /// The file's size, holes included.
    pub(crate) size: u64,
    /// Permission, set-id and sticky bits only.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: ErofsTime,
    /// Major and minor number of a device.
    pub(crate) device: (u32, u32),
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Reads one archive.
pub(crate) struct LayerArchive<'a, F> {
    plain: TarStream<'a, F>,
    parser: Parser,
    /// Bytes taken from `plain` ahead of the parser: a header that a buffer's end has cut.
    carry: Vec<u8>,
    carried: usize,
    /// Bytes before the next header or content.
    at: u64,
    content: u64,
    padding: u64,
    entries: u64,
    total_size: u64,
    max_entries: u64,
    max_size: u64,
    max_carry: usize,
    ended: bool,
    /// Receives all bytes that are no content of files.
    frame: Option<&'a mut dyn Write>,
    options: &'a UnpackOptions,
}

/// Next step after looking at the bytes at hand.
enum TarParseStep {
    Entry(Box<LayerEntry>, usize, u64),
    Skip(usize),
    More(usize),
    End(usize),
}

impl<'a, F: BufferSource> LayerArchive<'a, F> {
    pub(crate) fn new(plain: TarStream<'a, F>, options: &'a UnpackOptions) -> LayerArchive<'a, F> {
        let limits = &options.limits;
        let mut parser = Parser::new(TarLimits {
            max_metadata_size: limits.max_metadata,
            // `check_lengths` below names the entry.
            max_path_len: None,
            ..TarLimits::default()
        });
        // Negative times are legal; `strict_pax` below is strict about everything else.
        parser.set_ignore_pax_errors(true);
        // An extended header without a path leaves that of the header.
        parser.set_allow_empty_path(true);
        LayerArchive {
            plain,
            parser,
            carry: Vec::new(),
            carried: 0,
            at: 0,
            content: 0,
            padding: 0,
            entries: 0,
            total_size: 0,
            max_entries: limits.max_entries,
            max_size: limits.max_plain_bytes,
            max_carry: 2 * limits.max_metadata as usize + (64 << 10),
            ended: false,
            frame: None,
            options,
        }
    }

    /// Copies all bytes that are no content of files to `frame`, too.
    pub(super) fn with_frame(mut self, frame: &'a mut dyn Write) -> Self {
        self.frame = Some(frame);
        self
    }

    /// Entries so far.
    pub(super) fn entries(&self) -> u64 {
        self.entries
    }

    /// Bytes of the archive before the next header or content.
    pub(crate) fn position(&self) -> u64 {
        self.at
    }

    /// Reads what follows the archive, and compares the digest of everything. Returns the number of bytes.
    pub(super) fn finish(mut self) -> Result<u64, UnpackError> {
        self.read_rest()?;
        self.plain.finish()
    }

    /// Reads what follows the archive.
    pub(super) fn read_rest(&mut self) -> Result<(), UnpackError> {
        loop {
            match self.fill()?.len() {
                0 => return Ok(()),
                count => self.advance(count)?,
            }
        }
    }

    /// Says that the content of the entry is not in the archive. Returns its size.
    pub(super) fn content_elsewhere(&mut self) -> u64 {
        std::mem::take(&mut self.content)
    }

    /// Writes to the frame.
    pub(super) fn write_frame(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.frame.as_mut().map_or(Ok(()), |frame| frame.write_all(bytes))
    }

    /// Goes to the next entry, past whatever is left of the last one.
    pub(crate) fn next(&mut self) -> Result<Option<LayerEntry>, UnpackError> {
        self.skip_content()?;
        while !self.ended {
            match self.step()? {
                TarParseStep::Entry(entry, used, content) => {
                    self.advance(used)?;
                    self.content = content;
                    self.padding = padding(content);
                    self.count(&entry)?;
                    return Ok(Some(*entry));
                }
                TarParseStep::Skip(used) => {
                    self.advance(used)?;
                    // Metadata without entries costs time as entries do.
                    self.entries += 1;
                    self.check_entries()?;
                }
                TarParseStep::More(needed) => self.gather(needed)?,
                TarParseStep::End(used) => {
                    self.advance(used)?;
                    self.ended = true;
                }
            }
        }
        Ok(None)
    }

    /// The next piece of the entry's content; empty once all of it was consumed.
    pub(crate) fn content(&mut self) -> Result<&[u8], UnpackError> {
        if self.content == 0 {
            return Ok(&[]);
        }
        if self.fill()?.is_empty() {
            return Err(self.damaged("unexpected end of archive in a file"));
        }
        let wanted = usize::try_from(self.content).unwrap_or(usize::MAX);
        let piece = self.fill()?;
        Ok(&piece[..piece.len().min(wanted)])
    }

    /// Marks the first `count` bytes of [`LayerArchive::content`] as used.
    pub(crate) fn consume(&mut self, count: usize) {
        self.skip(count);
        self.content -= (count as u64).min(self.content);
    }

    fn skip_content(&mut self) -> Result<(), UnpackError> {
        while self.content > 0 {
            let piece = self.content()?.len();
            self.consume(piece);
        }
        while self.padding > 0 {
            let piece = (self.fill()?.len() as u64).min(self.padding);
            if piece == 0 {
                // The last file's padding may be missing.
                self.padding = 0;
            }
            self.padding -= piece;
            self.advance(usize::try_from(piece).unwrap_or(0))?;
        }
        Ok(())
    }

    /// Looks at the bytes at hand.
    fn step(&mut self) -> Result<TarParseStep, UnpackError> {
        let at = self.at;
        let LayerArchive { parser, carry, carried, plain, options, .. } = self;
        let input = if *carried < carry.len() { &carry[*carried..] } else { plain.fill()? };
        if input.is_empty() {
            return Ok(TarParseStep::End(0));
        }
        let step = match parser.parse(input) {
            Ok(ParseEvent::NeedData { min_bytes }) if min_bytes > input.len() => {
                TarParseStep::More(min_bytes)
            }
            Ok(ParseEvent::NeedData { .. }) => return Err(archive_error(at, "unterminated sparse map")),
            Ok(ParseEvent::End { consumed }) => TarParseStep::End(consumed),
            Ok(ParseEvent::GlobalExtensions { consumed, .. }) => TarParseStep::Skip(consumed),
            Ok(ParseEvent::Entry { consumed, entry }) => {
                let size = content_size(&entry, None, at)?;
                let entry = resolve(&entry, None, size, at)?;
                check_lengths(&entry, &options.limits)?;
                TarParseStep::Entry(Box::new(entry), consumed, size)
            }
            Ok(ParseEvent::SparseEntry { consumed, entry, sparse_map, real_size }) => {
                // The newest format has its map before the data and counts it in the size; the old one has it apart.
                let header = entry.header.as_bytes().as_ptr() as usize - input.as_ptr() as usize;
                let old_format = entry.entry_type == EntryType::GnuSparse;
                let map_bytes = if old_format { 0 } else { (consumed - header - HEADER_SIZE) as u64 };
                let size = content_size(&entry, Some(map_bytes), at)?;
                let extents = sparse_map.iter().map(|part| (part.offset, part.length)).collect();
                let entry = resolve(&entry, Some((extents, real_size)), size, at)?;
                check_lengths(&entry, &options.limits)?;
                TarParseStep::Entry(Box::new(entry), consumed, size)
            }
            Err(error) => return Err(parse_error(at, input, &error, options)),
        };
        Ok(step)
    }

    /// Puts at least `needed` bytes together, or as many as there are.
    fn gather(&mut self, needed: usize) -> Result<(), UnpackError> {
        if needed > self.max_carry {
            let limit = u64::from(self.options.limits.max_metadata);
            return Err(UnpackError::Limit {
                entry: name_at(self.fill()?),
                what: "bytes of extended headers in one entry",
                limit,
                setting: None,
            });
        }
        self.carry.drain(..self.carried);
        self.carried = 0;
        let had = self.carry.len();
        // Growing by halves keeps the number of looks at the same bytes small.
        let wanted = needed.max(had + had / 2);
        while self.carry.len() < wanted {
            let bytes = self.plain.fill()?;
            if bytes.is_empty() {
                break;
            }
            let taken = bytes.len().min(wanted - self.carry.len());
            self.carry.extend_from_slice(&bytes[..taken]);
            self.plain.consume(taken);
        }
        if self.carry.len() >= needed {
            return Ok(());
        }
        if self.carry.len() == HEADER_SIZE && self.carry.iter().all(|byte| *byte == 0) {
            // One block of zeros where two should be: an end all the same.
            self.advance(HEADER_SIZE)?;
            self.ended = true;
            return Ok(());
        }
        Err(self.damaged("unexpected end of archive in a header"))
    }

    /// Unread bytes: those put aside first.
    fn fill(&mut self) -> Result<&[u8], UnpackError> {
        if self.carried < self.carry.len() { Ok(&self.carry[self.carried..]) } else { self.plain.fill() }
    }

    /// Takes bytes that are no content of a file.
    fn advance(&mut self, count: usize) -> Result<(), UnpackError> {
        if let Some(frame) = &mut self.frame
            && count > 0
        {
            let carried = self.carried < self.carry.len();
            let bytes = if carried { &self.carry[self.carried..] } else { self.plain.fill()? };
            let written = frame.write_all(&bytes[..count.min(bytes.len())]);
            written.map_err(|error| UnpackError::File {
                doing: "write",
                path: "the record of a layer's archive".into(),
                cause: error,
            })?;
        }
        self.skip(count);
        Ok(())
    }

    fn skip(&mut self, count: usize) {
        self.at += count as u64;
        if self.carried < self.carry.len() {
            self.carried += count;
            if self.carried >= self.carry.len() {
                self.carry.clear();
                self.carried = 0;
            }
        } else {
            self.plain.consume(count);
        }
    }

    fn count(&mut self, entry: &LayerEntry) -> Result<(), UnpackError> {
        self.entries += 1;
        self.options.progress.set_entries(self.entries);
        self.check_entries()?;
        self.total_size = self.total_size.saturating_add(entry.size);
        if self.total_size > self.max_size {
            return Err(UnpackError::over_setting(self.max_size, "bytes of file content", MAX_LAYER_BYTES));
        }
        if self.options.progress.is_canceled() {
            return Err(UnpackError::Canceled);
        }
        // Its content is admitted as it is read.
        admit(self.options, DiskSpace { bytes: FILE_BYTES, inodes: 1 })
    }

    fn check_entries(&self) -> Result<(), UnpackError> {
        if self.entries > self.max_entries {
            return Err(UnpackError::over(self.max_entries, "entries"));
        }
        Ok(())
    }

    fn damaged(&self, problem: &str) -> UnpackError {
        archive_error(self.at, problem)
    }
}

fn archive_error(at: u64, problem: impl Into<String>) -> UnpackError {
    UnpackError::Archive { at, entry: None, problem: problem.into() }
}

/// Converts an error of the parser in the headers at the beginning of `input`.
fn parse_error(at: u64, input: &[u8], error: &ParseError, options: &UnpackOptions) -> UnpackError {
    let entry = name_at(input);
    match error {
        ParseError::MetadataTooLarge { .. } | ParseError::TooManyPendingEntries { .. } => {
            let limit = u64::from(options.limits.max_metadata);
            UnpackError::Limit { entry, what: "bytes of extended headers in one entry", limit, setting: None }
        }
        ParseError::TooManySparseEntries { limit, .. } => UnpackError::Limit {
            entry,
            what: "segments in a sparse file",
            limit: *limit as u64,
            setting: None,
        },
        other => UnpackError::Archive { at, entry, problem: header_problem(other) },
    }
}

/// The text of an error of the parser, without the bytes of the header.
pub(crate) fn header_problem(error: &ParseError) -> String {
    match error {
        ParseError::Header(HeaderError::InvalidOctal(_)) => "a number in the header is not octal".to_owned(),
        error => error.to_string(),
    }
}

/// The name of the entry whose headers begin here, for an error about them: by its extended headers, or else by its
/// own.
pub(crate) fn name_at(mut input: &[u8]) -> Option<PathBuf> {
    let mut long = None;
    loop {
        let (header, rest) = input.split_first_chunk::<HEADER_SIZE>()?;
        let header = Header::from_bytes(header);
        header.verify_checksum().ok()?;
        let kind = header.entry_type();
        if !matches!(kind, EntryType::GnuLongName | EntryType::GnuLongLink | EntryType::XHeader) {
            return long.or_else(|| header_path(header)).map(|path| named(&path));
        }
        let size = usize::try_from(header.entry_size().ok()?).ok()?;
        let data = &rest[..size.min(rest.len())];
        match kind {
            EntryType::GnuLongName => long = data.split(|byte| *byte == 0).next().map(<[u8]>::to_vec),
            EntryType::XHeader => {
                // After the first malformed record, the iterator returns its error without end.
                let records = PaxExtensions::new(data).map_while(Result::ok);
                let paths = records.filter(|record| record.key_bytes() == b"path");
                long = paths.last().map(|record| record.value_bytes().to_vec()).or(long);
            }
            _ => {}
        }
        long = long.filter(|path| !path.is_empty());
        let Some(next) = rest.get(size.checked_next_multiple_of(HEADER_SIZE)?..) else {
            return long.map(|path| named(&path));
        };
        input = next;
    }
}

/// The path in a header without its extensions.
fn header_path(header: &Header) -> Option<Vec<u8>> {
    let name = header.path_bytes();
    let prefix = header.prefix().filter(|prefix| !prefix.is_empty());
    let path = prefix.map_or_else(|| name.to_vec(), |prefix| [prefix, name].join(&b'/'));
    (!path.is_empty()).then_some(path)
}

/// Refuses paths and link targets that no path can be.
fn check_lengths(entry: &LayerEntry, limits: &UnpackLimits) -> Result<(), UnpackError> {
    let limit = limits.max_path;
    if entry.path.len() > limit as usize {
        let (entry, what) = (Some(named(&entry.path)), "bytes in the path of an entry");
        return Err(UnpackError::Limit { entry, what, limit: u64::from(limit), setting: None });
    }
    if entry.link.len() > limit as usize {
        return Err(UnpackError::refused(&entry.path, EntryRefusal::LinkTooLong(limit)));
    }
    Ok(())
}

fn malformed(at: u64, path: &[u8]) -> UnpackError {
    UnpackError::Archive { at, entry: Some(named(path)), problem: "malformed extended header".to_owned() }
}

fn padding(content: u64) -> u64 {
    content.wrapping_neg() % HEADER_SIZE as u64
}

/// Bytes of content that follow in the archive. `sparse` is the size of the map before them.
fn content_size(entry: &ParsedEntry<'_>, sparse: Option<u64>, at: u64) -> Result<u64, UnpackError> {
    let has_content = matches!(
        entry.entry_type,
        EntryType::Regular | EntryType::Continuous | EntryType::GnuSparse | EntryType::Other(_)
    );
    if !has_content || old_directory(entry) {
        return Ok(0);
    }
    let field = &entry.header.as_ustar().size;
    let overflows = field[0] & 0x80 != 0 && (field[0] != 0x80 || field[1..4] != [0, 0, 0]);
    if overflows || entry.size > i64::MAX as u64 {
        return Err(UnpackError::refused(&entry.path, EntryRefusal::Size));
    }
    // A size in the extended header replaces the reduced one, map and all.
    let from_pax = match entry.pax {
        Some(pax) => strict_pax(pax).ok_or_else(|| malformed(at, &entry.path))?.size,
        None => None,
    };
    match (from_pax, sparse) {
        (Some(size), Some(map)) => {
            size.checked_sub(map).ok_or_else(|| UnpackError::refused(&entry.path, EntryProblem::SparseMap))
        }
        _ => Ok(entry.size),
    }
}

/// Archives from before directories had a type mark them with a `/` at the end.
fn old_directory(entry: &ParsedEntry<'_>) -> bool {
    entry.header.as_ustar().typeflag == [0] && entry.path.ends_with(b"/")
}

/// The entry as the rest of the module wants it: checked, owned.
fn resolve(
    parsed: &ParsedEntry<'_>,
    sparse: Option<(Vec<SparseExtent>, u64)>,
    content: u64,
    at: u64,
) -> Result<LayerEntry, UnpackError> {
    let refuse = |reason| UnpackError::refused(&parsed.path, reason);
    let path = if parsed.path.is_empty() { header_path(parsed.header) } else { Some(parsed.path.to_vec()) };
    let path = path.ok_or_else(|| archive_error(at, "an entry without a name"))?;
    let link = parsed.link_target.as_deref().unwrap_or_else(|| parsed.header.link_name_bytes()).to_vec();
    if path.contains(&0) || link.contains(&0) {
        return Err(refuse(EntryProblem::ZeroByte.into()));
    }
    let (kind, size) = kind_of(parsed, sparse, content).map_err(refuse)?;
    let pax = match parsed.pax {
        Some(pax) => strict_pax(pax).ok_or_else(|| malformed(at, &path))?,
        None => PaxValues::default(),
    };
    // 4294967295 is no owner: to chown(2) it means "leave it".
    let owner = |id: u64| {
        u32::try_from(id).ok().filter(|id| *id != u32::MAX).ok_or_else(|| refuse(EntryProblem::Owner.into()))
    };
    Ok(LayerEntry {
        kind,
        link,
        size,
        mode: parsed.mode & 0o7777,
        uid: owner(parsed.uid)?,
        gid: owner(parsed.gid)?,
        // Binary fields are two's complement, so a time before 1970 comes out right.
        mtime: pax.mtime.unwrap_or(ErofsTime { seconds: parsed.mtime.cast_signed(), nanos: 0 }),
        device: (parsed.dev_major.unwrap_or(0), parsed.dev_minor.unwrap_or(0)),
        xattrs: parsed.xattrs.iter().map(|(name, value)| (name.to_vec(), value.to_vec())).collect(),
        path,
    })
}

/// Returns the kind of an entry, and the size of its file.
fn kind_of(
    parsed: &ParsedEntry<'_>,
    sparse: Option<(Vec<SparseExtent>, u64)>,
    content: u64,
) -> Result<(LayerEntryKind, u64), EntryRefusal> {
    Ok(match (parsed.entry_type, sparse) {
        (EntryType::Regular | EntryType::Continuous, None) if old_directory(parsed) => {
            (LayerEntryKind::Directory, 0)
        }
        (EntryType::Regular | EntryType::Continuous, None) => (LayerEntryKind::File, content),
        (EntryType::Regular | EntryType::Continuous | EntryType::GnuSparse, Some((extents, size))) => {
            if sparse_content(size, &extents) != Some(content) {
                return Err(EntryProblem::SparseMap.into());
            }
            (LayerEntryKind::Sparse(extents), size)
        }
        (EntryType::Directory, _) => (LayerEntryKind::Directory, 0),
        (EntryType::Symlink, _) => (LayerEntryKind::Symlink, 0),
        (EntryType::Link, _) => (LayerEntryKind::HardLink, 0),
        (EntryType::Fifo, _) => (LayerEntryKind::Fifo, 0),
        (EntryType::Char, _) => (LayerEntryKind::CharDevice, 0),
        (EntryType::Block, _) => (LayerEntryKind::BlockDevice, 0),
        (other, _) => return Err(EntryRefusal::Type(other.to_byte())),
    })
}
