//! The calls, over the connection of a CRI client. Lists that grow with the node come as streams.

use std::time::Duration;

use larder::backend::BackendError;
use larder_cri::channel::CriChannel;
use larder_cri::{MAX_MESSAGE_BYTES, call_error, deadline, joined, origin};
use tonic::metadata::AsciiMetadataValue;
use tonic::{Request, Status};

use crate::proto::containers::containers_client::ContainersClient;
use crate::proto::containers::{Container, ListContainersRequest};
use crate::proto::content::content_client::ContentClient;
use crate::proto::content::{Info as Blob, ListContentRequest};
use crate::proto::images::images_client::ImagesClient;
use crate::proto::images::{Image as ImageRecord, ListImagesRequest};
use crate::proto::leases::leases_client::LeasesClient;
use crate::proto::leases::{Lease, ListRequest as ListLeasesRequest, ListResourcesRequest, Resource};
use crate::proto::namespaces::ListNamespacesRequest;
use crate::proto::namespaces::namespaces_client::NamespacesClient;
use crate::proto::snapshots::snapshots_client::SnapshotsClient;
use crate::proto::snapshots::{
    Info as Snapshot, ListSnapshotsRequest, StatSnapshotRequest, UsageRequest, UsageResponse,
};

/// A client of containerd's API.
#[derive(Clone)]
pub(crate) struct ContainerdClient {
    channel: CriChannel,
    timeout: Duration,
}

/// A client of one service, with the limits of this crate.
macro_rules! client {
    ($self:ident, $client:ident) => {
        $client::with_origin($self.channel.clone(), origin()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    };
}

impl ContainerdClient {
    /// `timeout` limits each call, and the calls of one [`within_limit`](Self::within_limit) together.
    pub(crate) fn new(channel: CriChannel, timeout: Duration) -> ContainerdClient {
        ContainerdClient { channel, timeout }
    }

    /// Runs several calls within one time limit.
    pub(crate) async fn within_limit<T>(
        &self,
        calls: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        tokio::time::timeout(self.timeout, calls).await.unwrap_or_else(|_| Err(deadline()))
    }

    /// The error of a failed call.
    pub(crate) fn error(&self, status: &Status) -> BackendError {
        call_error(self.channel.endpoint(), status)
    }

    fn request<T>(&self, namespace: &str, message: T) -> Result<Request<T>, Status> {
        let mut request = Request::new(message);
        request.set_timeout(self.timeout);
        let namespace = AsciiMetadataValue::try_from(namespace)
            .map_err(|_| Status::invalid_argument(format!("invalid namespace {namespace:?}")))?;
        request.metadata_mut().insert("containerd-namespace", namespace);
        Ok(request)
    }

    /// The names of all namespaces.
    pub(crate) async fn namespaces(&self) -> Result<Vec<String>, Status> {
        let mut request = Request::new(ListNamespacesRequest {});
        request.set_timeout(self.timeout);
        let listed = client!(self, NamespacesClient).list(request).await?.into_inner();
        Ok(listed.namespaces.into_iter().map(|namespace| namespace.name).collect())
    }

    /// The images of a namespace.
    pub(crate) async fn images(&self, namespace: &str) -> Result<Vec<ImageRecord>, Status> {
        let request = self.request(namespace, ListImagesRequest {})?;
        Ok(client!(self, ImagesClient).list(request).await?.into_inner().images)
    }

    /// The containers of a namespace that match a filter.
    pub(crate) async fn containers(&self, namespace: &str, filter: &str) -> Result<Vec<Container>, Status> {
        let request = self.request(namespace, ListContainersRequest { filters: vec![filter.to_owned()] })?;
        let mut containers = client!(self, ContainersClient);
        joined(containers.list_stream(request), |part| part.container.into_iter().collect()).await
    }

    /// The leases of a namespace.
    pub(crate) async fn leases(&self, namespace: &str) -> Result<Vec<Lease>, Status> {
        let request = self.request(namespace, ListLeasesRequest {})?;
        Ok(client!(self, LeasesClient).list(request).await?.into_inner().leases)
    }

    /// The resources of a lease.
    pub(crate) async fn lease_resources(&self, namespace: &str, id: &str) -> Result<Vec<Resource>, Status> {
        let request = self.request(namespace, ListResourcesRequest { id: id.to_owned() })?;
        Ok(client!(self, LeasesClient).list_resources(request).await?.into_inner().resources)
    }

    /// The blobs of a namespace; those that match a filter, if there is one.
    pub(crate) async fn content(&self, namespace: &str, filter: Option<String>) -> Result<Vec<Blob>, Status> {
        let filters = filter.into_iter().collect();
        let request = self.request(namespace, ListContentRequest { filters })?;
        joined(client!(self, ContentClient).list(request), |part| part.info).await
    }

    /// The snapshots of a namespace.
    pub(crate) async fn snapshots(
        &self,
        namespace: &str,
        snapshotter: &str,
    ) -> Result<Vec<Snapshot>, Status> {
        let message = ListSnapshotsRequest { snapshotter: snapshotter.to_owned() };
        let request = self.request(namespace, message)?;
        joined(client!(self, SnapshotsClient).list(request), |part| part.info).await
    }

    /// One snapshot.
    pub(crate) async fn snapshot(
        &self,
        namespace: &str,
        snapshotter: &str,
        key: &str,
    ) -> Result<Snapshot, Status> {
        let message = StatSnapshotRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
        let request = self.request(namespace, message)?;
        Ok(client!(self, SnapshotsClient).stat(request).await?.into_inner().info.unwrap_or_default())
    }

    /// Disk usage of one snapshot, without its parents.
    pub(crate) async fn usage(
        &self,
        namespace: &str,
        snapshotter: &str,
        key: &str,
    ) -> Result<UsageResponse, Status> {
        let message = UsageRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
        let request = self.request(namespace, message)?;
        Ok(client!(self, SnapshotsClient).usage(request).await?.into_inner())
    }
}
