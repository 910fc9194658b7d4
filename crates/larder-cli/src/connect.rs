//! Finds the backend: larder's own store, unless the user names a runtime.

mod named;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use larder::backend::Backend;
use larder::gotext;
use larder::records::{ImageRecords, Verification};
use larder_cri::{CriBackend, CriConfig};
#[cfg(feature = "docker")]
use larder_docker::DockerBackend;
use larder_registry::RegistryConfig;
use larder_store::backend::StoreBackend;
use tokio::time::{self, Instant};

use crate::access;
use crate::args::Connection;
use crate::collect::{Notes, Spares};
use crate::daemon::Daemon;
use crate::docker;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::store;
pub(crate) use named::{DOCKER, is_docker, meant, variable};
use named::{IMAGE_VARIABLE, Named, RUNTIME_VARIABLE, STORE, VARIABLE, discovered, parse};

/// The folder of larder's own store, for commands that work on nothing else. What the variable names is for the others.
pub(crate) fn store_root(args: &Connection) -> Result<PathBuf, Failure> {
    match (Named::by(args, |_| None), &args.backend) {
        (Named::Store(Some(root)), _) => Ok(root),
        (Named::Store(None), _) | (_, None) => store::default_root(),
        (_, Some(other)) => {
            Err(Failure::bad_input(format!("--backend {other}: this command works on larder's own store"))
                .hint("leave --backend out, or name a folder with --root DIR"))
        }
    }
}

/// Larder's own store, opened; there must be one.
pub(crate) fn store(args: &Connection) -> Result<StoreBackend, Failure> {
    store::open(&store_root(args)?, registries(args)?)
}

/// Larder's own store, opened, and made if there is none: for commands that bring images.
pub(crate) fn store_to_fill(args: &Connection) -> Result<StoreBackend, Failure> {
    store::open_or_make(&store_root(args)?, registries(args)?)
}

/// Larder's own store, opened; `None`, and a note, where nothing has been pulled yet into the usual one.
pub(crate) fn store_to_list(args: &Connection, out: &Out) -> Result<Option<StoreBackend>, Failure> {
    let root = store_root(args)?;
    if args.root.is_some() {
        return store::open(&root, registries(args)?).map(Some);
    }
    let store = store::open_usual(registries(args)?)?;
    if store.is_none() {
        nothing_yet(&root, out);
    }
    Ok(store)
}

/// How larder's own store finds registries.
fn registries(args: &Connection) -> Result<RegistryConfig, Failure> {
    store::registries(args.certs_d.as_deref())
}

fn nothing_yet(root: &Path, out: &Out) {
    out.note(format_args!(
        "note: nothing has been pulled yet: there is no image store in {}",
        root.display()
    ));
}

/// The backend. A runtime is not spoken to before the first call; larder's own store is opened, and must be there.
pub(crate) fn backend(args: &Connection) -> Result<Arc<dyn Backend>, Failure> {
    Ok(chosen(args)?.into_backend())
}

/// The backend, for commands that tell more of the one than of the other.
#[derive(Clone)]
pub(crate) enum Chosen {
    /// Larder's own store, opened.
    Store(StoreBackend),
    /// A runtime, which is not spoken to before the first call.
    Runtime(Arc<CriBackend>),
    /// A Docker Engine, which is not spoken to before the first call.
    #[cfg(feature = "docker")]
    Docker(Arc<DockerBackend>),
}

impl Chosen {
    /// What it is, for people: the folder of the store, or the endpoint of the runtime.
    pub(crate) fn told(&self) -> String {
        match self {
            Chosen::Store(store) => format!("larder's own store in {}", store.store().root().display()),
            Chosen::Runtime(runtime) => format!("the images of {}", runtime.endpoint()),
            #[cfg(feature = "docker")]
            Chosen::Docker(engine) => format!("the images of Docker at {}", engine.host()),
        }
    }

    pub(crate) fn into_backend(self) -> Arc<dyn Backend> {
        match self {
            Chosen::Store(store) => Arc::new(store),
            Chosen::Runtime(runtime) => runtime,
            #[cfg(feature = "docker")]
            Chosen::Docker(engine) => engine,
        }
    }

    /// Larder's own store, if it is that.
    pub(crate) fn store(&self) -> Option<&StoreBackend> {
        match self {
            Chosen::Store(store) => Some(store),
            Chosen::Runtime(_) => None,
            #[cfg(feature = "docker")]
            Chosen::Docker(_) => None,
        }
    }

    /// Where it is.
    pub(crate) fn target(&self) -> Target {
        match self {
            Chosen::Store(store) => Target::Store(store.store().root().to_owned()),
            Chosen::Runtime(runtime) => Target::Runtime(runtime.endpoint().to_string()),
            #[cfg(feature = "docker")]
            Chosen::Docker(engine) => Target::Runtime(engine.host().to_string()),
        }
    }
}

/// Where the images are that the user means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// In larder's own store, in this folder.
    Store(PathBuf),
    /// In the runtime or engine at this endpoint.
    Runtime(String),
}

/// Where the images are that the user means. Nothing is opened.
pub(crate) fn target(args: &Connection) -> Result<Target, Failure> {
    Ok(match Named::by(args, variable) {
        Named::Store(Some(root)) => Target::Store(root),
        Named::Store(None) => Target::Store(store::default_root()?),
        Named::Docker(text, by) => Target::Runtime(docker::place(&text, by)?),
        Named::Runtime(text, by) => Target::Runtime(parse(&text, by)?.to_string()),
        Named::Cri => Target::Runtime(discovered(variable)?.0.to_string()),
    })
}

/// Whether the user names any place: a backend, a store, or one for the state.
pub(crate) fn is_named(args: &Connection) -> bool {
    args.state.is_some() || args.backend.is_some() || Named::by(args, variable) != Named::Store(None)
}

/// What the user wants to work on. Larder's own store must be there.
pub(crate) fn chosen(args: &Connection) -> Result<Chosen, Failure> {
    chosen_with(args, store::open)
}

/// What the user wants to bring images to. Larder's own store is made if there is none.
pub(crate) fn chosen_to_fill(args: &Connection) -> Result<Chosen, Failure> {
    chosen_with(args, store::open_or_make)
}

/// What the user wants to list; `None`, and a note, where nothing has been pulled yet into the usual store.
pub(crate) fn chosen_to_list(args: &Connection, out: &Out) -> Result<Option<Chosen>, Failure> {
    match Named::by(args, variable) {
        Named::Store(None) => Ok(store_to_list(args, out)?.map(Chosen::Store)),
        _ => chosen(args).map(Some),
    }
}

fn chosen_with(
    args: &Connection,
    open: impl Fn(&Path, RegistryConfig) -> Result<StoreBackend, Failure>,
) -> Result<Chosen, Failure> {
    let named = Named::by(args, variable);
    if let (Some(folder), false) = (&args.certs_d, matches!(named, Named::Store(_))) {
        return Err(Failure::bad_input(format!("--certs-d {}: a runtime does not read it", folder.display()))
            .hint("configure the runtime's own, for containerd config_path; or leave --backend and LARDER_BACKEND out"));
    }
    let (endpoint, image_endpoint) = match named {
        Named::Store(Some(root)) => return open(&root, registries(args)?).map(Chosen::Store),
        Named::Store(None) => return open(&store::default_root()?, registries(args)?).map(Chosen::Store),
        Named::Docker(text, by) => return docker::open(&text, by, args.timeout, None),
        Named::Runtime(text, by) => (parse(&text, by)?, None),
        Named::Cri => discovered(variable)?,
    };
    let mut config = CriConfig { image_endpoint, ..CriConfig::default() };
    if let Some(timeout) = args.timeout {
        config.request_timeout = timeout;
        config.connect_timeout = config.connect_timeout.min(timeout);
    }
    Ok(Chosen::Runtime(Arc::new(CriBackend::new(endpoint, config))))
}

/// How long to wait before a runtime that does not answer is tried again.
const RETRY_PERIOD: Duration = Duration::from_secs(1);

/// The daemon or the backend, once it has answered. One that does not is tried again for as long as `patience`, since a runtime may
/// come up later than larder when a machine starts.
pub(crate) async fn reach_within(
    args: &Connection,
    verification: &Verification,
    patience: Duration,
    out: &Out,
) -> Result<Reached, Failure> {
    let started = Instant::now();
    let mut told = false;
    loop {
        let failure = match reach(args, verification).await {
            Err(failure) if failure.outcome() == Outcome::Unreachable => failure,
            reached_or_never => return reached_or_never,
        };
        if started.elapsed() + RETRY_PERIOD > patience {
            return Err(failure);
        }
        if !told {
            told = true;
            let patience = gotext::duration(patience);
            out.note(format_args!("note: waiting up to {patience} for the runtime: {}", failure.message()));
        }
        time::sleep(RETRY_PERIOD).await;
    }
}

/// What makes images present, and has answered.
pub(crate) enum Reached {
    /// A backend of this process.
    Own {
        backend: Arc<dyn Backend>,
        /// Where it is written down at the end what was ensured on it.
        notes: Notes,
        /// The same for each image at once, where others collect meanwhile.
        spares: Option<Spares>,
        /// Who may use what is present.
        records: Arc<ImageRecords>,
    },
    /// A daemon, whose backend answers.
    Daemon(Daemon),
}

/// The daemon or the backend, once it has answered.
pub(crate) async fn reach(args: &Connection, verification: &Verification) -> Result<Reached, Failure> {
    if let Some(daemon) = Daemon::find(args)? {
        daemon.answered().await?;
        return Ok(Reached::Daemon(daemon));
    }
    let chosen = chosen_to_fill(args)?;
    let notes = Notes::of(args, &chosen)?;
    let spares = chosen.store().is_none().then(|| Spares::at(notes.place()));
    let backend = chosen.into_backend();
    backend.info().await?;
    let records = access::records(notes.place(), verification.clone())?;
    records.settle_with(Arc::clone(&backend));
    records.recover(&*backend).await;
    Ok(Reached::Own { backend, notes, spares, records })
}

/// The failure of a command that works on larder's own store only, and that the variable does not change this.
pub(crate) fn explain_store(args: &Connection, failure: Failure) -> Failure {
    let by_default = args.root.is_none() && args.backend.is_none();
    match variable(VARIABLE).filter(|named| by_default && named != STORE) {
        Some(named) => failure.hint(format!(
            "{VARIABLE}={named} is not read: this command works on larder's own store, since a runtime has no such thing"
        )),
        None => failure,
    }
}

/// The failure, and which variable led to the endpoint that does not answer.
pub(crate) fn explain(args: &Connection, failure: Failure) -> Failure {
    if failure.outcome() != Outcome::Unreachable {
        return failure;
    }
    let name = match Named::by(args, variable) {
        Named::Runtime(_, VARIABLE) | Named::Docker(_, VARIABLE) => Some(VARIABLE.to_owned()),
        Named::Docker(text, _) if text == DOCKER => docker::named_by(variable),
        Named::Cri => {
            let set = [RUNTIME_VARIABLE, IMAGE_VARIABLE].into_iter().find(|name| variable(name).is_some());
            set.map(str::to_owned)
        }
        _ => None,
    };
    match name {
        Some(name) => failure.hint(format!("the socket is the one that {name} names")),
        None => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_the_store_refuse_a_runtime_and_do_not_read_the_variable() {
        let root = Connection { root: Some("/images".into()), ..Connection::default() };
        assert_eq!(store_root(&root), Ok("/images".into()));
        for other in ["cri", "/a.sock"] {
            let named = Connection { backend: Some(other.to_owned()), ..Connection::default() };
            let refused = store_root(&named).expect_err("not the store");
            assert_eq!(refused.outcome(), Outcome::BadInput);
        }
    }
}
