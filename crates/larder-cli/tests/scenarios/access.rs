//! Who may use an image that another pod's credentials brought, what is shown to a registry with a password in which
//! order, and what happens when that password changes: on real backends.

use std::time::Duration;

use futures_util::StreamExt as _;
use larder_api::v1 as api;
use larder_api::v1::control_client::ControlClient;
use larder_api::v1::ensure_update::Update;
use larder_testkit_peers::process::pause;
use larder_testkit_peers::registry::{NEW_PASSWORD, PASSWORD, USER};
use larder_testkit_peers::{ImageBuilder, RegistryAccess, RegistryOptions};
use serde_json::json;
use tonic::codegen::http::Uri;

use crate::served::CriDaemon;
use crate::world::{RuntimeFixture, pod_with_secrets};

/// A world of each backend, with a registry that demands a password and has an image.
fn worlds() -> impl Iterator<Item = (RuntimeFixture, String, String)> {
    let options = RegistryOptions { auth: RegistryAccess::Basic, ..RegistryOptions::default() };
    RuntimeFixture::of_each_backend(options).map(|world| {
        ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
        let (image, host) = (world.registry.image("shop/web:1"), world.registry.address());
        (world, image, host)
    })
}

fn docker_config(registry: &str, user: &str, password: &str) -> String {
    json!({"auths": {registry: {"username": user, "password": password}}}).to_string()
}

fn secret(name: &str, registry: &str, user: &str, password: &str) -> String {
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name},
        "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": docker_config(registry, user, password)},
    });
    format!("{secret}\n---\n")
}

/// A helper `test` that gives this, for every registry.
fn helper(world: &RuntimeFixture, user: &str, password: &str) {
    let answer = json!({"Username": user, "Secret": password});
    world.program("helpers/docker-credential-test", &format!("cat > /dev/null; echo '{answer}'"));
}

/// A provider that gives this for a registry, and the flags that name it.
fn provider(world: &RuntimeFixture, registry: &str, user: &str, password: &str) -> [String; 4] {
    let version = "credentialprovider.kubelet.k8s.io/v1";
    let answer = json!({
        "kind": "CredentialProviderResponse", "apiVersion": version, "cacheKeyType": "Registry",
        "auth": {registry: {"username": user, "password": password}},
    });
    world.program("providers/test", &format!("cat > /dev/null; echo '{answer}'"));
    let config = json!({
        "kind": "CredentialProviderConfig", "apiVersion": "kubelet.config.k8s.io/v1",
        "providers": [{
            "name": "test", "matchImages": [registry], "defaultCacheDuration": "1m", "apiVersion": version,
        }],
    });
    [
        "--image-credential-provider-config".into(),
        world.file("providers.json", &config.to_string()),
        "--image-credential-provider-bin-dir".into(),
        world.path("providers"),
    ]
}

#[test]
fn records_are_removed_with_their_images_by_gc() {
    for (world, image, host) in worlds() {
        let pod = pod_with_secrets("a", "IfNotPresent", &[&image], &["right"]);
        let file = world.file("a.yaml", &(pod + &secret("right", &host, USER, PASSWORD)));
        let state = world.path("state");
        let larder = |arguments: &[&str]| world.larder(&[&["--state", &state], arguments].concat()).expect(0);
        let records = || fs_err::read_dir(format!("{state}/image_manager/pulled")).unwrap().count();
        larder(&["ensure", "-f", &file]);
        larder(&["gc", "--image-gc-high-threshold", "99"]);
        assert_eq!(records(), 1, "its image is there");
        larder(&["rm", &image]);
        // A round spares what was recorded in the second in which it began.
        pause(Duration::from_millis(1100));
        larder(&["gc", "--image-gc-high-threshold", "99"]);
        assert_eq!(records(), 0);
    }
}

#[test]
fn a_present_image_is_for_those_who_could_have_pulled_it() {
    for (world, image, host) in worlds() {
        let pod = |name: &str, secrets: &[&str]| pod_with_secrets(name, "IfNotPresent", &[&image], secrets);
        let secret = |name: &str, password: &str| secret(name, &host, USER, password);
        let right = world.file("a.yaml", &(pod("a", &["right"]) + &secret("right", PASSWORD)));
        let same = world.file("c.yaml", &(pod("c", &["copy"]) + &secret("copy", PASSWORD)));
        let wrong = world.file("d.yaml", &(pod("d", &["right"]) + &secret("right", "guessed")));
        let none = world.file("b.yaml", &pod("b", &[]));
        let ensure = |file: &str, policy: &str| world.larder(&["ensure", "-f", file, "--verify", policy]);

        ensure(&right, "AlwaysVerify").expect(0);
        for policy in ["AlwaysVerify", "NeverVerifyPreloadedImages", "NeverVerifyAllowlistedImages"] {
            let refused = ensure(&none, policy).expect(1);
            assert!(refused.stderr.contains("pull records do not allow this pod"), "{refused:?}");
            assert!(
                !refused.stdout.contains("pull records"),
                "what a pod shows reveals nothing: {refused:?}"
            );
            ensure(&wrong, policy).expect(1);
            let again = ensure(&right, policy).expect(0);
            assert!(again.stdout.contains("can be accessed by the pod"), "{again:?}");
            let copy = ensure(&same, policy).expect(0);
            assert!(copy.stdout.contains("can be accessed by the pod"), "{copy:?}");
        }
        let never = world.larder(&["ensure", "-f", &none, "--verify", "AlwaysVerify", "--policy", "Never"]);
        assert!(never.expect(1).stderr.contains("pull records do not allow this pod"));
        let explained = world.larder(&["explain", &image]).expect(0);
        assert!(explained.stdout.contains("pods with secret default/right"), "{explained:?}");
        ensure(&none, "NeverVerify").expect(0);
        let daemon = CriDaemon::of(&world);
        let refused = world.larder(&["ensure", "-f", &none]).expect(1);
        assert!(refused.stderr.contains("pull records do not allow this pod"), "{refused:?}");
        let explained = world.larder(&["explain", &image, "-o", "json"]).expect(0).json();
        assert!(
            explained["pulledRecords"][0]["secrets"].to_string().contains("default/right"),
            "{explained}"
        );
        daemon.stop().expect(0);
    }
}

#[test]
fn the_registry_sees_secrets_then_files_then_helpers_then_providers() {
    for (world, image, host) in worlds() {
        let config = json!({
            "auths": {host.as_str(): {"username": "of-file", "password": "x"}},
            "credHelpers": {host.as_str(): "test"},
        });
        let authfile = world.file("auth.json", &config.to_string());
        helper(&world, "of-helper", "x");
        let flags = provider(&world, &host, "of-provider", "x");
        let secrets =
            secret("one", &host, "of-secret-one", "x") + &secret("two", &host, "of-secret-two", "x");
        let file = world
            .file("pod.yaml", &(pod_with_secrets("web", "Always", &[&image], &["one", "two"]) + &secrets));
        let mut command = vec!["ensure", "-f", &file, "--authfile", &authfile];
        command.extend(flags.iter().map(String::as_str));
        world.larder(&command).expect(1);
        let order = ["of-secret-one", "of-secret-two", "of-file", "of-helper", "of-provider"];
        assert_eq!(world.registry.refused_users(), order);
        assert_eq!(world.images(), [""; 0]);
    }
}

#[test]
fn a_helper_alone_and_a_provider_alone_get_a_pod_its_image() {
    for (world, image, host) in worlds() {
        let file = world.file("pod.yaml", &pod_with_secrets("web", "Always", &[&image], &[]));
        world.larder(&["ensure", "-f", &file]).expect(1);

        let authfile = world.file("auth.json", &json!({"credsStore": "test"}).to_string());
        helper(&world, USER, PASSWORD);
        world.larder(&["ensure", "-f", &file, "--authfile", &authfile]).expect(0);
        assert_eq!(world.images(), [image.as_str()]);
        world.remove_images();

        let flags = provider(&world, &host, USER, PASSWORD);
        let mut command = vec!["ensure", "-f", &file];
        command.extend(flags.iter().map(String::as_str));
        world.larder(&command).expect(0);
        assert_eq!(world.images(), [image.as_str()]);
    }
}

#[test]
fn a_login_is_checked_by_the_registry_and_then_brings_images() {
    for (world, image, host) in worlds() {
        let file = world.path("docker/config.json");
        let log_in = |password: &str| {
            let password = world.file("password", password);
            world.larder_reading(
                &["login", "-u", USER, "--password-stdin", "--authfile", &file, &host],
                &password,
            )
        };
        log_in("guessed").expect(1);
        log_in(PASSWORD).expect(0);
        let printed = world.larder(&["explain", "access", "--authfile", &file, &image]).expect(0);
        assert!(printed.stdout.contains("200 OK"), "{printed:?}");
        world.larder(&["ensure", "--authfile", &file, &image]).expect(0);
    }
}

/// Asks the daemon for an image for one and the same pod, with this password, as a node agent does that keeps asking.
fn ensure(daemon: &CriDaemon, image: &str, host: &str, password: &str) -> Result<(), String> {
    let request = api::EnsureRequest {
        images: vec![api::WantedImage {
            image: image.into(),
            pull_policy: api::PullPolicy::Always.into(),
            ..api::WantedImage::default()
        }],
        pod: Some(api::PodReference { uid: "web-uid".into(), name: "web".into(), ..Default::default() }),
        secrets: vec![api::PullSecret {
            name: "regcred".into(),
            r#type: "kubernetes.io/dockerconfigjson".into(),
            document: docker_config(host, USER, password).into_bytes(),
            ..api::PullSecret::default()
        }],
        ..api::EnsureRequest::default()
    };
    let wire = daemon.wire();
    daemon.runtime.block_on(async {
        let mut client = ControlClient::with_origin(wire, Uri::from_static("http://localhost"));
        let mut updates = client.ensure(request).await.unwrap().into_inner();
        while let Some(update) = updates.next().await {
            match update.unwrap().update {
                Some(Update::Ensured(_)) => return Ok(()),
                Some(Update::Failed(failed)) => return Err(failed.reason),
                _ => {}
            }
        }
        Err("the daemon said nothing".into())
    })
}

#[test]
fn after_a_change_of_the_password_a_new_secret_works_at_once() {
    for (world, image, host) in worlds() {
        let daemon = CriDaemon::of(&world);
        let ensure = |password: &str| ensure(&daemon, &image, &host, password);
        assert_eq!(ensure(PASSWORD), Ok(()));
        world.registry.change_password().unwrap();
        assert_eq!(ensure(PASSWORD), Err("ErrImagePull".into()));
        assert_eq!(ensure(PASSWORD), Err("ImagePullBackOff".into()));
        assert_eq!(ensure(NEW_PASSWORD), Ok(()), "it does not wait for the back-off of the old one");
        assert_eq!(ensure(PASSWORD), Err("ImagePullBackOff".into()), "and that goes on");
    }
}
