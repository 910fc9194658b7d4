//! Containers that have exited, and their removal.

use std::time::{Duration, SystemTime};

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use larder::backend::BackendError;
use tonic::Code;

use crate::client::{CriBackend, STATUS_CALLS_AT_ONCE};
use crate::{proto, status};

/// The label of containers that a kubelet started.
const POD_UID: &str = "io.kubernetes.pod.uid";

/// A container that has exited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExitedContainer {
    /// Its id.
    pub id: String,
    /// Its name in its pod.
    pub name: String,
    /// Whether a kubelet started it, which also removes it.
    pub of_kubelet: bool,
    /// When it exited; `None` if the runtime does not report it.
    pub finished: Option<SystemTime>,
}

impl CriBackend {
    /// All containers that have exited.
    pub async fn exited_containers(&self) -> Result<Vec<ExitedContainer>, BackendError> {
        self.within_limit(&[self.runtime_connection()], async {
            let exited =
                |one: &proto::Container| one.state == i32::from(proto::ContainerState::ContainerExited);
            let listed = self.containers().await?.into_iter().filter(exited);
            let calls: Vec<_> = listed.map(|container| self.exited(container)).collect();
            let found: Vec<_> = stream::iter(calls).buffered(STATUS_CALLS_AT_ONCE).try_collect().await?;
            Ok(found.into_iter().flatten().collect())
        })
        .await
    }

    /// Returns the report of one container; `None` if it was removed in the meantime.
    async fn exited(&self, container: proto::Container) -> Result<Option<ExitedContainer>, BackendError> {
        let message = proto::ContainerStatusRequest { container_id: container.id.clone(), verbose: false };
        let mut runtime = self.runtime();
        let asked = runtime.container_status(self.request(message));
        let status = match self.operations().observe("container_status", asked).await {
            Ok(reply) => reply.into_inner().status.unwrap_or_default(),
            Err(status) if status.code() == Code::NotFound => return Ok(None),
            Err(status) => return Err(status::call_error(self.endpoint(), &status)),
        };
        let since_1970 = u64::try_from(status.finished_at).ok().filter(|&finished| finished > 0);
        Ok(Some(ExitedContainer {
            id: container.id,
            name: container.metadata.unwrap_or_default().name,
            of_kubelet: container.labels.contains_key(POD_UID),
            finished: since_1970.map(|nanos| SystemTime::UNIX_EPOCH + Duration::from_nanos(nanos)),
        }))
    }

    /// Removes a container that does not run. Succeeds when it is already gone.
    pub async fn remove_container(&self, id: &str) -> Result<(), BackendError> {
        let request = self.request(proto::RemoveContainerRequest { container_id: id.to_owned() });
        self.within_limit(&[self.runtime_connection()], async {
            let mut runtime = self.runtime();
            match self.operations().observe("remove_container", runtime.remove_container(request)).await {
                Ok(_) => Ok(()),
                Err(status) if status.code() == Code::NotFound => Ok(()),
                Err(status) => Err(status::call_error(self.endpoint(), &status)),
            }
        })
        .await
    }
}
