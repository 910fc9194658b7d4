//! Checks the contract of [`Backend`].
//!
//! [`check`] runs every check on a backend of its own, which a [`BackendFixture`] makes. It holds for a fake, for a
//! fake runtime behind a real socket, and for a real containerd (`larder_testkit_peers::fixtures`): nothing here
//! depends on more than the trait. Each failed check panics with the broken promise.

#![allow(async_fn_in_trait, reason = "fixtures are used on one thread, by tests")]

use std::sync::Arc;

use larder::backend::{
    Backend, BackendError, CallErrorKind, Image, ImageDetails, ImageSpec, ProgressReporter, RemoveOptions,
    Removed,
};
use larder::reference::ImageId;

/// A backend under test, and the controls of its environment that the checks need.
pub trait BackendFixture {
    /// Backend under test.
    type Backend: Backend + 'static;

    /// Images of the registry.
    fn names(&self) -> &FixtureImages;

    /// Creates a backend without the images of [`names`](BackendFixture::names). The other methods apply to the last
    /// one created.
    async fn empty(&self) -> Self::Backend;

    /// Makes the next pull hang in its middle.
    async fn hold_next_pull(&self);

    /// Waits until a pull hangs in its middle, so that it has certainly begun.
    async fn pull_held(&self);

    /// Lets pulls complete again.
    async fn release_pulls(&self);

    /// Starts a container that runs the image of this ID and mounts it as a volume. False if containers are not
    /// supported: then only the form of the inventory is checked.
    async fn run_container(&self, image_id: &str) -> bool;

    /// Whether containers here can mount images.
    fn mounts_images(&self) -> bool {
        true
    }
}

/// Images of the registry that the backend can reach. Names with tags are spelled as the backend spells them in its
/// lists: `registry.example/app:v1`, not a short name.
#[derive(Debug, Clone)]
pub struct FixtureImages {
    /// An image that can be pulled without credentials, and is not present in a fresh backend.
    pub image: String,
    /// Another name of the very same image.
    pub alias: String,
    /// Another image, which no backend of the fixture has ever fetched.
    pub untouched: String,
    /// A name that the registry does not have.
    pub unknown: String,
}

/// Checks the whole contract.
pub async fn check(fixture: &impl BackendFixture) {
    let names = fixture.names();
    info_names_what_answers(&fixture.empty().await).await;
    absence_is_an_answer(&fixture.empty().await, names).await;
    a_pulled_image_is_complete(&fixture.empty().await, names).await;
    pulling_again_changes_nothing(&fixture.empty().await, names).await;
    a_failed_pull_leaves_nothing_visible(&fixture.empty().await, names).await;
    a_pull_dropped_early_leaves_nothing_half_visible(&fixture.empty().await, names).await;
    a_pull_dropped_in_its_middle_leaves_nothing_visible(fixture, names).await;
    removing_takes_all_names_and_can_be_repeated(&fixture.empty().await, names).await;
    single_names_are_removed_or_refused(&fixture.empty().await, names).await;
    calls_may_overlap(Arc::new(fixture.empty().await), names).await;
    filesystems_are_named(&fixture.empty().await).await;
    uses_are_reported(fixture, names).await;
}

async fn info_names_what_answers(backend: &impl Backend) {
    let info = backend.info().await.expect("info of a working backend");
    assert!(!info.name.is_empty(), "info has a name: {info:?}");
    assert!(!info.version.is_empty(), "info has a version: {info:?}");
    assert!(!info.endpoint.is_empty(), "info says where it was reached: {info:?}");
}

async fn absence_is_an_answer(backend: &impl Backend, names: &FixtureImages) {
    let absent = ImageSpec::named(&names.image);
    assert_eq!(backend.status(&absent).await, Ok(None), "status of an absent image");
    assert_eq!(backend.inspect(&absent).await, Ok(None), "inspect of an absent image");
    assert_removed(backend, &absent, "removing an absent image").await;
    assert_eq!(listed(backend, &names.image).await, None, "an absent image in the list");
}

async fn a_pulled_image_is_complete(backend: &impl Backend, names: &FixtureImages) {
    let id = pull(backend, &names.image).await.expect("a pull of an image that the registry has");
    let spec = ImageSpec::named(&names.image);
    let by_name = backend.status(&spec).await.expect("status").expect("a pulled image is present by name");
    let by_id = backend.status(&ImageSpec::named(&id)).await.expect("status").expect("and by id");
    assert_eq!(by_name.id, id, "a pull returns the id of the image");
    assert_eq!(by_id.id, id, "one image has one id");
    assert!(by_name.size > 0, "a present image has a size: {by_name:?}");
    assert!(by_name.repo_tags.contains(&names.image), "an image knows its name: {by_name:?}");
    let ImageDetails { image, .. } =
        backend.inspect(&spec).await.expect("inspect").expect("inspect finds what status finds");
    assert_eq!((image.id, image.size), (by_name.id, by_name.size), "inspect agrees with status");
    let in_list = listed(backend, &names.image).await.expect("the list has every present image");
    assert_eq!((in_list.id, in_list.size), (id, by_name.size), "the list agrees with status");
}

async fn pulling_again_changes_nothing(backend: &impl Backend, names: &FixtureImages) {
    let first = pull(backend, &names.image).await.expect("a first pull");
    let again = pull(backend, &names.image).await.expect("a pull of a present image");
    let alias = pull(backend, &names.alias).await.expect("a pull under another name");
    assert_eq!((&again, &alias), (&first, &first), "the same image has the same id");
    let images = backend.list().await.expect("list");
    let count = images.iter().filter(|image| image.id == first).count();
    assert_eq!(count, 1, "the list has each image once: {images:?}");
}

async fn a_failed_pull_leaves_nothing_visible(backend: &impl Backend, names: &FixtureImages) {
    let error = pull(backend, &names.unknown).await.expect_err("a pull of an image that the registry lacks");
    assert!(!error.to_string().is_empty(), "an error says something");
    let unknown = ImageSpec::named(&names.unknown);
    assert_eq!(backend.status(&unknown).await, Ok(None), "a failed pull leaves nothing");
}

async fn a_pull_dropped_early_leaves_nothing_half_visible(backend: &impl Backend, names: &FixtureImages) {
    // The pull is dropped after each small number of turns, so before it has begun, or while it begins.
    for turns in 0..4 {
        let mut pulling = Box::pin(pull(backend, &names.image));
        for _ in 0..turns {
            tokio::select! {
                biased;
                _ = &mut pulling => break,
                () = tokio::task::yield_now() => {}
            }
        }
        drop(pulling);
        let found =
            backend.status(&ImageSpec::named(&names.image)).await.expect("status after a dropped pull");
        assert!(found.is_none_or(|image| complete(&image)), "half an image is visible");
    }
    pull(backend, &names.image).await.expect("a pull after dropped ones");
}

async fn a_pull_dropped_in_its_middle_leaves_nothing_visible(
    fixture: &impl BackendFixture,
    names: &FixtureImages,
) {
    let backend = fixture.empty().await;
    fixture.hold_next_pull().await;
    tokio::select! {
        ended = pull(&backend, &names.untouched) => panic!("a pull that is held has ended: {ended:?}"),
        () = fixture.pull_held() => {}
    }
    let spec = ImageSpec::named(&names.untouched);
    assert_eq!(backend.status(&spec).await, Ok(None), "status after a pull that was dropped in its middle");
    assert_eq!(listed(&backend, &names.untouched).await, None, "and the list");
    fixture.release_pulls().await;
    pull(&backend, &names.untouched).await.expect("a pull after one that was dropped in its middle");
}

async fn removing_takes_all_names_and_can_be_repeated(backend: &impl Backend, names: &FixtureImages) {
    let id = pull(backend, &names.image).await.expect("a pull");
    pull(backend, &names.alias).await.expect("a pull under another name");
    for _ in 0..2 {
        assert_removed(backend, &ImageSpec::named(&id), "removing by id").await;
        for name in [names.image.as_str(), &names.alias, id.as_str()] {
            assert_eq!(
                backend.status(&ImageSpec::named(name)).await,
                Ok(None),
                "{name} after it was removed"
            );
        }
    }
    assert_eq!(listed(backend, &names.image).await, None, "a removed image in the list");
}

async fn single_names_are_removed_or_refused(backend: &impl Backend, names: &FixtureImages) {
    let id = pull(backend, &names.image).await.expect("a pull");
    pull(backend, &names.alias).await.expect("a pull under another name");
    let options = RemoveOptions::of_names(vec![names.alias.clone()]);
    let removed = backend.remove(&ImageSpec::named(&id), &options).await;
    let alias = backend.status(&ImageSpec::named(&names.alias)).await.expect("status");
    if backend.names().is_some() {
        assert_eq!((removed, alias), (Ok(Removed::Names), None), "removing one of two names");
    } else {
        let is_refused =
            matches!(removed, Err(BackendError::Call { kind: CallErrorKind::Unimplemented, .. }));
        assert!(is_refused && alias.is_some(), "a name is not removed with all others: {removed:?}");
    }
    let image = backend.status(&ImageSpec::named(&names.image)).await.expect("status");
    assert_eq!(image.map(|image| image.id), Some(id), "the image is present under its other name");
}

async fn assert_removed(backend: &impl Backend, image: &ImageSpec, what: &str) {
    let removed = backend.remove(image, &RemoveOptions::default()).await;
    assert!(matches!(removed, Ok(Removed::Image { .. })), "{what}: {removed:?}");
}

async fn calls_may_overlap<B: Backend + 'static>(backend: Arc<B>, names: &FixtureImages) {
    let pulls = [&names.image, &names.alias, &names.image].map(|name| {
        let (backend, name) = (Arc::clone(&backend), name.clone());
        tokio::spawn(async move { pull(&*backend, &name).await })
    });
    let images = backend.list().await.expect("a list while pulls run");
    assert!(images.iter().all(complete), "the list never has half an image: {images:?}");
    let mut ids = Vec::new();
    for pull in pulls {
        ids.push(pull.await.expect("a pull does not panic").expect("pulls of one image side by side"));
    }
    ids.dedup();
    assert_eq!(ids.len(), 1, "pulls side by side agree on the id");
}

async fn filesystems_are_named(backend: &impl Backend) {
    let filesystems = backend.filesystems().await.expect("filesystems");
    let first = filesystems.image.first().expect("images live on some filesystem");
    assert!(first.mountpoint.is_absolute(), "a mountpoint is an absolute path: {first:?}");
}

async fn uses_are_reported(fixture: &impl BackendFixture, names: &FixtureImages) {
    let backend = fixture.empty().await;
    let id = pull(&backend, &names.image).await.expect("a pull");
    let runs = fixture.run_container(id.as_str()).await;
    let in_use = backend.container_inventory().await.expect("in_use");
    for container in &in_use.containers {
        assert!(
            !container.id.is_empty() && !container.image_id.is_empty(),
            "a container has ids: {container:?}"
        );
    }
    assert!(in_use.sandboxes.iter().all(|sandbox| !sandbox.id.is_empty()), "a sandbox has an id");
    if runs {
        let has_use = in_use
            .containers
            .iter()
            .filter(|container| container.image_id == id)
            .any(|container| !fixture.mounts_images() || container.mounted_images.contains(&id));
        assert!(has_use, "a container has the image that it runs, and those it mounts: {in_use:?}");
    }
}

async fn pull(backend: &impl Backend, name: &str) -> Result<ImageId, BackendError> {
    backend.pull(&ImageSpec::named(name), None, None, &ProgressReporter::unwatched()).await
}

/// The entry of the list that has this name.
async fn listed(backend: &impl Backend, name: &str) -> Option<Image> {
    let images = backend.list().await.expect("list");
    images.into_iter().find(|image| image.repo_tags.iter().any(|tag| tag == name))
}

fn complete(image: &Image) -> bool {
    !image.id.is_empty() && image.size > 0
}

#[cfg(test)]
mod tests {
    use std::cell::{Ref, RefCell};

    use larder::backend::{Container, ContainerInventory, FilesystemUsage, Filesystems};

    use super::*;
    use crate::fake_backend::{FakeBackend, ScriptedPull, image};

    fn names() -> FixtureImages {
        FixtureImages {
            image: "registry.example/app:v1".into(),
            alias: "registry.example/app:stable".into(),
            untouched: "registry.example/other:v1".into(),
            unknown: "registry.example/nothing:v1".into(),
        }
    }

    /// Makes backends in memory, the newest last.
    struct FakeBackendFixture {
        names: FixtureImages,
        made: RefCell<Vec<FakeBackend>>,
    }

    impl FakeBackendFixture {
        fn last(&self) -> Ref<'_, FakeBackend> {
            Ref::map(self.made.borrow(), |made| made.last().expect("a backend was made"))
        }
    }

    impl BackendFixture for FakeBackendFixture {
        type Backend = FakeBackend;

        fn names(&self) -> &FixtureImages {
            &self.names
        }

        async fn empty(&self) -> FakeBackend {
            let fake = FakeBackend::new();
            fake.offer(&self.names.image, image("sha256:app", 10));
            fake.offer(&self.names.alias, image("sha256:app", 10));
            fake.offer(&self.names.untouched, image("sha256:other", 10));
            let usage = FilesystemUsage { mountpoint: "/images".into(), ..FilesystemUsage::default() };
            fake.set_filesystems(Filesystems { image: vec![usage], container: Vec::new() });
            self.made.borrow_mut().push(fake.clone());
            fake
        }

        async fn hold_next_pull(&self) {
            self.last().on_pull(ScriptedPull::ok("sha256:other", 10).held().0);
        }

        async fn pull_held(&self) {
            let fake = self.last().clone();
            fake.until(|counts| counts.running == 1).await;
        }

        async fn release_pulls(&self) {}

        async fn run_container(&self, image_id: &str) -> bool {
            let container = Container {
                id: "c".into(),
                image_id: image_id.into(),
                mounted_images: vec![image_id.into()],
                ..Container::default()
            };
            self.last().set_in_use(ContainerInventory { containers: vec![container], sandboxes: Vec::new() });
            true
        }
    }

    #[tokio::test]
    async fn the_backend_in_memory_keeps_the_contract() {
        check(&FakeBackendFixture { names: names(), made: RefCell::default() }).await;
    }
}
