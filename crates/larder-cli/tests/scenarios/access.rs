//! Who may use an image that another pod's credentials brought, on real backends and a registry with a password.

use larder_testkit::peers::registry::{PASSWORD, USER};
use larder_testkit::peers::{Auth, Image, RegistryOptions};
use serde_json::json;

use crate::world::{World, pod_with_secrets};

fn secret(name: &str, registry: &str, password: &str) -> String {
    let config = json!({"auths": {registry: {"username": USER, "password": password}}}).to_string();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name},
        "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": config},
    });
    format!("{secret}\n---\n")
}

#[test]
fn a_present_image_is_for_those_who_could_have_pulled_it() {
    let options = RegistryOptions { auth: Auth::Basic, ..RegistryOptions::default() };
    for world in World::of_each_backend(options) {
        Image::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
        let (image, host) = (world.registry.image("shop/web:1"), world.registry.address());
        let pod = |name: &str, secrets: &[&str]| pod_with_secrets(name, "IfNotPresent", &[&image], secrets);
        let right = world.file("a.yaml", &(pod("a", &["right"]) + &secret("right", &host, PASSWORD)));
        let same = world.file("c.yaml", &(pod("c", &["copy"]) + &secret("copy", &host, PASSWORD)));
        let wrong = world.file("d.yaml", &(pod("d", &["right"]) + &secret("right", &host, "guessed")));
        let none = world.file("b.yaml", &pod("b", &[]));
        let ensure = |file: &str, policy: &str| world.larder(&["ensure", "-f", file, "--verify", policy]);

        ensure(&right, "AlwaysVerify").expect(0);
        for policy in ["AlwaysVerify", "NeverVerifyPreloadedImages", "NeverVerifyAllowlistedImages"] {
            ensure(&none, policy).expect(1);
            ensure(&wrong, policy).expect(1);
            let again = ensure(&right, policy).expect(0);
            assert!(again.stdout.contains("can be accessed by the pod"), "{again:?}");
            let copy = ensure(&same, policy).expect(0);
            assert!(copy.stdout.contains("can be accessed by the pod"), "{copy:?}");
        }
        ensure(&none, "NeverVerify").expect(0);
    }
}
