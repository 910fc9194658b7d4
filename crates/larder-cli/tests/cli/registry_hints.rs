//! Next steps when a registry does not give the image.

use larder_testkit::fault_registry::{FaultRegistry, FaultRegistryAuth};
use serde_json::json;

use crate::world::{CliFixture, CliOutput, larder};

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// The hints of a pull into larder's own store that fails.
fn hints_of(world: &CliFixture, image: &str, code: i32) -> String {
    let mut command = larder(world.home.path());
    let command = command.args(["--root", "store", "pull", image]);
    let run = CliOutput::of(command.output().unwrap()).expect(code);
    run.stderr.lines().filter_map(|line| line.strip_prefix("hint: ")).collect::<Vec<_>>().join("\n")
}

#[test]
fn an_unknown_tag_lists_the_nearest_tags_of_the_repository() {
    let (world, registry) = (CliFixture::new(), FaultRegistry::start());
    for tag in ["1.36", "1.36-musl", "1.37", "latest", "edge", "nightly-2026", "stable-glibc"] {
        registry.put_image("busybox", tag, LAYER, &[vec![0; 1024]], &[]);
    }
    let hints = hints_of(&world, &registry.image("busybox:1.38"), 1);
    let repository = registry.image("busybox");
    assert!(hints.starts_with(&format!("the nearest tags of {repository} are 1.36, 1.37, ")), "{hints}");
    assert_eq!(registry.requests_for("/tags/list?n=1000").len(), 1);

    let none = hints_of(&world, &registry.image("nothing:1"), 1);
    assert!(!none.contains("nearest"), "{none}");
    assert!(none.contains("skopeo list-tags --tls-verify=false docker://127.0.0.1:"), "{none}");
}

#[test]
fn a_denial_names_the_login_and_the_credential_that_was_sent() {
    let (world, registry) = (CliFixture::new(), FaultRegistry::start());
    registry.put_image("team/app", "1", LAYER, &[vec![0; 1024]], &[]);
    registry.require(FaultRegistryAuth::Basic { user: "bob".into(), password: "planted-right".into() });
    let (image, host) = (registry.image("team/app:1"), registry.address());

    let anonymous = hints_of(&world, &image, 1);
    assert_eq!(
        anonymous,
        format!("no credentials for {host}: log in with larder login {host}, or add a pull secret")
    );

    let login = json!({"auths": {host.as_str(): {"username": "bob", "password": "planted-wrong"}}});
    world.file(".docker/config.json", &login.to_string());
    let rejected = hints_of(&world, &image, 1);
    assert!(
        rejected.contains("rejected the credentials of ") && rejected.contains("(user bob)"),
        "{rejected}"
    );
    assert!(rejected.ends_with(&format!("larder login {host} replaces them")), "{rejected}");
    assert!(!rejected.contains("planted"), "{rejected}");
}

#[test]
fn an_unreachable_registry_names_the_configuration_of_its_mirrors() {
    let world = CliFixture::new();
    let hints = hints_of(&world, "127.0.0.1:1/app:1", 1);
    assert!(hints.contains("no mirror is configured: [host.\"https://MIRROR\"] in "), "{hints}");
    assert!(hints.contains("127.0.0.1:1/hosts.toml"), "{hints}");
}

#[test]
fn a_character_that_only_looks_like_a_letter_is_pointed_at() {
    let world = CliFixture::new();
    let hints = hints_of(&world, "registry.example/busybo\u{445}:1", 2);
    assert!(hints.contains("character 24 is 'х' (U+0445)"), "{hints}");
}
