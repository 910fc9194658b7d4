//! `larder explain access`: what is found, shown and answered.

use std::os::unix::fs::PermissionsExt as _;

use larder_testkit::fault_registry::{FaultRegistry, FaultRegistryAuth, FaultTrigger, ResponseFault};
use serde_json::{Value, json};

use crate::world::{CliFixture, CliOutput};

fn registry() -> FaultRegistry {
    let registry = FaultRegistry::start();
    registry.put_image("team/app", "1", "application/vnd.oci.image.layer.v1.tar", &[vec![0; 1024]], &[]);
    registry.require(FaultRegistryAuth::Basic { user: "bob".into(), password: "planted-right".into() });
    registry
}

fn secret(name: &str, host: &str, password: &str) -> String {
    let config = json!({"auths": {host: {"username": "bob", "password": password}}}).to_string();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name},
        "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": config},
    });
    format!("{secret}\n---\n")
}

fn pod(name: &str, image: &str, secrets: &[&str]) -> String {
    let secrets: Vec<_> = secrets.iter().map(|name| json!({"name": name})).collect();
    let spec = json!({"containers": [{"name": "c", "image": image}], "imagePullSecrets": secrets});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
    format!("{pod}\n---\n")
}

#[test]
fn each_credential_is_shown_with_source_host_and_result() {
    let (world, registry, mirror) = (CliFixture::new(), registry(), FaultRegistry::start());
    let (image, host) = (registry.image("team/app:1"), registry.address());
    let hosts = format!("server = \"{}\"\n[host.\"{}\"]\n", registry.url(), mirror.url());
    world.file(&format!("certs.d/{host}/hosts.toml"), &hosts);
    let login = json!({"auths": {host.as_str(): {"username": "bob", "password": "planted-right"}}});
    world.file(".docker/config.json", &login.to_string());
    let manifest = pod("web", &image, &["other", "wrong"])
        + &pod("bare", &image, &[])
        + &pod("elsewhere", "registry.example/x:1", &[])
        + &secret("other", "quay.io", "planted-other")
        + &secret("wrong", &host, "planted-wrong");
    world.file("pod.yaml", &manifest);
    let arguments = ["explain", "access", "-vv", "--certs-d", "certs.d", &image, "-f", "pod.yaml"];

    let run = world.larder(&[&arguments[..], &["-o", "json"]].concat()).expect(0);
    assert!(!format!("{run:?}").contains("planted"), "{run:?}");
    let printed = run.json();
    assert_eq!(printed["checks"].as_array().unwrap().len(), 2, "{printed:#}");
    let web = &printed["checks"][0];
    assert_eq!((&web["object"], &web["accepted"]), (&json!("pod/web"), &json!(true)), "{printed:#}");
    assert_eq!(web["otherRegistries"], json!(["secret default/other has: quay.io"]));
    let summary = |subject: &Value| -> Vec<String> {
        let credentials = subject["credentials"].as_array().unwrap().iter();
        let lines = credentials.flat_map(|found| {
            let hosts = found["hosts"].as_array().unwrap().iter();
            hosts.map(|answered| {
                let whose = if answered["host"] == host.as_str() { "registry" } else { "mirror" };
                let place = found["source"].as_str().unwrap_or("nowhere");
                let place = place.rsplit('/').next().unwrap();
                format!("{place} {} {whose} {} {}", found["user"], answered["sent"], answered["status"])
            })
        });
        lines.collect()
    };
    assert_eq!(
        summary(web),
        [
            "wrong \"bob\" mirror false 404",
            "wrong \"bob\" registry true 401",
            "config.json \"bob\" mirror false 404",
            "config.json \"bob\" registry true 200",
        ]
    );
    let shown = mirror.requests().into_iter().filter(|request| request.authorization.is_some());
    assert_eq!(shown.count(), 0, "a mirror is no registry of ours");
    assert!(registry.requests().iter().all(|request| request.method == "HEAD"), "nothing is fetched");

    let run = world.larder(&arguments).expect(0);
    assert!(!format!("{run:?}").contains("planted"), "{run:?}");
    assert!(run.stdout.contains("for pod/web in namespace default: accessible with "), "{run:?}");
    assert!(run.stdout.contains("401 Unauthorized"), "{run:?}");
}

#[test]
fn without_any_credential_the_anonymous_attempt_is_shown() {
    let (world, registry) = (CliFixture::new(), registry());
    let image = registry.image("team/app:1");
    let run = world.larder(&["explain", "access", &image]).expect(1);
    assert!(run.stdout.contains(&format!("{image} for image: not accessible")), "{run:?}");
    assert!(run.stdout.contains("\nanonymous "), "{run:?}");
    registry.require(FaultRegistryAuth::None);
    let run = world.larder(&["explain", "access", &image, "-o", "json"]).expect(0);
    assert_eq!(run.json()["checks"][0]["credentials"][0]["source"], Value::Null);
    assert!(run.stderr.contains("note: tested by larder"), "the runtime's configuration may differ: {run:?}");
}

#[test]
fn credentials_after_the_accepted_one_are_not_tried() {
    let (world, registry) = (CliFixture::new(), registry());
    let (image, host) = (registry.image("team/app:1"), registry.address());
    world.file("secrets.yaml", &(secret("a", &host, "planted-right") + &secret("b", &host, "planted-wrong")));
    let run = world.larder(&["explain", "access", &image, "--secret", "secrets.yaml"]).expect(0);
    assert!(run.stdout.contains("not tried"), "{run:?}");
    assert_eq!(registry.requests().len(), 2);
}

#[test]
fn an_image_that_no_pod_wants_and_a_bad_name_are_bad_input() {
    let world = CliFixture::new();
    world.file("pod.yaml", &pod("web", "registry.example/x:1", &[]));
    let run = world.larder(&["explain", "access", "registry.example/y:1", "-f", "pod.yaml"]).expect(2);
    assert!(run.stderr.contains("no pod in these files uses registry.example/y:1"), "{run:?}");
    world.larder(&["explain", "access", "upper/CASE"]).expect(2);
    world.larder(&["explain"]).expect(2);
}

#[test]
fn a_redirect_is_followed_as_a_pull_does_and_without_the_credential() {
    let (world, registry, elsewhere) = (CliFixture::new(), registry(), FaultRegistry::start());
    let put = elsewhere.put_image("x", "1", "application/vnd.oci.image.layer.v1.tar", &[vec![0; 1024]], &[]);
    let (image, host) = (registry.image("team/app:1"), registry.address());
    world.file("secret.yaml", &secret("a", &host, "planted-right"));
    let there = format!("{}/v2/x/manifests/{}", elsewhere.url(), put.manifest);
    registry.fault(FaultTrigger::path("/manifests/").nth(2..=usize::MAX), ResponseFault::Redirect(there));
    let run = world.larder(&["explain", "access", &image, "--secret", "secret.yaml"]).expect(0);
    assert!(run.stdout.contains("200 OK"), "{run:?}");
    let asked = elsewhere.requests();
    assert!(!asked.is_empty() && asked.iter().all(|request| request.method == "HEAD"), "{asked:?}");
    assert!(asked.iter().all(|request| request.authorization.is_none()), "{asked:?}");
}

#[test]
fn pods_of_one_name_in_two_namespaces_are_two_callers() {
    let (world, registry) = (CliFixture::new(), registry());
    let (image, host) = (registry.image("team/app:1"), registry.address());
    let of = |namespace: &str, password: &str| {
        (pod("web", &image, &["s"]) + &secret("s", &host, password))
            .replace(r#""metadata":{"#, &format!(r#""metadata":{{"namespace":"{namespace}","#))
    };
    world.file("pods.yaml", &(of("n1", "planted-right") + &of("n2", "planted-wrong")));
    let arguments = ["explain", "access", &image, "-f", "pods.yaml"];
    let printed = world.larder(&[&arguments[..], &["-o", "json"]].concat()).expect(1).json();
    let checks = printed["checks"].as_array().unwrap();
    let checks: Vec<_> =
        checks.iter().map(|subject| (subject["namespace"].as_str(), subject["accepted"].as_bool())).collect();
    assert_eq!(checks, [(Some("n1"), Some(true)), (Some("n2"), Some(false))]);
    let run = world.larder(&arguments).expect(1);
    assert!(run.stdout.contains("for pod/web in namespace n2: not accessible"), "{run:?}");
}

#[test]
fn a_host_that_serves_only_digests_is_requested_only_for_digests() {
    let (world, registry, mirror) = (CliFixture::new(), registry(), FaultRegistry::start());
    let layer = "application/vnd.oci.image.layer.v1.tar";
    let put = mirror.put_image("team/app", "1", layer, &[vec![0; 1024]], &[]);
    let host = registry.address();
    let hosts =
        format!("server = \"{}\"\n[host.\"{}\"]\ncapabilities = [\"pull\"]\n", registry.url(), mirror.url());
    world.file(&format!("certs.d/{host}/hosts.toml"), &hosts);
    world.file("secret.yaml", &secret("s", &host, "planted-right"));
    let explain = |image: &str| {
        world
            .larder(&["explain", "access", "--certs-d", "certs.d", image, "--secret", "secret.yaml"])
            .expect(0)
    };
    let run = explain(&registry.image("team/app:1"));
    assert!(run.stdout.contains("accessible with secret default/s"), "{run:?}");
    assert_eq!(mirror.requests().len(), 0);
    let run = explain(&registry.image(&format!("team/app@{}", put.manifest)));
    assert_eq!(mirror.requests().len(), 1);
    let anonymously = format!("accessible anonymously from {}", mirror.address());
    assert!(run.stdout.contains(&anonymously), "the mirror did not ask for the secret: {run:?}");
}

#[test]
fn a_helper_that_fails_is_named_with_its_error_and_not_as_refused() {
    let (world, registry) = (CliFixture::new(), registry());
    let image = registry.image("team/app:1");
    world.file("auth.json", r#"{"credsStore": "test"}"#);
    let program = world.file("bin/docker-credential-test", "#!/bin/sh\necho planted; exit 7\n");
    fs_err::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let larder = |arguments: &[&str]| {
        let path = format!("{}:/usr/bin:/bin", program.parent().unwrap().display());
        CliOutput::of(world.command(arguments).env("PATH", path).output().unwrap())
    };

    let run = larder(&["explain", "access", &image, "--authfile", "auth.json"]).expect(1);
    let says = "no credential from docker-credential-test: docker-credential-test failed (exit status: 7)";
    assert!(run.stdout.contains(says), "{run:?}");
    let by_hand = format!("'echo {} | docker-credential-test get'", registry.address());
    assert!(run.stdout.contains(&by_hand), "it can be copied: {run:?}");
    let printed =
        larder(&["explain", "access", &image, "--authfile", "auth.json", "-o", "json"]).expect(1).json();
    assert_eq!(printed["checks"][0]["failed"][0]["program"], "docker-credential-test", "{printed:#}");
    let run = larder(&["--root", "images", "pull", &image, "--authfile", "auth.json"]).expect(1);
    assert!(
        run.stderr.contains("hint: no credentials sent to the registry: docker-credential-test failed"),
        "{run:?}"
    );
    assert!(!run.stderr.contains("was refused"), "{run:?}");
    assert!(!format!("{run:?}").contains("planted"), "{run:?}");
}
