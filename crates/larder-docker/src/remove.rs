//! Removal: under all names, and never by force.
//!
//! The engine takes one name at a time, and an image goes with its last one. It refuses that for an image that a container
//! uses; by then the other names would be gone. So containers are looked at first, and names that were taken off come
//! back if the engine refuses in the end, because a container was made meanwhile.

use larder::backend::{BackendError, CallErrorKind};
use reqwest::Method;
use reqwest::header::HeaderMap;

use crate::answers::{ContainerSummary, ImageInspect};
use crate::engine::Engine;
use crate::names;

/// How often names are read again: somebody may give an image new ones while the old ones are taken off.
const LOOKS: usize = 3;

/// Removes an image, by name or id. It may be gone already.
pub(crate) async fn remove(engine: &Engine, image: &str) -> Result<(), BackendError> {
    let Some(found) = engine.inspect::<ImageInspect>(image).await? else { return Ok(()) };
    let id = found.id.clone();
    if let Some(container) = user_of(engine, &id).await? {
        return Err(in_use(image, &container));
    }
    let mut taken = Vec::new();
    match take_names_off(engine, found, &mut taken).await {
        Ok(()) => Ok(()),
        Err(error) => {
            give_back(engine, &id, &taken).await;
            Err(error)
        }
    }
}

async fn take_names_off(
    engine: &Engine,
    mut found: ImageInspect,
    taken: &mut Vec<String>,
) -> Result<(), BackendError> {
    let id = found.id.clone();
    for _ in 0..LOOKS {
        for name in all_names(&found) {
            if delete(engine, &name).await? {
                taken.push(name);
            }
        }
        match engine.inspect::<ImageInspect>(&id).await? {
            None => return Ok(()),
            Some(rest) if all_names(&rest).is_empty() => return by_id(engine, &id).await,
            Some(rest) => found = rest,
        }
    }
    let message = format!("{id}: somebody gives it new names while it is removed");
    Err(BackendError::Call { message, kind: CallErrorKind::Other, hint: None })
}

/// Removes what has no name. An image that another one was built on is no longer listed then, and goes with that one.
async fn by_id(engine: &Engine, id: &str) -> Result<(), BackendError> {
    match delete(engine, id).await {
        Err(BackendError::Call { message, .. }) if message.contains("dependent child images") => Ok(()),
        outcome => outcome.map(drop),
    }
}

/// Whether there was something to delete under this name.
async fn delete(engine: &Engine, name: &str) -> Result<bool, BackendError> {
    let path = format!("/images/{}", names::in_path(name)?);
    match engine.call(Method::DELETE, &path, &[], HeaderMap::new()).await {
        Ok(_) => Ok(true),
        Err(BackendError::Call { kind: CallErrorKind::NotFound, .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Tags, then names with digests whose repositories have no tag here: the others go with the last tag.
fn all_names(found: &ImageInspect) -> Vec<String> {
    let tags = names::real(found.repo_tags.clone());
    let repository = |name: &str| name.rsplit_once(':').map(|(repository, _)| repository.to_owned());
    let tagged: Vec<String> = tags.iter().filter_map(|tag| repository(tag)).collect();
    let digests = names::real(found.repo_digests.clone()).into_iter().filter(|name| {
        name.split_once('@').is_some_and(|(repository, _)| !tagged.iter().any(|tagged| tagged == repository))
    });
    let digests: Vec<String> = digests.collect();
    tags.into_iter().chain(digests).collect()
}

/// Gives tags back to an image that is still there. Names with digests cannot be given.
async fn give_back(engine: &Engine, id: &str, taken: &[String]) {
    for name in taken.iter().filter(|name| !name.contains('@')) {
        let Some((repository, tag)) = name.rsplit_once(':') else { continue };
        let query = [("repo", repository), ("tag", tag)];
        let given = engine.call(Method::POST, &format!("/images/{id}/tag"), &query, HeaderMap::new()).await;
        if let Err(error) = given {
            tracing::warn!("{id} has lost its name {name}, and could not be given it back: {error}");
        }
    }
}

/// A container that uses this image, in whatever state.
async fn user_of(engine: &Engine, id: &str) -> Result<Option<ContainerSummary>, BackendError> {
    let containers: Vec<ContainerSummary> = engine.must_get("/containers/json", &[("all", "1")]).await?;
    Ok(containers.into_iter().find(|container| container.image_id == id))
}

fn in_use(image: &str, container: &ContainerSummary) -> BackendError {
    let name = container.names.first().map_or(container.id.as_str(), |name| name.trim_start_matches('/'));
    BackendError::Call {
        message: format!("{image} is used by the container {name} ({})", container.state),
        kind: CallErrorKind::Other,
        hint: Some("remove the container first (docker rm); larder removes no image that a container uses"),
    }
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
}
