//! Removes an image with all its names, never by force.
//!
//! The engine removes an image by its ID if it has one name only, so all names but one are removed first, each only
//! while it still points at this image. The engine refuses to remove an image that a container uses; the other names
//! would be lost by then. So containers are checked first, and removed names are restored if the engine refuses in the
//! end, because a container was created since.

use larder::backend::{BackendError, CallErrorKind};
use larder::hint::Hint;
use larder::reference::{DEFAULT_TAG, ImageId, ImageName, Reference};
use reqwest::Method;
use reqwest::header::HeaderMap;

use crate::api::{ContainerSummary, DeletedImage, ImageInspect};
use crate::engine::EngineClient;
use crate::names;

/// How often names are read again: another client may tag the image while names are removed.
const LOOKS: usize = 3;

/// The engine's error for an image that another one was built on.
const HAS_CHILDREN: &str = "dependent child images";

/// Removes an image, by name or ID. A missing image is a success. Each call to the engine has its own time limit.
pub(crate) async fn remove(engine: &EngineClient, image: &ImageName) -> Result<(), BackendError> {
    let Some(found) = engine.inspect::<ImageInspect>(image.as_str()).await? else { return Ok(()) };
    let id = found.id.clone();
    if let Some(container) = user_of(engine, &id).await? {
        return Err(in_use(image, &container));
    }
    let mut taken = Vec::new();
    let outcome = with_all_names(engine, found, &mut taken).await;
    if outcome.is_err() {
        give_back(engine, &id, &taken).await;
    }
    outcome
}

/// Removes these names of an image, and the image if it has no others. Returns whether it is present under others. A
/// missing image is a success.
pub(crate) async fn remove_names(
    engine: &EngineClient,
    image: &ImageName,
    names: &[String],
) -> Result<bool, BackendError> {
    let found = engine.inspect::<ImageInspect>(image.as_str()).await?;
    let has_others = |found: &ImageInspect| all_names(found).iter().any(|name| !names.contains(name));
    let Some(found) = found.filter(has_others) else {
        remove(engine, image).await?;
        return Ok(false);
    };
    for name in names {
        take_off(engine, &found.id, name.clone(), &mut Vec::new()).await?;
    }
    Ok(true)
}

/// Adds a name to an image, in place of the image that has it. Returns whether the image is present.
pub(crate) async fn add_name(
    engine: &EngineClient,
    id: &ImageId,
    name: &Reference,
) -> Result<bool, BackendError> {
    let path = format!("/images/{}/tag", names::in_path(id.as_str())?);
    let query = [("repo", name.name()), ("tag", name.tag().unwrap_or(DEFAULT_TAG))];
    match engine.within(engine.call(Method::POST, &path, &query, HeaderMap::new())).await {
        Err(BackendError::Call { kind: CallErrorKind::NotFound, .. }) => Ok(false),
        answer => answer.map(|_| true),
    }
}

async fn with_all_names(
    engine: &EngineClient,
    mut found: ImageInspect,
    taken: &mut Vec<String>,
) -> Result<(), BackendError> {
    let id = found.id.clone();
    for _ in 0..LOOKS {
        let mut names = all_names(&found).into_iter();
        let last = names.next();
        for name in names {
            take_off(engine, &id, name, taken).await?;
        }
        let Err(refused) = delete(engine, id.as_str()).await else { return Ok(()) };
        match engine.inspect::<ImageInspect>(id.as_str()).await? {
            // The image is removed, whatever the engine responded, or did not respond in time.
            None => return Ok(()),
            // It is no longer listed without a name, and is removed with the image that was built on it.
            Some(_) if refused.to_string().contains(HAS_CHILDREN) => {
                return match last {
                    Some(name) => take_off(engine, &id, name, taken).await,
                    None => Ok(()),
                };
            }
            // The image was tagged since.
            Some(rest) if all_names(&rest).len() > 1 => found = rest,
            Some(_) => return Err(refused),
        }
    }
    let message = format!("{id}: another client keeps tagging the image during its removal");
    Err(BackendError::call(CallErrorKind::Other, message))
}

/// Removes a name of an image, unless it points at another image now.
async fn take_off(
    engine: &EngineClient,
    id: &ImageId,
    name: String,
    taken: &mut Vec<String>,
) -> Result<(), BackendError> {
    let named = engine.inspect::<ImageInspect>(&name).await?;
    if named.is_none_or(|named| named.id != *id) {
        return Ok(());
    }
    let removed = delete(engine, &name).await?;
    if let Some(lost) = another_s(&removed, id) {
        tracing::error!(
            "{name} was moved to another image while it was removed from {id}: the engine deleted {lost:?}"
        );
    }
    taken.push(name);
    Ok(())
}

/// The layers deleted with a name of this image, if they are another image's: then the name was moved after the check.
/// This image is deleted with a name if other clients removed its other names.
fn another_s<'a>(removed: &'a [DeletedImage], id: &ImageId) -> Option<Vec<&'a ImageId>> {
    let lost: Vec<&ImageId> =
        removed.iter().map(|entry| &entry.deleted).filter(|id| !id.is_empty()).collect();
    (!lost.is_empty() && !lost.contains(&id)).then_some(lost)
}

/// Returns the names and images that the engine removed; empty if the name does not exist.
async fn delete(engine: &EngineClient, name: &str) -> Result<Vec<DeletedImage>, BackendError> {
    let path = format!("/images/{}", names::in_path(name)?);
    let answer = engine.within(async {
        let response = engine.call(Method::DELETE, &path, &[], HeaderMap::new()).await?;
        engine.read(&path, response).await
    });
    match answer.await {
        Err(BackendError::Call { kind: CallErrorKind::NotFound, .. }) => Ok(Vec::new()),
        answer => answer,
    }
}

/// Tags, then names with digests whose repositories have no tag here: the others are removed with the last tag.
fn all_names(found: &ImageInspect) -> Vec<String> {
    let tags = names::without_placeholders(found.repo_tags.clone());
    let repository = |name: &str| name.rsplit_once(':').map(|(repository, _)| repository.to_owned());
    let tagged: Vec<String> = tags.iter().filter_map(|tag| repository(tag)).collect();
    let digests = names::without_placeholders(found.repo_digests.clone()).into_iter().filter(|name| {
        name.split_once('@').is_some_and(|(repository, _)| !tagged.iter().any(|tagged| tagged == repository))
    });
    let digests: Vec<String> = digests.collect();
    tags.into_iter().chain(digests).collect()
}

/// Restores tags of an image that still exists, unless they point at another image now. Names with digests
/// cannot be restored.
async fn give_back(engine: &EngineClient, id: &ImageId, taken: &[String]) {
    for name in taken.iter().filter(|name| !name.contains('@')) {
        if let Err(error) = give(engine, id, name).await {
            tracing::warn!("cannot restore the tag {name} of {id}: {error}");
        }
    }
}

async fn give(engine: &EngineClient, id: &ImageId, name: &str) -> Result<(), BackendError> {
    if engine.inspect::<ImageInspect>(name).await?.is_some() {
        return Ok(());
    }
    let Some((repository, tag)) = name.rsplit_once(':') else { return Ok(()) };
    let (path, query) = (format!("/images/{id}/tag"), [("repo", repository), ("tag", tag)]);
    engine.within(engine.call(Method::POST, &path, &query, HeaderMap::new())).await.map(drop)
}

/// A container that uses this image, in whatever state.
async fn user_of(engine: &EngineClient, id: &ImageId) -> Result<Option<ContainerSummary>, BackendError> {
    let containers: Vec<ContainerSummary> = engine.get_required("/containers/json", &[("all", "1")]).await?;
    Ok(containers.into_iter().find(|container| container.image_id == *id))
}

fn in_use(image: &ImageName, container: &ContainerSummary) -> BackendError {
    let name = container.names.first().map_or(container.id.as_str(), |name| name.trim_start_matches('/'));
    let message = format!("{image} is in use by container {name} ({})", container.state);
    let hint = Hint::from("remove the container first (docker rm); larder never removes an image in use");
    BackendError::call(CallErrorKind::FailedPrecondition, message).with_hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_removed_by_themselves_only_where_no_tag_takes_them_along() {
        let found = ImageInspect {
            repo_tags: ["h:5000/a:1", "h:5000/a:2", "<none>:<none>"].map(str::to_owned).to_vec(),
            repo_digests: ["h:5000/a@sha256:f", "b@sha256:f"].map(str::to_owned).to_vec(),
            ..ImageInspect::default()
        };
        assert_eq!(all_names(&found), ["h:5000/a:1", "h:5000/a:2", "b@sha256:f"]);
    }

    #[test]
    fn an_image_removed_by_its_own_name_is_not_attributed_to_another() {
        let removed = |deleted: &[&str]| {
            let name = DeletedImage { deleted: ImageId::default() };
            let ids = deleted.iter().map(|id| DeletedImage { deleted: (*id).into() });
            [name].into_iter().chain(ids).collect::<Vec<_>>()
        };
        let a = ImageId::from("a");
        assert_eq!(another_s(&removed(&[]), &a), None);
        assert_eq!(another_s(&removed(&["a", "its layer"]), &a), None, "others took its other names off");
        let lost = ["b", "its layer"].map(ImageId::from);
        assert_eq!(another_s(&removed(&["b", "its layer"]), &a), Some(lost.iter().collect()));
    }
}
