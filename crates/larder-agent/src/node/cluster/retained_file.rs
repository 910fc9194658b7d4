//! The images that image sets retain, on disk: a daemon that starts while the API server does not answer retains them.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use larder::files;
use larder::reference::ImageId;
use serde::{Deserialize, Serialize};
use tokio::task;

use crate::node::pods::desired::DesiredKey;

const VERSION: u32 = 1;

/// Images by their name in the sets.
pub(super) type RetainedImages = BTreeMap<String, (DesiredKey, ImageId)>;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RetainedDocument {
    version: u32,
    images: Vec<RetainedRecord>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RetainedRecord {
    image: String,
    id: String,
    sets: String,
    pull_policy: String,
    pinned: bool,
}

/// Reads the file; nothing without a file.
pub(super) async fn read(path: PathBuf) -> io::Result<RetainedImages> {
    let read = move || match fs_err::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        text => decode(&path, &text?),
    };
    task::spawn_blocking(read).await?
}

/// Replaces what the file has. Without any image there is no file.
pub(super) async fn write(path: PathBuf, images: RetainedImages) -> io::Result<()> {
    let write = move || {
        if !images.is_empty() {
            return files::replace(&path, &serde_json::to_vec(&document_of(&images))?);
        }
        match fs_err::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    };
    task::spawn_blocking(write).await?
}

fn document_of(images: &RetainedImages) -> RetainedDocument {
    let record = |(key, id): &(DesiredKey, ImageId)| RetainedRecord {
        image: key.image.to_string(),
        id: id.to_string(),
        sets: key.owner.clone(),
        pull_policy: key.policy.clone(),
        pinned: key.is_pinned,
    };
    RetainedDocument { version: VERSION, images: images.values().map(record).collect() }
}

fn decode(path: &Path, text: &[u8]) -> io::Result<RetainedImages> {
    let invalid = |problem: String| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{}: {problem}", path.display()))
    };
    let document: RetainedDocument = files::decode_document(text, VERSION).map_err(invalid)?;
    let image = |record: RetainedRecord| {
        let key = DesiredKey {
            owner: record.sets,
            part: String::new(),
            image: record.image.as_str().into(),
            policy: record.pull_policy,
            is_pinned: record.pinned,
        };
        (record.image, (key, ImageId::from(record.id)))
    };
    Ok(document.images.into_iter().map(image).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn retained_images_are_read_as_they_were_written_and_no_other_version_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image-sets.json");
        assert_eq!(read(path.clone()).await.unwrap(), BTreeMap::new());
        let key = DesiredKey {
            owner: "ImageSet web".into(),
            part: String::new(),
            image: "a:1".into(),
            policy: "IfNotPresent".into(),
            is_pinned: true,
        };
        let images = BTreeMap::from([("a:1".to_owned(), (key, ImageId::from("sha256:a")))]);
        write(path.clone(), images.clone()).await.unwrap();
        assert_eq!(read(path.clone()).await.unwrap(), images);
        fs_err::write(&path, r#"{"version":2,"nodes":[]}"#).unwrap();
        let error = read(path.clone()).await.unwrap_err().to_string();
        assert_eq!(error, format!("{}: unsupported version 2: expected 1", path.display()));
        write(path.clone(), BTreeMap::new()).await.unwrap();
        write(path.clone(), BTreeMap::new()).await.unwrap();
        assert!(!path.exists());
    }
}
