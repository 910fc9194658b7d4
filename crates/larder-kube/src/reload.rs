//! A client that is replaced when the files of its credentials change, such as kubelet's client certificate at its
//! rotation.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{self, Instant};
use tower::BoxError;

use crate::error::{ClusterError, chain};
use crate::kubeconfig::{problem, tls_problem};

/// How often it is looked whether a file has changed.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// How long reading the files may take, with the exec plugin that they name.
const LOAD_WITHIN: Duration = Duration::from_secs(30);
/// After so long another read is begun beside those that hang, of which there are at most so many.
const ABANDON_AFTER: Duration = Duration::from_secs(600);
const MAX_ABANDONED: usize = 3;
/// How long to wait for a connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// How long a silent answer may take: a watch gets a bookmark every minute or so.
const READ_WITHIN: Duration = Duration::from_secs(295);
/// The files of a pod's service account that kube reads once; it reads the token again by itself.
const POD_FILES: [&str; 1] = ["/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"];

/// Sends requests with the credentials of a kubeconfig, or of the pod's service account.
pub(crate) struct ReloadingClient {
    kubeconfig: Option<PathBuf>,
    state: Mutex<ClientState>,
}

#[derive(Default)]
struct ClientState {
    current: Option<LoadedClient>,
    /// A read of the files in progress, and when it began: a canceled request neither cancels it nor starts another.
    loading: Option<(Instant, Loading)>,
    /// Reads that hang, each with the process of an exec plugin.
    abandoned: Vec<Loading>,
}

type Loading = JoinHandle<Result<LoadedClient, ClusterError>>;

struct LoadedClient {
    client: Client,
    files: Vec<FileStamp>,
    looked: Instant,
}

/// Identifies a state of a file: its inode, change time and length; `None` if it is missing.
type FileStamp = (PathBuf, Option<(u64, i64, i64, u64)>);

impl ReloadingClient {
    /// Reads nothing yet.
    pub(crate) fn new(kubeconfig: Option<PathBuf>) -> ReloadingClient {
        ReloadingClient { kubeconfig, state: Mutex::default() }
    }

    /// One request. After a rejection the files are read again for the next one.
    pub(crate) async fn send(&self, request: Request<Body>) -> Result<Response<Body>, BoxError> {
        let client = self.client().await?;
        let response = client.send(request).await?;
        if response.status() == StatusCode::UNAUTHORIZED {
            self.state.lock().await.current.take();
        }
        Ok(response)
    }

    /// The client of the files as they are now.
    pub(crate) async fn client(&self) -> Result<Client, ClusterError> {
        let mut state = self.state.lock().await;
        if let Some(loaded) = &mut state.current {
            if loaded.looked.elapsed() < CHECK_INTERVAL {
                return Ok(loaded.client.clone());
            }
            let paths = loaded.files.iter().map(|(path, _)| path.clone()).collect();
            if stamps(paths).await == loaded.files {
                loaded.looked = Instant::now();
                return Ok(loaded.client.clone());
            }
            tracing::info!("{}: changed, read again", place(self.kubeconfig.as_deref()));
        }
        // Until it can be read, the next request tries again.
        let loaded = self.load_shared(&mut state).await?;
        let client = loaded.client.clone();
        state.current = Some(loaded);
        Ok(client)
    }

    /// Waits for the read in progress, or begins one. An exec plugin that hangs has a bounded number of processes.
    async fn load_shared(&self, state: &mut ClientState) -> Result<LoadedClient, ClusterError> {
        state.abandoned.retain(|loading| !loading.is_finished());
        let may_abandon = state.abandoned.len() < MAX_ABANDONED;
        let is_lost = |(began, _): &mut (Instant, _)| may_abandon && began.elapsed() > ABANDON_AFTER;
        let lost = state.loading.take_if(is_lost);
        state.abandoned.extend(lost.map(|(_, loading)| loading));
        let load = || (Instant::now(), tokio::spawn(load(self.kubeconfig.clone())));
        let (began, loading) = state.loading.get_or_insert_with(load);
        let Ok(done) = time::timeout_at(*began + LOAD_WITHIN, loading).await else {
            let problem = format!("not read after {LOAD_WITHIN:?}: an exec plugin may hang");
            return Err(unusable(self.kubeconfig.as_deref(), problem));
        };
        state.loading = None;
        done.map_err(|error| unusable(self.kubeconfig.as_deref(), chain(&error)))?
    }
}

fn place(kubeconfig: Option<&Path>) -> String {
    kubeconfig.map_or_else(|| "service account of the pod".to_owned(), |path| path.display().to_string())
}

fn unusable(kubeconfig: Option<&Path>, problem: String) -> ClusterError {
    ClusterError::Unusable { place: place(kubeconfig), problem }
}

/// The stamps are from before the files are read: a change in between is found later.
async fn load(kubeconfig: Option<PathBuf>) -> Result<LoadedClient, ClusterError> {
    let at = kubeconfig.clone();
    let (mut config, files) = if let Some(path) = kubeconfig {
        let parsed = on_a_thread(at.clone(), move || Kubeconfig::read_from(path)).await?;
        let parsed = parsed.map_err(|error| unusable(at.as_deref(), problem(&error)))?;
        let files = stamps(files_of(&parsed).into_iter().chain(at.clone()).collect()).await;
        let config = Config::from_custom_kubeconfig(parsed, &KubeConfigOptions::default()).await;
        (config.map_err(|error| unusable(at.as_deref(), problem(&error)))?, files)
    } else {
        let files = stamps(POD_FILES.map(PathBuf::from).to_vec()).await;
        (Config::incluster().map_err(|error| unusable(None, chain(&error)))?, files)
    };
    config.connect_timeout = Some(CONNECT_WITHIN);
    config.read_timeout = Some(READ_WITHIN);
    // An exec plugin runs here.
    let runtime = tokio::runtime::Handle::current();
    let made = on_a_thread(at.clone(), move || {
        let _entered = runtime.enter();
        Client::try_from(config)
    });
    let client = made.await?.map_err(|error| unusable(at.as_deref(), tls_problem(&error)))?;
    Ok(LoadedClient { client, files, looked: Instant::now() })
}

/// It fails only when the runtime stops.
async fn on_a_thread<T: Send + 'static>(
    kubeconfig: Option<PathBuf>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ClusterError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| unusable(kubeconfig.as_deref(), chain(&error)))
}

/// The files that a kubeconfig names. kube reads token files again by itself.
fn files_of(kubeconfig: &Kubeconfig) -> Vec<PathBuf> {
    let clusters = kubeconfig.clusters.iter().filter_map(|named| named.cluster.as_ref());
    let authorities = clusters.filter_map(|cluster| cluster.certificate_authority.clone());
    let users = kubeconfig.auth_infos.iter().filter_map(|named| named.auth_info.as_ref());
    let keys = users.flat_map(|user| [user.client_certificate.clone(), user.client_key.clone()]);
    authorities.chain(keys.flatten()).map(PathBuf::from).collect()
}

async fn stamps(paths: Vec<PathBuf>) -> Vec<FileStamp> {
    let stamp = |path: PathBuf| {
        let found = fs_err::metadata(&path).ok();
        let stamp = found.map(|found| (found.ino(), found.ctime(), found.ctime_nsec(), found.len()));
        (path, stamp)
    };
    // It fails only when the runtime stops.
    let read = move || paths.into_iter().map(stamp).collect();
    tokio::task::spawn_blocking(read).await.unwrap_or_default()
}
