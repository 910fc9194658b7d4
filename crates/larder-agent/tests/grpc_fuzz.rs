//! A daemon, and messages of any bytes to every call that it serves: CRI, snapshots and the control API. No message
//! ends its handler by a panic, or the daemon.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use larder_agent::config::{SettingOrigin, SettingsSource, SettingsSources};
use larder_agent::environment::DefaultPaths;
use larder_agent::serve::{self, Daemon};
use larder_api::v1 as control;
use larder_cri::proto as cri;
use larder_snapshots::proto as snapshots;
use larder_testkit_peers::fuzz;
use larder_testkit_peers::wire::RawConnection;
use prost::Message;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::time;
use tonic::body::Body;
use tonic::codegen::{Bytes, Service as _, http};

/// Time for one call: a client that has waited that long goes away. Pulls and watches last longer.
const CALL_TIMEOUT: Duration = Duration::from_millis(100);
/// Time for the daemon to answer that it still runs.
const RUNS_WITHIN: Duration = Duration::from_secs(10);
/// Where nothing listens.
const NOWHERE: &str = "http://127.0.0.1:1";

struct FuzzedDaemon {
    _dir: TempDir,
    runtime: Runtime,
    connection: RawConnection,
}

impl FuzzedDaemon {
    /// A daemon with a store of its own, which reaches no registry.
    fn start() -> FuzzedDaemon {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let settings = [
            ("root", path("store")),
            ("state", path("state")),
            ("listen.socket", path("larder.sock")),
            ("metrics.address", String::new()),
            ("containerd.snapshotter", "true".into()),
            ("registry.proxy", NOWHERE.into()),
        ];
        let given = |(key, value)| SettingsSource::Given { by: SettingOrigin::Flag("test"), key, value };
        let layers = settings.map(given).to_vec();
        let sources = SettingsSources { places: DefaultPaths::of(true, |_| None), layers };
        let (listens, listening) = channel();
        thread::spawn(move || {
            let runtime = serve::runtime().unwrap();
            let within = runtime.enter();
            let daemon = Daemon::build(&sources, tracing::Level::ERROR).unwrap();
            drop(within);
            listens.send(()).unwrap();
            runtime.block_on(daemon.run()).unwrap();
        });
        listening.recv().unwrap();
        let runtime = Runtime::new().unwrap();
        let connection = runtime.block_on(RawConnection::connect(&dir.path().join("larder.sock")));
        FuzzedDaemon { _dir: dir, runtime, connection }
    }

    /// Sends an input: a path, a line break, and a message.
    fn send(&self, input: &[u8]) {
        let at = input.iter().position(|byte| *byte == b'\n').unwrap_or(input.len());
        let path = String::from_utf8_lossy(&input[..at]);
        let message = input.get(at + 1..).unwrap_or_default();
        let Ok(uri) =
            http::Uri::builder().scheme("http").authority("localhost").path_and_query(&*path).build()
        else {
            return;
        };
        self.runtime.block_on(async {
            if let Ok(text) = time::timeout(CALL_TIMEOUT, self.call(uri, message)).await {
                assert!(!text.contains("a defect in larder"), "{path}: {text}");
            }
        });
    }

    /// Returns headers and trailers of the response, or the error of the connection.
    async fn call(&self, uri: http::Uri, message: &[u8]) -> String {
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        let frame = Bytes::from([&[0][..], &length, message].concat());
        let body = Body::new(Full::new(frame).map_err(|never| match never {}));
        let request = http::Request::post(uri)
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(body)
            .unwrap();
        match self.connection.clone().call(request).await {
            Ok(response) => {
                let head = format!("{:?}", response.headers());
                let trailers = response.into_body().collect().await.map(|body| body.trailers().cloned());
                format!("{head} {trailers:?}")
            }
            Err(error) => error.to_string(),
        }
    }

    /// Asserts that the daemon answers.
    fn assert_runs(&self) {
        let mut images = self.connection.images();
        let answer = async move { images.image_fs_info(cri::ImageFsInfoRequest {}).await };
        let answer = self.runtime.block_on(async { time::timeout(RUNS_WITHIN, answer).await });
        answer.expect("the daemon answers").expect("the daemon serves CRI");
    }
}

/// An input for a call.
fn call(path: &str, message: &impl Message) -> Vec<u8> {
    [path.as_bytes(), b"\n", &message.encode_to_vec()].concat()
}

const IMAGE: &str = "registry.example/team/app:1";

fn cri_calls() -> Vec<Vec<u8>> {
    let image = Some(cri::ImageSpec { image: IMAGE.into(), ..Default::default() });
    let filter = Some(cri::ImageFilter { image: image.clone() });
    let auth = Some(cri::AuthConfig { username: "u".into(), password: "p".into(), ..Default::default() });
    let labels = [("a".to_owned(), "b".to_owned())].into();
    let metadata = Some(cri::PodSandboxMetadata { name: "web".into(), ..Default::default() });
    let sandbox_config = Some(cri::PodSandboxConfig { metadata, labels, ..Default::default() });
    let pull = cri::PullImageRequest { image: image.clone(), auth, sandbox_config };
    let status = cri::ImageStatusRequest { image: image.clone(), verbose: true };
    let version = cri::VersionRequest { version: "v1".into() };
    let service = "/runtime.v1.ImageService";
    vec![
        call(&format!("{service}/ListImages"), &cri::ListImagesRequest { filter: filter.clone() }),
        call(&format!("{service}/StreamImages"), &cri::StreamImagesRequest { filter }),
        call(&format!("{service}/ImageStatus"), &status),
        call(&format!("{service}/PullImage"), &pull),
        call(&format!("{service}/RemoveImage"), &cri::RemoveImageRequest { image }),
        call(&format!("{service}/ImageFsInfo"), &cri::ImageFsInfoRequest {}),
        call("/runtime.v1.RuntimeService/Version", &version),
        call("/runtime.v1.RuntimeService/Status", &cri::StatusRequest { verbose: true }),
    ]
}

fn snapshot_calls() -> Vec<Vec<u8>> {
    let (snapshotter, key, parent) = ("larder".to_owned(), "k8s.io/1/a".to_owned(), String::new());
    let labels: BTreeMap<_, _> = [
        ("containerd.io/snapshot.ref", format!("sha256:{}", "a".repeat(64))),
        ("containerd.io/snapshot/cri.image-ref", IMAGE.to_owned()),
        ("containerd.io/snapshot/cri.layer-digest", format!("sha256:{}", "b".repeat(64))),
        ("containerd.io/gc.root", "1".to_owned()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into();
    let name = "k8s.io/2/b".to_owned();
    let filters = [
        r#"kind==committed,labels."containerd.io/gc.root"!=b"#,
        r"name~=/^k8s\.io\/(a|b)+$/",
        r#"parent=="\u00e4\x41""#,
    ]
    .map(str::to_owned)
    .to_vec();
    let info = Some(snapshots::Info {
        name: key.clone(),
        kind: snapshots::Kind::Active.into(),
        labels: labels.clone(),
        ..Default::default()
    });
    let update_mask = Some(prost_types::FieldMask { paths: vec!["labels.containerd.io/gc.root".into()] });
    let prepare = snapshots::PrepareSnapshotRequest {
        snapshotter: snapshotter.clone(),
        key: key.clone(),
        parent: parent.clone(),
        labels: labels.clone(),
    };
    let view = snapshots::ViewSnapshotRequest {
        snapshotter: snapshotter.clone(),
        key: key.clone(),
        parent: name.clone(),
        labels: labels.clone(),
    };
    let (snapshotter, key) = (|| snapshotter.clone(), || key.clone());
    let commit =
        snapshots::CommitSnapshotRequest { snapshotter: snapshotter(), name, key: key(), labels, parent };
    let service = "/containerd.services.snapshots.v1.Snapshots";
    let at = |method: &str| format!("{service}/{method}");
    vec![
        call(&at("Prepare"), &prepare),
        call(&at("View"), &view),
        call(&at("Mounts"), &snapshots::MountsRequest { snapshotter: snapshotter(), key: key() }),
        call(&at("Commit"), &commit),
        call(&at("Remove"), &snapshots::RemoveSnapshotRequest { snapshotter: snapshotter(), key: key() }),
        call(&at("Stat"), &snapshots::StatSnapshotRequest { snapshotter: snapshotter(), key: key() }),
        call(
            &at("Update"),
            &snapshots::UpdateSnapshotRequest { snapshotter: snapshotter(), info, update_mask },
        ),
        call(&at("List"), &snapshots::ListSnapshotsRequest { snapshotter: snapshotter(), filters }),
        call(&at("Usage"), &snapshots::UsageRequest { snapshotter: snapshotter(), key: key() }),
        call(&at("Cleanup"), &snapshots::CleanupRequest { snapshotter: snapshotter() }),
    ]
}

fn control_calls() -> Vec<Vec<u8>> {
    use control::collect_request::Goal;
    use control::keep_rule::Select;

    let image = || IMAGE.to_owned();
    let document = format!(r#"{{"auths":{{"{IMAGE}":{{"username":"u","password":"p"}}}}}}"#).into_bytes();
    let secret = control::PullSecret {
        namespace: "team".into(),
        name: "login".into(),
        r#type: "kubernetes.io/dockerconfigjson".into(),
        document,
    };
    let wanted =
        control::WantedImage { image: image(), pull_policy: 2, field_path: "spec.containers{web}".into() };
    let pod =
        Some(control::PodReference { namespace: "team".into(), name: "web".into(), ..Default::default() });
    let ensure = control::EnsureRequest {
        images: vec![wanted],
        pod,
        secrets: vec![secret],
        progress: true,
        run: "1".into(),
        ..control::EnsureRequest::default()
    };
    let collect = control::CollectRequest {
        goal: Some(Goal::FreeBytes(1)),
        high_threshold_percent: Some(85),
        low_threshold_percent: Some(80),
        minimum_age_milliseconds: Some(1),
        maximum_age_milliseconds: Some(u64::MAX),
        kubelet: true,
        ended_leases: control::EndedLeases::All.into(),
    };
    let label = control::LabelSelector { key: "a".into(), value: Some("b".into()) };
    let rules = [Select::Name("ci/*".into()), Select::Digest(image()), Select::Label(label)];
    let rule = |select| control::KeepRule {
        select: Some(select),
        ttl_seconds: Some(9),
        budget_bytes: Some(1 << 40),
    };
    let keep = control::KeepRequest { add: rules.map(rule).to_vec(), ..Default::default() };
    let remove =
        control::RemoveRequest { images: vec![image()], image_id: "sha256:0".into(), ..Default::default() };
    let tag = control::TagRequest { source: image(), target: "app:2".into() };
    let explain = control::ExplainRequest { image: image(), limits: Some(collect) };
    let mount = control::MountRequest { image: image(), target: "/nowhere/a".into(), ..Default::default() };
    let unmount = control::UnmountRequest { target: "/nowhere/a".into(), force: true };
    let at = |method: &str| format!("/larder.control.v1.Control/{method}");
    let listed = control::ImagesRequest { details: true, label_keys: vec!["a".into()], ..Default::default() };
    vec![
        call(&at("Ensure"), &ensure),
        call(&at("PlanEnsure"), &ensure),
        call(&at("Images"), &listed),
        call(&at("Inspect"), &control::InspectRequest { image: image(), exact: true }),
        call(&at("Remove"), &remove),
        call(&at("Tag"), &tag),
        call(&at("Plan"), &collect),
        call(&at("Collect"), &collect),
        call(&at("Explain"), &explain),
        call(&at("History"), &control::HistoryRequest { newest: 3 }),
        call(&at("Usage"), &control::UsageRequest {}),
        call(&at("Events"), &control::EventsRequest { from: 1, watch: true }),
        call(&at("Runtime"), &control::RuntimeRequest {}),
        call(&at("Status"), &control::StatusRequest { look: true }),
        call(&at("Keep"), &keep),
        call(&at("Lease"), &control::LeaseRequest { image: image(), seconds: u64::MAX }),
        call(&at("Leases"), &control::LeasesRequest::default()),
        call(
            &at("Load"),
            &control::LoadRequest { name: image(), piece: b"archive".to_vec(), platform: image() },
        ),
        call(&at("Export"), &control::ExportRequest { images: vec![image()], format: 1, sparse: true }),
        call(&at("Mount"), &mount),
        call(&at("Unmount"), &unmount),
        call(&at("Mounts"), &control::MountsRequest::default()),
        call(&at("Join"), &control::JoinRequest::default()),
    ]
}

#[test]
fn calls_of_any_bytes() {
    let daemon = FuzzedDaemon::start();
    let seeds = [cri_calls(), snapshot_calls(), control_calls()].concat();
    fuzz::run("grpc", &seeds, 3000, |input| daemon.send(input));
    daemon.assert_runs();
}
