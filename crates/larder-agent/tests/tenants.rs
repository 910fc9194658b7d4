//! One hostile registry and one hostile repository at full effort: pulls of others keep their speed, and no private
//! byte is served. All pulls go through the control API of a node, as those of a daemon's clients do.
//!
//! The registry of the others sends at a fixed pace, so that the time of a pull is that of waiting, not of this
//! machine's processors.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use larder::events::LogSink;
use larder::pod::Pod;
use larder::pull::{EnsureRequest, PullPolicy};
use larder_agent::backend::{OpenMode, RuntimeRequirement};
use larder_agent::client::EnsureCalls;
use larder_agent::config::{self, SettingsSources};
use larder_agent::environment::DefaultPaths;
use larder_agent::node::{Node, NodeOptions, StateDirAccess};
use larder_agent::serve::{CommandServer, JoinedPulls};
use larder_api::v1::{ImagesRequest, ImagesResponse};
use larder_registry::{Proxy, RegistryConfig};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{
    FaultRegistry, FaultRegistryAuth, FaultTrigger, PutImage, ResponseFault,
};
use serde_json::json;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::{self, Instant};

const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// Pulls that are measured, in peace, and as many under attack.
const ROUNDS: usize = 6;
/// How often the pulls under attack may be measured: an attack slows down each time, the machine some time.
const ATTEMPTS: usize = 4;
/// Of the speed in peace.
const LEAST: f64 = 0.8;
/// Over which the rate of a pull is measured; the default is ten seconds.
const WINDOW: Duration = Duration::from_secs(1);
/// Between two attempts of one hostile pull.
const PAUSE: Duration = Duration::from_millis(100);
/// For a pull of half a second.
const SLOT_TIMEOUT: Duration = Duration::from_secs(30);
const HOUR: Duration = Duration::from_secs(3600);

struct TenantFixture {
    _dir: TempDir,
    server: CommandServer,
    session: Arc<EnsureCalls>,
    honest: FaultRegistry,
    hostile: FaultRegistry,
    /// Of a hostile registry too; its token service does not answer.
    hanging: FaultRegistry,
    victim: PutImage,
}

fn layer(name: &str, bytes: usize) -> Vec<u8> {
    TarBuilder::new().with(TarBuilderEntry::file(name, vec![7; bytes])).finish()
}

impl TenantFixture {
    async fn new() -> TenantFixture {
        let dir = tempfile::tempdir().unwrap();
        let sources = SettingsSources { places: DefaultPaths::of(true, |_| None), layers: Vec::new() };
        let mut config = config::load(&sources).unwrap();
        config.root = dir.path().join("store");
        config.state = Some(dir.path().join("state"));
        config.registry =
            RegistryConfig { config_dirs: Vec::new(), proxy: Proxy::None, ..RegistryConfig::default() };
        config.store.minimum_rate.window = WINDOW;
        // It counts the pulls of all registries, as in kubelet.
        config.pull.registry_pull_qps = 0;
        let options = NodeOptions {
            store: OpenMode::Create,
            runtime: RuntimeRequirement::Require,
            state: StateDirAccess::CurrentUser,
            publishes: false,
            joins_cluster: false,
            logs_events: false,
            verbosity: tracing::Level::ERROR,
        };
        let server = CommandServer::start(Node::open(sources, config, None, options).unwrap());
        let session = Arc::new(EnsureCalls::new(server.client(), None, Arc::new(LogSink), false));
        let [honest, hostile, hanging] = [(); 3].map(|()| FaultRegistry::start());
        let victim = honest.put_image("private/app", "1", PLAIN, &[layer("secret", 20_000)], &[]);
        for round in 0..(1 + ATTEMPTS) * ROUNDS {
            let layers = ["a", "b", "c"].map(|name| layer(&format!("{name}{round}"), 400_000));
            honest.put_image(&format!("app{round}"), "1", PLAIN, &layers, &[]);
        }
        // 400 kB in about half a second.
        let pace = ResponseFault::Trickle(16 << 10, Duration::from_millis(20));
        honest.fault(FaultTrigger::path("/v2/app"), pace);
        let node = TenantFixture { _dir: dir, server, session, honest, hostile, hanging, victim };
        node.set_traps();
        pull(&node.session, &node.honest.image("private/app:1")).await.unwrap();
        node
    }

    fn set_traps(&self) {
        let layers: Vec<_> = (0..6).map(|byte| layer(&format!("slow{byte}"), 1 << 20)).collect();
        let slow = self.hostile.put_image("slow", "1", PLAIN, &layers, &[]);
        for blob in slow.layers {
            let trickle = ResponseFault::Trickle(80, Duration::from_millis(100));
            self.hostile.fault(FaultTrigger::path(format!("/blobs/{blob}")), trickle);
        }
        self.hostile.fault(FaultTrigger::path("/v2/silent/"), ResponseFault::SlowHeaders(HOUR));
        self.hostile.fault(FaultTrigger::path("/v2/stalled/"), ResponseFault::StallAfter(10));
        self.hostile.put_image("stalled", "1", PLAIN, &[layer("stalled", 10_000)], &[]);
        let later = || ResponseFault::RetryAfter(429, "86400".into());
        self.hostile.fault(FaultTrigger::path("/v2/limited/"), later());
        // A repository of the honest registry whose owner exhausted its quota.
        self.honest.fault(FaultTrigger::path("/v2/hostile/"), later());
        self.name_private_config();
        self.hanging.require(FaultRegistryAuth::Token { realm: String::new(), login: None, expires_in: 300 });
        self.hanging.fault(FaultTrigger::path("/token"), ResponseFault::SlowHeaders(HOUR));
        self.hanging.put_image("app", "1", PLAIN, &[layer("hanging", 10_000)], &[]);
    }

    /// Junk under the private image's config and with its layers' digests, in a registry that does not have them.
    fn name_private_config(&self) {
        let config = json!({"mediaType": CONFIG, "digest": self.victim.config, "size": 200});
        let (junk, secret) = (layer("junk", 5_000), &self.victim.layers[0]);
        for (name, blob, size) in [
            ("junk", self.hostile.put_blob(junk.clone()), junk.len()),
            ("stolen", secret.clone(), layer("secret", 20_000).len()),
        ] {
            let layers = json!([{"mediaType": PLAIN, "digest": blob, "size": size}]);
            let manifest =
                json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers});
            self.hostile.put_manifest(name, "1", MANIFEST, manifest.to_string());
        }
    }

    /// Hostile pulls, each repeated until the set is dropped.
    fn attack(&self) -> JoinSet<()> {
        let mut attack = JoinSet::new();
        let of_hostile = ["slow:1", "silent:1", "stalled:1", "limited:1", "junk:1", "stolen:1"];
        let mut names = of_hostile.map(|name| self.hostile.image(name)).to_vec();
        names.extend([self.hanging.image("app:1"), self.honest.image("hostile:1")]);
        for name in names {
            for _ in 0..2 {
                let (session, name) = (Arc::clone(&self.session), name.clone());
                attack.spawn(async move {
                    loop {
                        assert!(pull(&session, &name).await.is_err(), "{name} was pulled");
                        time::sleep(PAUSE).await;
                    }
                });
            }
        }
        attack
    }

    async fn images(&self) -> ImagesResponse {
        let client = self.server.client();
        client.ask(async |mut calls| calls.images(ImagesRequest::default()).await).await.unwrap()
    }

    /// Time of the pulls of images that were not pulled before.
    async fn measure(&self, attempt: usize) -> Duration {
        let began = Instant::now();
        for round in 0..ROUNDS {
            let name = self.honest.image(&format!("app{}:1", attempt * ROUNDS + round));
            time::timeout(SLOT_TIMEOUT, pull(&self.session, &name)).await.expect("it has a slot").unwrap();
        }
        began.elapsed()
    }
}

/// A pod of its own pulls this image: no back-off applies.
async fn pull(session: &EnsureCalls, name: &str) -> Result<(), String> {
    static PODS: AtomicU64 = AtomicU64::new(0);
    let uid = format!("uid-{}", PODS.fetch_add(1, Ordering::Relaxed));
    let pod = Pod { uid, name: "app".into(), namespace: "tenant".into(), ..Pod::default() };
    let outcome = session.ensure(&EnsureRequest::new(name, PullPolicy::Always, pod)).await;
    outcome.map(drop).map_err(|error| error.to_string())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_registries_neither_slow_down_other_pulls_nor_get_private_images() {
    let node = TenantFixture::new().await;
    let before = node.images().await;
    assert_eq!(before.images[0].id, node.victim.config);
    node.honest.forget_requests();
    let peace = node.measure(0).await;
    let mut attack = node.attack();
    // Until each of its pulls was measured.
    time::sleep(4 * WINDOW).await;
    let (mut attempt, mut speed) = (0, 0.0);
    while attempt < ATTEMPTS && speed < LEAST {
        attempt += 1;
        let attacked = node.measure(attempt).await;
        speed = peace.as_secs_f64() / attacked.as_secs_f64();
        eprintln!(
            "{ROUNDS} pulls in peace: {peace:.2?}, under attack: {attacked:.2?}, speed: {:.0}%",
            speed * 100.0
        );
    }
    assert!(attack.try_join_next().is_none(), "no hostile pull succeeds");
    attack.shutdown().await;
    assert!(speed >= LEAST, "pulls of others have {:.0}% of their speed", speed * 100.0);
    let after = node.images().await;
    assert_eq!(after.images.len(), 1 + (1 + attempt) * ROUNDS, "no hostile image is present");
    assert!(after.images.contains(&before.images[0]), "the private image is unchanged");
    let secret = format!("/blobs/{}", node.victim.layers[0]);
    assert!(node.honest.requests_for(&secret).is_empty());
    node.server.close(JoinedPulls::Finish, |_| ()).await;
}
