//! Listings of directory trees, to compare those of different programs.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

/// Every path below a directory, relative to it, with what two equal trees have in common.
#[derive(Debug, PartialEq, Eq)]
pub struct TreeListing(BTreeMap<PathBuf, ListedFile>);

/// A file of whatever type.
#[derive(Debug, PartialEq, Eq)]
pub struct ListedFile {
    mode: u32,
    owner: (u32, u32),
    /// Modification time; `None` for a directory, whose time depends on when its entries were made.
    mtime: Option<(i64, i64)>,
    size: Option<u64>,
    device: Option<u64>,
    content: Option<Vec<u8>>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// The first of the paths that are the same file.
    same_as: Option<PathBuf>,
}

impl TreeListing {
    /// Lists a tree.
    ///
    /// # Panics
    /// When it cannot be read.
    pub fn of(root: &Path) -> TreeListing {
        let mut first_names = BTreeMap::new();
        let mut looks = BTreeMap::new();
        for (path, meta) in walk(root) {
            let relative = path.strip_prefix(root).expect("a readable tree").to_owned();
            let kind = meta.file_type();
            let content = if kind.is_file() {
                Some(hash(&path))
            } else if kind.is_symlink() {
                Some(fs_err::read_link(&path).expect("a readable tree").as_os_str().as_bytes().to_vec())
            } else {
                None
            };
            let is_device = matches!(meta.mode() & 0o170_000, 0o020_000 | 0o060_000);
            let first =
                first_names.entry((meta.dev(), meta.ino())).or_insert_with(|| relative.clone()).clone();
            let found = ListedFile {
                mode: meta.mode(),
                owner: (meta.uid(), meta.gid()),
                mtime: (!kind.is_dir()).then(|| (meta.mtime(), meta.mtime_nsec())),
                size: kind.is_file().then_some(meta.len()),
                device: is_device.then(|| meta.rdev()),
                content,
                xattrs: xattrs(&path),
                same_as: (first != relative && !kind.is_dir()).then_some(first),
            };
            looks.insert(relative, found);
        }
        TreeListing(looks)
    }

    /// The file at this path.
    pub fn get(&self, path: impl AsRef<Path>) -> Option<&ListedFile> {
        self.0.get(path.as_ref())
    }

    /// Number of paths.
    #[allow(clippy::len_without_is_empty, reason = "a tree has its root")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Fails with all paths that differ, but for those that are known to.
    ///
    /// # Panics
    /// When others differ.
    pub fn assert_equal(&self, name: &str, theirs: &TreeListing, known: &[&str]) {
        let paths: BTreeSet<_> = self.0.keys().chain(theirs.0.keys()).collect();
        let differences: Vec<String> = paths
            .into_iter()
            .filter(|path| self.get(path) != theirs.get(path))
            .filter(|path| !known.iter().any(|known| path.as_path() == Path::new(known)))
            .map(|path| {
                let (ours, theirs) = (self.get(path), theirs.get(path));
                format!("{}\n  ours   {ours:?}\n  theirs {theirs:?}", path.display())
            })
            .collect();
        assert!(differences.is_empty(), "{name} differs:\n{}", differences.join("\n"));
    }
}

/// Everything below a directory and itself, sorted by path.
///
/// # Panics
/// When they cannot be read.
pub fn walk(dir: &Path) -> Vec<(PathBuf, std::fs::Metadata)> {
    let mut found = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(path) = todo.pop() {
        let meta = fs_err::symlink_metadata(&path).expect("a readable tree");
        if meta.is_dir() {
            todo.extend(
                fs_err::read_dir(&path)
                    .expect("a readable tree")
                    .map(|entry| entry.expect("a readable tree").path()),
            );
        }
        found.push((path, meta));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

fn hash(path: &Path) -> Vec<u8> {
    let (mut file, mut hasher) = (fs_err::File::open(path).expect("a readable tree"), Sha256::new());
    let mut buffer = vec![0; 1 << 18];
    loop {
        match std::io::Read::read(&mut file, &mut buffer).expect("a readable tree") {
            0 => return hasher.finalize().to_vec(),
            read => hasher.update(&buffer[..read]),
        }
    }
}

fn xattrs(path: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut names = vec![0; 65_536];
    let length = rustix::fs::llistxattr(path, &mut names[..]).expect("a readable tree");
    names.truncate(length);
    let mut found: Vec<_> = names
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty() && !name.starts_with(b"trusted.overlay."))
        .map(|name| {
            let mut value = vec![0; 65_536];
            let length = rustix::fs::lgetxattr(
                path,
                std::str::from_utf8(name).expect("a readable tree"),
                &mut value[..],
            )
            .expect("a readable tree");
            value.truncate(length);
            (name.to_vec(), value)
        })
        .collect();
    found.sort();
    found
}
