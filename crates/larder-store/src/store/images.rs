//! Looks up images: by name, by ID, or all of them.

use std::collections::{BTreeSet, HashMap, HashSet};

use larder::backend;
use larder::gc::{ActivityKind, ClockReading, ImageActivity};
use larder::reference::{Digest, ImageName, names_platform};

use super::db::{DbRead, DbReadTransaction, DbResult, IMAGES, NAMES, USES, encode};
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::{OpenStore, Store};
use super::layout::{digest_of_name, names_in};
use super::listing::{ImageListing, has_damaged_layer};
use super::records::{ImageRecord, LayerKey};
use crate::disk::replace;

/// Fewest digits of an id that stand for the whole of it.
const SHORTEST_ID: usize = 4;
/// Images of a repository that are searched for a manifest.
const MAX_OF_REPOSITORY: usize = 1000;

impl Store {
    /// Finds an image by name, ID, or unique ID prefix. `None` if there is none or it is incomplete.
    pub fn image(&self, image: impl Into<ImageName>) -> Result<Option<ImageRecord>, StoreError> {
        let image = image.into();
        let found = self.0.db.read("look up an image", |reader| find(reader, &image))?;
        Ok(found.filter(|image| image.complete))
    }

    /// All complete images, ordered by ID.
    pub fn images(&self) -> Result<Vec<ImageRecord>, StoreError> {
        let mut images = self.0.db.read("list images", |reader| reader.all::<ImageRecord>(IMAGES))?;
        images.retain(|image| image.complete);
        Ok(images)
    }

    /// The images whose uses by mounts and containers have begun since the last call.
    pub fn take_begun_uses(&self) -> Result<Vec<ImageActivity>, StoreError> {
        let begun = self.0.begun_uses.take();
        if begun.is_empty() {
            return Ok(Vec::new());
        }
        let images = self.images()?.into_iter().filter_map(|image| {
            let layers: Vec<_> = image.layers.iter().map(|layer| layer.key.clone()).collect();
            let at = *begun.get(&layers)?;
            Some(ImageActivity { image: image.id.into(), at, what: ActivityKind::Used })
        });
        Ok(images.collect())
    }

    /// The image as a backend shows it. Its size is what its layers, config and manifests take on disk.
    pub fn to_image(&self, image: &ImageRecord) -> backend::Image {
        ImageListing::from(image).into_image()
    }

    /// Missing data of the images that are not complete, by their ids.
    fn fills(&self, reader: &DbReadTransaction) -> DbResult<HashMap<String, backend::ImageFill>> {
        let mut fills: HashMap<String, backend::ImageFill> = HashMap::new();
        for layer in self.incomplete(reader, &ClockReading::now())? {
            for id in reader.endings(USES, &format!("layer/{}/", layer.key))? {
                fills.entry(id).or_default().add(layer.fill.clone());
            }
        }
        Ok(fills)
    }

    /// Missing data of an image; `None` if it is complete.
    pub(crate) fn image_fill(&self, id: &Digest) -> Result<Option<backend::ImageFill>, StoreError> {
        self.0.db.read("look up an image", |reader| Ok(self.fills(reader)?.remove(id.as_str())))
    }

    /// Notes in lists of images what is missing of them.
    fn with_fills(
        &self,
        reader: &DbReadTransaction,
        mut images: Vec<backend::Image>,
    ) -> DbResult<Vec<backend::Image>> {
        let mut fills = self.fills(reader)?;
        for image in &mut images {
            image.fill = fills.remove(image.id.as_str());
        }
        Ok(images)
    }

    fn with_fill(
        &self,
        reader: &DbReadTransaction,
        image: Option<ImageListing>,
    ) -> DbResult<Option<backend::Image>> {
        let images = image.into_iter().map(ImageListing::into_image).collect();
        Ok(self.with_fills(reader, images)?.pop())
    }

    /// The image that is meant, as a backend shows it: what [`image`](Store::image) and [`to_image`](Store::to_image)
    /// give, without building the whole record.
    pub fn image_summary(&self, image: impl Into<ImageName>) -> Result<Option<backend::Image>, StoreError> {
        let image = image.into();
        self.0.db.read("look up an image", |reader| {
            let Some(id) = find_id(reader, &image)? else { return Ok(None) };
            let listed = reader.get::<ImageListing>(IMAGES, &id)?.filter(|listed| listed.complete);
            self.with_fill(reader, listed)
        })
    }

    /// Like [`image_summary`](Store::image_summary), but `None` for an image with a layer that `fsck` marked as
    /// damaged: it must not be used before a pull has replaced the layer.
    pub fn usable_image_summary(
        &self,
        image: impl Into<ImageName>,
    ) -> Result<Option<backend::Image>, StoreError> {
        let image = image.into();
        self.0.db.read("look up an image", |reader| {
            let Some(id) = find_id(reader, &image)? else { return Ok(None) };
            let listed = reader.get::<ImageListing>(IMAGES, &id)?.filter(|listed| listed.complete);
            let Some(listed) = listed else { return Ok(None) };
            if has_damaged_layer(reader, &id)? { Ok(None) } else { self.with_fill(reader, Some(listed)) }
        })
    }

    /// All images as a backend shows them, in the order of their ids. Those that lack a layer are left out.
    pub fn list(&self) -> Result<Vec<backend::Image>, StoreError> {
        self.0.db.read("list images", |reader| {
            let mut images = Vec::new();
            reader.for_each::<ImageListing>(IMAGES, |image| {
                if image.complete {
                    images.push(image.into_image());
                }
            })?;
            self.with_fills(reader, images)
        })
    }

    /// Whether an administrator loaded this image from an archive. The image may lack a layer.
    pub fn is_preloaded(&self, id: &Digest) -> Result<bool, StoreError> {
        let get = |reader: &DbReadTransaction| reader.get::<ImageRecord>(IMAGES, id.as_str());
        Ok(self.0.db.read("look up an image", get)?.is_some_and(|image| image.preloaded))
    }

    /// The IDs of all images with a record, also of those that lack a layer.
    pub fn recorded_images(&self) -> Result<Vec<String>, StoreError> {
        self.0.db.read("list images", |reader| reader.endings(IMAGES, ""))
    }

    /// The images that are complete and have this blob as a config or manifest.
    pub(crate) fn images_with_blob(&self, digest: &Digest) -> Result<Vec<ImageRecord>, StoreError> {
        let images = self.0.db.read("look up the images of a blob", |reader| {
            let ids = reader.endings(USES, &format!("blob/{digest}/"))?;
            let images = ids.iter().map(|id| reader.get::<ImageRecord>(IMAGES, id));
            images.collect::<DbResult<Vec<_>>>()
        })?;
        Ok(images.into_iter().flatten().filter(|image| image.complete).collect())
    }

    /// The bytes of a manifest or config of an image; `None` if missing.
    pub fn blob(&self, digest: &Digest) -> Result<Option<Vec<u8>>, StoreError> {
        super::blobs::read_blob(&self.0.layout.blob(digest)).context("read a manifest or config")
    }
}

impl OpenStore {
    /// Names of the complete images that have a layer, one for each.
    pub(crate) fn names_of_images_with(&self, layer: &LayerKey) -> Result<Vec<String>, StoreError> {
        self.db.read("look up the images of a layer", |reader| {
            let mut names = Vec::new();
            for id in reader.endings(USES, &format!("layer/{layer}/"))? {
                let image = reader.get::<ImageListing>(IMAGES, &id)?.filter(|image| image.complete);
                names.extend(image.map(|image| image.name().to_owned()));
            }
            Ok(names)
        })
    }
}

/// The image that is meant, complete or not.
pub(super) fn find(source: &impl DbRead, image: &ImageName) -> DbResult<Option<ImageRecord>> {
    match find_id(source, image)? {
        Some(id) => source.get(IMAGES, &id),
        None => Ok(None),
    }
}

/// The id of the image that is meant. It may be one that is not there.
fn find_id(source: &impl DbRead, image: &ImageName) -> DbResult<Option<String>> {
    if let Ok(id) = Digest::parse(image.as_str()) {
        return Ok(Some(id.to_string()));
    }
    if let Ok(name) = image.reference()
        && let Some(id) = source.value(NAMES, &name.stored().to_string())?
    {
        return Ok(Some(String::from_utf8_lossy(&id).into_owned()));
    }
    if let Some(id) = by_manifest(source, image)? {
        return Ok(Some(id));
    }
    by_digits(source, image.as_str().strip_prefix("sha256:").unwrap_or(image.as_str()))
}

/// The ID of an image of the repository, for the platform of the name, that has the manifest of this digest: an image
/// of an index has the name with the digest of the index, and the manifest of its platform names it as well.
fn by_manifest(source: &impl DbRead, image: &ImageName) -> DbResult<Option<String>> {
    let Ok(reference) = image.reference() else { return Ok(None) };
    let Some(digest) = reference.digest() else { return Ok(None) };
    let is_of_platform = |name: &str| match reference.platform() {
        Some(platform) => name.ends_with(&format!("#{platform}")),
        None => !names_platform(name),
    };
    let mut ids = BTreeSet::new();
    for separator in [':', '@'] {
        let prefix = format!("{}{separator}", reference.name());
        source.visit(NAMES, &prefix, &mut |rest, id| {
            if is_of_platform(rest) {
                ids.insert(String::from_utf8_lossy(id).into_owned());
            }
            Ok(ids.len() < MAX_OF_REPOSITORY)
        })?;
    }
    for id in ids {
        let found = source.get::<ImageRecord>(IMAGES, &id)?;
        if found.is_some_and(|image| image.manifests.contains(digest)) {
            return Ok(Some(id));
        }
    }
    Ok(None)
}

/// The id of the one image whose id starts with these digits.
fn by_digits(source: &impl DbRead, digits: &str) -> DbResult<Option<String>> {
    if digits.len() < SHORTEST_ID || !digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return Ok(None);
    }
    let mut ids = Vec::new();
    for algorithm in ["sha256", "sha384", "sha512"] {
        let prefix = format!("{algorithm}:{digits}");
        source.visit(IMAGES, &prefix, &mut |id, _| {
            ids.push(id.to_owned());
            Ok(ids.len() < 2)
        })?;
    }
    Ok(if ids.len() == 1 { ids.pop() } else { None })
}

impl OpenStore {
    /// Writes a copy of each record beside the blobs. It is for rebuilding a lost database, which then
    /// knows no other place of which images wait for a pull of their own.
    pub(crate) fn note_images<'a>(&self, images: impl Iterator<Item = &'a ImageRecord>) {
        for image in images {
            let path = self.layout.image(&image.id);
            let noted = encode(image.id.as_str(), image)
                .map_err(std::io::Error::other)
                .and_then(|bytes| replace(&*self.disk, &self.layout.new_staging(), &path, &bytes));
            if let Err(error) = noted {
                tracing::warn!(image = %image.id, %error, "cannot save a record for rebuilding the database");
            }
        }
    }

    /// Makes the copies of records be those of the images that are there.
    pub(crate) fn note_missing_images(&self) -> Result<(), StoreError> {
        let doing = "save records for rebuilding the database";
        let mut noted = HashSet::new();
        for name in names_in(&self.layout.images()).context(doing)? {
            match name.strip_suffix(".json").and_then(digest_of_name) {
                Some(id) => drop(noted.insert(id)),
                None => self.discard(&self.layout.images().join(&name)).context(doing)?,
            }
        }
        let ids = self.db.read(doing, |reader| reader.endings(IMAGES, ""))?;
        for id in ids.iter().filter_map(|id| Digest::parse(id).ok()) {
            if !noted.remove(&id) {
                let image = self.db.read(doing, |reader| reader.get::<ImageRecord>(IMAGES, id.as_str()))?;
                self.note_images(image.iter());
            }
        }
        for id in noted {
            self.discard(&self.layout.image(&id)).context(doing)?;
        }
        Ok(())
    }
}
