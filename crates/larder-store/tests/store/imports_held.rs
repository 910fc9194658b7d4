//! Layers that a streamed import protects from removal, and its leftovers after an error.

use std::io::{Cursor, Read};

use larder_store::disk::DiskSpace;
use larder_store::store::import::{Import, ImportError, ImportSource};
use larder_store::store::{LayerKey, LayerMetadata, RemoveOptions, Store, StoreRemoval};

use crate::help::*;
use crate::imports::*;

/// An archive whose reader does something before its first byte, or at its end.
struct ActingReader<F> {
    archive: Cursor<Vec<u8>>,
    at_end: bool,
    action: Option<F>,
}

impl<F: FnOnce()> Read for ActingReader<F> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let ended = self.archive.position() == self.archive.get_ref().len() as u64;
        if ended == self.at_end
            && let Some(action) = self.action.take()
        {
            action();
        }
        self.archive.read(buffer)
    }
}

/// Reads an archive, and removes an image before it has begun, or at its end.
fn read_while_removing(
    store: &Store,
    archive: Vec<u8>,
    at_end: bool,
    image: &'static str,
) -> (Result<Import, ImportError>, StoreRemoval) {
    let (sender, removed) = std::sync::mpsc::channel();
    let own = store.clone();
    let action = move || sender.send(own.remove(image, &RemoveOptions::default()).unwrap().unwrap()).unwrap();
    let stream = ActingReader { archive: Cursor::new(archive), at_end, action: Some(action) };
    let import =
        store.read_import(ImportSource::Stream(Box::new(stream)), &amd64(), None, DiskSpace::default());
    (import, removed.recv().unwrap())
}

/// Commits an image of one layer that is the layer of this name in archives.
fn have(store: &Store, name: &str, layer: &str) -> LayerKey {
    let (diff_id, packed) = (digest(plain(layer)), gzip(&plain(layer)));
    let facts = LayerMetadata {
        digest: digest(&packed),
        compressed_bytes: packed.len() as u64,
        plain_bytes: 1,
        skipped_xattrs: 0,
        diff_id: diff_id.clone(),
    };
    let layer = layer_of(store, &LayerKey::from(&diff_id), facts, &[]);
    store.commit(&image(&[name], &[layer]), noon()).unwrap();
    LayerKey::from(&diff_id)
}

#[test]
fn layers_that_a_stream_contains_can_be_removed_during_the_import() {
    let scratch = TempStore::new();
    let (store, archive) = (&scratch.store, tar_of(&layout(APP, &["a"])));
    let of_another = have(store, "other", "b");
    let (import, removed) = read_while_removing(store, archive.clone(), false, "other");
    assert!(import.is_ok());
    assert_eq!(removed.layers, [of_another], "the archive has nothing of it");

    let wanted = have(store, "other", "a");
    let (import, removed) = read_while_removing(store, archive, false, "other");
    assert_eq!(removed.layers, [wanted], "it was not held yet");
    let import = import.unwrap();
    let layer = &import.images[0].manifest.layers[0].digest;
    let mut bytes = Vec::new();
    import.open(layer).unwrap().read_to_end(&mut bytes).unwrap();
    assert_eq!(digest(&bytes), *layer, "so its bytes were kept");
}

#[test]
fn a_layer_omitted_by_a_stream_is_retained_until_the_import_ends() {
    let scratch = TempStore::new();
    let (store, archive) = (&scratch.store, tar_of(&layout(APP, &["a"])));
    let key = have(store, "other", "a");
    // The reader asks for more only when all that came is used: the archive lacks its end.
    let cut = archive[..archive.len() - 1024 - 512 - 100].to_vec();
    let (import, removed) = read_while_removing(store, cut, true, "other");
    assert!(import.is_err());
    assert_eq!(removed.layers, [], "its bytes were left out");
    assert!(store.layer(&key).unwrap().is_none(), "it is unused");

    let key = have(store, "other", "a");
    let import = store.read_import(stream(archive), &amd64(), None, DiskSpace::default()).unwrap();
    store.remove("other", &RemoveOptions::default()).unwrap();
    assert!(store.layer(&key).unwrap().is_some());
    drop(import);
    assert!(store.layer(&key).unwrap().is_none());
}
