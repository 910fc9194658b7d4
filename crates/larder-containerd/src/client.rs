//! The calls, over the connection of a CRI client. Lists that grow with the node come as streams.

use std::collections::BTreeMap;
use std::time::Duration;

use larder::backend::BackendError;
use larder_cri::channel::CriChannel;
use larder_cri::{MAX_MESSAGE_BYTES, call_error, deadline, joined, origin};
use prost_types::FieldMask;
use tonic::metadata::AsciiMetadataValue;
use tonic::{Code, Request, Status, Streaming};

use crate::proto::containers::containers_client::ContainersClient;
use crate::proto::containers::{Container, ListContainersRequest};
use crate::proto::content::content_client::ContentClient;
use crate::proto::content::{
    Info as Blob, InfoRequest, ListContentRequest, ReadContentRequest, ReadContentResponse,
    UpdateRequest as UpdateContentRequest, WriteAction, WriteContentRequest,
};
use crate::proto::events::events_client::EventsClient;
use crate::proto::events::{Envelope, SubscribeRequest};
use crate::proto::images::images_client::ImagesClient;
use crate::proto::images::{
    CreateImageRequest, DeleteImageRequest, GetImageRequest, Image as ImageRecord, ListImagesRequest,
    UpdateImageRequest,
};
use crate::proto::introspection::introspection_client::IntrospectionClient;
use crate::proto::introspection::{Plugin, PluginsRequest};
use crate::proto::leases::leases_client::LeasesClient;
use crate::proto::leases::{
    CreateRequest as CreateLeaseRequest, DeleteRequest as DeleteLeaseRequest, Lease,
    ListRequest as ListLeasesRequest, ListResourcesRequest, Resource,
};
use crate::proto::namespaces::ListNamespacesRequest;
use crate::proto::namespaces::namespaces_client::NamespacesClient;
use crate::proto::snapshots::snapshots_client::SnapshotsClient;
use crate::proto::snapshots::{
    Info as Snapshot, ListSnapshotsRequest, PrepareSnapshotRequest, RemoveSnapshotRequest,
    StatSnapshotRequest, UsageRequest, UsageResponse,
};
use crate::proto::version::version_client::VersionClient;

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
        let mut request = unlimited(namespace, message)?;
        request.set_timeout(self.timeout);
        Ok(request)
    }

    /// The names of all namespaces.
    pub(crate) async fn namespaces(&self) -> Result<Vec<String>, Status> {
        let mut request = Request::new(ListNamespacesRequest {});
        request.set_timeout(self.timeout);
        let listed = client!(self, NamespacesClient).list(request).await?.into_inner();
        Ok(listed.namespaces.into_iter().map(|namespace| namespace.name).collect())
    }

    /// containerd's version.
    pub(crate) async fn version(&self) -> Result<String, Status> {
        let mut request = Request::new(());
        request.set_timeout(self.timeout);
        Ok(client!(self, VersionClient).version(request).await?.into_inner().version)
    }

    /// The plugins that match a filter, also those that failed to start.
    pub(crate) async fn plugins(&self, filter: &str) -> Result<Vec<Plugin>, Status> {
        let mut request = Request::new(PluginsRequest { filters: vec![filter.to_owned()] });
        request.set_timeout(self.timeout);
        Ok(client!(self, IntrospectionClient).plugins(request).await?.into_inner().plugins)
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

    /// Returns true if a namespace has the blob.
    pub(crate) async fn has_blob(&self, namespace: &str, digest: &str) -> Result<bool, Status> {
        let request = self.request(namespace, InfoRequest { digest: digest.to_owned() })?;
        match client!(self, ContentClient).info(request).await {
            Err(status) if status.code() == Code::NotFound => Ok(false),
            found => found.map(|_| true),
        }
    }

    /// The bytes of a blob, in parts. No time limit.
    pub(crate) async fn read_blob(
        &self,
        namespace: &str,
        digest: &str,
    ) -> Result<Streaming<ReadContentResponse>, Status> {
        let request = unlimited(namespace, ReadContentRequest { digest: digest.to_owned() })?;
        Ok(client!(self, ContentClient).read(request).await?.into_inner())
    }

    /// The events that match a filter, from now on. No time limit.
    pub(crate) async fn subscribe(&self, filter: String) -> Result<Streaming<Envelope>, Status> {
        let request = Request::new(SubscribeRequest { filters: vec![filter] });
        Ok(client!(self, EventsClient).subscribe(request).await?.into_inner())
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

/// A request without a time limit.
fn unlimited<T>(namespace: &str, message: T) -> Result<Request<T>, Status> {
    let mut request = Request::new(message);
    let namespace = AsciiMetadataValue::try_from(namespace)
        .map_err(|_| Status::invalid_argument(format!("invalid namespace {namespace:?}")))?;
    request.metadata_mut().insert("containerd-namespace", namespace);
    Ok(request)
}

/// Calls that change something, under a lease: what they make is not collected before it is referenced.
impl ContainerdClient {
    fn leased<T>(&self, namespace: &str, lease: &str, message: T) -> Result<Request<T>, Status> {
        let mut request = self.request(namespace, message)?;
        let lease = AsciiMetadataValue::try_from(lease)
            .map_err(|_| Status::invalid_argument(format!("invalid lease {lease:?}")))?;
        request.metadata_mut().insert("containerd-lease", lease);
        Ok(request)
    }

    /// Makes a lease.
    pub(crate) async fn create_lease(
        &self,
        namespace: &str,
        id: &str,
        labels: BTreeMap<String, String>,
    ) -> Result<(), Status> {
        let request = self.request(namespace, CreateLeaseRequest { id: id.to_owned(), labels })?;
        client!(self, LeasesClient).create(request).await.map(drop)
    }

    /// Ends a lease.
    pub(crate) async fn delete_lease(&self, namespace: &str, id: &str) -> Result<(), Status> {
        let request = self.request(namespace, DeleteLeaseRequest { id: id.to_owned() })?;
        client!(self, LeasesClient).delete(request).await.map(drop)
    }

    /// Stores a blob with these labels. One that is there gets them. Writers of one reference exclude each other: it
    /// has the name of the lease.
    pub(crate) async fn write_blob(&self, namespace: &str, lease: &str, blob: NewBlob) -> Result<(), Status> {
        let NewBlob { digest, data, labels } = blob;
        let message = WriteContentRequest {
            action: WriteAction::Commit.into(),
            r#ref: format!("{lease}-{digest}"),
            total: i64::try_from(data.len()).unwrap_or(i64::MAX),
            expected: digest.clone(),
            offset: 0,
            data,
            labels: labels.clone(),
        };
        let request = self.leased(namespace, lease, futures_util::stream::iter([message]))?;
        let written = joined(client!(self, ContentClient).write(request), |part| vec![part]).await;
        match written {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::AlreadyExists => {
                let paths = labels.keys().map(|label| format!("labels.{label}")).collect();
                let info = Some(Blob { digest, labels, ..Blob::default() });
                let message = UpdateContentRequest { info, update_mask: Some(FieldMask { paths }) };
                let request = self.leased(namespace, lease, message)?;
                client!(self, ContentClient).update(request).await.map(drop)
            }
            Err(status) if status.code() == Code::FailedPrecondition && !digest.starts_with("sha256:") => {
                let message = format!("containerd keeps manifests and configs by SHA-256 only, not {digest}");
                Err(Status::failed_precondition(message))
            }
            Err(status) => Err(status),
        }
    }

    /// Prepares a snapshot; fails with `AlreadyExists` if the snapshotter has what the labels ask for.
    pub(crate) async fn prepare_snapshot(
        &self,
        namespace: &str,
        lease: &str,
        message: PrepareSnapshotRequest,
    ) -> Result<(), Status> {
        let request = self.leased(namespace, lease, message)?;
        client!(self, SnapshotsClient).prepare(request).await.map(drop)
    }

    /// Removes a snapshot.
    pub(crate) async fn remove_snapshot(
        &self,
        namespace: &str,
        snapshotter: &str,
        key: &str,
    ) -> Result<(), Status> {
        let message = RemoveSnapshotRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
        let request = self.request(namespace, message)?;
        client!(self, SnapshotsClient).remove(request).await.map(drop)
    }

    /// Returns the image that a name stands for.
    pub(crate) async fn image(&self, namespace: &str, name: &str) -> Result<Option<ImageRecord>, Status> {
        let request = self.request(namespace, GetImageRequest { name: name.to_owned() })?;
        match client!(self, ImagesClient).get(request).await {
            Err(status) if status.code() == Code::NotFound => Ok(None),
            found => Ok(found?.into_inner().image),
        }
    }

    /// Records an image under a name that no image has; fails with `AlreadyExists` otherwise.
    pub(crate) async fn create_image(&self, namespace: &str, image: ImageRecord) -> Result<(), Status> {
        let request = self.request(namespace, CreateImageRequest { image: Some(image) })?;
        client!(self, ImagesClient).create(request).await.map(drop)
    }

    /// Records an image under a name, instead of the one that has it.
    pub(crate) async fn update_image(&self, namespace: &str, image: ImageRecord) -> Result<(), Status> {
        let paths = image.labels.keys().map(|label| format!("labels.{label}"));
        let paths = paths.chain(["target".to_owned()]).collect();
        let message = UpdateImageRequest { image: Some(image), update_mask: Some(FieldMask { paths }) };
        let request = self.request(namespace, message)?;
        client!(self, ImagesClient).update(request).await.map(drop)
    }

    /// Removes the name of an image. With `collect`, returns after containerd's garbage collector has run.
    pub(crate) async fn delete_image(
        &self,
        namespace: &str,
        name: &str,
        collect: bool,
    ) -> Result<(), Status> {
        let request = self.request(namespace, DeleteImageRequest { name: name.to_owned(), sync: collect })?;
        match client!(self, ImagesClient).delete(request).await {
            Err(status) if status.code() == Code::NotFound => Ok(()),
            deleted => deleted.map(drop),
        }
    }
}

/// A blob to be stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NewBlob {
    pub(crate) digest: String,
    pub(crate) data: Vec<u8>,
    pub(crate) labels: BTreeMap<String, String>,
}
