//! Uses of images by containers.

use std::collections::BTreeMap;
use std::time::{Duration, UNIX_EPOCH};

use larder::backend::{Backend as _, Container, ContainerInventory, Sandbox};
use larder_cri::{ExitedContainer, proto};
use larder_testkit_peers::fake_cri::{CallHold, FakeCri, Rpc};
use tonic::Code;

use super::{client, streaming_client};

/// A container and its sandbox, labelled as kubelet does; the container mounts an image.
pub(super) fn run_a_container(fake: &FakeCri) {
    let label = |key: &str, value: &str| (format!("io.kubernetes.{key}"), value.to_owned());
    let labels = BTreeMap::from([
        label("pod.name", "web"),
        label("pod.namespace", "ns"),
        label("container.name", "nginx"),
    ]);
    fake.change(|contents| {
        contents.containers = vec![proto::Container {
            id: "c1".into(),
            pod_sandbox_id: "s1".into(),
            metadata: Some(proto::ContainerMetadata { name: "nginx".into(), attempt: 0 }),
            image_ref: "registry.example/app@sha256:d".into(),
            state: proto::ContainerState::ContainerRunning.into(),
            labels: labels.clone(),
            ..proto::Container::default()
        }];
        let image = Some(proto::ImageSpec { image: "sha256:model".into(), ..proto::ImageSpec::default() });
        contents.mounts.insert("c1".into(), vec![proto::Mount { image, ..proto::Mount::default() }]);
        contents.sandboxes = vec![proto::PodSandbox {
            id: "s1".into(),
            labels,
            runtime_handler: "kata".into(),
            ..proto::PodSandbox::default()
        }];
        contents.sandbox_images.insert("s1".into(), "registry.example/pause:3".into());
    });
}

#[tokio::test]
async fn use_names_pods_and_mounted_images_and_asks_once_for_each_container() {
    let fake = FakeCri::start();
    run_a_container(&fake);
    let client = client(&fake);
    let first = client.container_inventory().await.unwrap();
    let container = Container {
        id: "c1".into(),
        name: "nginx".into(),
        image_id: "registry.example/app@sha256:d".into(),
        sandbox_id: "s1".into(),
        mounted_images: vec!["sha256:model".into()],
        mounts_error: None,
        running: true,
        pod: "ns/web".into(),
        is_mount: false,
    };
    assert_eq!(first.containers, [container]);
    let sandbox = Sandbox {
        id: "s1".into(),
        pod: "ns/web".into(),
        runtime_handler: "kata".into(),
        ready: true,
        image: "registry.example/pause:3".into(),
    };
    assert_eq!(first.sandboxes, [sandbox]);
    assert_eq!(client.container_inventory().await.unwrap(), first);
    assert_eq!(fake.calls(Rpc::ContainerStatus).started, 1);
    assert_eq!(fake.calls(Rpc::PodSandboxStatus).started, 1);
    fake.change(|contents| contents.containers[0].image_id = "sha256:app".into());
    assert_eq!(client.container_inventory().await.unwrap().containers[0].image_id, "sha256:app");
}

#[tokio::test]
async fn the_image_of_a_sandbox_has_the_name_under_which_it_is_listed() {
    let id = format!("sha256:{}", "a1".repeat(32));
    for (reported, image) in [
        ("pause", "docker.io/library/pause:latest"),
        ("team/pause:3", "docker.io/team/pause:3"),
        ("registry.example/pause:3", "registry.example/pause:3"),
        (&id, &id),
        (&id[7..], &id[7..]),
    ] {
        let fake = FakeCri::start();
        run_a_container(&fake);
        fake.change(|contents| _ = contents.sandbox_images.insert("s1".into(), reported.into()));
        let in_use = client(&fake).container_inventory().await.unwrap();
        assert_eq!(in_use.sandboxes[0].image, image, "{reported}");
    }
}

#[tokio::test]
async fn exited_containers_are_listed_with_their_end_and_removed() {
    let fake = FakeCri::start();
    fake.change(|contents| {
        let container = |id: &str, state: proto::ContainerState| proto::Container {
            id: id.into(),
            metadata: Some(proto::ContainerMetadata { name: "job".into(), attempt: 0 }),
            state: state.into(),
            ..proto::Container::default()
        };
        let mut of_kubelet = container("k1", proto::ContainerState::ContainerExited);
        of_kubelet.labels.insert("io.kubernetes.pod.uid".into(), "u1".into());
        contents.containers = vec![
            container("c1", proto::ContainerState::ContainerExited),
            container("r1", proto::ContainerState::ContainerRunning),
            of_kubelet,
        ];
        contents.finished.insert("c1".into(), 5_000_000_000);
    });
    let client = client(&fake);
    let exited = |id: &str, of_kubelet, finished: Option<u64>| ExitedContainer {
        id: id.into(),
        name: "job".into(),
        of_kubelet,
        finished: finished.map(|seconds| UNIX_EPOCH + Duration::from_secs(seconds)),
    };
    assert_eq!(
        client.exited_containers().await.unwrap(),
        [exited("c1", false, Some(5)), exited("k1", true, None)]
    );
    client.remove_container("c1").await.unwrap();
    client.remove_container("c1").await.unwrap();
    assert_eq!(client.exited_containers().await.unwrap(), [exited("k1", true, None)]);
}

#[tokio::test]
async fn many_containers_are_asked_about_some_at_a_time_and_one_that_is_broken_spoils_nothing() {
    let fake = FakeCri::start();
    run_a_container(&fake);
    fake.change(|contents| {
        let (container, mount) = (contents.containers[0].clone(), contents.mounts["c1"].clone());
        for number in 2..=20 {
            let id = format!("c{number}");
            contents.mounts.insert(id.clone(), mount.clone());
            contents.containers.push(proto::Container { id, ..container.clone() });
        }
    });
    fake.fail_next(Rpc::ContainerStatus, Code::Unknown, "container c0ffee is in an unknown state");
    let held: Vec<_> = (0..8).map(|_| fake.hold_next(Rpc::ContainerStatus)).collect();
    let client = client(&fake);
    let watch = async {
        fake.until(Rpc::ContainerStatus, |calls| calls.running == 8).await;
        assert_eq!(fake.calls(Rpc::ContainerStatus).started, 9, "eight at once, and the one that failed");
        held.into_iter().for_each(CallHold::release);
    };
    let (first, ()) = tokio::join!(client.container_inventory(), watch);
    let unknown = |in_use: ContainerInventory| {
        let errors = in_use.containers.iter().filter_map(|one| one.mounts_error.as_deref());
        let said = "rpc error: code = Unknown desc = container c0ffee is in an unknown state";
        let count = errors.inspect(|error| assert_eq!(*error, said)).count();
        assert_eq!(count, in_use.containers.iter().filter(|one| one.mounted_images.is_empty()).count());
        count
    };
    assert_eq!(unknown(first.unwrap()), 1);
    assert_eq!(unknown(client.container_inventory().await.unwrap()), 0, "the broken one is asked again");
    assert_eq!(fake.calls(Rpc::ContainerStatus).started, 21);
}

#[tokio::test]
async fn a_runtime_lost_while_listing_containers_is_an_error() {
    let mut fake = FakeCri::start();
    run_a_container(&fake);
    fake.hang_next(Rpc::ContainerStatus);
    let client = client(&fake);
    let crash = async {
        fake.until(Rpc::ContainerStatus, |calls| calls.running == 1).await;
        fake.stop();
    };
    let (answer, ()) = tokio::join!(client.container_inventory(), crash);
    answer.expect_err("what containers mount is not known");
}

#[tokio::test]
async fn use_is_streamed_when_wanted_and_known() {
    let fake = FakeCri::start();
    run_a_container(&fake);
    let client = streaming_client(&fake);
    let whole = client.container_inventory().await.unwrap();
    fake.change(|contents| contents.streaming = true);
    assert_eq!(client.container_inventory().await.unwrap(), whole, "this client has given streams up");
    assert_eq!(fake.calls(Rpc::StreamContainers).started, 1);
    assert_eq!(streaming_client(&fake).container_inventory().await.unwrap(), whole);
    assert_eq!(fake.calls(Rpc::ListContainers).started, 2);
    assert_eq!(fake.calls(Rpc::ListPodSandbox).started, 2);
}

#[tokio::test]
async fn a_broken_usage_stream_is_dropped_and_requested_again() {
    for rpc in [Rpc::StreamContainers, Rpc::StreamPodSandboxes] {
        let fake = FakeCri::start();
        run_a_container(&fake);
        fake.change(|contents| {
            contents.streaming = true;
            contents.stream_errors.insert(rpc, (Code::Internal, "disk".into()));
        });
        let client = streaming_client(&fake);
        let error = client.container_inventory().await.unwrap_err().to_string();
        assert_eq!(error, "rpc error: code = Internal desc = disk", "{rpc:?}");
        fake.change(|contents| contents.stream_errors.clear());
        let in_use = client.container_inventory().await.unwrap();
        assert_eq!((in_use.containers.len(), in_use.sandboxes.len()), (1, 1), "{rpc:?}");
        assert_eq!(fake.calls(rpc).started, 2, "streams are not given up");
        assert_eq!(
            (fake.calls(Rpc::ListContainers).started, fake.calls(Rpc::ListPodSandbox).started),
            (0, 0)
        );
    }
}
