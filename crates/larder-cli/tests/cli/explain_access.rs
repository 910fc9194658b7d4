//! `larder explain access`: what is found, shown and answered.

use larder_testkit::fault_registry::{Auth, FaultRegistry};
use serde_json::{Value, json};

use crate::world::World;

fn registry() -> FaultRegistry {
    let registry = FaultRegistry::start();
    registry.put_image("team/app", "1", "application/vnd.oci.image.layer.v1.tar", &[vec![0; 1024]], &[]);
    registry.require(Auth::Basic { user: "bob".into(), password: "planted-right".into() });
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
fn each_credential_is_told_with_its_place_its_host_and_the_answer() {
    let (world, registry, mirror) = (World::new(), registry(), FaultRegistry::start());
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
    let told = run.json();
    assert_eq!(told["askers"].as_array().unwrap().len(), 2, "{told:#}");
    let web = &told["askers"][0];
    assert_eq!((&web["who"], &web["accepted"]), (&json!("pod/web"), &json!(true)), "{told:#}");
    assert_eq!(web["notFitting"], json!(["secret default/other has: quay.io"]));
    let summary = |asker: &Value| -> Vec<String> {
        let credentials = asker["credentials"].as_array().unwrap().iter();
        let lines = credentials.flat_map(|found| {
            let hosts = found["hosts"].as_array().unwrap().iter();
            hosts.map(|answered| {
                let whose = if answered["host"] == host.as_str() { "registry" } else { "mirror" };
                let place = found["foundIn"].as_str().unwrap_or("nowhere");
                let place = place.rsplit('/').next().unwrap();
                format!("{place} {} {whose} {} {}", found["user"], answered["shown"], answered["status"])
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
    assert!(run.stdout.contains("for pod/web: it can be pulled with "), "{run:?}");
    assert!(run.stdout.contains("401 Unauthorized"), "{run:?}");
}

#[test]
fn without_any_credential_it_is_the_anonymous_attempt_that_is_told() {
    let (world, registry) = (World::new(), registry());
    let image = registry.image("team/app:1");
    let run = world.larder(&["explain", "access", &image]).expect(1);
    assert!(run.stdout.contains(&format!("{image} for image: it cannot be pulled")), "{run:?}");
    assert!(run.stdout.contains("nowhere: anonymous"), "{run:?}");
    registry.require(Auth::None);
    let run = world.larder(&["explain", "access", &image, "-o", "json"]).expect(0);
    assert_eq!(run.json()["askers"][0]["credentials"][0]["foundIn"], Value::Null);
    assert!(run.stderr.contains("note: asked by larder"), "a runtime may be configured otherwise: {run:?}");
}

#[test]
fn what_comes_after_the_credential_that_is_taken_is_not_tried() {
    let (world, registry) = (World::new(), registry());
    let (image, host) = (registry.image("team/app:1"), registry.address());
    world.file("secrets.yaml", &(secret("a", &host, "planted-right") + &secret("b", &host, "planted-wrong")));
    let run = world.larder(&["explain", "access", &image, "--secret", "secrets.yaml"]).expect(0);
    assert!(run.stdout.contains("not tried"), "{run:?}");
    assert_eq!(registry.requests().len(), 2);
}

#[test]
fn an_image_that_no_pod_wants_and_a_bad_name_are_bad_input() {
    let world = World::new();
    world.file("pod.yaml", &pod("web", "registry.example/x:1", &[]));
    let run = world.larder(&["explain", "access", "registry.example/y:1", "-f", "pod.yaml"]).expect(2);
    assert!(run.stderr.contains("no pod in these files wants registry.example/y:1"), "{run:?}");
    world.larder(&["explain", "access", "upper/CASE"]).expect(2);
    world.larder(&["explain"]).expect(2);
}
