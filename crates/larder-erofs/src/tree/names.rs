//! Names and other texts, one after the other, each with its length before it. Frequent names are stored once.
//!
//! Texts begin in memory. [`NameArena::spill`] moves them to a temporary file, from which they are read through a small
//! cache. An error of that file is kept until [`NameArena::check`]: until then what cannot be read is empty.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::io;

use crate::output::ErofsScratch;

/// Bytes of one piece of memory.
const CHUNK: usize = 1 << 16;
/// As many recent names are recognised.
const RECENT: usize = 1 << 14;
const NONE: u32 = u32::MAX;
/// Bytes of texts, at most: their places are numbers of 32 bits.
const MAX_BYTES: usize = u32::MAX as usize;
/// One call stores no more.
const MAX_TEXT: usize = 1 << 20;

/// Texts by the place where they start.
pub(super) struct NameArena {
    /// Pieces in memory; those before are in the file.
    chunks: Vec<Vec<u8>>,
    spilled_chunks: usize,
    /// Bytes of a piece that is not full, while it waits in the file.
    parked: usize,
    spilled: RefCell<SpilledNames>,
    /// A name of this hash, or [`NONE`].
    recent: Vec<u32>,
    /// Keyed at random, since archives choose the names. It decides where something is in memory, never in the layer.
    hasher: RandomState,
}

impl NameArena {
    pub(super) fn new(scratch: Box<dyn ErofsScratch>) -> NameArena {
        NameArena {
            chunks: Vec::new(),
            spilled_chunks: 0,
            parked: 0,
            spilled: RefCell::new(SpilledNames { scratch, pages: Vec::new(), error: None }),
            recent: vec![NONE; RECENT],
            hasher: RandomState::new(),
        }
    }

    /// Bytes of memory that [`NameArena::spill`] can free.
    pub(super) fn text_memory(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// Bytes of memory.
    pub(super) fn memory(&self) -> usize {
        self.text_memory() + self.recent.len() * size_of::<u32>()
    }

    /// Whether there may be no room for one more text.
    pub(super) fn is_full(&self) -> bool {
        self.end() > MAX_BYTES - MAX_TEXT
    }

    /// Moves full pieces to the temporary file.
    pub(super) fn spill(&mut self) -> io::Result<()> {
        let full = self.chunks.len().saturating_sub(1);
        let file = self.spilled.get_mut();
        for (number, chunk) in (self.spilled_chunks..).zip(&self.chunks[..full]) {
            file.scratch.write_at((number * CHUNK) as u64, chunk)?;
        }
        self.chunks.drain(..full);
        self.spilled_chunks += full;
        Ok(())
    }

    /// Moves all of it to the temporary file, until [`NameArena::unpark`].
    pub(super) fn park(&mut self) -> io::Result<()> {
        self.spill()?;
        if let Some(chunk) = self.chunks.pop() {
            self.spilled.get_mut().scratch.write_at((self.spilled_chunks * CHUNK) as u64, &chunk)?;
            self.parked = chunk.len();
        }
        (self.chunks, self.recent) = (Vec::new(), Vec::new());
        Ok(())
    }

    /// Reads the piece that is not full, so that texts can be added.
    pub(super) fn unpark(&mut self) -> io::Result<()> {
        if self.parked > 0 {
            let mut chunk = Vec::with_capacity(CHUNK);
            chunk.resize(std::mem::take(&mut self.parked), 0);
            let at = (self.spilled_chunks * CHUNK) as u64;
            self.spilled.get_mut().scratch.read_exact_at(&mut chunk, at)?;
            self.chunks.push(chunk);
        }
        self.recent = vec![NONE; RECENT];
        Ok(())
    }

    /// Releases descriptors and what was read ahead, until the next text is read.
    pub(super) fn close(&mut self) {
        let spilled = self.spilled.get_mut();
        spilled.scratch.close();
        spilled.pages = Vec::new();
    }

    /// The first error of the temporary file since the last call.
    pub(super) fn check(&self) -> io::Result<()> {
        self.spilled.borrow_mut().error.take().map_or(Ok(()), Err)
    }

    pub(super) fn hash(&self, dir: u32, name: &[u8]) -> u64 {
        let mut mixed = self.hasher.hash_one(name) ^ u64::from(dir).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        for _ in 0..2 {
            mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        }
        mixed ^ (mixed >> 32)
    }

    /// Stores a name of at most 255 bytes.
    pub(super) fn add(&mut self, name: &[u8]) -> u32 {
        let slot = usize::try_from(self.hash(0, name) % RECENT as u64).unwrap_or(0);
        let recent = self.recent[slot];
        if recent != NONE && *self.name(recent) == *name {
            return recent;
        }
        let added = self.store(&[&length_of_name(name), name]);
        self.recent[slot] = added;
        added
    }

    /// Stores a name and, behind it, the text of a symbolic link.
    pub(super) fn add_symlink(&mut self, name: &[u8], link: &[u8]) -> u32 {
        self.store(&[&length_of_name(name), name, &length_of_text(link), link])
    }

    /// Stores a text of any length.
    pub(super) fn add_text(&mut self, text: &[u8]) -> u32 {
        self.store(&[&length_of_text(text), text])
    }

    pub(super) fn name(&self, at: u32) -> Cow<'_, [u8]> {
        let at = at as usize;
        if let Some([length, rest @ ..]) =
            self.in_memory(at / CHUNK).and_then(|chunk| chunk.get(at % CHUNK..))
            && let Some(name) = rest.get(..usize::from(*length))
        {
            return Cow::Borrowed(name);
        }
        let length = self.read(at, 1).first().copied().unwrap_or(0);
        self.read(at + 1, length.into())
    }

    /// Returns the target that [`NameArena::add_symlink`] stored.
    pub(super) fn link(&self, at: u32) -> Cow<'_, [u8]> {
        let length = self.name(at).len();
        self.text_at(at as usize + 1 + length)
    }

    /// Returns the text that [`NameArena::add_text`] stored.
    pub(super) fn text(&self, at: u32) -> Cow<'_, [u8]> {
        self.text_at(at as usize)
    }

    fn text_at(&self, at: usize) -> Cow<'_, [u8]> {
        let length = self.read(at, 4).first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        self.read(at + 4, length as usize)
    }

    fn read(&self, at: usize, length: usize) -> Cow<'_, [u8]> {
        let (chunk, start) = (at / CHUNK, at % CHUNK);
        if let Some(bytes) = self.in_memory(chunk).and_then(|chunk| chunk.get(start..start + length)) {
            return Cow::Borrowed(bytes);
        }
        let mut bytes = vec![0; length];
        let mut done = 0;
        while done < length {
            let (chunk, start) = ((at + done) / CHUNK, (at + done) % CHUNK);
            let part = &mut bytes[done..length.min(done + CHUNK - start)];
            done += part.len();
            match self.in_memory(chunk) {
                Some(chunk) => part.copy_from_slice(&chunk[start..start + part.len()]),
                None => self.spilled.borrow_mut().read(part, chunk * CHUNK + start),
            }
        }
        Cow::Owned(bytes)
    }

    /// The piece of this number, unless it is in the file.
    fn in_memory(&self, chunk: usize) -> Option<&Vec<u8>> {
        self.chunks.get(chunk.checked_sub(self.spilled_chunks)?)
    }

    fn end(&self) -> usize {
        let full = self.spilled_chunks + self.chunks.len().saturating_sub(1);
        full * CHUNK + self.chunks.last().map_or(0, Vec::len)
    }

    fn store(&mut self, parts: &[&[u8]]) -> u32 {
        let at = self.end();
        for mut part in parts.iter().copied() {
            while !part.is_empty() {
                if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
                    self.chunks.push(Vec::with_capacity(CHUNK));
                }
                let Some(chunk) = self.chunks.last_mut() else { break };
                let (now, rest) = part.split_at(part.len().min(CHUNK - chunk.len()));
                chunk.extend_from_slice(now);
                part = rest;
            }
        }
        u32::try_from(at).unwrap_or(NONE)
    }
}

fn length_of_name(name: &[u8]) -> [u8; 1] {
    [u8::try_from(name.len()).unwrap_or(u8::MAX)]
}

fn length_of_text(text: &[u8]) -> [u8; 4] {
    u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes()
}

const PAGE: usize = 4096;
/// Pages in the cache.
const PAGES: usize = 256;

/// Texts in the temporary file.
struct SpilledNames {
    scratch: Box<dyn ErofsScratch>,
    /// Pages that were read, each in the place that its number has among them. Empty until the first one.
    pages: Vec<Option<(usize, Box<[u8; PAGE]>)>>,
    error: Option<io::Error>,
}

impl SpilledNames {
    fn read(&mut self, buffer: &mut [u8], at: usize) {
        let mut done = 0;
        while done < buffer.len() {
            let (number, start) = ((at + done) / PAGE, (at + done) % PAGE);
            let end = buffer.len().min(done + PAGE - start);
            let part = &mut buffer[done..end];
            done = end;
            match self.page(number) {
                Ok(page) => part.copy_from_slice(&page[start..start + part.len()]),
                Err(error) => {
                    self.error.get_or_insert(error);
                    return;
                }
            }
        }
    }

    fn page(&mut self, number: usize) -> io::Result<&[u8; PAGE]> {
        self.pages.resize_with(PAGES, || None);
        let place = &mut self.pages[number % PAGES];
        let found = place.take().filter(|(found, _)| *found == number);
        let page = if let Some((_, page)) = found {
            page
        } else {
            let mut page = Box::new([0; PAGE]);
            self.scratch.read_exact_at(&mut page[..], (number * PAGE) as u64)?;
            page
        };
        Ok(&place.insert((number, page)).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_the_same_in_memory_and_in_the_file() {
        let mut arena = NameArena::new(Box::new(Vec::new()));
        let name = |at: usize| format!("{at:0>width$}", width = at % 251 + 1).into_bytes();
        let link = |at: usize| vec![b'l'; at % 4095 + 1];
        let places: Vec<_> = (0..2000)
            .map(|at| {
                if at % 700 == 699 {
                    arena.spill().unwrap();
                }
                let symlink = arena.add_symlink(&name(at), &link(at));
                (arena.add(&name(at)), symlink, arena.add_text(&vec![b't'; at * 100]))
            })
            .collect();
        assert!(arena.spilled_chunks > 0 && arena.chunks.len() > 1);
        for (at, (plain, symlink, text)) in places.into_iter().enumerate() {
            assert_eq!((&*arena.name(plain), &*arena.name(symlink)), (&name(at)[..], &name(at)[..]));
            assert_eq!(*arena.link(symlink), link(at));
            assert_eq!(arena.text(text).len(), at * 100);
        }
        arena.check().unwrap();
    }

    #[test]
    fn an_error_of_the_file_is_kept() {
        let mut arena = NameArena::new(Box::new(Vec::new()));
        let name = arena.add(b"name");
        arena.add_text(&vec![0; 2 * CHUNK]);
        arena.spill().unwrap();
        arena.spilled.get_mut().scratch = Box::new(Vec::new());
        assert_eq!(*arena.name(name), []);
        assert_eq!(arena.check().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        arena.check().unwrap();
    }
}
