//! What the user names as the backend: with a flag, with a variable, or where crictl is told to look.

use std::env;
use std::path::{Path, PathBuf};

use larder_cri::{Endpoint, discover};

use crate::args::Connection;
use crate::failure::Failure;

/// Names the backend where no flag does.
pub(super) const VARIABLE: &str = "LARDER_BACKEND";
/// What crictl reads, too. They say which runtime is meant, not that one is.
pub(super) const RUNTIME_VARIABLE: &str = "CONTAINER_RUNTIME_ENDPOINT";
pub(super) const IMAGE_VARIABLE: &str = "IMAGE_SERVICE_ENDPOINT";

/// The name of larder's own store, where the others are sockets.
pub(super) const STORE: &str = "store";
/// The name of whatever runtime runs here.
const CRI: &str = "cri";
/// The name of the Docker Engine that docker's own client would talk to; with `://` an address follows.
pub(crate) const DOCKER: &str = "docker";

/// What the user wants to work on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Named {
    /// Larder's own store, in this folder or its usual one.
    Store(Option<PathBuf>),
    /// Whatever runtime runs here.
    Cri,
    /// A Docker Engine, as it was written, and what named it.
    Docker(String, &'static str),
    /// The runtime at this endpoint, and what named it.
    Runtime(String, &'static str),
}

impl Named {
    /// By the flags, else by the variable.
    pub(super) fn by(args: &Connection, variable: impl Fn(&str) -> Option<String>) -> Named {
        if args.root.is_some() {
            return Named::Store(args.root.clone());
        }
        let flag = args.backend.clone().map(|text| (text, "--backend"));
        match flag.or_else(|| Some((variable(VARIABLE)?, VARIABLE))) {
            None => Named::Store(None),
            Some((text, _)) if text == STORE => Named::Store(None),
            Some((text, _)) if text == CRI => Named::Cri,
            Some((text, by)) if is_docker(&text) => Named::Docker(text, by),
            Some((text, by)) => Named::Runtime(text, by),
        }
    }
}

/// Whether a text names a Docker Engine.
pub(crate) fn is_docker(text: &str) -> bool {
    text == DOCKER || text.starts_with("docker://")
}

/// The value of a variable. An empty one counts as unset.
pub(crate) fn variable(name: &str) -> Option<String> {
    let value = env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    value.filter(|value| !value.is_empty())
}

/// Where the runtime is, and where images are if that is another place: where crictl is told to look, else the first
/// socket that a runtime listens on where runtimes usually do.
pub(super) fn discovered(
    variable: impl Fn(&str) -> Option<String>,
) -> Result<(Endpoint, Option<Endpoint>), Failure> {
    let runtime = variable(RUNTIME_VARIABLE).map(|text| parse(&text, RUNTIME_VARIABLE)).transpose()?;
    let image = variable(IMAGE_VARIABLE).map(|text| parse(&text, IMAGE_VARIABLE)).transpose()?;
    match (runtime, image) {
        (Some(runtime), image) => Ok((runtime, image)),
        (None, Some(image)) => Ok((image, None)),
        (None, None) => match discover() {
            Ok(endpoint) => Ok((endpoint, None)),
            Err(error) => Err(Failure::unreachable(error.to_string())
                .hint(error.hint())
                .hint("or leave --backend out: larder's own store needs no runtime")),
        },
    }
}

/// What a misspelt name of a backend stands for. A socket has a slash in its path, or is there.
pub(crate) fn meant(text: &str) -> Option<&'static str> {
    let is_word = !text.contains(['/', ':', '.']) && !Path::new(text).exists();
    larder::near::nearest(text, [STORE, CRI, DOCKER]).filter(|_| is_word)
}

/// An endpoint; `from` is what named it.
pub(super) fn parse(text: &str, from: &str) -> Result<Endpoint, Failure> {
    if let Some(meant) = meant(text) {
        return Err(Failure::bad_input(format!("{from} {text}: there is no such backend"))
            .hint(format!("did you mean {meant}?")));
    }
    Endpoint::parse(text).map_err(|error| {
        Failure::bad_input(format!("{from} {text}: {error}"))
            .hint("write it as unix:///path/to.sock, cri for whatever runtime runs here, docker for Docker Engine, or store for larder's own store")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::docker;
    use crate::exit::Outcome;

    fn args(backend: Option<&str>, root: Option<&str>) -> Connection {
        Connection {
            backend: backend.map(str::to_owned),
            root: root.map(PathBuf::from),
            ..Connection::default()
        }
    }

    fn variables<'a>(set: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    }

    #[test]
    fn a_runtime_is_used_only_where_one_is_named_to_larder() {
        let crictl = [(RUNTIME_VARIABLE, "unix:///r.sock"), (IMAGE_VARIABLE, "unix:///i.sock")];
        let named = |backend, set: &[(&str, &str)]| Named::by(&args(backend, None), variables(set));
        let runtime = |text: &str, by| Named::Runtime(text.into(), by);
        assert_eq!(named(None, &[]), Named::Store(None));
        assert_eq!(
            named(None, &crictl),
            Named::Store(None),
            "what crictl talks to is no wish of larder's user"
        );
        assert_eq!(named(None, &[(VARIABLE, "/l.sock")]), runtime("/l.sock", VARIABLE));
        assert_eq!(named(None, &[(VARIABLE, "cri")]), Named::Cri);
        assert_eq!(named(None, &[(VARIABLE, "docker")]), Named::Docker("docker".into(), VARIABLE));
        let socket = "docker:///d.sock";
        assert_eq!(named(Some(socket), &[]), Named::Docker(socket.into(), "--backend"));
        assert_eq!(named(None, &[(docker::HOST, "unix:///d.sock")]), Named::Store(None), "it is docker's");
        assert_eq!(named(Some("/a.sock"), &[(VARIABLE, "/l.sock")]), runtime("/a.sock", "--backend"));
        assert_eq!(named(Some("store"), &[(VARIABLE, "/l.sock")]), Named::Store(None));
        let rooted = Named::by(&args(None, Some("/images")), variables(&[(VARIABLE, "/l.sock")]));
        assert_eq!(rooted, Named::Store(Some("/images".into())));
    }

    #[test]
    fn discovery_looks_first_where_crictl_does() {
        let all = [(RUNTIME_VARIABLE, "unix:///r.sock"), (IMAGE_VARIABLE, "/i.sock")];
        let found = |set| {
            let (runtime, image) = discovered(variables(set)).expect("an endpoint");
            (runtime.to_string(), image.map(|image| image.to_string()))
        };
        assert_eq!(found(&all), ("unix:///r.sock".into(), Some("unix:///i.sock".into())));
        assert_eq!(found(&all[1..]), ("unix:///i.sock".into(), None));
    }

    #[test]
    fn a_misspelt_backend_is_no_socket() {
        for (text, meant) in [("dokcer", "docker"), ("stor", "store"), ("Docker", "docker"), ("CRI", "cri")] {
            let refused = parse(text, "--backend").expect_err(text);
            assert_eq!(refused.outcome(), Outcome::BadInput);
            assert_eq!(refused.next_steps(), [format!("did you mean {meant}?")]);
        }
        for socket in ["/run/dokcer", "dokcer.sock", "unix:///docke", "./docke", "something"] {
            assert!(parse(socket, "--backend").is_ok(), "{socket}");
        }
    }

    #[test]
    fn a_bad_endpoint_names_where_it_came_from() {
        let failure =
            discovered(variables(&[(RUNTIME_VARIABLE, "tcp://1.2.3.4:5")])).expect_err("tcp is none");
        assert!(
            format!("{failure:?}").contains("CONTAINER_RUNTIME_ENDPOINT tcp://1.2.3.4:5: only support unix")
        );
    }
}
