//! Makes images that other programs put into containerd, such as by `ctr images import`, images of the store.
//!
//! ```text
//! names of containerd that the store lacks -> load of their content
//!     -> names, as far as they are still containerd's -> publication
//! ```
//!
//! Only an image whose content containerd has in full is loaded, and none by a name of an image that larder pulled:
//! nothing that was pulled for some pods gets a record as of an image that every pod may use.

use std::collections::HashMap;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::{BackendError, CallErrorKind};
use larder::error_chain;
use larder::reference::{Digest, ImageId, ImageName, Reference};
use larder_containerd::{ContainerdImage, ContainerdImages, ForeignName};
use larder_store::pull::{LoadOptions, PullError};
use larder_store::store::import::{BlobReader, ImportError, ImportSource};
use larder_store::store::{Store, StoreError};
use parking_lot::Mutex;
use serde_json::json;
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;
use tokio::time::{self, Instant};

use super::piece_reader::PieceReader;
use super::publisher::StorePublisher;

/// How long a caller waits to learn whether containerd has an image.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// How long an image whose content cannot be used is not read again.
const REFUSED: Duration = Duration::from_secs(60);

/// The images of containerd that could not be loaded, by the digests of their documents.
#[derive(Default)]
pub(super) struct AdoptionFailures(Mutex<HashMap<Digest, (String, Instant)>>);

impl AdoptionFailures {
    /// Returns true if the image failed a short time ago.
    fn is_recent(&self, target: &Digest, now: Instant) -> bool {
        self.0.lock().get(target).is_some_and(|(_, at)| now.duration_since(*at) < REFUSED)
    }

    /// Notes a failure. Returns true if it is another one than the last.
    fn note(&self, target: &Digest, failure: &str, now: Instant) -> bool {
        let last = self.0.lock().insert(target.clone(), (failure.to_owned(), now));
        last.is_none_or(|(last, _)| last != failure)
    }

    /// Forgets the failure of an image that has none any more.
    fn forget(&self, target: &Digest) {
        self.0.lock().remove(target);
    }

    /// Forgets all images but these.
    fn retain(&self, images: &[ContainerdImage]) {
        self.0.lock().retain(|target, _| images.iter().any(|image| image.target == *target));
    }

    /// Returns one of the failures.
    pub(super) fn first(&self) -> Option<String> {
        self.0.lock().values().next().map(|(failure, _)| failure.clone())
    }
}

/// Why an image of containerd was not loaded.
enum AdoptionError {
    /// containerd does not have all of it, or it is no image of this platform.
    NotLoadable(PullError),
    Load(PullError),
    Backend(BackendError),
}

impl From<PullError> for AdoptionError {
    fn from(error: PullError) -> AdoptionError {
        match error {
            PullError::Import(
                ImportError::Missing { .. }
                | ImportError::NoPlatform { .. }
                | ImportError::NoImages
                | ImportError::OtherContent { .. },
            ) => AdoptionError::NotLoadable(error),
            PullError::Import(ImportError::Manifest { ref cause, .. }) if cause.is_other_content() => {
                AdoptionError::NotLoadable(error)
            }
            error => AdoptionError::Load(error),
        }
    }
}

impl From<BackendError> for AdoptionError {
    fn from(error: BackendError) -> AdoptionError {
        AdoptionError::Backend(error)
    }
}

impl StorePublisher {
    /// Loads the images of containerd that the store lacks, and adds the names that it lacks. Returns false if one must
    /// be tried again.
    pub(super) async fn adopt_missing(&self) -> Result<bool, BackendError> {
        let listed = self.images.list().await?;
        self.failures.retain(&listed);
        let mut complete = true;
        for image in self.missing(listed).await? {
            complete &= self.adopt_or_warn(&image).await;
        }
        Ok(complete)
    }

    /// Loads the image that containerd has under this name, if the store lacks it. Returns whether there was one.
    pub(crate) async fn adopt_named(&self, name: &ImageName) -> bool {
        let Some(name) = record_name(name) else { return false };
        let found = match time::timeout(ANSWERS_WITHIN, self.images.named(&name)).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => {
                tracing::debug!("cannot determine whether containerd has {name}: {error}");
                None
            }
            Err(_) => None,
        };
        match found {
            Some(image) => self.adopt_or_warn(&image).await,
            None => false,
        }
    }

    /// Returns false if the image must be tried again.
    async fn adopt_or_warn(&self, image: &ContainerdImage) -> bool {
        let (target, failures) = (&image.target, &self.failures);
        if failures.is_recent(target, Instant::now()) {
            return true;
        }
        let (failure, is_settled) = match self.adopt(image).await {
            Ok(()) => {
                failures.forget(target);
                return true;
            }
            Err(AdoptionError::NotLoadable(error)) => {
                failures.forget(target);
                tracing::debug!("image {target} of containerd is not loaded: {}", error_chain(&error));
                return true;
            }
            Err(AdoptionError::Load(error)) if error.is_no_space() => (error_chain(&error), false),
            Err(AdoptionError::Load(error)) => (error_chain(&error), true),
            Err(AdoptionError::Backend(error)) => (error.to_string(), false),
        };
        let names: Vec<String> = image.names.iter().map(ToString::to_string).collect();
        let names = names.join(", ");
        let failure = format!("cannot load image {names} from containerd: {failure}");
        let at = Instant::now();
        // One that lacked space is tried again as soon as that may have changed.
        let at = if is_settled { at } else { at.checked_sub(REFUSED).unwrap_or(at) };
        if failures.note(target, &failure, at) {
            tracing::warn!("{failure}");
        }
        is_settled
    }

    async fn adopt(&self, image: &ContainerdImage) -> Result<(), AdoptionError> {
        let _one = self.lock(image.target.as_str()).await;
        let Some(image) = self.missing(vec![image.clone()]).await?.pop() else { return Ok(()) };
        let from = ImportSource::Blobs {
            index: index_of(&image),
            sizes: self.images.blobs().await?,
            reader: Arc::new(ContentReader { images: self.images.clone(), runtime: Handle::current() }),
        };
        for loaded in self.store.puller().load(from, &LoadOptions::default()).await?.images {
            self.add_names(&image, &loaded.image.id).await?;
        }
        Ok(())
    }

    /// Gives a loaded image its names, and publishes it with them.
    async fn add_names(&self, image: &ContainerdImage, id: &Digest) -> Result<(), BackendError> {
        if let Some(hidden) = &self.hidden {
            hidden.show(&ImageId::from(id.clone())).await;
        }
        let name = ImageName::from(id.as_str());
        let Some((_lock, loaded)) = self.locked(&name).await? else { return Ok(()) };
        let mut current = ContainerdImage { names: Vec::new(), ..image.clone() };
        for name in image.names.iter().filter(|name| name.digest().is_none()) {
            // Another program may have given it away while the image was loaded.
            let present = self.images.named(name).await?;
            current.names.extend(present.filter(|found| found.target == image.target).map(|_| name.clone()));
        }
        for name in self.missing(vec![current]).await?.into_iter().flat_map(|image| image.names) {
            let id = loaded.id.clone();
            in_store(self.store.store(), move |store| store.add_name(&id, &name)).await?;
        }
        let Some(named) = self.published(&name).await? else { return Ok(()) };
        tracing::info!(image = %id, "loaded image {} from containerd", named.record_names().join(", "));
        self.publish_locked(&named, ForeignName::Keep, &named.record_names()).await
    }

    /// The images, and those of their names, that the store lacks. A name of an image of the store that is not
    /// published yet is not among them: it was given to that one later than containerd's.
    async fn missing(&self, images: Vec<ContainerdImage>) -> Result<Vec<ContainerdImage>, BackendError> {
        let found = in_store(self.store.store(), move |store| {
            let lookup = |(image, name): (usize, Reference)| {
                let text = ImageName::from(name.to_string());
                // One with a damaged layer is loaded again.
                let is_usable = store.usable_image_summary(text.clone())?.is_some();
                let found = if is_usable { store.image(text)? } else { None };
                let found = found
                    .map(|found| (found.manifests.contains(&images[image].target), store.to_image(&found)));
                Ok((image, name, found))
            };
            let names = images.iter().enumerate();
            let names = names.flat_map(|(at, image)| image.names.iter().map(move |name| (at, name.clone())));
            let found = names.map(lookup).collect::<Result<Vec<_>, StoreError>>()?;
            Ok((images, found))
        });
        let (mut images, found) = found.await?;
        for image in &mut images {
            image.names.clear();
        }
        for (image, name, found) in found {
            if found.is_none_or(|(is_known, holder)| !is_known && self.is_published(&holder)) {
                images[image].names.push(name);
            }
        }
        images.retain(|image| !image.names.is_empty());
        Ok(images)
    }
}

/// The name in full under which containerd has an image that is called so; `None` for an ID.
fn record_name(name: &ImageName) -> Option<Reference> {
    if Digest::parse(name.as_str()).is_ok() {
        return None;
    }
    let name = name.reference().ok()?;
    let text = match (name.digest(), name.tag_or_default()) {
        (Some(digest), _) => format!("{}@{digest}", name.name()),
        (None, tag) => format!("{}:{}", name.name(), tag.unwrap_or_default()),
    };
    Reference::parse(&text).ok()
}

/// The `index.json` of a layout with this image. Names with digests stand for nothing else, so they are given by the
/// load.
fn index_of(image: &ContainerdImage) -> Vec<u8> {
    let ContainerdImage { target, media_type, size, names } = image;
    let entry = |annotations| json!({ "mediaType": media_type, "digest": target.as_str(), "size": size, "annotations": annotations });
    let named = names.iter().filter(|name| name.digest().is_some());
    let named = named.map(|name| entry(json!({ "io.containerd.image.name": name.to_string() })));
    let manifests: Vec<_> = named.chain([entry(json!({}))]).collect();
    json!({ "schemaVersion": 2, "manifests": manifests }).to_string().into_bytes()
}

/// Asks the store on a thread where it may block.
pub(super) async fn in_store<T: Send + 'static>(
    store: &Store,
    question: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, BackendError> {
    let store = store.clone();
    match spawn_blocking(move || question(&store)).await {
        Ok(answer) => answer.map_err(|error| BackendError::caused_by(CallErrorKind::Other, error)),
        Err(error) => Err(BackendError::caused_by(CallErrorKind::Canceled, error)),
    }
}

/// The content of containerd.
struct ContentReader {
    images: ContainerdImages,
    runtime: Handle,
}

impl BlobReader for ContentReader {
    fn open(&self, digest: &Digest) -> Box<dyn Read + Send> {
        let _entered = self.runtime.enter();
        Box::new(PieceReader::new(Vec::new(), self.images.read(digest)))
    }
}
