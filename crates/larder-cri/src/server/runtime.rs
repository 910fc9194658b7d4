//! The calls of `runtime.v1.RuntimeService` that an image service needs: tools request version and status first.

use std::collections::BTreeMap;

use futures_util::stream::Empty;
use tonic::{Request, Response, Status, async_trait};

use super::{CriService, to_response};
use crate::proto;
use crate::proto::runtime_service_server::RuntimeService;

fn unimplemented<T>(call: &str) -> Result<Response<T>, Status> {
    Err(Status::unimplemented(format!("{call}: not served here; containers belong to the runtime")))
}

#[async_trait]
impl RuntimeService for CriService {
    type StreamPodSandboxesStream = Empty<Result<proto::StreamPodSandboxesResponse, Status>>;
    type StreamContainersStream = Empty<Result<proto::StreamContainersResponse, Status>>;

    /// The version of this server, which also answers while the backend is down.
    async fn version(
        &self,
        _: Request<proto::VersionRequest>,
    ) -> Result<Response<proto::VersionResponse>, Status> {
        Ok(Response::new(to_response::version(&self.about)))
    }

    /// A backend that does not answer is a condition, not an error, so that the node's status shows the reason.
    async fn status(
        &self,
        request: Request<proto::StatusRequest>,
    ) -> Result<Response<proto::StatusResponse>, Status> {
        let backend_info = self.images.info().await;
        let info = if request.into_inner().verbose {
            to_response::status_info(&self.about, backend_info.as_ref().ok())
        } else {
            BTreeMap::new()
        };
        let conditions = match backend_info {
            Ok(info) => to_response::conditions(info.conditions),
            Err(error) => vec![to_response::not_ready(error.to_string())],
        };
        Ok(Response::new(proto::StatusResponse { status: Some(proto::RuntimeStatus { conditions }), info }))
    }

    async fn pod_sandbox_status(
        &self,
        _: Request<proto::PodSandboxStatusRequest>,
    ) -> Result<Response<proto::PodSandboxStatusResponse>, Status> {
        unimplemented("PodSandboxStatus")
    }

    async fn list_pod_sandbox(
        &self,
        _: Request<proto::ListPodSandboxRequest>,
    ) -> Result<Response<proto::ListPodSandboxResponse>, Status> {
        unimplemented("ListPodSandbox")
    }

    async fn stream_pod_sandboxes(
        &self,
        _: Request<proto::StreamPodSandboxesRequest>,
    ) -> Result<Response<Self::StreamPodSandboxesStream>, Status> {
        unimplemented("StreamPodSandboxes")
    }

    async fn list_containers(
        &self,
        _: Request<proto::ListContainersRequest>,
    ) -> Result<Response<proto::ListContainersResponse>, Status> {
        unimplemented("ListContainers")
    }

    async fn remove_container(
        &self,
        _: Request<proto::RemoveContainerRequest>,
    ) -> Result<Response<proto::RemoveContainerResponse>, Status> {
        unimplemented("RemoveContainer")
    }

    async fn stream_containers(
        &self,
        _: Request<proto::StreamContainersRequest>,
    ) -> Result<Response<Self::StreamContainersStream>, Status> {
        unimplemented("StreamContainers")
    }

    async fn container_status(
        &self,
        _: Request<proto::ContainerStatusRequest>,
    ) -> Result<Response<proto::ContainerStatusResponse>, Status> {
        unimplemented("ContainerStatus")
    }
}
