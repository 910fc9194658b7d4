//! The images that example manifests name: found, made, and pushed into a registry.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{ImageBuilder, LayerFiles, PeerResult, RegistryProcess};

/// The port of the registry that the example manifests name, on 127.0.0.1.
pub const PORT: u16 = 5000;

/// The port of the one that asks for a password.
pub const PRIVATE_PORT: u16 = 5001;

/// Copies the manifests of a directory into a new directory below `into`, for registries on other ports.
pub fn copied_for(examples: &Path, port: u16, private_port: u16, into: &Path) -> PeerResult<PathBuf> {
    let copies = into.join("examples");
    fs_err::create_dir_all(&copies)?;
    for (path, text) in manifests(examples)? {
        // By way of a mark, so that a new port is not taken for one of the old.
        let text = text
            .replace(&format!("127.0.0.1:{PRIVATE_PORT}"), "\0private")
            .replace(&format!("127.0.0.1:{PORT}"), &format!("127.0.0.1:{port}"))
            .replace("\0private", &format!("127.0.0.1:{private_port}"));
        fs_err::write(copies.join(path.file_name().unwrap_or_default()), text)?;
    }
    Ok(copies)
}

/// Makes an image for each name that the manifests of a directory have for this registry, and pushes it there.
pub fn push_all(examples: &Path, registry: &RegistryProcess) -> PeerResult<()> {
    for name in images_named(examples, &registry.address())? {
        image_called(&name).push(registry, &name)?;
    }
    Ok(())
}

/// Names, with tags, of the images at `address` that the manifests mention, each once.
///
/// Reads the manifests as text: wherever a manifest holds its images, their names begin with the address. A name
/// with a digest is left out, since content cannot be made for a digest.
pub fn images_named(examples: &Path, address: &str) -> PeerResult<BTreeSet<String>> {
    let start = format!("{address}/");
    let mut names = BTreeSet::new();
    for (_, text) in manifests(examples)? {
        let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
        for rest in lines.flat_map(|line| line.split(&start).skip(1)) {
            let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "/._-:@".contains(c);
            let name = rest.split(|c| !is_name(c)).next().unwrap_or_default();
            if !name.is_empty() && !name.contains('@') {
                names.insert(name.to_owned());
            }
        }
    }
    Ok(names)
}

/// An image that looks like a small application: a base that all share, a runtime that some share, an own layer.
pub fn image_called(name: &str) -> ImageBuilder {
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    ImageBuilder::new()
        .layer(LayerFiles::new().file("etc/os-release", "ID=playground\n").noise(
            "usr/lib/base",
            2_000_000,
            1,
        ))
        .layer(LayerFiles::new().noise("usr/lib/runtime", 1_000_000, 2 + seed % 2))
        .layer(LayerFiles::new().file("srv/name", name).noise("srv/app", 300_000, seed))
}

/// The manifests of a directory, with their text, sorted by name.
fn manifests(dir: &Path) -> PeerResult<Vec<(PathBuf, String)>> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir(dir)? {
        let path = entry?.path();
        let known = ["yaml", "yml", "json"];
        if path.extension().is_some_and(|extension| known.iter().any(|known| extension == *known)) {
            found.push((path.clone(), fs_err::read_to_string(&path)?));
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_found_wherever_a_manifest_names_them() {
        let dir = tempfile::tempdir().unwrap();
        let text = "image: 127.0.0.1:5000/shop/web:1\n- {image: \"127.0.0.1:5000/shop/api\"}\n\
                    # image: 127.0.0.1:5000/comment\nreference: 127.0.0.1:5000/data@sha256:0\nimage: busybox\n\
                    image: 127.0.0.1:5001/private/ledger:1\n";
        fs_err::write(dir.path().join("pod.yaml"), text).unwrap();
        fs_err::write(dir.path().join("notes.txt"), "127.0.0.1:5000/not/a/manifest").unwrap();
        let names = images_named(dir.path(), "127.0.0.1:5000").unwrap();
        assert_eq!(Vec::from_iter(names), ["shop/api", "shop/web:1"]);

        let other = tempfile::tempdir().unwrap();
        let copies = copied_for(dir.path(), PRIVATE_PORT, 5002, other.path()).unwrap();
        assert_eq!(images_named(&copies, "127.0.0.1:5001").unwrap().len(), 2);
        assert_eq!(images_named(&copies, "127.0.0.1:5002").unwrap().len(), 1);
        assert_eq!(images_named(&copies, "127.0.0.1:5000").unwrap().len(), 0);
    }
}
