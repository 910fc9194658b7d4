//! Calls of kubelet and crictl to an image service, made to `larder serve`: on its own store, and in front of a real
//! containerd.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::{Backend as _, ImageSpec, ProgressReporter, RemoveOptions, Removed};
use larder::credentials::{Credential, Secret};
use larder_cri::proto;
use larder_testkit_peers::process::{poll, wait_until};
use larder_testkit_peers::registry::{PASSWORD, USER};
use larder_testkit_peers::wire::with_deadline;
use larder_testkit_peers::{self as peers, RegistryAccess, RegistryOptions};
use tonic::Code;

use crate::served::{CriDaemon, client_of};
use crate::world::RuntimeFixture;

fn spec(image: &str) -> proto::ImageSpec {
    proto::ImageSpec { image: image.into(), ..proto::ImageSpec::default() }
}

fn worlds() -> impl Iterator<Item = RuntimeFixture> {
    RuntimeFixture::of_each_backend(RegistryOptions::default())
}

#[test]
fn an_image_is_pulled_by_tag_by_digest_and_without_a_tag_and_is_the_same_by_each_name() {
    for world in worlds() {
        let layout = peers::ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:v1").unwrap();
        peers::ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:latest").unwrap();
        let daemon = CriDaemon::of(&world);
        let tagged = world.registry.image("shop/web:v1");
        let bare = world.registry.image("shop/web");
        let digest = format!("{bare}@{}", layout.manifest_digest);
        for name in [&tagged, &digest, &bare] {
            assert_eq!(daemon.pull(name), Ok(layout.image_id.as_str().into()), "{name}");
        }
        let by_tag = daemon.status(&tagged).expect("it is present");
        assert_eq!(by_tag.id, layout.image_id, "what a pull answers is the id");
        assert!(by_tag.size > 0);
        let mut tags = by_tag.repo_tags.clone();
        tags.sort();
        assert_eq!(tags, [format!("{bare}:latest"), tagged.clone()]);
        assert_eq!(by_tag.repo_digests, [digest.as_str()]);
        let digits = layout.image_id.trim_start_matches("sha256:");
        for name in [&layout.image_id, &digest, &bare, digits, &digits[..12]] {
            assert_eq!(daemon.status(name).as_ref(), Some(&by_tag), "{name}");
        }
        assert_eq!(daemon.status(&world.registry.image("shop/none:v1")), None);

        let filter = Some(proto::ImageFilter { image: Some(spec(&digest)) });
        let mut images = daemon.wire().images();
        let found = daemon.runtime.block_on(images.list_images(proto::ListImagesRequest { filter })).unwrap();
        assert_eq!(found.into_inner().images.len(), 1);
        let verbose = proto::ImageStatusRequest { image: Some(spec(&tagged)), verbose: true };
        let printed = daemon.runtime.block_on(images.image_status(verbose)).unwrap().into_inner();
        let info: serde_json::Value = serde_json::from_str(&printed.info["info"]).unwrap();
        assert_eq!(info["imageSpec"]["config"]["Cmd"][0], "/bin/true", "{info}");
    }
}

#[test]
fn all_names_of_an_image_are_removed_together_by_five_concurrent_calls() {
    for world in worlds() {
        let layout = peers::ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:a").unwrap();
        let names: Vec<_> =
            ["a", "b", "c"].map(|tag| world.registry.image(&format!("shop/web:{tag}"))).into();
        for tag in ["b", "c"] {
            peers::ImageBuilder::small(1, 50_000).push(&world.registry, &format!("shop/web:{tag}")).unwrap();
        }
        peers::ImageBuilder::small(2, 50_000).push(&world.registry, "shop/other:1").unwrap();
        let other = world.registry.image("shop/other:1");
        let daemon = CriDaemon::of(&world);
        daemon.pull(&other).unwrap();
        let pull_all = || {
            for name in &names {
                assert_eq!(daemon.pull(name), Ok(layout.image_id.as_str().into()));
            }
        };

        pull_all();
        assert_eq!(daemon.status(&layout.image_id).unwrap().repo_tags.len(), 3);
        daemon.remove(&names[1]);
        assert!(names.iter().all(|name| daemon.status(name).is_none()));

        pull_all();
        let by = [&names[0], &names[1], &names[2], &layout.image_id, &names[0]].map(ImageSpec::named);
        let options = RemoveOptions::default();
        let removals = by.iter().map(|spec| daemon.client.remove(spec, &options));
        let removed = daemon.runtime.block_on(futures_util::future::join_all(removals));
        assert_eq!(removed, [const { Ok(Removed::Image { freed: None }) }; 5]);
        daemon.remove(&names[0]);
        let left: Vec<_> = daemon.list().into_iter().flat_map(|image| image.repo_tags).collect();
        assert_eq!(left, [other.as_str()], "and nothing else went");
    }
}

#[test]
fn a_deadline_of_a_millisecond_is_exceeded_and_leaves_nothing() {
    for world in worlds() {
        peers::ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:v1").unwrap();
        let daemon = CriDaemon::of(&world);
        let name = world.registry.image("shop/web:v1");
        let request =
            proto::PullImageRequest { image: Some(spec(&name)), ..proto::PullImageRequest::default() };
        let mut images = daemon.wire().images();
        let late =
            daemon.runtime.block_on(images.pull_image(with_deadline(request.clone(), "1m"))).unwrap_err();
        assert_eq!((late.code(), late.message()), (Code::DeadlineExceeded, "context deadline exceeded"));
        assert_eq!(daemon.status(&name), None);
        let in_time = daemon.runtime.block_on(images.pull_image(with_deadline(request, "60S"))).unwrap();
        assert_eq!(Some(in_time.into_inner().image_ref.into()), daemon.status(&name).map(|image| image.id));
    }
}

#[test]
fn a_caller_that_vanishes_cancels_its_pull_unless_others_wait_for_it() {
    for world in worlds() {
        let gate = world.gate();
        peers::ImageBuilder::small(1, 500_000).push(&world.registry, "shop/web:v1").unwrap();
        let daemon = CriDaemon::of(&world);
        let name = gate.image("shop/web:v1");
        gate.hold_blobs_after(1000);
        let start = || {
            let client = client_of(daemon.socket.clone());
            let spec = ImageSpec::named(&name);
            daemon
                .runtime
                .spawn(async move { client.pull(&spec, None, None, &ProgressReporter::unwatched()).await })
        };
        let (leaving, staying) = (start(), start());
        gate.wait_until_held(1);
        leaving.abort();
        gate.open();
        let id = daemon.runtime.block_on(staying).unwrap().expect("one caller is left");
        assert_eq!(daemon.status(&name).map(|image| image.id), Some(id));

        daemon.remove(&name);
        gate.hold_blobs_after(1000);
        let alone = start();
        gate.wait_until_held(1);
        let pulling =
            |count: u8| daemon.metrics().contains(&format!("larder_pulls{{phase=\"pulling\"}} {count}"));
        assert!(pulling(1));
        alone.abort();
        wait_until("nothing is pulled any more", || pulling(0));
        gate.open();
        assert_eq!(daemon.status(&name), None);
    }
}

#[test]
fn five_callers_that_want_one_image_cause_one_pull() {
    for world in worlds() {
        let gate = Arc::new(world.gate());
        peers::ImageBuilder::small(1, 200_000).push(&world.registry, "shop/web:v1").unwrap();
        world.registry.forget_requests();
        let daemon = CriDaemon::of(&world);
        let spec = ImageSpec::named(gate.image("shop/web:v1"));
        let progress = ProgressReporter::unwatched();
        gate.hold_blobs_after(0);
        let pulls = (0..5).map(|_| daemon.client.pull(&spec, None, None, &progress));
        let all = async {
            let let_go = async {
                let held = tokio::task::spawn_blocking({
                    let gate = Arc::clone(&gate);
                    move || gate.wait_until_held(1)
                });
                held.await.unwrap();
                gate.open();
            };
            tokio::join!(futures_util::future::join_all(pulls), let_go).0
        };
        let ids = daemon.runtime.block_on(all);
        assert!(ids.iter().all(|id| id.is_ok() && *id == ids[0]), "{ids:?}");
        let requests = world.pull_requests();
        let manifests = requests.iter().filter(|request| request.is_manifest_fetch());
        assert_eq!(manifests.count(), 1, "{requests:?}");
    }
}

#[test]
fn usage_rises_after_a_pull_and_falls_after_the_removal() {
    for world in worlds() {
        peers::ImageBuilder::small(1, 4_000_000).push(&world.registry, "shop/big:1").unwrap();
        let daemon = CriDaemon::of(&world);
        let before = daemon.used();
        let name = world.registry.image("shop/big:1");
        daemon.pull(&name).unwrap();
        // containerd measures once a second.
        wait_until("the image is counted", || daemon.used() > before + 3_000_000);
        daemon.remove(&name);
        wait_until("the image is counted no longer", || daemon.used() < before + 1_000_000);
    }
}

#[test]
fn credentials_of_a_request_are_used_and_never_returned() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions {
        auth: RegistryAccess::Basic,
        ..RegistryOptions::default()
    }) {
        peers::ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
        let daemon = CriDaemon::of(&world);
        let name = world.registry.image("shop/web:1");
        let login = |password: &str| Credential {
            username: USER.into(),
            password: Secret::new(password),
            ..Credential::default()
        };
        for refused in [daemon.pull(&name), daemon.pull_as(&name, Some(&login("not-the-password")))] {
            let text = refused.expect_err("only with the password").to_string();
            assert!(
                text.contains("shop/web") && !text.contains("rpc error"),
                "kubelet shows it bare: {text}"
            );
            assert!(!text.contains("not-the-password"), "{text}");
        }
        daemon.pull_as(&name, Some(&login(PASSWORD))).expect("with the password");
        let said = daemon.running.stderr() + &daemon.running.stdout();
        assert!(!said.contains("not-the-password") && !said.contains(PASSWORD), "{said}");
    }
}

#[test]
fn a_registry_that_is_down_is_named_first_and_an_unknown_image_is_not_found() {
    for mut world in worlds() {
        peers::ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
        let daemon = CriDaemon::of(&world);
        let missing = daemon.pull(&world.registry.image("shop/none:1")).unwrap_err().to_string();
        assert!(missing.starts_with("rpc error: code = NotFound desc = "), "{missing}");
        assert_eq!(missing.matches("rpc error").count(), 1, "wrapped once: {missing}");
        let name = world.registry.image("shop/web:1");
        world.registry.stop();
        let down = daemon.pull(&name).unwrap_err().to_string();
        // containerd and Docker do not name a registry that is down; their texts pass as they are.
        let bare = match (world.has_containerd(), world.has_docker()) {
            (true, _) => "failed to pull and unpack image",
            (_, true) => "Get \"http://",
            _ => "RegistryUnavailable: ",
        };
        assert!(down.contains(bare) && down.contains("onnection refused"), "{down}");
    }
}

#[test]
fn bytes_that_are_no_grpc_affect_no_other_client() {
    for world in worlds() {
        let daemon = CriDaemon::of(&world);
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice();
        let junk: Vec<u8> = (0..100_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let huge = [preface, &[0, 0, 0, 4, 0, 0, 0, 0, 0], &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat();
        let mut half_open = Vec::new();
        for bytes in [b"".as_slice(), b"GET /", b"POST / HTTP/1.1\r\nHost: x\r\n\r\n", preface, &huge, &junk]
        {
            for _ in 0..20 {
                let mut stream = UnixStream::connect(&daemon.socket).unwrap();
                // larder may have hung up before all of it was written.
                let _ = stream.write_all(bytes);
                half_open.push(stream);
            }
            assert_eq!(daemon.list(), []);
        }
        let version =
            daemon.runtime.block_on(daemon.wire().runtime().version(proto::VersionRequest::default()));
        assert_eq!(version.unwrap().into_inner().runtime_name, "larder");
    }
}

#[test]
fn larder_and_the_runtime_list_each_others_pulls() {
    let Some(world) = RuntimeFixture::plain() else { return };
    for name in ["shop/ours:1", "shop/theirs:1"] {
        peers::ImageBuilder::small(name.len() as u64, 50_000).push(&world.registry, name).unwrap();
    }
    let [ours, theirs] = ["shop/ours:1", "shop/theirs:1"].map(|name| world.registry.image(name));
    let daemon = CriDaemon::of(&world);
    let runtime = client_of(world.containerd().socket());
    let progress = ProgressReporter::unwatched();

    let id = daemon.pull(&ours).unwrap();
    let seen = daemon.runtime.block_on(runtime.status(&ImageSpec::named(&ours))).unwrap();
    assert_eq!(seen, daemon.status(id.as_str()), "the runtime has the same status");
    assert_eq!(world.images(), [ours.as_str()]);

    let theirs_spec = ImageSpec::named(&theirs);
    let id = daemon.runtime.block_on(runtime.pull(&theirs_spec, None, None, &progress)).unwrap();
    assert_eq!(daemon.status(&theirs).map(|image| image.id), Some(id));
    assert_eq!(daemon.list().len(), 2);

    daemon.remove(&theirs);
    assert_eq!(world.images(), [ours.as_str()], "removed through larder, it is gone from the runtime");
    daemon.runtime.block_on(runtime.remove(&ImageSpec::named(&ours), &RemoveOptions::default())).unwrap();
    assert_eq!(daemon.list(), []);
}

#[test]
fn a_runtime_that_dies_is_reported_and_reconnected() {
    let Some(mut world) = RuntimeFixture::plain() else { return };
    peers::ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    let name = world.registry.image("shop/web:1");
    let daemon = CriDaemon::of(&world);
    let ready = || {
        let status = daemon.wire().runtime();
        let status = async { { status }.status(proto::StatusRequest { verbose: false }).await };
        let conditions = daemon.runtime.block_on(status).unwrap().into_inner().status.unwrap().conditions;
        conditions.into_iter().find(|condition| condition.r#type == "RuntimeReady").unwrap()
    };
    assert!(ready().status);
    world.containerd_mut().stop();
    let down = daemon.pull(&name).unwrap_err().to_string();
    assert!(down.starts_with("rpc error: code = Unavailable desc = unix:///"), "{down}");
    let printed = ready();
    assert!(!printed.status && printed.message.contains("containerd.sock"), "{printed:?}");
    world.containerd_mut().start_again().unwrap();
    daemon.pull(&name).expect("the same daemon, once the runtime is back");
    let back = poll(Duration::from_secs(10), || ready().status.then_some(()));
    assert!(back.is_some());
}
