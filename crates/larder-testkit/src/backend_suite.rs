//! The contract of [`Backend`], checked.
//!
//! [`check`] runs every check on a backend of its own, which the caller makes. It holds for a fake, for a fake
//! runtime behind a real socket, and for a real containerd whose registry has the images that are named: nothing
//! here knows more of a backend than the trait says. Each failed check panics and says which promise is broken.

use std::sync::Arc;

use larder::backend::{Backend, BackendError, Image, ImageDetails, ImageSpec, Progress};

/// What the registry has, as far as the backend can reach it.
#[derive(Debug, Clone)]
pub struct Fixtures {
    /// A name with tag that can be pulled without credentials, and is not present in a fresh backend. Spelled as
    /// the backend spells it in its lists: `registry.example/app:v1`, not a short name.
    pub image: String,
    /// Another name of the very same image.
    pub alias: String,
    /// A name that the registry does not have.
    pub unknown: String,
}

/// Checks the whole contract; `empty` makes a backend without the images of the fixtures.
pub async fn check<B: Backend + 'static>(empty: impl AsyncFn() -> B, fixtures: &Fixtures) {
    info_names_what_answers(&empty().await).await;
    absence_is_an_answer(&empty().await, fixtures).await;
    a_pulled_image_is_complete(&empty().await, fixtures).await;
    pulling_again_changes_nothing(&empty().await, fixtures).await;
    a_failed_pull_leaves_nothing_visible(&empty().await, fixtures).await;
    a_dropped_pull_leaves_nothing_half_visible(&empty().await, fixtures).await;
    removing_takes_all_names_and_can_be_repeated(&empty().await, fixtures).await;
    calls_may_overlap(Arc::new(empty().await), fixtures).await;
    filesystems_are_named(&empty().await).await;
    use_is_told(&empty().await).await;
}

async fn info_names_what_answers(backend: &impl Backend) {
    let info = backend.info().await.expect("info of a working backend");
    assert!(!info.name.is_empty(), "info has a name: {info:?}");
    assert!(!info.version.is_empty(), "info has a version: {info:?}");
    assert!(!info.endpoint.is_empty(), "info says where it was reached: {info:?}");
}

async fn absence_is_an_answer(backend: &impl Backend, fixtures: &Fixtures) {
    let absent = ImageSpec::named(&fixtures.image);
    assert_eq!(backend.status(&absent).await, Ok(None), "status of an absent image");
    assert_eq!(backend.inspect(&absent).await, Ok(None), "inspect of an absent image");
    assert_eq!(backend.remove(&absent).await, Ok(()), "removing an absent image");
    assert_eq!(listed(backend, &fixtures.image).await, None, "an absent image in the list");
}

async fn a_pulled_image_is_complete(backend: &impl Backend, fixtures: &Fixtures) {
    let id = pull(backend, &fixtures.image).await.expect("a pull of an image that the registry has");
    let spec = ImageSpec::named(&fixtures.image);
    let by_name = backend.status(&spec).await.expect("status").expect("a pulled image is present by name");
    let by_id = backend.status(&ImageSpec::named(&id)).await.expect("status").expect("and by id");
    assert_eq!(by_name.id, id, "a pull returns the id of the image");
    assert_eq!(by_id.id, id, "one image has one id");
    assert!(by_name.size > 0, "a present image has a size: {by_name:?}");
    assert!(by_name.repo_tags.contains(&fixtures.image), "an image knows its name: {by_name:?}");
    let ImageDetails { image, .. } =
        backend.inspect(&spec).await.expect("inspect").expect("inspect finds what status finds");
    assert_eq!((image.id, image.size), (by_name.id, by_name.size), "inspect agrees with status");
    let in_list = listed(backend, &fixtures.image).await.expect("the list has every present image");
    assert_eq!((in_list.id, in_list.size), (id, by_name.size), "the list agrees with status");
}

async fn pulling_again_changes_nothing(backend: &impl Backend, fixtures: &Fixtures) {
    let first = pull(backend, &fixtures.image).await.expect("a first pull");
    let again = pull(backend, &fixtures.image).await.expect("a pull of a present image");
    let alias = pull(backend, &fixtures.alias).await.expect("a pull under another name");
    assert_eq!((&again, &alias), (&first, &first), "the same image has the same id");
    let images = backend.list().await.expect("list");
    let count = images.iter().filter(|image| image.id == first).count();
    assert_eq!(count, 1, "the list has each image once: {images:?}");
}

async fn a_failed_pull_leaves_nothing_visible(backend: &impl Backend, fixtures: &Fixtures) {
    let error =
        pull(backend, &fixtures.unknown).await.expect_err("a pull of an image that the registry lacks");
    assert!(!error.to_string().is_empty(), "an error says something");
    let unknown = ImageSpec::named(&fixtures.unknown);
    assert_eq!(backend.status(&unknown).await, Ok(None), "a failed pull leaves nothing");
}

async fn a_dropped_pull_leaves_nothing_half_visible(backend: &impl Backend, fixtures: &Fixtures) {
    // The pull is dropped after each small number of turns, to meet it in as many states as can be had.
    for turns in 0..4 {
        let mut pulling = Box::pin(pull(backend, &fixtures.image));
        for _ in 0..turns {
            tokio::select! {
                biased;
                _ = &mut pulling => break,
                () = tokio::task::yield_now() => {}
            }
        }
        drop(pulling);
        let found =
            backend.status(&ImageSpec::named(&fixtures.image)).await.expect("status after a dropped pull");
        assert!(found.is_none_or(|image| complete(&image)), "half an image is visible");
    }
    pull(backend, &fixtures.image).await.expect("a pull after dropped ones");
}

async fn removing_takes_all_names_and_can_be_repeated(backend: &impl Backend, fixtures: &Fixtures) {
    let id = pull(backend, &fixtures.image).await.expect("a pull");
    pull(backend, &fixtures.alias).await.expect("a pull under another name");
    for _ in 0..2 {
        assert_eq!(backend.remove(&ImageSpec::named(&id)).await, Ok(()), "removing by id");
        for name in [&fixtures.image, &fixtures.alias, &id] {
            assert_eq!(
                backend.status(&ImageSpec::named(name)).await,
                Ok(None),
                "{name} after it was removed"
            );
        }
    }
    assert_eq!(listed(backend, &fixtures.image).await, None, "a removed image in the list");
}

async fn calls_may_overlap<B: Backend + 'static>(backend: Arc<B>, fixtures: &Fixtures) {
    let pulls = [&fixtures.image, &fixtures.alias, &fixtures.image].map(|name| {
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
    let first = filesystems.image.first().expect("images live on some file system");
    assert!(first.mountpoint.is_absolute(), "a mountpoint is an absolute path: {first:?}");
}

async fn use_is_told(backend: &impl Backend) {
    let in_use = backend.in_use().await.expect("in_use");
    for container in &in_use.containers {
        assert!(
            !container.id.is_empty() && !container.image_id.is_empty(),
            "a container has ids: {container:?}"
        );
    }
    assert!(in_use.sandboxes.iter().all(|sandbox| !sandbox.id.is_empty()), "a sandbox has an id");
}

async fn pull(backend: &impl Backend, name: &str) -> Result<String, BackendError> {
    backend.pull(&ImageSpec::named(name), None, None, &Progress::unwatched()).await
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
    use larder::backend::{FilesystemUsage, Filesystems};
    use larder_cri::{CriBackend, CriConfig, proto};

    use super::*;
    use crate::fake_backend::{FakeBackend, image};
    use crate::fake_cri::FakeCri;

    fn fixtures() -> Fixtures {
        Fixtures {
            image: "registry.example/app:v1".into(),
            alias: "registry.example/app:stable".into(),
            unknown: "registry.example/nothing:v1".into(),
        }
    }

    #[tokio::test]
    async fn the_backend_in_memory_keeps_the_contract() {
        let fixtures = fixtures();
        let empty = async || {
            let fake = FakeBackend::new();
            fake.offer(&fixtures.image, image("sha256:app", 10));
            fake.offer(&fixtures.alias, image("sha256:app", 10));
            let usage = FilesystemUsage { mountpoint: "/images".into(), ..FilesystemUsage::default() };
            fake.set_filesystems(Filesystems { image: vec![usage], container: Vec::new() });
            fake
        };
        check(empty, &fixtures).await;
    }

    #[tokio::test]
    async fn the_cri_client_keeps_the_contract() {
        let fixtures = fixtures();
        let runtimes = std::sync::Mutex::new(Vec::new()); // they live as long as the backends
        let empty = async || {
            let fake = FakeCri::start();
            let app = proto::Image { id: "sha256:app".into(), size: 10, ..proto::Image::default() };
            fake.offer(&fixtures.image, app.clone());
            fake.offer(&fixtures.alias, app);
            fake.change(|contents| {
                contents.filesystems.image_filesystems = vec![proto::FilesystemUsage {
                    fs_id: Some(proto::FilesystemIdentifier { mountpoint: "/images".into() }),
                    ..proto::FilesystemUsage::default()
                }];
                contents.containers = vec![proto::Container {
                    id: "c".into(),
                    image_ref: "sha256:x".into(),
                    ..Default::default()
                }];
            });
            let backend = CriBackend::new(fake.endpoint(), CriConfig::default());
            runtimes.lock().unwrap().push(fake);
            backend
        };
        check(empty, &fixtures).await;
    }
}
