//! The connection to the API server.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::error::{ClusterError, chain};

/// How long to wait for a connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// How long a call that is no watch may take.
const CALL_WITHIN: Duration = Duration::from_secs(10);
/// How long a silent answer may take: a watch gets a bookmark every minute or so.
const READ_WITHIN: Duration = Duration::from_secs(295);

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
}

impl Cluster {
    /// Reads the files and prepares a client; connects with the first call.
    pub async fn connect(options: &ClusterOptions) -> Result<Cluster, ClusterError> {
        let mut config = match &options.kubeconfig {
            Some(path) => from_file(path).await?,
            None => Config::incluster().map_err(|error| ClusterError::Unusable {
                place: "service account of the pod".to_owned(),
                problem: chain(&error),
            })?,
        };
        config.connect_timeout = Some(CONNECT_WITHIN);
        config.read_timeout = Some(READ_WITHIN);
        Cluster::with_config(config, &options.node)
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
        let client = Client::try_from(config)
            .map_err(|error| ClusterError::Unusable { place, problem: chain(&error) })?;
        Ok(Cluster { client, node: node.to_owned() })
    }

    /// One call about `what`, such as `secret default/registry`. A watch waits for longer.
    pub(crate) async fn call<T>(
        &self,
        what: String,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, ClusterError> {
        match tokio::time::timeout(CALL_WITHIN, call).await {
            Ok(answer) => answer.map_err(|error| ClusterError::of_call(what, &error)),
            Err(_) => {
                Err(ClusterError::Unavailable { message: format!("{what}: no answer in {CALL_WITHIN:?}") })
            }
        }
    }

    /// Name of the node's object.
    pub fn node(&self) -> &str {
        &self.node
    }
}

async fn from_file(path: &Path) -> Result<Config, ClusterError> {
    let unusable = |error: &dyn std::error::Error| ClusterError::Unusable {
        place: path.display().to_string(),
        problem: chain(error),
    };
    let file = path.to_owned();
    // It fails only when the runtime stops.
    let read = tokio::task::spawn_blocking(move || Kubeconfig::read_from(file)).await;
    let kubeconfig = read.map_err(|error| unusable(&error))?.map_err(|error| unusable(&error))?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    config.map_err(|error| unusable(&error))
}
