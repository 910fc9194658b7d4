//! The connection to the API server.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::header::USER_AGENT;
use http::{HeaderValue, Request};
use http_body_util::BodyExt as _;
use kube::client::{Body, ClientBuilder};
use kube::{Client, Config};
use tokio::sync::watch;
use tower::util::MapRequestLayer;

use crate::error::{ClusterError, chain};
use crate::reload::ReloadingClient;
use crate::responses::{ResponseObserver, send_observed};

/// How long a call that is no watch may take.
const CALL_WITHIN: Duration = Duration::from_secs(10);

/// The `User-Agent` of larder's requests.
const OWN_AGENT: &str = concat!("larder/", env!("CARGO_PKG_VERSION"));

/// Where the cluster is, and which node this is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterOptions {
    /// A kubeconfig, such as kubelet's; `None` is the service account of the pod that larder runs in.
    pub kubeconfig: Option<PathBuf>,
    /// Name of the node's object.
    pub node: String,
}

/// A cluster, as seen from one node.
#[derive(Clone)]
pub struct Cluster {
    pub(crate) client: Client,
    pub(crate) node: String,
    counters: Arc<RequestCounters>,
    observer: Option<Arc<dyn ResponseObserver>>,
    /// How many leases are being released.
    pub(crate) releases: watch::Sender<usize>,
}

/// Requests to a cluster since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestCounts {
    /// All requests.
    pub requests: u64,
    /// Requests that began a watch.
    pub watches: u64,
}

#[derive(Debug, Default)]
struct RequestCounters {
    requests: AtomicU64,
    watches: AtomicU64,
}

impl RequestCounters {
    /// Counts a request, and names larder in it: audit logs and limits of the API server go by the name.
    fn note(&self, mut request: Request<Body>) -> Request<Body> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
        self.watches.fetch_add(u64::from(is_watch), Ordering::Relaxed);
        request.headers_mut().insert(USER_AGENT, HeaderValue::from_static(OWN_AGENT));
        request
    }
}

impl Cluster {
    /// Reads no file yet: the first call does. Later calls read files that have changed, such as a rotated certificate,
    /// and all of them after the server rejected the credentials. Must be called within a runtime.
    pub fn open(options: &ClusterOptions) -> Cluster {
        Cluster::of(ReloadingClient::new(options.kubeconfig.clone()), &options.node)
    }

    /// Opens a cluster like [`Cluster::open`], and fails if the files cannot be read now.
    pub async fn connect(options: &ClusterOptions) -> Result<Cluster, ClusterError> {
        let reloading = ReloadingClient::new(options.kubeconfig.clone());
        reloading.client().await?;
        Ok(Cluster::of(reloading, &options.node))
    }

    fn of(reloading: ReloadingClient, node: &str) -> Cluster {
        let (reloading, counters) = (Arc::new(reloading), Arc::<RequestCounters>::default());
        let counting = Arc::clone(&counters);
        let service = tower::service_fn(move |request| {
            let request = counting.note(request);
            let reloading = Arc::clone(&reloading);
            async move { reloading.send(request).await }
        });
        Cluster::with_client(Client::new(service, "default"), node, counters)
    }

    /// A cluster at this URL, with a bearer token or without credentials, and without TLS.
    ///
    /// # Errors
    /// [`ClusterError::Unusable`] if it is no URL.
    pub fn at_url(url: &str, node: &str, token: Option<&str>) -> Result<Cluster, ClusterError> {
        let invalid = |error: &dyn std::error::Error| ClusterError::Unusable {
            place: url.to_owned(),
            problem: error.to_string(),
        };
        let mut config = Config::new(url.parse().map_err(|error| invalid(&error))?);
        config.auth_info.token = token.map(|token| token.to_owned().into());
        Cluster::with_config(config, node)
    }

    fn with_config(config: Config, node: &str) -> Result<Cluster, ClusterError> {
        let place = config.cluster_url.to_string();
        let builder = ClientBuilder::try_from(config)
            .map_err(|error| ClusterError::Unusable { place, problem: chain(&error) })?;
        let counters = Arc::<RequestCounters>::default();
        let counting = Arc::clone(&counters);
        let count = move |request| counting.note(request);
        let client = builder.with_layer(&MapRequestLayer::new(count)).build();
        Ok(Cluster::with_client(client, node, counters))
    }

    fn with_client(client: Client, node: &str, counters: Arc<RequestCounters>) -> Cluster {
        Cluster { client, node: node.to_owned(), counters, observer: None, releases: watch::Sender::new(0) }
    }

    /// Waits until each lease is released whose holder was dropped, by this cluster or a clone of it. Takes two seconds
    /// at most.
    pub async fn wait_released(&self) {
        // This has a sender, so that the channel is open.
        _ = self.releases.subscribe().wait_for(|releases| *releases == 0).await;
    }

    /// Returns the cluster with an observer that receives the outcomes of its requests.
    #[must_use]
    pub fn observed_by(self, observer: Arc<dyn ResponseObserver>) -> Cluster {
        let (client, observing) = (self.client.clone(), Arc::clone(&observer));
        let service = tower::service_fn(move |request| {
            let (client, observer) = (client.clone(), Arc::clone(&observing));
            async move {
                let response = send_observed(&client, &*observer, request).await?;
                let is_success = response.status().is_success();
                // A watch is one response for minutes: each of its events shows that the server can be reached.
                Ok::<_, kube::Error>(response.map(|body| {
                    body.map_frame(move |frame| {
                        if is_success {
                            observer.observe_watch();
                        }
                        frame
                    })
                }))
            }
        });
        Cluster { client: Client::new(service, "default"), observer: Some(observer), ..self }
    }

    /// Counts the requests to the API server so far, by this client and its clones.
    pub fn requests(&self) -> RequestCounts {
        RequestCounts {
            requests: self.counters.requests.load(Ordering::Relaxed),
            watches: self.counters.watches.load(Ordering::Relaxed),
        }
    }

    /// The observer of its responses.
    pub(crate) fn observer(&self) -> Option<&Arc<dyn ResponseObserver>> {
        self.observer.as_ref()
    }

    /// The outcome of an action that is more than one request.
    pub(crate) fn observe(&self, action: &str, outcome: Result<(), ClusterError>) {
        if let Some(observer) = &self.observer {
            observer.observe(action, outcome);
        }
    }

    /// Forgets failures of requests that this node no longer sends.
    pub(crate) fn forget(&self, actions: &[&str]) {
        let Some(observer) = &self.observer else { return };
        for action in actions {
            observer.forget(action);
        }
    }

    /// One call about `what`, such as `secret default/registry`. A watch waits for longer.
    pub(crate) async fn call<T>(
        &self,
        what: String,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, ClusterError> {
        if let Ok(answer) = tokio::time::timeout(CALL_WITHIN, call).await {
            return answer.map_err(|error| ClusterError::of_call(what, &error));
        }
        let error = ClusterError::Unavailable { message: format!("{what}: no answer in {CALL_WITHIN:?}") };
        self.observe(&what, Err(error.clone()));
        Err(error)
    }

    /// Name of the node's object.
    pub fn node(&self) -> &str {
        &self.node
    }
}

/// Where a pod has the namespace of its service account.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
/// The namespace of the manifests.
const USUAL_NAMESPACE: &str = "larder-system";

/// The namespace of larder: of the pod that it runs in, or that of the manifests.
pub async fn own_namespace() -> String {
    // It fails only when the runtime stops.
    let read = tokio::task::spawn_blocking(|| fs_err::read_to_string(NAMESPACE_FILE)).await;
    let namespace = read.ok().and_then(Result::ok).map(|text| text.trim().to_owned());
    namespace.filter(|text| !text.is_empty()).unwrap_or_else(|| USUAL_NAMESPACE.to_owned())
}
