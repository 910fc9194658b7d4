//! Removes names of images, and images: a name removes itself, and the image with its last name. Over CRI, a removal
//! takes all names.

mod naming;

use std::path::Path;
use std::sync::Arc;

use larder::backend::{Backend, BackendError, CallErrorKind, Image, ImageSpec, RemoveOptions, Removed};
use larder::detached::run_to_completion;
use larder::error_chain;
use larder::gc::ClockReading;
use larder::hint::Hint;
use larder::pull::{ImageManager, RefuseRemoval};
use larder::reference::ImageId;
use larder::retention::{RetentionError, RetentionPurpose, SourceScope};
use larder_api::convert;
use larder_api::v1::{self as api, RemoveRequest, RemoveResponse, removed};
use larder_store::backend::StoreBackend;
use larder_store::store::StoreError;
use tokio::task::spawn_blocking;

use super::find::{FoundImage, find_among, is_same_name};
use super::images::image_error;
use crate::error::{Error, ErrorKind};
use crate::node::collection::{Collection, RequestApi};
use crate::node::health::error_with_hint;
use crate::node::peer::Peer;
use crate::node::{Node, Storage};
use naming::{RemovalScope, Selection};

/// The parts of a node that a removal needs.
#[derive(Clone)]
pub(super) struct RemovalParts {
    pub(super) storage: Arc<Storage>,
    pub(super) collection: Arc<Collection>,
    pub(super) manager: Arc<ImageManager>,
}

impl RemovalParts {
    pub(super) fn of(node: &Node) -> RemovalParts {
        RemovalParts {
            storage: Arc::clone(&node.storage),
            collection: Arc::clone(&node.collection),
            manager: Arc::clone(node.pulls.manager()),
        }
    }
}

/// Removes images and names one after the other; the texts were checked. Removals and failures are recorded. An
/// unavailable backend ends it. Dropping the call ends it after the image that is being removed.
pub(super) async fn remove(request: &RemoveRequest, parts: &RemovalParts) -> RemoveResponse {
    let mut answer = RemoveResponse::default();
    if let Err(failure) = remove_all(request, parts, &mut answer).await {
        answer.error = Some(failure.into());
        return answer;
    }
    // A removal also deletes what dead processes left. The images are removed whether or not that works.
    if let Some(store) = parts.storage.store().map(StoreBackend::store).cloned() {
        let swept = spawn_blocking(move || {
            store.sweep(&ClockReading::now()).map_err(|error| unswept(store.root(), &error))
        });
        if let Ok(Err(warning)) = swept.await {
            answer.warnings.push(warning);
        }
    }
    answer
}

/// Looks all names up, before the first removal: two of them may mean one image.
async fn look_up<'a>(
    request: &'a RemoveRequest,
    backend: &dyn Backend,
    answer: &mut RemoveResponse,
) -> Result<Vec<RemovalRequest<'a>>, Error> {
    let mut found: Vec<RemovalRequest> = Vec::new();
    if request.images.is_empty() {
        return Ok(found);
    }
    let images = backend.list().await?;
    let mut is_outdated = false;
    for text in &request.images {
        match find_among(text, &images, backend).await {
            Ok(FoundImage { image, .. })
                if !request.image_id.is_empty() && image.id.as_str() != request.image_id =>
            {
                is_outdated = true;
                answer.refuse(moved(text))?;
            }
            Ok(FoundImage { image, name }) => {
                let known = found.iter().position(|known| known.image.id == image.id).unwrap_or(found.len());
                if known == found.len() {
                    found.push(RemovalRequest { text, image, selected: Selection::default() });
                }
                found[known].selected.add(name);
            }
            Err(error) if request.ignore_not_found && error.kind() == ErrorKind::NotFound => {}
            Err(error) => answer.refuse(error)?,
        }
    }
    if is_outdated {
        found.clear();
    }
    Ok(found)
}

async fn remove_all(
    request: &RemoveRequest,
    parts: &RemovalParts,
    answer: &mut RemoveResponse,
) -> Result<(), Error> {
    let RemovalParts { storage, collection, .. } = parts;
    storage.require_publisher()?;
    let (backend, is_store) = (storage.backend(), storage.store().is_some());
    let found = look_up(request, &**backend, answer).await?;
    // Mounts that stay after a forced removal are reported for the store only.
    let needs_reasons = is_store || !request.force;
    let images: Vec<Image> =
        found.iter().filter(|_| needs_reasons).map(|request| request.image.clone()).collect();
    let retained = collection.unchecked_collector().retentions(&images, SourceScope::Runtime).await;
    let retained = retained.map_err(RetentionError::into_backend_error)?;
    for RemovalRequest { text, image, selected } in &found {
        let mut refuse = |refusal: Error| {
            collection.record_failed_removal(RequestApi::Control, text, refusal.message());
            answer.refuse(refusal.about(text))
        };
        let scope = naming::scope(image, selected, backend.names().is_some(), request.force);
        let takes_image = match &scope {
            Some(RemovalScope::Names(names)) => naming::all_names(image).len() == names.len(),
            Some(RemovalScope::Image) | None => true,
        };
        let reasons = retained.get(&image.id).map_or(&[][..], Vec::as_slice);
        let mounts = mounts(reasons);
        if takes_image && !request.force {
            let is_docker = !containers(reasons).is_empty() && is_docker(backend).await;
            if let Some(refusal) = refuse_used(reasons, is_docker) {
                refuse(refusal)?;
                continue;
            }
        }
        let refusal = refuse_desired(image, scope.as_ref(), reasons).filter(|_| !request.force);
        if let Some(refusal) = refusal {
            refuse(refusal)?;
            continue;
        }
        let Some(scope) = scope else {
            refuse(other_names(image, backend.names().is_some()))?;
            continue;
        };
        match remove_one(text, image, scope.clone(), request.force, parts).await {
            Ok(removal) => {
                let mut result = removed(image, &scope, removal, text, &mounts);
                if removal != Removed::Names && result.note.is_empty() {
                    result.note = kept_note(text, reasons);
                }
                answer.results.push(result);
            }
            Err(error) => answer.refuse(image_error(text, error))?,
        }
    }
    Ok(())
}

/// The refusal to remove an image, unless forced: containers, mounts and sandboxes use it, or it is pinned.
fn refuse_used(reasons: &[RetentionPurpose], is_docker: bool) -> Option<Error> {
    let containers = containers(reasons);
    if !containers.is_empty() {
        return Some(used(&users(reasons), &containers, !is_docker));
    }
    let mounts = mounts(reasons);
    if !mounts.is_empty() {
        return Some(mounted(&mounts));
    }
    let others = other_users(reasons);
    if !others.is_empty() {
        return Some(
            Error::failed(format!("in use by {}", others.join(", ")))
                .hint(Hint::from("remove that first; or use ").setting("force", "")),
        );
    }
    reasons.contains(&RetentionPurpose::Pinned).then(pinned)
}

/// The refusal to remove a name, or the image, that an image set, a static pod or the prefetch list pins.
fn refuse_desired(
    image: &Image,
    scope: Option<&RemovalScope>,
    reasons: &[RetentionPurpose],
) -> Option<Error> {
    let is_removed = |desired: &str| match scope {
        Some(RemovalScope::Names(names)) => {
            naming::all_names(image).len() == names.len()
                || names.iter().any(|name| is_same_name(name, desired))
        }
        Some(RemovalScope::Image) | None => true,
    };
    let owner = reasons.iter().find_map(|reason| match reason {
        RetentionPurpose::Desired { by, name, is_pinned: true } if is_removed(name) => Some(by),
        _ => None,
    })?;
    let refusal = Error::failed(format!("pinned by {owner}"));
    Some(refusal.hint("remove it from there first").hint(force_pinned()))
}

/// Converts the removed image or names to the answer.
fn removed(
    image: &Image,
    scope: &RemovalScope,
    removal: Removed,
    text: &str,
    mounts: &[&str],
) -> api::Removed {
    if let (Removed::Names, RemovalScope::Names(names)) = (removal, scope) {
        let untagged = api::Untagged { id: image.id.to_string(), names: names.clone() };
        return api::Removed { result: Some(removed::Result::Untagged(untagged)), ..api::Removed::default() };
    }
    api::Removed {
        result: Some(removed::Result::Removed(convert::image(image.clone()))),
        note: if mounts.is_empty() { String::new() } else { still_mounted(text, mounts) },
    }
}

/// Removes names, or an image, and records it, even if the caller is gone.
async fn remove_one(
    text: &str,
    image: &Image,
    scope: RemovalScope,
    force: bool,
    parts: &RemovalParts,
) -> Result<Removed, BackendError> {
    let (text, image, parts) = (text.to_owned(), image.clone(), parts.clone());
    let names = match scope {
        RemovalScope::Names(names) => names,
        RemovalScope::Image => Vec::new(),
    };
    let removal = async move {
        let removal = remove_from_backend(&image.id, &names, force, &parts).await;
        match &removal {
            Ok(Removed::Image { freed }) => {
                parts.collection.record_removal(RequestApi::Control, &image, *freed, None).await;
            }
            Ok(Removed::Names) => parts.collection.record_untagged(RequestApi::Control, &image, &names),
            Err(error) => {
                parts.collection.record_failed_removal(RequestApi::Control, &text, &error_with_hint(error));
            }
        }
        removal
    };
    run_to_completion(Peer::current().scope(removal)).await
}

/// Removes an image, or these names of it where the backend can do that. A pinned image is not removed with its last
/// names, unless forced: it may have lost the others since it was listed.
async fn remove_from_backend(
    id: &ImageId,
    names: &[String],
    force: bool,
    parts: &RemovalParts,
) -> Result<Removed, BackendError> {
    let RemovalParts { storage, manager, .. } = parts;
    let names = (!names.is_empty() && storage.backend().names().is_some()).then(|| names.to_vec());
    let refuse = {
        let names = names.clone();
        move |image: Option<&Image>| {
            let (image, names) = image.filter(|image| image.pinned).zip(names.as_ref())?;
            let is_last =
                naming::all_names(image).into_iter().all(|name| names.iter().any(|own| own == name));
            is_last.then(|| {
                BackendError::call(CallErrorKind::FailedPrecondition, PINNED).with_hint(force_pinned())
            })
        }
    };
    let refuse: Option<&RefuseRemoval> = if force || names.is_none() { None } else { Some(&refuse) };
    let options = RemoveOptions { names: names.clone(), force };
    let removed = manager.remove_by_id(id, &ImageSpec::named(id), &options, refuse).await?;
    if let Some(store) = storage.store() {
        // The space is free when the command is done.
        store.store().finish_deletion();
    }
    Ok(removed)
}

trait AddRefusal {
    /// Notes why one image is still there. A backend that is gone is the end of all.
    fn refuse(&mut self, failure: Error) -> Result<(), Error>;
}

impl AddRefusal for RemoveResponse {
    fn refuse(&mut self, failure: Error) -> Result<(), Error> {
        if failure.kind() == ErrorKind::Unavailable {
            return Err(failure);
        }
        let result = Some(removed::Result::Refused(failure.into()));
        self.results.push(api::Removed { result, ..api::Removed::default() });
        Ok(())
    }
}

/// The name is another image's since the caller listed images.
fn moved(name: &str) -> Error {
    Error::failed(format!("{name}: another image has this name now; removed nothing"))
        .hint("list images again before you repeat the removal")
}

/// An image to remove or to take names from, as the request first selects it.
struct RemovalRequest<'a> {
    text: &'a str,
    image: Image,
    selected: Selection,
}

/// Returns true for an engine of Docker: it drops single tags, and refuses the image of a container, forced or not.
async fn is_docker(backend: &Arc<dyn Backend>) -> bool {
    backend.info().await.is_ok_and(|info| info.name == "docker")
}

/// Users that a refusal names.
const MAX_USERS: usize = 5;

/// The image is in use by containers of a runtime.
fn used(users: &[String], containers: &[&str], can_force: bool) -> Error {
    let containers = match containers {
        [one] => format!("the container {one}"),
        several => format!("these {} containers", several.len()),
    };
    let remove = Hint::from(format!("remove {containers} first"));
    let force =
        |hint: Hint| hint.text("; or use ").setting("force", "").text(", where the runtime allows it");
    let more = users.len().saturating_sub(MAX_USERS);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let named = users[..users.len().min(MAX_USERS)].join(", ");
    Error::failed(format!("in use by {named}{more}")).hint(if can_force { force(remove) } else { remove })
}

/// The runtime needs the image, for its sandboxes mostly.
fn pinned() -> Error {
    Error::failed(PINNED).hint("pods need it to start").hint(force_pinned())
}

const PINNED: &str = "pinned by the runtime or by runtime.sandboxImages";

fn force_pinned() -> Hint {
    Hint::from("to remove it anyway, use ").setting("force", "")
}

/// The image is mounted out of larder's own store.
fn mounted(mounts: &[&str]) -> Error {
    Error::failed(format!("mounted at {}", mounts.join(", "))).hint(
        Hint::new()
            .command(std::iter::once("umount").chain(mounts.iter().copied()).map(str::to_owned))
            .text(" first; or use ")
            .setting("force", "")
            .text(": mounts stay until they are unmounted"),
    )
}

/// The image is gone from lists, and its layers are not.
fn still_mounted(name: &str, mounts: &[&str]) -> String {
    let mounts = mounts.join(", ");
    format!("note: {name} is still mounted at {mounts}; its layers are removed when it is unmounted")
}

/// The keep rule by which GC retained the image that was removed; empty without one.
fn kept_note(text: &str, reasons: &[RetentionPurpose]) -> String {
    let rule = reasons.iter().find_map(|reason| match reason {
        RetentionPurpose::Kept(kept) => Some(kept),
        _ => None,
    });
    rule.map_or_else(String::new, |kept| {
        format!("note: {text} was {kept}, which is for GC; it applies to later pulls")
    })
}

/// Describes the remains of dead processes that are still there.
fn unswept(root: &Path, error: &StoreError) -> String {
    let hint = error.hint().unwrap_or_else(|| "the next removal retries".into());
    format!("cannot delete leftovers in {}: {}; {hint}", root.display(), error_chain(error))
}

/// The image has names that were not requested.
fn other_names(image: &Image, single: bool) -> Error {
    let names = naming::all_names(image).join(", ");
    let (problem, step) = if single {
        ("the image has several names", "give the names to remove; or remove all of them with ")
    } else {
        ("the runtime removes an image with all its names", "give all tags; or remove all names with ")
    };
    Error::failed(format!("{problem}: {names}")).hint(Hint::from(step).setting("force", ""))
}

/// Names of the containers that run or mount an image.
fn containers(reasons: &[RetentionPurpose]) -> Vec<&str> {
    let names = reasons.iter().filter_map(|reason| match reason {
        RetentionPurpose::Container { name, .. } | RetentionPurpose::Volume { name, .. } => {
            Some(name.as_str())
        }
        _ => None,
    });
    names.collect()
}

/// Where an image of larder's own store is mounted.
fn mounts(reasons: &[RetentionPurpose]) -> Vec<&str> {
    let targets = reasons.iter().filter_map(|reason| match reason {
        RetentionPurpose::Mount { target, .. } => Some(target.as_str()),
        _ => None,
    });
    targets.collect()
}

/// Sandboxes, and containers that CRI does not list, in words, each once.
fn other_users(reasons: &[RetentionPurpose]) -> Vec<String> {
    let others = reasons.iter().filter(|reason| {
        matches!(reason, RetentionPurpose::UnlistedContainer { .. } | RetentionPurpose::Sandbox { .. })
    });
    let mut users: Vec<String> = others.map(ToString::to_string).collect();
    users.sort_unstable();
    users.dedup();
    users
}

/// The containers that run or mount an image, in words.
fn users(reasons: &[RetentionPurpose]) -> Vec<String> {
    let users = reasons.iter().filter_map(|reason| match reason {
        RetentionPurpose::Container { id, name, pod, running }
        | RetentionPurpose::Volume { container: id, name, pod, running } => {
            let id = id.get(..13).unwrap_or(id);
            let state = if *running { "running" } else { "not running" };
            Some(match pod.as_str() {
                "" => format!("container {name} ({id}, {state})"),
                pod => format!("container {name} of pod {pod} ({id}, {state})"),
            })
        }
        _ => None,
    });
    users.collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use larder::backend::{Container, ContainerInventory, Sandbox};
    use larder::retention::LeasePurpose;
    use larder_testkit::fake_backend::{FakeBackend, image};
    use tokio::time::timeout;

    use super::*;
    use crate::node::testing;

    #[tokio::test]
    async fn users_are_found_by_id_by_name_and_by_mount() {
        let (fake, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
        fake.add_image("r.example/a:1", image("sha256:1", 1));
        let container = |name: &str, image_id: &str, mounted: &[&str]| Container {
            id: "0123456789abcdef".into(),
            name: name.into(),
            image_id: image_id.into(),
            mounted_images: mounted.iter().map(|&name| name.into()).collect(),
            pod: "default/web".into(),
            running: true,
            ..Container::default()
        };
        fake.set_in_use(ContainerInventory {
            containers: vec![
                container("by-id", "sha256:1", &[]),
                container("by-name", "r.example/a:1", &[]),
                container("by-mount", "sha256:2", &["sha256:1"]),
                container("other", "sha256:2", &[]),
            ],
            sandboxes: Vec::new(),
        });
        let node = testing::node(&fake, dir.path(), None, |_| ());
        let retained = node
            .collection
            .unchecked_collector()
            .retentions(&fake.images(), SourceScope::Runtime)
            .await
            .unwrap();
        assert_eq!(
            users(&retained[&ImageId::from("sha256:1")]),
            ["by-id", "by-name", "by-mount"]
                .map(|name| format!("container {name} of pod default/web (0123456789abc, running)"))
        );
    }

    #[test]
    fn a_refusal_names_few_of_many_users() {
        let names: Vec<String> = (0..12).map(|number| format!("pod-{number}")).collect();
        let refused = used(&names, &["main"; 12], false);
        assert_eq!(refused.message(), "in use by pod-0, pod-1, pod-2, pod-3, pod-4 and 7 more");
        assert_eq!(refused.next_steps(), [Hint::from("remove these 12 containers first")]);
    }

    #[tokio::test]
    async fn a_pinned_image_and_that_of_a_sandbox_are_removed_only_by_force() {
        let (fake, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
        fake.add_image("pinned:1", Image { pinned: true, ..image("sha256:1", 1) });
        fake.add_image("sandbox:1", image("sha256:2", 1));
        let sandbox = Sandbox { pod: "ns/web".into(), image: "sandbox:1".into(), ..Sandbox::default() };
        fake.set_in_use(ContainerInventory { sandboxes: vec![sandbox], ..ContainerInventory::default() });
        let node = testing::node(&fake, dir.path(), None, |_| ());
        let mut request =
            RemoveRequest { images: vec!["pinned:1".into(), "sandbox:1".into()], ..RemoveRequest::default() };
        let refused = remove(&request, &RemovalParts::of(&node)).await;
        let messages: Vec<String> = refused.results.into_iter().map(|result| format!("{result:?}")).collect();
        assert!(messages[0].contains("pinned:1: pinned by the runtime"), "{messages:?}");
        assert!(messages[1].contains("sandbox:1: in use by sandbox of pod ns/web"), "{messages:?}");
        assert_eq!(fake.images().len(), 2);
        request.force = true;
        let removed = remove(&request, &RemovalParts::of(&node)).await;
        assert_eq!((removed.results.len(), fake.images().len()), (2, 0));
    }

    #[tokio::test]
    async fn nothing_is_removed_where_a_name_is_that_of_another_image_now() {
        let (fake, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
        fake.add_image("a:1", image("sha256:1", 1));
        fake.add_image("b:1", image("sha256:2", 1));
        let node = testing::node(&fake, dir.path(), None, |_| ());
        let request = |images: &[&str]| RemoveRequest {
            images: images.iter().map(|&name| name.to_owned()).collect(),
            image_id: "sha256:1".into(),
            ..RemoveRequest::default()
        };
        for images in [&["b:1"][..], &["a:1", "b:1"]] {
            let refused = format!("{:?}", remove(&request(images), &RemovalParts::of(&node)).await.results);
            assert!(refused.contains("b:1: another image has this name now"), "{refused}");
            assert_eq!(fake.images().len(), 2, "{images:?}");
        }
        remove(&request(&["a:1"]), &RemovalParts::of(&node)).await;
        let left: Vec<_> = fake.images().into_iter().map(|image| image.id).collect();
        assert_eq!(left, ["sha256:2"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_removal_without_its_caller_ends_behind_the_closed_gate_and_no_other_begins() {
        let (fake, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
        let minute = Duration::from_secs(60);
        for name in ["a:1", "b:1"] {
            fake.add_image(name, image(format!("sha256:{name}"), 1));
        }
        fake.hold_removals();
        let node = testing::node(&fake, dir.path(), None, |_| ());
        let request = RemoveRequest { images: vec!["a:1".into(), "b:1".into()], ..RemoveRequest::default() };
        let parts = RemovalParts::of(&node);
        let removing = remove(&request, &parts);
        assert!(timeout(minute, removing).await.is_err(), "it gives up");
        fake.release_removals();
        assert!(
            !Arc::clone(node.collection.gate())
                .begin_presence_check()
                .lease("sha256:a:1", LeasePurpose::Ensure, minute)
                .await
        );
        let left: Vec<_> = fake.images().into_iter().map(|image| image.id).collect();
        assert_eq!(left, ["sha256:b:1"]);
    }
}
