//! `runtime.v1.ImageService`.

use futures_util::stream::{self, Iter};
use larder::backend::{Image, ImageSpec};
use larder::pull::StatusIntent;
use tonic::{Request, Response, Status, async_trait};

use super::{CriService, from_request, to_response, to_status};
use crate::proto;
use crate::proto::image_service_server::ImageService;

impl CriService {
    /// All images; or those of a repository; or the named one, found as [`ImageService::image_status`] does. A list
    /// does not announce a use, so it takes no lease.
    async fn listed(&self, filter: Option<proto::ImageFilter>) -> Result<Vec<proto::Image>, Status> {
        let failed = |error| to_status::of(&error);
        let Some(named) = from_request::filter(filter) else {
            let all = self.images.list().await.map_err(failed)?;
            return Ok(all.into_iter().map(to_response::image).collect());
        };
        if let Some(repository) = from_request::repository(&named.image) {
            let mut all = self.images.list().await.map_err(failed)?;
            all.retain(|image| is_of_repository(image, &repository));
            if !all.is_empty() {
                return Ok(all.into_iter().map(to_response::image).collect());
            }
        }
        let found = self.images.status(&named, StatusIntent::Show).await.map_err(failed)?;
        Ok(found.into_iter().map(to_response::image).collect())
    }

    async fn pulled(&self, request: proto::PullImageRequest) -> Result<String, Status> {
        let spec = from_request::to_pull(request.image)?;
        let credential = from_request::credential(request.auth, from_request::name(&spec.image)?)?;
        let sandbox = request.sandbox_config.map(from_request::sandbox);
        let pulled = self.images.pull(spec.clone(), credential, sandbox).await;
        pulled.map(String::from).map_err(|error| refused("PullImage", &spec, &error))
    }
}

/// Whether an image has a name in this repository.
fn is_of_repository(image: &Image, repository: &str) -> bool {
    let mut names = image.repo_tags.iter().chain(&image.repo_digests);
    names.any(|name| {
        let rest = name.strip_prefix(repository);
        rest.is_some_and(|rest| rest.starts_with(['@', ':']) && !rest.contains('/'))
    })
}

/// The status of a failed call that changes state, logged.
fn refused(call: &'static str, spec: &ImageSpec, error: &larder::backend::BackendError) -> Status {
    let status = to_status::of(error);
    let hint = error.hint().map(|hint| hint.to_string());
    tracing::debug!(call, image = %spec.image, code = ?status.code(), hint, "{}", status.message());
    status
}

type StreamImagesParts = Iter<std::vec::IntoIter<Result<proto::StreamImagesResponse, Status>>>;

#[async_trait]
impl ImageService for CriService {
    type StreamImagesStream = StreamImagesParts;

    async fn list_images(
        &self,
        request: Request<proto::ListImagesRequest>,
    ) -> Result<Response<proto::ListImagesResponse>, Status> {
        let images = self.listed(request.into_inner().filter).await?;
        Ok(Response::new(proto::ListImagesResponse { images: to_response::fitted(images) }))
    }

    async fn stream_images(
        &self,
        request: Request<proto::StreamImagesRequest>,
    ) -> Result<Response<StreamImagesParts>, Status> {
        let images = self.listed(request.into_inner().filter).await?;
        let parts: Vec<_> = to_response::parts(images).into_iter().map(Ok).collect();
        Ok(Response::new(stream::iter(parts)))
    }

    async fn image_status(
        &self,
        request: Request<proto::ImageStatusRequest>,
    ) -> Result<Response<proto::ImageStatusResponse>, Status> {
        let proto::ImageStatusRequest { image, verbose } = request.into_inner();
        let spec = from_request::spec(image)?;
        let refused = |error| to_status::of(&error);
        if !verbose {
            let image =
                self.images.status(&spec, StatusIntent::Use).await.map_err(refused)?.map(to_response::image);
            return Ok(Response::new(proto::ImageStatusResponse { image, ..Default::default() }));
        }
        let found = self.images.inspect(&spec).await.map_err(refused)?;
        let reply = found.map(|details| proto::ImageStatusResponse {
            image: Some(to_response::image(details.image)),
            info: to_response::info(details.info),
        });
        Ok(Response::new(reply.unwrap_or_default()))
    }

    async fn pull_image(
        &self,
        request: Request<proto::PullImageRequest>,
    ) -> Result<Response<proto::PullImageResponse>, Status> {
        let image_ref = self.pulled(request.into_inner()).await?;
        Ok(Response::new(proto::PullImageResponse { image_ref }))
    }

    async fn remove_image(
        &self,
        request: Request<proto::RemoveImageRequest>,
    ) -> Result<Response<proto::RemoveImageResponse>, Status> {
        let spec = from_request::spec(request.into_inner().image)?;
        let removed = self.images.remove(&spec).await;
        removed.map_err(|error| refused("RemoveImage", &spec, &error))?;
        Ok(Response::new(proto::RemoveImageResponse {}))
    }

    async fn image_fs_info(
        &self,
        _: Request<proto::ImageFsInfoRequest>,
    ) -> Result<Response<proto::ImageFsInfoResponse>, Status> {
        let filesystems = self.images.filesystems().await.map_err(|error| to_status::of(&error))?;
        Ok(Response::new(to_response::filesystems(&filesystems)))
    }
}
