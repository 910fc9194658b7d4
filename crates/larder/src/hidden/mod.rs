//! Images that callers of CRI do not see: fetched with credentials before kubelet asked for them.
//!
//! Kubelet's default policy gives every pod an image that is present without a pull record of kubelet. An image that
//! larder fetches ahead of kubelet with credentials is therefore hidden from kubelet until a pull of kubelet has
//! succeeded for it, which checks the credentials of the pod.
//!
//! An image is hidden before it becomes visible: the file says which names are pulled, and which images were visible
//! before. New images of their repositories are hidden until the pulls have ended, or a day after their end is unknown;
//! those that are present when a pull has failed stay hidden, because the runtime may have recorded them for it. A file
//! that is damaged hides all images that are present.

mod state;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Mutex as AsyncMutex;

use crate::backend::{Backend, BackendError, CallErrorKind, Image};
use crate::files;
use crate::reference::{ImageId, ImageName};
use crate::threads::blocking;
use state::HiddenState;

/// Treatment of the credentials of pulls ahead of kubelet.
#[derive(Debug, Clone, Default)]
pub enum PrefetchCredentials {
    /// They are used: no kubelet asks for images.
    #[default]
    Use,
    /// They are used, and the images are hidden.
    Hide(Arc<HiddenImages>),
    /// They are not used, because kubelet sees the images in another way. Images that were hidden with earlier settings
    /// stay so for callers of CRI.
    Withhold(Option<Arc<HiddenImages>>),
}

impl PrefetchCredentials {
    /// Where images are hidden, if they are.
    pub fn hidden(&self) -> Option<&Arc<HiddenImages>> {
        match self {
            PrefetchCredentials::Hide(hidden) | PrefetchCredentials::Withhold(Some(hidden)) => Some(hidden),
            PrefetchCredentials::Use | PrefetchCredentials::Withhold(None) => None,
        }
    }
}

/// The hidden images of a node.
pub struct HiddenImages {
    path: PathBuf,
    state: Mutex<HiddenState>,
    /// The content of the file; empty after a failed write. Locked while the file is written, also where the caller is
    /// canceled.
    written: Arc<AsyncMutex<Vec<u8>>>,
}

/// The images of a backend.
#[derive(Debug, Default)]
struct PresentImages {
    listed: Vec<Image>,
    /// All images with a record, if the backend records more than it lists.
    recorded: Vec<ImageId>,
}

impl PresentImages {
    async fn of(backend: &dyn Backend) -> Result<PresentImages, BackendError> {
        let listed = backend.list().await?;
        // After the list: an image that is completed in between is in one of the two.
        let recorded = match backend.origins() {
            Some(origins) => origins.recorded().await?,
            None => Vec::new(),
        };
        Ok(PresentImages { listed, recorded })
    }
}

/// How a pull ended.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PrefetchEnd<'a> {
    /// The image is present.
    Pulled(&'a ImageId),
    /// It is not, because of this pull.
    Failed,
    /// The runtime may continue the pull.
    Unknown,
}

/// A pull that makes a hidden image present. If it is dropped before its end, the runtime may continue the pull.
pub(crate) struct HiddenPull<'a> {
    images: &'a HiddenImages,
    image: ImageName,
    has_ended: bool,
}

impl HiddenImages {
    /// Reads the file, if there is one. A damaged one is replaced, and hides all images that are present. May block.
    pub fn open(path: &Path) -> io::Result<HiddenImages> {
        let text = match fs_err::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => content(&HiddenState::default()),
            text => text?,
        };
        let (path, place) = (path.to_owned(), path.display());
        let why = match HiddenState::read(&text) {
            Ok(state) => {
                return Ok(HiddenImages::of(path, state, text));
            }
            Err(why) => why,
        };
        tracing::error!(
            "{place}: {why}; all present images are hidden from kubelet until it pulls them: ensure those that no registry has"
        );
        let (state, text) = (HiddenState::lost(), content(&HiddenState::lost()));
        files::replace(&path, &text)?;
        Ok(HiddenImages::of(path, state, text))
    }

    fn of(path: PathBuf, state: HiddenState, written: Vec<u8>) -> HiddenImages {
        HiddenImages { path, state: Mutex::new(state), written: Arc::new(AsyncMutex::new(written)) }
    }

    /// Whether callers of CRI must not see this image.
    pub fn hides(&self, image: &Image) -> bool {
        self.state().hides(image)
    }

    /// Shows an image: a pull without credentials, of kubelet or of an operator has succeeded. It is shown even if that
    /// cannot be written, which is logged.
    pub async fn show(&self, id: &ImageId) {
        if self.state().show(id) {
            tracing::info!(image = %id, "image is no longer hidden from kubelet");
        }
        self.save_or_warn().await;
    }

    /// The images of a backend, hidden ones included. Forgets hidden images that are removed.
    pub async fn list(&self, backend: &dyn Backend) -> Result<Vec<Image>, BackendError> {
        let changes = self.state().changes();
        let present = PresentImages::of(backend).await?;
        self.state().note_present(changes, &present, SystemTime::now());
        self.save_or_warn().await;
        Ok(present.listed)
    }

    /// Hides what a pull of this image will make present. Durable when it returns.
    pub(crate) async fn begin(
        &self,
        image: &ImageName,
        backend: &dyn Backend,
    ) -> Result<HiddenPull<'_>, BackendError> {
        loop {
            let changes = self.state().changes();
            let present = PresentImages::of(backend).await?;
            // What is visible must be known as of now: an image that was removed since may be fetched again.
            if self.state().begin(image, changes, &present, SystemTime::now()) {
                break;
            }
        }
        let pull = HiddenPull { images: self, image: image.clone(), has_ended: false };
        if let Err(error) = self.save().await {
            pull.end(PrefetchEnd::Failed).await;
            let message = format!("cannot hide the image from kubelet before it is pulled: {error}");
            return Err(BackendError::call(CallErrorKind::Other, message).with_cause(error));
        }
        Ok(pull)
    }

    async fn save_or_warn(&self) {
        if let Err(error) = self.save().await {
            tracing::warn!("cannot write which images are hidden from kubelet: {error}");
        }
    }

    /// Writes the present state, unless the file has it.
    async fn save(&self) -> io::Result<()> {
        let mut written = Arc::clone(&self.written).lock_owned().await;
        let content = content(&self.state());
        if *written == content {
            return Ok(());
        }
        let path = self.path.clone();
        let write = move || {
            written.clear();
            files::replace(&path, &content)?;
            *written = content;
            Ok(())
        };
        blocking(write).await
    }

    fn state(&self) -> MutexGuard<'_, HiddenState> {
        self.state.lock()
    }
}

impl HiddenPull<'_> {
    /// The pull has failed for good. A runtime may have recorded the image before it did: what is new in the repository
    /// is hidden.
    pub(crate) async fn fail(self, backend: &dyn Backend) {
        let end = match backend.list().await {
            Ok(present) => {
                self.images.state().hide_new(&present);
                PrefetchEnd::Failed
            }
            Err(_) => PrefetchEnd::Unknown,
        };
        self.end(end).await;
    }

    /// Hides the image that is present now.
    pub(crate) async fn end(mut self, end: PrefetchEnd<'_>) {
        self.images.state().end(&self.image, end, SystemTime::now());
        self.has_ended = true;
        self.images.save_or_warn().await;
    }
}

impl Drop for HiddenPull<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.images.state().end(&self.image, PrefetchEnd::Unknown, SystemTime::now());
        }
    }
}

impl fmt::Debug for HiddenImages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HiddenImages").field("path", &self.path).finish_non_exhaustive()
    }
}

fn content(state: &HiddenState) -> Vec<u8> {
    // Sets of strings have a JSON form.
    serde_json::to_vec_pretty(&state.document()).unwrap_or_default()
}
