//! Registries that ask for a password, or have a certificate of their own authority.

use larder_testkit_peers::registry::{PASSWORD, USER};
use larder_testkit_peers::tls::certificates;
use larder_testkit_peers::{ImageBuilder, RegistryAccess, RegistryOptions, TlsMode};
use serde_json::json;

use crate::world::{LarderOutput, RuntimeFixture, pod_with_secrets};

/// A Secret manifest of type `kubernetes.io/dockerconfigjson`.
fn secret(name: &str, registry: &str, password: &str) -> String {
    let config = docker_config(registry, password);
    json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name},
        "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": config},
    })
    .to_string()
        + "\n---\n"
}

fn docker_config(registry: &str, password: &str) -> String {
    json!({"auths": {registry: {"username": USER, "password": password}}}).to_string()
}

/// A pod that names these pull secrets.
fn pod(image: &str, secrets: &[&str]) -> String {
    pod_with_secrets("web", "Always", &[image], secrets)
}

#[track_caller]
fn assert_no_password(run: &LarderOutput) {
    for secret in [PASSWORD, "not-the-password"] {
        assert!(!format!("{}{}", run.stdout, run.stderr).contains(secret), "a password is printed: {run:?}");
    }
}

#[test]
fn a_registry_with_a_password_serves_clients_that_have_it() {
    let options = RegistryOptions { auth: RegistryAccess::Basic, ..RegistryOptions::default() };
    for world in RuntimeFixture::of_each_backend(options) {
        ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
        let (image, host) = (world.registry.image("shop/web:1"), world.registry.address());
        let wrong = secret("wrong", &host, "not-the-password");
        let right = secret("right", &host, PASSWORD);

        // Each: a manifest, and whether the image can be had with it.
        let manifests = [
            ("no secret", pod(&image, &[]), false),
            ("a secret that no pod names", pod(&image, &[]) + &right, false),
            ("the wrong password", pod(&image, &["wrong"]) + &wrong, false),
            (
                "a secret for another registry",
                pod(&image, &["other"]) + &secret("other", "127.0.0.1:1", PASSWORD),
                false,
            ),
            (
                "the wrong password, then the right one",
                pod(&image, &["wrong", "right"]) + &wrong + &right,
                true,
            ),
            ("the right password", pod(&image, &["right"]) + &right, true),
        ];
        let refusals = ["401", "authorization failed", "no basic auth credentials", "unauthorized"];
        for (case, manifest, works) in manifests {
            let file = world.file("pod.yaml", &manifest);
            let run = world.larder(&["ensure", "-v", "-v", "-f", &file]);
            assert_eq!(run.code, i32::from(!works), "{case}: {run:?}");
            assert_eq!(!world.images().is_empty(), works, "{case}");
            assert!(works || refusals.iter().any(|words| run.stdout.contains(words)), "{case}: {run:?}");
            assert_no_password(&run);
            world.remove_images();
        }

        let secret_file = world.file("secret.yaml", &right);
        let authfile = world.file("auth.json", &docker_config(&host, PASSWORD));
        for from in [["--secret", &secret_file], ["--authfile", &authfile]] {
            let run = world.larder(&["ensure", from[0], from[1], &image]).expect(0);
            assert_no_password(&run);
            world.remove_images();
        }
    }
}

#[test]
fn a_registry_with_a_private_authority_serves_once_the_runtime_trusts_it() {
    let options = RegistryOptions {
        auth: RegistryAccess::Basic,
        tls: TlsMode::PrivateCa,
        ..RegistryOptions::default()
    };
    for world in RuntimeFixture::of_each_backend(options) {
        ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
        let (image, host) = (world.registry.image("shop/web:1"), world.registry.address());
        let manifest = pod(&image, &["right"]) + &secret("right", &host, PASSWORD);
        let file = world.file("pod.yaml", &manifest);

        if world.has_docker() {
            continue; // it trusts any user who answers on loopback
        }
        let dir = tempfile::tempdir().unwrap();
        let another = certificates(dir.path()).unwrap();
        world.knows_at(&host, "https", Some(&another.ca));
        let run = world.larder(&["ensure", "-f", &file]).expect(1);
        assert!(
            ["x509", "not trusted", "another key"].iter().any(|said| run.stdout.contains(said)),
            "{run:?}"
        );
        assert_eq!(world.images(), [""; 0]);

        world.knows(&world.registry);
        let run = world.larder(&["ensure", "-f", &file]).expect(0);
        assert_eq!(world.images(), [image]);
        assert_no_password(&run);
    }
}
