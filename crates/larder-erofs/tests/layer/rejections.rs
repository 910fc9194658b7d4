//! An entry that a layer cannot hold is an error that names it.

use std::io;

use larder_erofs::{EntryProblem, ErofsError, ErofsOptions, ErofsOutput, ErofsScratch, ErofsWriter};

use crate::script::{ScriptEntry, ScriptKind, dir, entry, file, hard_link, noise, symlink, write};

fn problem(entries: &[ScriptEntry]) -> EntryProblem {
    match write(entries).unwrap_err() {
        ErofsError::Rejected { path, problem } => {
            let last = entries.last().unwrap();
            assert_eq!(path.as_os_str().as_encoded_bytes(), last.path, "{problem}");
            problem
        }
        other => panic!("{other}"),
    }
}

#[test]
fn contradictions_are_rejected() {
    let cases: Vec<(Vec<ScriptEntry>, EntryProblem)> = vec![
        (vec![file("a\0b", "")], EntryProblem::ZeroByte),
        (vec![symlink("a", "b\0")], EntryProblem::ZeroByte),
        (vec![file([b'n'; 256], "")], EntryProblem::NameTooLong),
        (vec![entry([&b".wh."[..], &[b'n'; 256]].concat(), ScriptKind::Fifo)], EntryProblem::NameTooLong),
        (vec![file(vec![vec![b'n'; 200]; 25].join(&b'/'), "")], EntryProblem::PathTooLong),
        (vec![file("a", ""), file("a/b", "")], EntryProblem::ParentNotDirectory),
        (vec![symlink("a", "b"), symlink("b", "a"), file("a/c", "")], EntryProblem::TooManyLinks),
        (vec![file("/", "")], EntryProblem::RootNotDirectory),
        (vec![file("a/.wh.", "")], EntryProblem::Whiteout),
        (vec![file("a/.wh...", "")], EntryProblem::Whiteout),
        (vec![symlink("a", "")], EntryProblem::SymlinkTarget),
        (vec![symlink("a", vec![b'x'; 4096])], EntryProblem::SymlinkTarget),
        (vec![dir("a"), hard_link("b", "a")], EntryProblem::LinkToDirectory),
        (vec![hard_link("b", "/")], EntryProblem::LinkToDirectory),
        (vec![hard_link("b", "./b")], EntryProblem::LinkToItself),
        (vec![file("a/b", ""), hard_link("a", "a/b")], EntryProblem::LinkTarget),
        (vec![file("a", "").owner(u32::MAX, 0)], EntryProblem::Owner),
        (vec![file("a", "").mtime(0, 1_000_000_000)], EntryProblem::Time),
        (vec![entry("a", ScriptKind::BlockDevice(4096, 0))], EntryProblem::Device),
        (vec![entry("a", ScriptKind::Sparse(5, vec![(3, vec![0; 3])]))], EntryProblem::SparseMap),
    ];
    for (entries, expected) in cases {
        assert_eq!(problem(&entries), expected, "{entries:?}");
    }
}

#[test]
fn data_must_have_the_size_of_its_entry() {
    let add = |data: &[usize]| -> Result<(), ErofsError> {
        let mut writer = ErofsWriter::new(Vec::new(), ErofsOptions::default())?;
        let entry = file("dir/f", "");
        writer.add(&larder_erofs::ErofsEntry {
            path: &entry.path,
            kind: larder_erofs::ErofsEntryKind::File { size: 100 },
            mode: 0,
            uid: 0,
            gid: 0,
            mtime: entry.mtime,
            xattrs: &[],
        })?;
        for length in data {
            writer.write_data(&noise(*length, 1))?;
        }
        writer.finish().map(drop)
    };
    assert!(add(&[60, 40, 0]).is_ok());
    let short = add(&[60]).unwrap_err().to_string();
    assert_eq!(short, "wrong amount of data for \"dir/f\": expected 100 bytes, got 60");
    let long = add(&[60, 41]).unwrap_err().to_string();
    assert_eq!(long, "wrong amount of data for \"dir/f\": expected 100 bytes, got more than 100");
    assert!(add(&[100, 1]).is_err());
}

/// A temporary file that takes everything and returns nothing.
struct LostScratch;

impl ErofsScratch for LostScratch {
    fn write_at(&mut self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn read_exact_at(&mut self, _buffer: &mut [u8], _offset: u64) -> io::Result<()> {
        Err(io::ErrorKind::UnexpectedEof.into())
    }

    fn close(&mut self) {}
}

struct LostOutput;

impl ErofsOutput for LostOutput {
    fn append(&mut self, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn write_at(&mut self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn scratch(&mut self) -> io::Result<Box<dyn ErofsScratch>> {
        Ok(Box::new(LostScratch))
    }
}

#[test]
fn errors_of_temporary_files_are_returned() {
    let options = ErofsOptions { max_name_bytes: 0, ..ErofsOptions::default() };
    let write = || {
        let mut writer = ErofsWriter::new(LostOutput, options.clone())?;
        for at in 0..10_000 {
            let path = format!("directory/{}/{at:0>100}", at % 7);
            writer.add(&larder_erofs::ErofsEntry {
                path: path.as_bytes(),
                kind: larder_erofs::ErofsEntryKind::Fifo,
                mode: 0,
                uid: 0,
                gid: 0,
                mtime: larder_erofs::ErofsTime::default(),
                xattrs: &[],
            })?;
        }
        writer.finish()
    };
    assert!(matches!(write().err(), Some(ErofsError::Output(_))));
}

/// An output with room for some bytes.
struct FullOutput(usize);

impl ErofsOutput for FullOutput {
    fn scratch(&mut self) -> io::Result<Box<dyn ErofsScratch>> {
        Ok(Box::new(Vec::new()))
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
        Ok(())
    }

    fn write_at(&mut self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
        self.append(&[0])
    }
}

#[test]
fn errors_of_the_output_are_returned() {
    for room in [0, 4096, 5000, 4096 * 2] {
        let write = || {
            let mut writer = ErofsWriter::new(FullOutput(room), ErofsOptions::default())?;
            writer.add(&larder_erofs::ErofsEntry {
                path: b"f",
                kind: larder_erofs::ErofsEntryKind::File { size: 4096 },
                mode: 0,
                uid: 0,
                gid: 0,
                mtime: larder_erofs::ErofsTime::default(),
                xattrs: &[],
            })?;
            writer.write_data(&[0; 4096])?;
            writer.finish()
        };
        assert!(matches!(write().err(), Some(ErofsError::Output(_))), "{room}");
    }
}
