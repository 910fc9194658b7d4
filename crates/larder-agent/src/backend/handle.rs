//! A backend in its concrete type, for callers that need more of it than [`Backend`](larder::backend::Backend) offers.

use std::sync::Arc;

use larder::retention::RetentionSource;
use larder_containerd::ContainerdUses;
use larder_cri::CriBackend;
#[cfg(feature = "docker")]
use larder_docker::DockerBackend;
use larder_store::backend::StoreBackend;

use super::publisher::StorePublisher;
use super::target::BackendTarget;

/// An opened backend. Runtimes and engines are not connected to before the first call.
#[derive(Clone)]
pub enum BackendHandle {
    /// larder's own store.
    Store(StoreBackend),
    /// A container runtime, over CRI.
    Runtime(Arc<CriBackend>),
    /// A Docker Engine.
    #[cfg(feature = "docker")]
    Docker(Arc<DockerBackend>),
}

impl BackendHandle {
    /// A description for operators: the directory of the store, or the endpoint.
    pub fn description(&self) -> String {
        match self {
            BackendHandle::Store(store) => {
                format!("larder's own store in {}", store.store().root().display())
            }
            BackendHandle::Runtime(runtime) => format!("the images of {}", runtime.endpoint()),
            #[cfg(feature = "docker")]
            BackendHandle::Docker(engine) => format!("the images of {}", engine.host()),
        }
    }

    /// Publishes the images of the store from now on. Does nothing with another backend.
    pub(crate) fn publish_with(&mut self, publisher: Arc<StorePublisher>) {
        if let BackendHandle::Store(store) = self {
            *store = store.clone().with_attached_runtime(publisher);
        }
    }

    /// larder's own store, if the backend is that.
    pub fn store(&self) -> Option<&StoreBackend> {
        match self {
            BackendHandle::Store(store) => Some(store),
            BackendHandle::Runtime(_) => None,
            #[cfg(feature = "docker")]
            BackendHandle::Docker(_) => None,
        }
    }

    /// The container runtime, if the backend is that.
    pub fn runtime(&self) -> Option<&Arc<CriBackend>> {
        match self {
            BackendHandle::Runtime(runtime) => Some(runtime),
            BackendHandle::Store(_) => None,
            #[cfg(feature = "docker")]
            BackendHandle::Docker(_) => None,
        }
    }

    /// The containers of a runtime that its inventory lacks. Each call is a client of its own.
    pub(crate) fn unlisted_containers(&self) -> Option<Arc<dyn RetentionSource>> {
        match self {
            BackendHandle::Runtime(runtime) => {
                Some(Arc::new(ContainerdUses::new(runtime.runtime_channel(), runtime.request_timeout())))
            }
            BackendHandle::Store(_) => None,
            #[cfg(feature = "docker")]
            BackendHandle::Docker(_) => None,
        }
    }

    /// Where it keeps images.
    pub fn target(&self) -> BackendTarget {
        match self {
            BackendHandle::Store(store) => BackendTarget::Store(store.store().root().to_owned()),
            BackendHandle::Runtime(runtime) => BackendTarget::Runtime(runtime.endpoint().to_string()),
            #[cfg(feature = "docker")]
            BackendHandle::Docker(engine) => BackendTarget::Runtime(engine.host().to_string()),
        }
    }
}
