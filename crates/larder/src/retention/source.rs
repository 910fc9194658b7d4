//! Sources of retention.
//!
//! Every round queries every source. A source that fails ends the round, because an image in use could be removed
//! otherwise.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;

use super::entry::{Retention, RetentionError, RetentionPurpose};
use crate::backend::{Backend, Container, Sandbox};

/// Reports the images that something needs.
#[async_trait]
pub trait RetentionSource: Send + Sync {
    /// All current reasons. Must fail rather than return an incomplete list.
    async fn retentions(&self) -> Result<Vec<Retention>, RetentionError>;

    /// Returns the scope of the source's queries.
    fn scope(&self) -> SourceScope {
        SourceScope::Larder
    }
}

/// Scope of a source's queries, the quickest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SourceScope {
    /// Larder's own state.
    Larder,
    /// The inventory of the backend.
    Backend,
    /// A runtime's other interfaces.
    Runtime,
}

/// Containers of a runtime, or mounts of larder's own store: those of [`Backend::container_inventory`].
pub struct BackendRetentions(Arc<dyn Backend>);

impl BackendRetentions {
    /// The containers and mounts of this backend.
    pub fn new(backend: Arc<dyn Backend>) -> BackendRetentions {
        BackendRetentions(backend)
    }
}

#[async_trait]
impl RetentionSource for BackendRetentions {
    async fn retentions(&self) -> Result<Vec<Retention>, RetentionError> {
        let in_use = self.0.container_inventory().await?;
        let handlers: HashMap<&str, &str> =
            in_use.sandboxes.iter().map(|sandbox| (&*sandbox.id, &*sandbox.runtime_handler)).collect();
        let mut found = Vec::with_capacity(in_use.containers.len());
        for Sandbox { image, pod, runtime_handler, .. } in &in_use.sandboxes {
            if !image.is_empty() {
                let handler = Some(runtime_handler.clone());
                let purpose = RetentionPurpose::Sandbox { pod: pod.clone() };
                found.push(Retention { image: image.clone(), handler, purpose });
            }
        }
        for container in in_use.containers {
            if let Some(cause) = container.mounts_error {
                return Err(RetentionError::MountsUnknown { container: container.id, cause });
            }
            let handler = handlers.get(&*container.sandbox_id).copied().unwrap_or_default();
            let Container { id, name, pod, running, .. } = container;
            for image in container.mounted_images {
                let (container, name, pod) = (id.clone(), name.clone(), pod.clone());
                found.push(Retention::new(image, RetentionPurpose::Volume { container, name, pod, running }));
            }
            let purpose = if container.is_mount {
                RetentionPurpose::Mount { target: name, mounted: running }
            } else {
                RetentionPurpose::Container { id, name, pod, running }
            };
            let handler = Some(handler.to_owned());
            found.push(Retention { image: container.image_id, handler, purpose });
        }
        Ok(found)
    }

    fn scope(&self) -> SourceScope {
        SourceScope::Backend
    }
}

/// All reasons of these sources; fails with the first error.
pub(crate) async fn collect(sources: &[Arc<dyn RetentionSource>]) -> Result<Vec<Retention>, RetentionError> {
    let mut found = Vec::new();
    for source in sources {
        found.append(&mut source.retentions().await?);
    }
    Ok(found)
}
