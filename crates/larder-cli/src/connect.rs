//! Finds the backend: what the user named, a runtime or larder's own store; else the first runtime that listens where
//! runtimes usually do.

use std::env;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::Backend;
use larder::gotext;
use larder_cri::{CriBackend, CriConfig, Endpoint, discover};
use larder_store::backend::StoreBackend;
use tokio::time::{self, Instant};

use crate::args::Connection;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::store;

const VARIABLE: &str = "LARDER_BACKEND";
/// What crictl reads, too.
const RUNTIME_VARIABLE: &str = "CONTAINER_RUNTIME_ENDPOINT";
const IMAGE_VARIABLE: &str = "IMAGE_SERVICE_ENDPOINT";

/// The name of larder's own store, where the others are sockets.
const STORE: &str = "store";

/// The folder of larder's own store, if that is what the user named.
fn named_store(args: &Connection) -> Result<Option<PathBuf>, Failure> {
    if args.root.is_some() {
        return Ok(args.root.clone());
    }
    let named = args.backend.clone().or_else(|| variable(VARIABLE));
    if named.as_deref() == Some(STORE) { store::default_root().map(Some) } else { Ok(None) }
}

/// The folder of larder's own store, for commands that work on nothing else.
pub(crate) fn store_root(args: &Connection) -> Result<PathBuf, Failure> {
    match (named_store(args)?, &args.backend) {
        (Some(root), _) => Ok(root),
        (None, Some(other)) => {
            Err(Failure::bad_input(format!("--backend {other}: this command works on larder's own store"))
                .hint("leave --backend out, or name a folder with --root DIR"))
        }
        (None, None) => store::default_root(),
    }
}

/// Larder's own store, opened.
pub(crate) fn store(args: &Connection) -> Result<StoreBackend, Failure> {
    store::open(&store_root(args)?)
}

/// The backend. A runtime is not spoken to before the first call; larder's own store is opened.
pub(crate) fn backend(args: &Connection) -> Result<Arc<dyn Backend>, Failure> {
    if let Some(root) = named_store(args)? {
        return Ok(Arc::new(store::open(&root)?));
    }
    let mut config = CriConfig::default();
    if let Some(timeout) = args.timeout {
        config.request_timeout = timeout;
        config.connect_timeout = config.connect_timeout.min(timeout);
    }
    let (endpoint, image_endpoint) = endpoints(args.backend.as_deref(), variable)?;
    config.image_endpoint = image_endpoint;
    Ok(Arc::new(CriBackend::new(endpoint, config)))
}

/// How long to wait before a runtime that does not answer is tried again.
const RETRY_PERIOD: Duration = Duration::from_secs(1);

/// The backend, once it has answered. One that does not is tried again for as long as `patience`, since a runtime may
/// come up later than larder when a machine starts.
pub(crate) async fn reach_within(
    args: &Connection,
    patience: Duration,
    out: &Out,
) -> Result<Arc<dyn Backend>, Failure> {
    let started = Instant::now();
    let mut told = false;
    loop {
        let failure = match reach(args).await {
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

/// The backend, once it has answered.
pub(crate) async fn reach(args: &Connection) -> Result<Arc<dyn Backend>, Failure> {
    let backend = backend(args)?;
    backend.info().await?;
    Ok(backend)
}

/// The failure, and which variable led to the endpoint that does not answer.
pub(crate) fn explain(args: &Connection, failure: Failure) -> Failure {
    if args.backend.is_some() || failure.outcome() != Outcome::Unreachable {
        return failure;
    }
    let set = |name: &&str| variable(name).is_some_and(|value| !value.is_empty());
    match [VARIABLE, RUNTIME_VARIABLE, IMAGE_VARIABLE].into_iter().find(set) {
        Some(name) => failure.hint(format!("the socket is the one that {name} names")),
        None => failure,
    }
}

fn variable(name: &str) -> Option<String> {
    env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Where the runtime is, and where images are if that is another place.
fn endpoints(
    named: Option<&str>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<(Endpoint, Option<Endpoint>), Failure> {
    let variable = |name| variable(name).filter(|value| !value.is_empty());
    if let Some(named) = named {
        return Ok((parse(named, "--backend")?, None));
    }
    if let Some(named) = variable(VARIABLE) {
        return Ok((parse(&named, VARIABLE)?, None));
    }
    let runtime = variable(RUNTIME_VARIABLE).map(|text| parse(&text, RUNTIME_VARIABLE)).transpose()?;
    let image = variable(IMAGE_VARIABLE).map(|text| parse(&text, IMAGE_VARIABLE)).transpose()?;
    match (runtime, image) {
        (Some(runtime), image) => Ok((runtime, image)),
        (None, Some(image)) => Ok((image, None)),
        (None, None) => match discover() {
            Ok(endpoint) => Ok((endpoint, None)),
            Err(error) => Err(Failure::unreachable(error.to_string())
                .hint(error.hint())
                .hint("or use larder's own store, which needs no runtime: --backend store")),
        },
    }
}

fn parse(text: &str, from: &str) -> Result<Endpoint, Failure> {
    Endpoint::parse(text).map_err(|error| {
        Failure::bad_input(format!("{from} {text}: {error}"))
            .hint("write it as unix:///path/to.sock, or store for larder's own store")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(named: Option<&str>, variables: &[(&str, &str)]) -> Result<(String, Option<String>), Failure> {
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        let (runtime, image) = endpoints(named, variable)?;
        Ok((runtime.to_string(), image.map(|image| image.to_string())))
    }

    #[test]
    fn the_flag_wins_over_larders_variable_and_that_over_crictls() {
        let variables = [(RUNTIME_VARIABLE, "unix:///r.sock"), (IMAGE_VARIABLE, "unix:///i.sock")];
        assert_eq!(found(Some("/a.sock"), &variables), Ok(("unix:///a.sock".into(), None)));
        let all = [(VARIABLE, "/l.sock"), variables[0], variables[1]];
        assert_eq!(found(Some("/a.sock"), &all), Ok(("unix:///a.sock".into(), None)));
        assert_eq!(found(None, &all), Ok(("unix:///l.sock".into(), None)));
        assert_eq!(found(None, &variables), Ok(("unix:///r.sock".into(), Some("unix:///i.sock".into()))));
        assert_eq!(found(None, &variables[1..]), Ok(("unix:///i.sock".into(), None)));
    }

    #[test]
    fn an_empty_variable_is_as_good_as_none() {
        let variables = [(VARIABLE, ""), (RUNTIME_VARIABLE, ""), (IMAGE_VARIABLE, "unix:///i.sock")];
        assert_eq!(found(None, &variables), Ok(("unix:///i.sock".into(), None)));
    }

    #[test]
    fn a_bad_endpoint_names_where_it_came_from() {
        let variables = [(RUNTIME_VARIABLE, "tcp://1.2.3.4:5")];
        let named = found(None, &[(VARIABLE, "tcp://1.2.3.4:5")]).expect_err("tcp is no endpoint");
        assert!(format!("{named:?}").contains("\"LARDER_BACKEND tcp://1.2.3.4:5: "), "{named:?}");
        let failure = found(None, &variables).expect_err("tcp is no endpoint");
        assert!(
            format!("{failure:?}").contains("CONTAINER_RUNTIME_ENDPOINT tcp://1.2.3.4:5: only support unix")
        );
    }
}
