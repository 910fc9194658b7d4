//! Describes images, and the backend that has them.

use std::sync::Arc;
use std::time::Duration;

use larder::backend::{Backend, BackendError, FilesystemUsage, ImageDetails, ImageSpec};
use larder::hint::Hint;
use larder::reference::Reference;
use larder::retention::{LeasePurpose, RemovalGate};
use larder_api::is_gone;
use larder_api::v1::{Condition, InspectRequest, RuntimeResponse, TagRequest, TagResponse};

use super::find::{FoundImage, find, find_to_describe};
use crate::error::Error;
use crate::image_name::{self, InvalidImageName};
use crate::node::Storage;

/// One image with its details.
pub(super) async fn inspect(
    InspectRequest { image: name, exact }: &InspectRequest,
    backend: &dyn Backend,
) -> Result<ImageDetails, Error> {
    let image = if *exact { find(name, backend).await? } else { find_to_describe(name, backend).await? };
    match backend.inspect(&ImageSpec::named(image.key())).await {
        Ok(found) => found.ok_or_else(|| absent(name)),
        Err(error) => Err(image_error(name, error)),
    }
}

/// An error about one image. That of an unreachable backend does not name the image.
pub(super) fn image_error(name: &str, error: BackendError) -> Error {
    if is_gone(&error) {
        return error.into();
    }
    Error::failed(format!("{name}: {error}")).hints(error.hint())
}

/// A requested image that does not exist.
pub(super) fn absent(image: &str) -> Error {
    Error::missing(format!("{image}: image not found"))
        .hint(Hint::new().command(["images"]).text(" lists the present images"))
}

/// How long GC retains an image that got a name: a round that looked at the image before may still remove it.
const TAGGED_LEASE: Duration = Duration::from_secs(60);

/// Adds a name to an image. A removal of the image by GC is either over, and the image not found, or does not begin.
pub(super) async fn tag(
    request: &TagRequest,
    storage: &Storage,
    gate: &Arc<RemovalGate>,
) -> Result<TagResponse, Error> {
    let TagRequest { source, target } = request;
    let (target, backend) = (target_name(target)?, &**storage.backend());
    let Some(names) = backend.names() else {
        return Err(Error::failed("cannot tag an image of a runtime: CRI has no call for it")
            .hint(format!("with containerd: ctr -n k8s.io images tag {source} {target}")));
    };
    let found = loop {
        let check = gate.begin_presence_check();
        let found = find(source, backend).await?;
        if check.lease(&found.image.id, LeasePurpose::Ensure, TAGGED_LEASE).await {
            break found;
        }
    };
    let (target, image) = (target_of(&target, &found)?, found.image);
    match names.add_name(&image.id, &target).await {
        Ok(true) => Ok(TagResponse { id: image.id.to_string(), name: target.to_string() }),
        Ok(false) => Err(absent(source)),
        Err(error) => Err(image_error(source, error)),
    }
}

/// The target for an image: a name of an image for another platform is for that as well.
fn target_of(target: &Reference, found: &FoundImage) -> Result<Reference, Error> {
    let mut own = found.image.repo_tags.iter().chain(&found.image.repo_digests);
    let own = if found.image.is_for_other_platforms() { own.next() } else { None };
    let source = found.name.as_ref().or(own).and_then(|name| Reference::parse(name).ok());
    let platform = source.as_ref().and_then(Reference::platform);
    match target.platform() {
        Some(other) if Some(other) != platform => {
            Err(Error::bad_input(format!("{target}: the image is not one for {other}"))
                .hint("leave out the platform: the name gets that of the image"))
        }
        _ => Ok(target.for_platform(platform)),
    }
}

/// A name that an image can be given: with a tag, and without a digest.
fn target_name(target: &str) -> Result<Reference, Error> {
    let bad = |bad: InvalidImageName| Error::bad_input(bad.message).hints(bad.hints);
    image_name::check(target).map_err(bad)?;
    let name = Reference::parse(target).map_err(|error| Error::bad_input(error.to_string()))?;
    if name.digest().is_some() {
        return Err(Error::bad_input(format!("{target}: a digest cannot be given to an image"))
            .hint("write a name with a tag"));
    }
    Ok(name.stored())
}

/// Describes the runtime or store that larder works on.
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
