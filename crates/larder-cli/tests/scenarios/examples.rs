//! The project's example manifests, from nothing to everything present, and with the registry down.

use std::path::Path;

use larder_testkit_peers::examples::{copied_for, images_named, push_all};
use larder_testkit_peers::{RegistryAccess, RegistryOptions, RegistryProcess};

use crate::world::RuntimeFixture;

#[test]
fn the_examples_become_present_once_and_survive_a_registry_that_is_down() {
    for mut world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        let dir = tempfile::tempdir().unwrap();
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
        let mut private = RegistryProcess::start(RegistryOptions {
            auth: RegistryAccess::Basic,
            ..RegistryOptions::default()
        })
        .unwrap();
        world.knows(&private);
        let examples = copied_for(&examples, world.registry.port(), private.port(), dir.path()).unwrap();
        push_all(&examples, &world.registry).unwrap();
        push_all(&examples, &private).unwrap();
        let mut named = images_named(&examples, &world.registry.address()).unwrap();
        named.extend(images_named(&examples, &private.address()).unwrap());
        assert!(named.len() >= 3, "the examples name images: {named:?}");
        let examples = examples.to_string_lossy();

        world.registry.forget_requests();
        let first = world.larder(&["ensure", "-f", &examples]).expect(0);
        assert!(first.lines_with(&["Successfully pulled image"]) >= named.len(), "{first:?}");
        assert_eq!(world.images().len(), named.len());
        let refused = world.larder(&["pull", &private.image("private/ledger:3.1")]).expect(1);
        assert!(refused.stderr.contains("hint: no credentials for "), "only with its secret: {refused:?}");

        world.registry.forget_requests();
        let second = world.larder(&["ensure", "-f", &examples]).expect(0);
        assert_eq!(second.lines_with(&["Pulling image"]), 0, "{second:?}");
        assert!(second.lines_with(&["already present on machine"]) >= named.len(), "{second:?}");
        assert_eq!(world.registry.requests(), []);

        world.registry.stop();
        private.stop();
        world.larder(&["ensure", "--policy", "IfNotPresent", "-f", &examples]).expect(0);
        let run =
            world.larder(&["ensure", "--policy", "Always", "--retry-for", "8s", "-f", &examples]).expect(1);
        assert!(run.lines_with(&["Failed to pull image", "onnection refused"]) >= named.len(), "{run:?}");
        assert!(run.lines_with(&["Back-off pulling image"]) >= named.len(), "{run:?}");
        assert!(run.lines_with(&["ImagePullBackOff"]) >= named.len(), "{run:?}");
    }
}
