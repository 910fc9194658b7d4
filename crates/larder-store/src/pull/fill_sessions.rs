//! Sessions with the registry for the data of a layer that is in use already: the credential of the pull, and after it
//! those of this node and of later pulls.
//!
//! A fill may last longer than the credential it began with, or than the process that knew it. When the registry
//! refuses one, the others are tried; while it refuses them all, the fill waits for a pull that has another.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use larder::credentials::{Credential, NodeKeyring};
use larder::pod::Pod;
use larder::reference::{Digest, ImageName, Reference};
use larder_registry::manifest::Descriptor;
use larder_registry::{RegistryClient, RepositorySession, fetch_range};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Mutex as AsyncMutex, Notify, oneshot};
use tokio::time::Instant;

use super::StorePuller;
use super::error::PullError;
use super::plan::PlannedLayer;
use crate::store::{BlobSource, ImageRecord, IngestFile, LayerKey};

/// Time between two lookups of credentials while the registry refuses them all: a lookup may run programs.
const LOOKUP: Duration = Duration::from_secs(10);
/// Credentials that one request is made with, at most.
const SESSIONS_PER_REQUEST: usize = 3;

/// Credentials of this node, once they are known. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct NodeCredentials(Arc<OnceLock<Arc<NodeKeyring>>>);

impl NodeCredentials {
    pub(super) fn set(&self, keyring: Arc<NodeKeyring>) {
        let _ = self.0.set(keyring);
    }

    /// The credentials to try for an image, in order.
    pub(super) async fn lookup(&self, name: &Reference) -> Vec<Option<Credential>> {
        let Some(keyring) = self.0.get() else { return vec![None] };
        let found = keyring.lookup(&ImageName::from(name.to_string().as_str()), &[], &Pod::default()).await;
        match found {
            Ok(found) if !found.is_empty() => found.into_iter().map(Some).collect(),
            Ok(_) => vec![None],
            Err(error) => {
                let error = larder::error_chain(&error);
                tracing::warn!(image = %name, error, "cannot look up the node's credentials for an image");
                vec![None]
            }
        }
    }
}

/// Sessions for the data of one layer.
#[derive(Debug)]
pub(super) struct FillSessions {
    client: RegistryClient,
    credentials: NodeCredentials,
    image: Reference,
    blob: Descriptor,
    state: Mutex<SessionState>,
    /// Held while other credentials are tried.
    renewing: AsyncMutex<()>,
    /// A pull has offered its session, or a blob.
    offered: Notify,
    /// A pull has offered a blob.
    blob_offered: Notify,
}

/// The whole blob of a layer, from a repository that proves to have it.
#[derive(Debug)]
pub(super) struct OfferedBlob {
    pub(super) session: RepositorySession,
    pub(super) planned: PlannedLayer,
    pub(super) ingest: IngestFile,
    pub(super) source: BlobSource,
    /// Dropped when it is of no more use for the layer.
    pub(super) _used: oneshot::Sender<()>,
}

#[derive(Debug, Default)]
struct SessionState {
    /// Session in use; `None` before the first.
    current: Option<RepositorySession>,
    /// Number of sessions before it.
    number: usize,
    /// Session of the last pull of the image.
    offered: Option<RepositorySession>,
    /// The layer's blob, of another pull.
    blob: Option<OfferedBlob>,
    /// When the registry refused all credentials, unless one was accepted since.
    refused: Option<Instant>,
}

impl FillSessions {
    /// Sessions that begin with that of a pull, or else with a credential of this node.
    pub(super) fn new(
        puller: &StorePuller,
        image: Reference,
        blob: Descriptor,
        current: Option<RepositorySession>,
    ) -> FillSessions {
        FillSessions {
            client: puller.client.clone(),
            credentials: puller.credentials.clone(),
            image,
            blob,
            state: Mutex::new(SessionState { current, ..SessionState::default() }),
            renewing: AsyncMutex::default(),
            offered: Notify::new(),
            blob_offered: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock()
    }

    /// Image whose repository sends the layer.
    pub(super) fn image(&self) -> &Reference {
        &self.image
    }

    /// Makes a request, again with other credentials while the registry refuses those.
    pub(super) async fn request<T, F: Future<Output = Result<T, PullError>>>(
        &self,
        attempt: impl Fn(RepositorySession) -> F,
    ) -> Result<T, PullError> {
        let mut attempts = 0;
        loop {
            let (current, number) = {
                let state = self.state();
                (state.current.clone(), state.number)
            };
            let Some(session) = current else {
                self.renew(number).await?;
                continue;
            };
            attempts += 1;
            match attempt(session).await {
                Err(error) if error.is_denied() && attempts < SESSIONS_PER_REQUEST => {
                    if !self.renew(number).await? {
                        return Err(error);
                    }
                }
                done => return done,
            }
        }
    }

    /// Fetches a range of a blob of the repository.
    pub(super) async fn fetch_range(
        &self,
        blob: &Descriptor,
        range: Range<u64>,
    ) -> Result<Vec<u8>, PullError> {
        let fetch = |session: RepositorySession| {
            let range = range.clone();
            async move { Ok(fetch_range(&session, blob, range).await?) }
        };
        Box::pin(self.request(fetch)).await
    }

    /// Replaces the session of this number. False if the registry refuses all others, too; one of them is in use then.
    async fn renew(&self, number: usize) -> Result<bool, PullError> {
        let _renewing = self.renewing.lock().await;
        let (offered, was_refused) = {
            let mut state = self.state();
            if state.number != number {
                return Ok(true);
            }
            (state.offered.take(), state.refused.is_some_and(|at| at.elapsed() < LOOKUP))
        };
        if let Some(session) = offered
            && self.is_accepted(session).await
        {
            return Ok(true);
        }
        if was_refused {
            return Ok(false);
        }
        for credential in self.credentials.lookup(&self.image).await {
            if self.is_accepted(self.client.session(&self.image, credential.as_ref())?).await {
                return Ok(true);
            }
        }
        let mut state = self.state();
        if state.refused.replace(Instant::now()).is_none() {
            let (image, digest) = (&self.image, &self.blob.digest);
            tracing::warn!(%image, %digest, "the registry refuses the credentials for a layer: pull its image again");
        }
        Ok(false)
    }

    /// Goes on with a session, unless the registry refuses it: the one in use may be accepted the next time.
    async fn is_accepted(&self, session: RepositorySession) -> bool {
        let probed = fetch_range(&session, &self.blob, 0..1.min(self.blob.size)).await;
        let (is_answered, error) = (probed.is_ok(), probed.err().map(PullError::from));
        let mut state = self.state();
        if error.is_some_and(|error| error.is_denied()) {
            state.current.get_or_insert(session);
            return false;
        }
        state.current = Some(session);
        state.number += 1;
        if is_answered {
            state.refused = None;
        }
        true
    }

    fn offer(&self, session: RepositorySession) {
        self.state().offered = Some(session);
        self.offered.notify_one();
    }

    /// Waits until a pull offers its session, or a blob.
    pub(super) async fn offered(&self) {
        self.offered.notified().await;
    }

    /// Lets the layer be filled from a whole blob.
    pub(super) fn offer_blob(&self, blob: OfferedBlob) {
        self.state().blob = Some(blob);
        self.blob_offered.notify_one();
        self.offered.notify_one();
    }

    /// Whether a pull has offered a blob that nothing has taken.
    pub(super) fn has_blob(&self) -> bool {
        self.state().blob.is_some()
    }

    /// Takes the blob that a pull has offered.
    pub(super) fn take_blob(&self) -> Option<OfferedBlob> {
        self.state().blob.take()
    }

    /// Waits until a pull offers a blob.
    pub(super) async fn blob_offered(&self) {
        while !self.has_blob() {
            self.blob_offered.notified().await;
        }
    }

    /// Digest of the blob that the layer is filled from.
    pub(super) fn digest(&self) -> &Digest {
        &self.blob.digest
    }
}

/// Sessions of the layers that are being filled. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct LayerSessions(Arc<Mutex<HashMap<LayerKey, Weak<FillSessions>>>>);

impl LayerSessions {
    /// Adds those of a layer, as long as they are used.
    pub(super) fn add(&self, key: LayerKey, sessions: &Arc<FillSessions>) {
        let mut all = self.0.lock();
        all.retain(|_, sessions| sessions.strong_count() > 0);
        all.insert(key, Arc::downgrade(sessions));
    }

    pub(super) fn get(&self, key: &LayerKey) -> Option<Arc<FillSessions>> {
        self.0.lock().get(key).and_then(Weak::upgrade)
    }
}

impl StorePuller {
    /// Lets the layers of an image that are being filled use the credential of a pull of it.
    pub(super) fn offer_credential(
        &self,
        image: &ImageRecord,
        name: &Reference,
        credential: Option<&Credential>,
    ) -> Result<(), PullError> {
        for sessions in image.layers.iter().filter_map(|layer| self.layer_sessions.get(&layer.key)) {
            if sessions.image.name() == name.name() {
                sessions.offer(self.client.session(name, credential)?);
            }
        }
        Ok(())
    }

    /// Names of the images with layers whose data the registry refuses with all credentials that are known: they wait
    /// for a pull.
    pub fn refused_fills(&self) -> Vec<String> {
        let all: Vec<_> = self.layer_sessions.0.lock().values().filter_map(Weak::upgrade).collect();
        let refused = all.iter().filter(|sessions| sessions.state().refused.is_some());
        let mut names: Vec<String> = refused.map(|sessions| sessions.image.to_string()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}
