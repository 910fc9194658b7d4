//! The name of a registry, as `login` accepts it and as docker's `config.json` has it. Pure.

use larder::reference::Reference;

use crate::error::Error;

const HUB: &str = "docker.io";
const HUB_HOSTS: [&str; 3] = [HUB, "index.docker.io", "registry-1.docker.io"];
const HUB_KEY: &str = "https://index.docker.io/v1/";

/// A registry to log in to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoginRegistry {
    host: String,
}

impl LoginRegistry {
    /// `HOST` or `HOST:PORT`; a scheme before it and docker's old paths after it are dropped.
    pub fn parse(text: &str) -> Result<LoginRegistry, Error> {
        let bare =
            ["https://", "http://"].iter().find_map(|scheme| text.strip_prefix(scheme)).unwrap_or(text);
        let bare = ["/v1/", "/v2/", "/v1", "/v2", "/"]
            .iter()
            .find_map(|path| bare.strip_suffix(path))
            .unwrap_or(bare);
        if HUB_HOSTS.contains(&bare) {
            return Ok(LoginRegistry { host: HUB.to_owned() });
        }
        // The name in front of an image: what has neither dot nor colon is a repository of the hub.
        let is_registry =
            Reference::parse(&format!("{bare}/login")).is_ok_and(|image| image.registry() == bare);
        if is_registry {
            return Ok(LoginRegistry { host: bare.to_owned() });
        }
        if let Some((host, _)) = bare.split_once('/')
            && (host.contains(['.', ':']) || host == "localhost")
            && let Ok(registry) = LoginRegistry::parse(host)
        {
            return Err(Error::bad_input("cannot log in to a repository, only to a registry")
                .hint(format!("use {}", registry.host)));
        }
        // The argument may be a password in the wrong place, so it is not printed.
        Err(Error::bad_input("invalid registry name")
            .hint("write HOST or HOST:PORT, as in an image name: registry.example:5000"))
    }

    /// As in front of an image's name.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Its key in docker's file.
    pub fn key(&self) -> &str {
        if self.host == HUB { HUB_KEY } else { &self.host }
    }

    /// All keys that docker and podman may have used for it.
    pub fn keys(&self) -> impl Iterator<Item = String> + use<> {
        let hosts =
            if self.host == HUB { HUB_HOSTS.map(str::to_owned).to_vec() } else { vec![self.host.clone()] };
        hosts.into_iter().flat_map(|host| {
            let schemes = ["", "https://", "http://"];
            schemes.into_iter().flat_map(move |scheme| {
                let host = host.clone();
                ["", "/", "/v1", "/v1/", "/v2", "/v2/"].map(move |path| format!("{scheme}{host}{path}"))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_registry_leads_to_the_registry() {
        for text in ["r.example/team", "https://r.example/team/app", "r.example:5000/x", "localhost/x"] {
            let refused = LoginRegistry::parse(text).unwrap_err();
            let host = text.trim_start_matches("https://").split('/').next().unwrap();
            assert_eq!(refused.next_steps(), [format!("use {host}").into()]);
        }
        let secret = LoginRegistry::parse("hunter2/x").unwrap_err();
        assert!(!format!("{secret:?}").contains("hunter2"), "it may be a password");
    }

    #[test]
    fn a_registry_is_known_by_its_host() {
        for (text, host, key) in [
            ("r.example", "r.example", "r.example"),
            ("https://r.example:5000/v2/", "r.example:5000", "r.example:5000"),
            ("localhost:5000/", "localhost:5000", "localhost:5000"),
            ("docker.io", "docker.io", HUB_KEY),
            (HUB_KEY, "docker.io", HUB_KEY),
        ] {
            let registry = LoginRegistry::parse(text).unwrap();
            assert_eq!((registry.host(), registry.key()), (host, key), "{text}");
        }
        assert!(LoginRegistry::parse("docker.io").unwrap().keys().any(|key| key == HUB_KEY));
        for text in ["", "r.example/team", "hunter2", "bob:hunter2@r.example", "r.example:x", "https://"] {
            let failure = LoginRegistry::parse(text).unwrap_err();
            assert!(!format!("{failure:?}").contains("hunter2"), "{failure:?}");
        }
    }
}
