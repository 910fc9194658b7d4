//! Failures: engines that are down, stop, or are other servers; images with strange names; concurrent clients.

use std::sync::atomic::{AtomicBool, Ordering};

use larder::backend::{
    Backend as _, BackendError, CallErrorKind, EndpointFailure, ImageSpec, RemoveOptions, Removed,
};
use larder_docker::{DockerBackend, EngineConfig, EngineHost};
use larder_testkit_peers::{HoldingProxy, ImageBuilder};

use crate::fake::FakeEngine;
use crate::world::{EngineFixture, block_on, pull, status};

fn at(path: &std::path::Path) -> DockerBackend {
    DockerBackend::new(EngineHost::Unix(path.to_owned()), EngineConfig::default()).unwrap()
}

fn unreachable(error: &BackendError) -> (String, String) {
    let BackendError::Unreachable { problem: EndpointFailure::Reported { problem, hint }, .. } = error else {
        panic!("{error:?}")
    };
    (problem.clone(), hint.to_string())
}

#[tokio::test]
async fn a_server_that_is_no_engine_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("d.sock");
    let found = async || unreachable(&at(&path).info().await.unwrap_err());
    let (missing, hint) = found().await;
    assert!(missing == "socket not found" && hint.contains("systemctl start docker"), "{missing} {hint}");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert_eq!(found().await.0, "connection refused: no process listens on this address");
    fs_err::remove_file(&path).unwrap();

    let version = |api: &str| format!(r#"{{"Version":"1.0","ApiVersion":"{api}","MinAPIVersion":"1.12"}}"#);
    let old = FakeEngine::start(move |_, _| (200, version("1.24")));
    let (reported, hint) = unreachable(&old.backend().info().await.unwrap_err());
    assert_eq!(reported, "API version 1.24 is too old; larder requires 1.28 or later");
    assert!(hint.contains("update"), "{hint}");
    for answer in [(404, "<html>no</html>"), (200, "{\"name\":7}"), (200, "hello")] {
        let other = FakeEngine::start(move |_, _| (answer.0, answer.1.to_owned()));
        let error = other.backend().info().await.unwrap_err();
        assert!(matches!(error, BackendError::Unreachable { .. }), "{answer:?}: {error:?}");
    }
}

#[test]
fn an_engine_that_restarts_is_reconnected_and_its_lost_pull_is_reported() {
    let Some(mut world) = EngineFixture::new() else { return };
    let name = world.push("app:1", &ImageBuilder::small(1, 300_000));
    let backend = world.backend();
    let gate = HoldingProxy::for_registry(world.registry.port()).unwrap();
    let held = gate.image("app:1");
    gate.hold_blobs_after(0);
    let puller = backend.clone();
    let pulling = std::thread::spawn(move || block_on(pull(&puller, &held)));
    gate.wait_until_held(1);
    world.engine.stop();
    let error = pulling.join().unwrap().unwrap_err();
    drop(gate);
    assert!(
        matches!(error, BackendError::Call { kind: CallErrorKind::Unavailable | CallErrorKind::Other, .. }),
        "{error:?}"
    );
    let down = block_on(backend.list()).unwrap_err();
    assert!(matches!(down, BackendError::Unreachable { .. }), "{down:?}");
    world.engine.start_again().unwrap();
    block_on(async {
        pull(&backend, &name).await.unwrap();
        assert_eq!(backend.list().await.unwrap().len(), 1);
    });
}

#[test]
fn images_with_no_name_and_with_hundreds_are_listed_once_and_removed_whole() {
    let Some(world) = EngineFixture::new() else { return };
    let name = world.push("app:1", &ImageBuilder::small(1, 10_000));
    let backend = world.backend();
    let id = block_on(pull(&backend, &name)).unwrap();
    for number in 0..300 {
        world.engine.tag(id.as_str(), &format!("shop/web-{}", number % 3), &number.to_string()).unwrap();
    }
    let container = world.engine.create_container(&name, "builder").unwrap();
    world.engine.commit(&container, "built", "1").unwrap();
    world.engine.remove_container(&container).unwrap();
    let nameless = block_on(status(&backend, "built:1")).unwrap().id;
    // Its name moves to the other image.
    world.engine.tag(id.as_str(), "built", "1").unwrap();
    block_on(async {
        let listed = backend.list().await.unwrap();
        let many = listed.iter().find(|image| image.id == id).unwrap();
        assert_eq!(many.repo_tags.len(), 302);
        assert_eq!(listed.iter().filter(|image| image.id == id).count(), 1);
        let dangling = listed.iter().find(|image| image.id == nameless).unwrap();
        assert!(dangling.repo_tags.is_empty() && dangling.repo_digests.is_empty(), "{dangling:?}");
        for id in [&nameless, &id] {
            backend.remove(&ImageSpec::named(id), &RemoveOptions::default()).await.unwrap();
            assert_eq!(status(&backend, id.as_str()).await, None);
        }
        assert_eq!(backend.list().await.unwrap(), []);
    });
    assert_eq!(world.engine.image_names().unwrap(), [""; 0]);
}

#[test]
fn an_image_of_a_container_keeps_all_its_names_whatever_the_container_does() {
    let Some(world) = EngineFixture::new() else { return };
    let name = world.push("app:1", &ImageBuilder::small(1, 10_000));
    let backend = world.backend();
    let id = block_on(pull(&backend, &name)).unwrap();
    for tag in ["a", "b"] {
        world.engine.tag(id.as_str(), "other", tag).unwrap();
    }
    let names = world.engine.image_names().unwrap();
    let container = world.engine.create_container(&name, "user").unwrap();
    for image in [id.as_str(), &name] {
        let refused =
            block_on(backend.remove(&ImageSpec::named(image), &RemoveOptions::default())).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("is in use by container user (created)"), "{text}");
        assert!(refused.hint().unwrap().to_string().contains("docker rm"));
    }
    assert_eq!(world.engine.image_names().unwrap(), names);
    world.engine.remove_container(&container).unwrap();
    block_on(backend.remove(&ImageSpec::named(&id), &RemoveOptions::default())).unwrap();
    assert_eq!(world.engine.image_names().unwrap(), [""; 0]);
}

#[test]
fn a_base_image_is_removed_with_the_image_built_on_it() {
    let Some(world) = EngineFixture::new() else { return };
    let base = world.push("base:1", &ImageBuilder::small(1, 10_000));
    let backend = world.backend();
    let id = block_on(pull(&backend, &base)).unwrap();
    let container = world.engine.create_container(&base, "builder").unwrap();
    world.engine.commit(&container, "child", "1").unwrap();
    world.engine.remove_container(&container).unwrap();
    block_on(async {
        backend.remove(&ImageSpec::named(&id), &RemoveOptions::default()).await.unwrap();
        let listed = backend.list().await.unwrap();
        assert!(!listed.iter().any(|image| image.id == id), "it is hidden behind its child: {listed:?}");
        backend.remove(&ImageSpec::named("child:1"), &RemoveOptions::default()).await.unwrap();
        assert_eq!(status(&backend, id.as_str()).await, None);
        assert_eq!(backend.list().await.unwrap(), []);
    });
}

/// An engine with an image of two names, which refuses to remove it; `b_is` says whose the second name is, when it was
/// taken off and before.
fn with_a_concurrent_container(b_is: fn(bool) -> Option<&'static str>) -> FakeEngine {
    let (taken, looked) = (AtomicBool::new(false), AtomicBool::new(false));
    FakeEngine::start(move |method, path| match (method, path) {
        ("GET", "/version") => (200, r#"{"Version":"1","ApiVersion":"1.41","MinAPIVersion":"1.12"}"#.into()),
        ("GET", "/v1.41/containers/json?all=1") => (200, "[]".into()),
        ("GET", "/v1.41/images/b:2/json") => match b_is(taken.load(Ordering::Relaxed)) {
            Some(id) => (200, format!(r#"{{"Id":"{id}"}}"#)),
            None => (404, r#"{"message":"No such image: b:2"}"#.into()),
        },
        ("DELETE", "/v1.41/images/b:2") => {
            taken.store(true, Ordering::Relaxed);
            (200, r#"[{"Untagged":"b:2"}]"#.into())
        }
        ("GET", _) if looked.swap(true, Ordering::Relaxed) => {
            (200, r#"{"Id":"sha256:a","RepoTags":["a:1"]}"#.into())
        }
        ("GET", _) => (200, r#"{"Id":"sha256:a","RepoTags":["a:1","b:2"]}"#.into()),
        ("DELETE", "/v1.41/images/sha256:a") => {
            (409, r#"{"message":"conflict: container 1 is using its referenced image a"}"#.into())
        }
        _ => (200, "[]".into()),
    })
}

async fn refused(engine: &FakeEngine) -> Vec<String> {
    let refused =
        engine.backend().remove(&ImageSpec::named("sha256:a"), &RemoveOptions::default()).await.unwrap_err();
    assert!(refused.to_string().starts_with("conflict: container 1"), "{refused}");
    let asked = engine.asked();
    assert!(!asked.iter().any(|call| call.contains("force")), "nothing is forced: {asked:?}");
    asked
}

const TAKEN: &str = "DELETE /v1.41/images/b:2";
const GIVEN_BACK: &str = "POST /v1.41/images/sha256:a/tag?repo=b&tag=2";

#[tokio::test]
async fn removed_names_are_restored_if_a_container_is_created() {
    let engine = with_a_concurrent_container(|taken| (!taken).then_some("sha256:a"));
    let asked = refused(&engine).await;
    assert!(asked.iter().any(|call| call == TAKEN), "{asked:?}");
    assert!(asked.iter().any(|call| call == GIVEN_BACK), "{asked:?}");
}

#[tokio::test]
async fn a_name_moved_to_another_image_is_neither_removed_nor_restored() {
    let engine = with_a_concurrent_container(|_| Some("sha256:b"));
    let asked = refused(&engine).await;
    assert!(!asked.iter().any(|call| call == TAKEN || call == GIVEN_BACK), "{asked:?}");
    let engine = with_a_concurrent_container(|taken| Some(if taken { "sha256:b" } else { "sha256:a" }));
    let asked = refused(&engine).await;
    assert!(asked.iter().any(|call| call == TAKEN), "{asked:?}");
    assert!(!asked.iter().any(|call| call == GIVEN_BACK), "{asked:?}");
}

#[test]
fn a_name_that_a_build_takes_for_its_image_keeps_that_image() {
    let Some(world) = EngineFixture::new() else { return };
    let old = world.push("web:1", &ImageBuilder::small(1, 10_000));
    let new = world.push("web:2", &ImageBuilder::small(2, 10_000));
    let backend = world.backend();
    let (old_id, new_id) = (block_on(pull(&backend, &old)).unwrap(), block_on(pull(&backend, &new)).unwrap());
    world.engine.tag(old_id.as_str(), "web", "2").unwrap();
    // What a removal of the old image read before the build ended.
    world.engine.tag(new_id.as_str(), "web", "2").unwrap();
    world.engine.remove_image(&new).unwrap();
    block_on(async {
        backend.remove(&ImageSpec::named(&old_id), &RemoveOptions::default()).await.unwrap();
        assert_eq!(status(&backend, old_id.as_str()).await, None);
        assert_eq!(status(&backend, "web:2").await.unwrap().id, new_id);
    });
}

#[tokio::test]
async fn an_error_in_a_pull_that_began_well_fails_it_and_names_the_image() {
    let began = "{\"status\":\"Pulling from shop/web\",\"id\":\"1\"}\r\n";
    let ended =
        "{\"errorDetail\":{\"message\":\"no space left on device\"},\"error\":\"no space left on device\"}";
    let engine = FakeEngine::start(move |_, path| match path {
        "/version" => (200, r#"{"Version":"1","ApiVersion":"1.41"}"#.into()),
        path if path.starts_with("/v1.41/images/create?fromImage=h%3A1%2Fshop%2Fweb&tag=latest") => {
            (200, format!("{began}{ended}"))
        }
        _ => (200, r#"{"Id":"sha256:a"}"#.into()),
    });
    let error = pull(&engine.backend(), "h:1/shop/web").await.unwrap_err();
    assert_eq!(error.to_string(), "h:1/shop/web: no space left on device");
    assert!(matches!(error, BackendError::Call { kind: CallErrorKind::InsufficientSpace { .. }, .. }));
}

#[test]
fn an_image_removed_by_another_process_is_no_error() {
    let Some(world) = EngineFixture::new() else { return };
    let name = world.push("app:1", &ImageBuilder::small(1, 10_000));
    let backend = world.backend();
    let id = block_on(pull(&backend, &name)).unwrap();
    world.engine.remove_image(id.as_str()).unwrap();
    block_on(async {
        assert_eq!(
            backend.remove(&ImageSpec::named(&id), &RemoveOptions::default()).await,
            Ok(Removed::Image { freed: None })
        );
        assert_eq!(
            backend.remove(&ImageSpec::named(&name), &RemoveOptions::default()).await,
            Ok(Removed::Image { freed: None })
        );
    });
}
