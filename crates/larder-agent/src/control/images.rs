//! Describes images, and the backend that has them.

use larder::backend::{Backend, BackendError, FilesystemUsage, ImageDetails, ImageSpec};
use larder::hint::Hint;
use larder_api::is_gone;
use larder_api::v1alpha1::{Condition, RuntimeResponse};

use crate::error::Error;

/// One image with its details.
pub(super) async fn inspect(name: &str, backend: &dyn Backend) -> Result<ImageDetails, Error> {
    match backend.inspect(&ImageSpec::named(name)).await {
        Ok(found) => found.ok_or_else(|| absent(name)),
        Err(error) => Err(image_error(name, error)),
    }
}

/// An error about one image. That of an unreachable backend does not name the image.
pub(super) fn image_error(name: &str, error: BackendError) -> Error {
    if is_gone(&error) {
        return error.into();
    }
    let failure = Error::failed(format!("{name}: {error}"));
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// A requested image that does not exist.
pub(super) fn absent(image: &str) -> Error {
    Error::missing(format!("{image}: image not found"))
        .hint(Hint::new().command(["images"]).text(" lists the present images"))
}

/// What larder works on.
pub(super) async fn runtime(backend: &dyn Backend) -> Result<RuntimeResponse, Error> {
    let (info, filesystems) = (backend.info().await?, backend.filesystems().await?);
    let paths = |found: &[FilesystemUsage]| {
        found.iter().map(|usage| usage.mountpoint.display().to_string()).collect()
    };
    let known = |text: String| Some(text).filter(|text| !text.is_empty());
    let conditions = info.conditions.into_iter().map(|condition| Condition {
        r#type: condition.kind,
        status: condition.ok,
        reason: known(condition.reason),
        message: known(condition.message),
    });
    Ok(RuntimeResponse {
        endpoint: info.endpoint,
        name: info.name,
        version: info.version,
        api_version: info.api_version,
        conditions: conditions.collect(),
        image_filesystems: paths(&filesystems.image),
        container_filesystems: paths(&filesystems.container),
    })
}
