//! Reads buffers of the format `FlatBuffers`: each offset is checked before it is followed.

/// A table in a buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct FlatTable<'a> {
    buffer: &'a [u8],
    start: usize,
    /// Offsets of its fields from its start, two bytes each.
    fields: &'a [u8],
}

/// A vector in a buffer, of offsets to its elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct FlatVector<'a> {
    buffer: &'a [u8],
    start: usize,
    length: usize,
}

fn bytes<const N: usize>(buffer: &[u8], at: usize) -> Option<[u8; N]> {
    buffer.get(at..)?.first_chunk().copied()
}

/// Follows the offset at a place.
fn target(buffer: &[u8], at: usize) -> Option<usize> {
    at.checked_add(usize::try_from(u32::from_le_bytes(bytes(buffer, at)?)).ok()?)
}

/// Length and start of a vector whose offset is at a place.
fn vector(buffer: &[u8], at: usize) -> Option<(usize, usize)> {
    let start = target(buffer, at)?;
    let length = usize::try_from(u32::from_le_bytes(bytes(buffer, start)?)).ok()?;
    Some((length, start + 4))
}

fn octets(buffer: &[u8], at: usize) -> Option<&[u8]> {
    let (length, start) = vector(buffer, at)?;
    buffer.get(start..)?.get(..length)
}

impl<'a> FlatTable<'a> {
    /// The table that a buffer is.
    pub(super) fn root(buffer: &'a [u8]) -> Option<FlatTable<'a>> {
        FlatTable::at(buffer, 0)
    }

    /// The table whose offset is at a place.
    fn at(buffer: &'a [u8], at: usize) -> Option<FlatTable<'a>> {
        let start = target(buffer, at)?;
        let to_fields = i64::from(i32::from_le_bytes(bytes(buffer, start)?));
        let fields = usize::try_from(i64::try_from(start).ok()?.checked_sub(to_fields)?).ok()?;
        let length = usize::from(u16::from_le_bytes(bytes(buffer, fields)?));
        // Before the offsets are two sizes.
        let fields = buffer.get(fields..)?.get(..length)?.get(4..)?;
        Some(FlatTable { buffer, start, fields })
    }

    /// Place of a field; `None` if the table does not have it.
    fn field(&self, number: usize) -> Option<usize> {
        let offset = usize::from(u16::from_le_bytes(bytes(self.fields, 2 * number)?));
        (offset > 0).then_some(self.start + offset)
    }

    /// A number, or `default` if the table does not have it. `None` if it is not in the buffer.
    fn number<const N: usize, T>(&self, field: usize, default: T, read: impl Fn([u8; N]) -> T) -> Option<T> {
        self.field(field).map_or(Some(default), |at| bytes(self.buffer, at).map(read))
    }

    pub(super) fn u8(&self, field: usize, default: u8) -> Option<u8> {
        self.number(field, default, u8::from_le_bytes)
    }

    pub(super) fn u32(&self, field: usize) -> Option<u32> {
        self.number(field, 0, u32::from_le_bytes)
    }

    /// A number of the schema's type `long`, which must not be negative.
    pub(super) fn u63(&self, field: usize) -> Option<u64> {
        u64::try_from(self.number(field, 0, i64::from_le_bytes)?).ok()
    }

    /// A string, or a vector of bytes; empty if the table does not have it.
    pub(super) fn octets(&self, field: usize) -> Option<&'a [u8]> {
        self.field(field).map_or(Some(&[]), |at| octets(self.buffer, at))
    }

    pub(super) fn table(&self, field: usize) -> Option<FlatTable<'a>> {
        FlatTable::at(self.buffer, self.field(field)?)
    }

    /// A vector of tables or strings; empty if the table does not have it.
    pub(super) fn vector(&self, field: usize) -> Option<FlatVector<'a>> {
        let buffer = self.buffer;
        let Some(at) = self.field(field) else { return Some(FlatVector { buffer, start: 0, length: 0 }) };
        let (length, start) = vector(buffer, at)?;
        let is_inside = buffer.len().checked_sub(start)? / 4 >= length;
        is_inside.then_some(FlatVector { buffer, start, length })
    }
}

impl<'a> FlatVector<'a> {
    pub(super) fn len(&self) -> usize {
        self.length
    }

    fn places(self) -> impl Iterator<Item = usize> {
        (0..self.length).map(move |number| self.start + 4 * number)
    }

    /// Its tables; `None` for one that is not in the buffer.
    pub(super) fn tables(self) -> impl Iterator<Item = Option<FlatTable<'a>>> {
        self.places().map(move |at| FlatTable::at(self.buffer, at))
    }

    /// Its strings; `None` for one that is not in the buffer.
    pub(super) fn strings(self) -> impl Iterator<Item = Option<&'a [u8]>> {
        self.places().map(move |at| octets(self.buffer, at))
    }
}
