//! Reads a layer back, without any code of the writer, and checks what the format demands on the way.

use std::collections::BTreeMap;

const BLOCK: usize = 4096;

/// All that a layer says about one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReadNode {
    /// With the type bits.
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: (i64, u32),
    pub(crate) links: u32,
    pub(crate) size: u64,
    pub(crate) device: u32,
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Of a file or link; empty for files over [`MAX_CONTENT`].
    pub(crate) content: Vec<u8>,
    /// Of a sparse file, the number of chunks and of those with data.
    pub(crate) chunks: Option<(u64, u64)>,
    pub(crate) number: u64,
}

const MAX_CONTENT: u64 = 64 << 20;

/// Contents of a layer, by path; the root is the empty path.
pub(crate) type ReadTree = BTreeMap<Vec<u8>, ReadNode>;

pub(crate) struct Reader<'a> {
    layer: &'a [u8],
    meta: u64,
    /// Parts of the layer that something occupies, by their beginning, and what.
    used: BTreeMap<u64, (u64, String)>,
    seen: BTreeMap<u64, ReadNode>,
}

/// Reads all paths.
///
/// # Panics
/// When the layer is not as it must be.
pub(crate) fn read(layer: &[u8]) -> ReadTree {
    let superblock = &layer[1024..1152];
    assert_eq!(u32_at(superblock, 0), 0xE0F5_E1E2, "magic");
    assert_eq!(layer.len() % BLOCK, 0, "partial block");
    assert_eq!(u32_at(superblock, 36) as usize, layer.len() / BLOCK, "number of blocks");
    assert_eq!(
        (superblock[12], superblock[13], superblock[90]),
        (12, 0, 0),
        "block size, slots, directory blocks"
    );
    assert_eq!(u32_at(superblock, 80) & !4, 0, "incompatible features");
    let mut first = layer[1024..BLOCK].to_vec();
    first[4..8].fill(0);
    assert_eq!(u32_at(superblock, 4), checksum(&first), "checksum");
    let mut reader = Reader {
        layer,
        meta: u64::from(u32_at(superblock, 40)) * BLOCK as u64,
        used: BTreeMap::from([(0, (1152, "superblock".into()))]),
        seen: BTreeMap::new(),
    };
    let root = u64::from(u16_at(superblock, 14));
    let mut tree = ReadTree::new();
    reader.directory(b"", root, root, &mut tree);
    assert_eq!(u64_at(superblock, 16), reader.seen.len() as u64, "number of inodes");
    reader.check_overlaps();
    check_links(&tree);
    tree
}

impl Reader<'_> {
    fn directory(&mut self, path: &[u8], number: u64, parent: u64, tree: &mut ReadTree) {
        let node = self.inode(number);
        assert_eq!(node.mode & 0o170_000, 0o040_000, "{path:?} is no directory");
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut children = Vec::new();
        for block in node.content.chunks(BLOCK) {
            for (name, child, kind) in entries(block) {
                match &name[..] {
                    b"." => assert_eq!(child, number, "dot in {path:?}"),
                    b".." => assert_eq!(child, parent, "dot dot in {path:?}"),
                    _ => children.push((name.clone(), child, kind)),
                }
                names.push(name);
            }
        }
        assert!(names.windows(2).all(|pair| pair[0] < pair[1]), "{path:?}: order of {names:?}");
        assert_eq!(names.len(), children.len() + 2, "{path:?} lacks dot or dot dot");
        let directories = children.iter().filter(|(_, _, kind)| *kind == 2).count();
        assert_eq!(node.links as usize, 2 + directories, "links of {path:?}");
        tree.insert(path.to_owned(), node);
        for (name, child, kind) in children {
            let path = if path.is_empty() { name } else { [path, b"/", &name].concat() };
            if kind == 2 {
                self.directory(&path, child, number, tree);
            } else {
                let node = self.inode(child);
                let expected = match node.mode & 0o170_000 {
                    0o100_000 => 1,
                    0o020_000 => 3,
                    0o060_000 => 4,
                    0o010_000 => 5,
                    0o120_000 => 7,
                    other => panic!("{path:?}: type {other:o}"),
                };
                assert_eq!(kind, expected, "type of {path:?}");
                tree.insert(path, node);
            }
        }
    }

    fn inode(&mut self, number: u64) -> ReadNode {
        if let Some(node) = self.seen.get(&number) {
            return node.clone();
        }
        let at = self.meta + number * 32;
        let inode = self.bytes(at, 64).to_vec();
        let format = u16_at(&inode, 0);
        assert_eq!(format & 1, 1, "only extended inodes are expected");
        let units = u64::from(u16_at(&inode, 2));
        let xattr_bytes = if units == 0 { 0 } else { 12 + (units - 1) * 4 };
        let behind = at + 64 + xattr_bytes;
        let xattrs = self.xattrs(at + 64, xattr_bytes);
        let mut node = ReadNode {
            mode: u16_at(&inode, 4),
            size: u64_at(&inode, 8),
            uid: u32_at(&inode, 24),
            gid: u32_at(&inode, 28),
            mtime: (u64_at(&inode, 32).cast_signed(), u32_at(&inode, 40)),
            links: u32_at(&inode, 44),
            device: 0,
            xattrs,
            content: Vec::new(),
            chunks: None,
            number,
        };
        let place = u32_at(&inode, 16);
        let mut length = 64 + xattr_bytes;
        if matches!(node.mode & 0o170_000, 0o020_000 | 0o060_000) {
            node.device = place;
        } else {
            let first = u64::from(place) * BLOCK as u64;
            let is_directory = node.mode & 0o170_000 == 0o040_000;
            let what = if is_directory { "directory data" } else { "file data" };
            match format >> 1 {
                0 => {
                    node.content = self.bytes(first, node.size).to_vec();
                    self.occupy(first, node.size.next_multiple_of(BLOCK as u64), number, what);
                }
                2 => {
                    let tail = node.size % BLOCK as u64;
                    assert_ne!(tail, 0, "inode {number}: nothing follows");
                    assert_eq!(
                        behind / BLOCK as u64,
                        (behind + tail - 1) / BLOCK as u64,
                        "tail crosses a block"
                    );
                    node.content = self.bytes(first, node.size - tail).to_vec();
                    node.content.extend_from_slice(self.bytes(behind, tail));
                    self.occupy(first, node.size - tail, number, what);
                    length += tail;
                }
                4 => length += self.chunks(&mut node, place, behind),
                other => panic!("layout {other}"),
            }
        }
        self.occupy(at, length, number, "inode");
        self.seen.insert(number, node.clone());
        node
    }

    /// Reads a sparse file. Returns the length of its map.
    fn chunks(&mut self, node: &mut ReadNode, form: u32, map: u64) -> u64 {
        assert_eq!(form & !31, 0, "form of chunks");
        let chunk = (BLOCK as u64) << form;
        let count = node.size.div_ceil(chunk);
        let mut filled = 0;
        if node.size <= MAX_CONTENT {
            node.content = vec![0; usize::try_from(node.size).unwrap()];
        }
        for at in 0..count {
            let block = u32_at(self.bytes(map + at * 4, 4), 0);
            if block == u32::MAX {
                continue;
            }
            filled += 1;
            let (start, length) = (at * chunk, chunk.min(node.size - at * chunk));
            let place = u64::from(block) * BLOCK as u64;
            if node.size <= MAX_CONTENT {
                let range = usize::try_from(start).unwrap()..usize::try_from(start + length).unwrap();
                let bytes = self.bytes(place, length).to_vec();
                node.content[range].copy_from_slice(&bytes);
            }
            self.occupy(place, length.next_multiple_of(BLOCK as u64), node.number, "chunk");
        }
        node.chunks = Some((count, filled));
        count * 4
    }

    fn xattrs(&self, at: u64, length: u64) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let mut found = BTreeMap::new();
        if length == 0 {
            return found;
        }
        let bytes = self.bytes(at, length);
        assert_eq!(bytes[4], 0, "shared attributes");
        let mut at = 12;
        while at < bytes.len() {
            let (name_len, value_len) = (usize::from(bytes[at]), usize::from(u16_at(bytes, at + 2)));
            let prefix: &[u8] = match bytes[at + 1] {
                1 => b"user.",
                2 => b"system.posix_acl_access",
                3 => b"system.posix_acl_default",
                4 => b"trusted.",
                6 => b"security.",
                other => panic!("index of attribute: {other}"),
            };
            let name = &bytes[at + 4..at + 4 + name_len];
            let value = bytes[at + 4 + name_len..at + 4 + name_len + value_len].to_vec();
            assert!(found.insert([prefix, name].concat(), value).is_none(), "attribute twice");
            at = (at + 4 + name_len + value_len).next_multiple_of(4);
        }
        found
    }

    fn bytes(&self, at: u64, length: u64) -> &[u8] {
        let at = usize::try_from(at).unwrap();
        &self.layer[at..at + usize::try_from(length).unwrap()]
    }

    fn occupy(&mut self, at: u64, length: u64, number: u64, what: &str) {
        if length > 0 {
            let is_data = what == "file data" || what == "chunk";
            let is_separate = if is_data { at + length <= self.meta } else { at >= self.meta };
            assert!(is_separate, "{at}: {what} of inode {number}, metadata begins at {}", self.meta);
            let before = self.used.insert(at, (at + length, format!("{what} of inode {number}")));
            assert!(before.is_none(), "{at}: {what} of inode {number} and {before:?}");
        }
    }

    fn check_overlaps(&self) {
        let parts: Vec<_> = self.used.iter().collect();
        for pair in parts.windows(2) {
            let ((_, (end, what)), (begin, (_, next))) = (pair[0], pair[1]);
            assert!(end <= begin, "{what} ends at {end}, {next} begins at {begin}");
        }
    }
}

/// Each inode has as many names as it says.
fn check_links(tree: &ReadTree) {
    let mut names: BTreeMap<u64, u32> = BTreeMap::new();
    for node in tree.values().filter(|node| node.mode & 0o170_000 != 0o040_000) {
        *names.entry(node.number).or_default() += 1;
    }
    for (path, node) in tree {
        if let Some(names) = names.get(&node.number) {
            assert_eq!(node.links, *names, "links of {}", String::from_utf8_lossy(path));
        }
    }
}

/// Names, inode numbers and types of a block of a directory.
fn entries(block: &[u8]) -> Vec<(Vec<u8>, u64, u8)> {
    let count = usize::from(u16_at(block, 8)) / 12;
    let offset = |at: usize| usize::from(u16_at(block, at * 12 + 8));
    let entry = |at: usize| {
        let end = if at + 1 < count { offset(at + 1) } else { block.len() };
        let name = &block[offset(at)..end];
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default().to_vec();
        assert!((1..=255).contains(&name.len()), "name of {} bytes", name.len());
        (name, u64_at(block, at * 12), block[at * 12 + 10])
    };
    (0..count).map(entry).collect()
}

fn checksum(bytes: &[u8]) -> u32 {
    let mut state = u32::MAX;
    for byte in bytes {
        state ^= u32::from(*byte);
        for _ in 0..8 {
            state = if state & 1 == 1 { (state >> 1) ^ 0x82F6_3B78 } else { state >> 1 };
        }
    }
    state
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}
