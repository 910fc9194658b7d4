//! Feeds a tar archive to a writer; for tests and the example.

use std::io::{self, Read};

use larder_erofs::{ErofsEntry, ErofsEntryKind, ErofsOutput, ErofsTime, ErofsWriter};
use tar::EntryType;

/// Adds all entries of an archive.
pub(crate) fn add_archive<O: ErofsOutput>(archive: impl Read, writer: &mut ErofsWriter<O>) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 18];
    for entry in tar::Archive::new(archive).entries()? {
        let mut entry = entry?;
        let (mut xattrs, mut nanos) = (Vec::new(), 0);
        for extension in entry.pax_extensions()?.into_iter().flatten() {
            let extension = extension?;
            if let Some(name) = extension.key_bytes().strip_prefix(b"SCHILY.xattr.") {
                xattrs.push((name.to_vec(), extension.value_bytes().to_vec()));
            } else if extension.key_bytes() == b"mtime" {
                nanos = nanos_of(extension.value_bytes());
            }
        }
        let (path, link) = (entry.path_bytes().into_owned(), entry.link_name_bytes());
        let link = link.map(std::borrow::Cow::into_owned).unwrap_or_default();
        let header = entry.header().clone();
        let number = |part: io::Result<Option<u32>>| part.map(Option::unwrap_or_default);
        let (major, minor) = (number(header.device_major())?, number(header.device_minor())?);
        let kind = match header.entry_type() {
            EntryType::Directory => ErofsEntryKind::Directory,
            EntryType::Symlink => ErofsEntryKind::Symlink { target: &link },
            EntryType::Link => ErofsEntryKind::HardLink { target: &link },
            EntryType::Fifo => ErofsEntryKind::Fifo,
            EntryType::Char => ErofsEntryKind::CharDevice { major, minor },
            EntryType::Block => ErofsEntryKind::BlockDevice { major, minor },
            EntryType::XGlobalHeader => continue,
            _ => ErofsEntryKind::File { size: entry.size() },
        };
        let id = |id: u64| u32::try_from(id).map_err(io::Error::other);
        writer
            .add(&ErofsEntry {
                path: &path,
                kind,
                mode: header.mode()?,
                uid: id(header.uid()?)?,
                gid: id(header.gid()?)?,
                mtime: ErofsTime { seconds: header.mtime()?.cast_signed(), nanos },
                xattrs: &xattrs,
            })
            .map_err(io::Error::other)?;
        if matches!(kind, ErofsEntryKind::File { .. }) {
            copy(&mut entry, writer, &mut buffer)?;
        }
    }
    Ok(())
}

fn copy<O: ErofsOutput>(from: &mut impl Read, to: &mut ErofsWriter<O>, buffer: &mut [u8]) -> io::Result<()> {
    loop {
        let read = from.read(buffer)?;
        if read == 0 {
            return Ok(());
        }
        to.write_data(&buffer[..read]).map_err(io::Error::other)?;
    }
}

/// The digits behind the point of a time.
fn nanos_of(time: &[u8]) -> u32 {
    let digits = time.iter().skip_while(|byte| **byte != b'.').skip(1).chain(std::iter::repeat(&b'0'));
    digits.take(9).fold(0, |nanos, digit| nanos * 10 + u32::from(digit - b'0'))
}
