//! Images that larder fetches with credentials before kubelet asks: kubelet does not see them until its own pull
//! succeeds.

use std::time::Duration;

use larder::credentials::{Credential, Secret};
use larder_testkit_peers::registry::{AccessLogLine, PASSWORD, USER};
use larder_testkit_peers::{ImageBuilder, RegistryAccess, RegistryOptions, TlsMode};
use serde_json::json;

use crate::served::CriDaemon;
use crate::world::{LarderProcess, RuntimeFixture};

const PRIVATE: RegistryOptions =
    RegistryOptions { auth: RegistryAccess::Basic, tls: TlsMode::None, port: None };

/// A daemon with these settings.
fn serve(world: &RuntimeFixture, settings: &str) -> CriDaemon {
    let head = "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n";
    let settings = world.file("config.yaml", &format!("{head}{settings}"));
    let socket = world.path("larder.sock");
    let mut command = world.command(&["serve", "--socket", &socket]);
    command.env("LARDER_CONFIG", settings);
    CriDaemon::at(socket.into(), LarderProcess::start(command))
}

/// The node's own credentials for the registry.
pub(crate) fn log_in(world: &RuntimeFixture) {
    let config = json!({"auths": {world.registry.address(): {"username": USER, "password": PASSWORD}}});
    fs_err::create_dir_all(world.path(".docker")).unwrap();
    world.file(".docker/config.json", &config.to_string());
}

fn login(password: &str) -> Credential {
    Credential { username: USER.into(), password: Secret::new(password), ..Credential::default() }
}

#[test]
fn a_prefetched_private_image_is_absent_for_kubelet_until_it_has_pulled_it_itself() {
    for world in RuntimeFixture::of_each_backend(PRIVATE) {
        let layout = ImageBuilder::small(1, 500_000).push(&world.registry, "shop/web:1").unwrap();
        log_in(&world);
        let name = world.registry.image("shop/web:1");
        let cri = "cri: {kubelet: larder}\n";
        let prefetch = format!("{cri}prefetch: [{{image: '{name}', jitter: 0s}}]\n");
        let daemon = serve(&world, &prefetch);
        daemon.wait_for_log("Successfully pulled", 1);
        let is_hidden = |daemon: &CriDaemon| {
            let found = [&name, &layout.image_id].map(|name| daemon.status(name));
            assert_eq!((found, daemon.list()), ([None, None], Vec::new()));
            let shown = world.larder(&["--daemon", &daemon.socket.to_string_lossy(), "images", "-o", "json"]);
            assert!(shown.expect(0).stdout.contains("\"hidden\": true"));
        };
        is_hidden(&daemon);
        daemon.running.kill_after(Duration::ZERO);

        let daemon = serve(&world, cri);
        is_hidden(&daemon);
        for refused in [None, Some(login("not-the-password"))] {
            daemon.pull_as(&name, refused.as_ref()).expect_err("only with the password");
            is_hidden(&daemon);
        }
        world.registry.forget_requests();
        let id = daemon.pull_as(&name, Some(&login(PASSWORD))).expect("with the password");
        assert_eq!(id, layout.image_id.as_str());
        let requests = world.registry.requests();
        assert!(
            requests.iter().any(|r| r.path.contains("/manifests/") && r.status == 200),
            "checked: {requests:?}"
        );
        assert!(!requests.iter().any(AccessLogLine::is_blob_fetch), "{requests:?}");
        assert_eq!(daemon.status(&name).map(|image| image.id), Some(id));
        daemon.running.kill_after(Duration::ZERO);

        let daemon = serve(&world, &prefetch);
        daemon.wait_for_log("Successfully pulled", 1);
        assert_eq!(daemon.list().len(), 1, "a later prefetch does not hide what kubelet has pulled");
    }
}

#[test]
fn images_are_prefetched_without_credentials_where_kubelet_asks_the_runtime_itself() {
    for world in RuntimeFixture::of_each_runtime(PRIVATE) {
        ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
        log_in(&world);
        let name = world.registry.image("shop/web:1");
        let daemon = serve(&world, &format!("prefetch: [{{image: '{name}', jitter: 0s}}]\n"));
        daemon.wait_for_log("Failed to pull image", 1);
        assert_eq!(daemon.list(), Vec::new());
        daemon.pull_as(&name, Some(&login(PASSWORD))).expect("kubelet's own pull");
    }
}
