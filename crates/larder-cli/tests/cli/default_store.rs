//! What happens when no backend is named.

use std::process::Stdio;

use crate::world::{Run, World, unprivileged};

#[test]
fn without_a_backend_images_are_in_the_users_own_store_whatever_crictl_talks_to() {
    let world = World::offering(&["busybox:1.36"]);
    let data = world.home.path().join("data");
    let run = |arguments: &[&str]| {
        let mut command = unprivileged(world.home.path());
        command.env("XDG_DATA_HOME", &data).env("LARDER_BACKEND", "");
        command.env("CONTAINER_RUNTIME_ENDPOINT", world.cri.endpoint().to_string());
        Run::of(command.args(arguments).stdin(Stdio::null()).output().unwrap())
    };
    let info = run(&["runtime", "-o", "json"]).expect(0).json();
    assert_eq!(info["name"], "larder");
    assert_eq!(info["endpoint"], data.join("larder").to_string_lossy().into_owned());
    assert_eq!(run(&["images", "-q"]).expect(0).stdout, "");
}
