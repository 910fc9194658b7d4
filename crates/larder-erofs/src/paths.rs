//! Paths of archives, which may be anything.

use std::borrow::Cow;

/// The parts of a path that mean something: not the empty ones, not `.`.
pub(crate) fn parts(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b"."))
}

/// The path without `.`, `..` and doubled slashes, relative to the root, above which it never gets.
pub(crate) fn clean(path: &[u8]) -> Cow<'_, [u8]> {
    let path = path.strip_suffix(b"/").unwrap_or(path);
    let is_clean = |part: &[u8]| !matches!(part, b"" | b"." | b"..");
    if path.split(|byte| *byte == b'/').all(is_clean) {
        return Cow::Borrowed(path);
    }
    let mut clean: Vec<&[u8]> = Vec::new();
    for part in parts(path) {
        if part == b".." {
            clean.pop();
        } else {
            clean.push(part);
        }
    }
    Cow::Owned(clean.join(&b'/'))
}

/// The path of the directory, and the name in it.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"", path),
    }
}

/// The path of a name in a directory.
pub(crate) fn join(mut dir: Vec<u8>, name: &[u8]) -> Vec<u8> {
    if !dir.is_empty() {
        dir.push(b'/');
    }
    dir.extend_from_slice(name);
    dir
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clean_path_is_relative_and_stays_below_the_root() {
        for (path, cleaned) in [
            ("a/b", "a/b"),
            ("a/b/", "a/b"),
            ("/a//b/./c", "a/b/c"),
            ("../../a/../b", "b"),
            ("a/..", ""),
            ("/", ""),
            (".", ""),
            ("./", ""),
        ] {
            assert_eq!(clean(path.as_bytes()), cleaned.as_bytes(), "{path}");
        }
    }
}
