//! Selects the helper of a repository. Pure.

use std::collections::BTreeMap;

use crate::credentials::docker_config::DockerConfig;
use crate::credentials::matching;

/// The name of Docker Hub's credentials in helpers.
const HUB_SERVER: &str = "https://index.docker.io/v1/";
const HUB: &str = "docker.io";
const HUB_HOSTS: [&str; 3] = ["index.docker.io", "docker.io", "registry-1.docker.io"];

/// The helpers that a docker config names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HelperNames {
    store: Option<String>,
    by_host: BTreeMap<String, String>,
}

/// One request to one helper.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HelperRequest {
    /// The name behind `docker-credential-`.
    pub helper: String,
    /// The server, as Docker names it.
    pub server: String,
}

impl HelperNames {
    /// Helpers of a config. A `credHelpers` entry that names no helper turns the store off for its registry.
    pub fn from_config(config: &DockerConfig) -> HelperNames {
        let host = |location: &String| matching::key_of(location).ok();
        let by_host = config.cred_helpers.iter().filter_map(|(at, helper)| Some((host(at)?, helper.clone())));
        HelperNames { store: config.creds_store.clone(), by_host: by_host.collect() }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.store.is_none() && self.by_host.is_empty()
    }

    /// The helpers, one description each.
    pub(crate) fn programs(&self) -> impl Iterator<Item = String> {
        let named = |helper: &String| format!("docker-credential-{helper}");
        let by_host = self.by_host.iter().map(move |(host, helper)| format!("{} for {host}", named(helper)));
        by_host.chain(self.store.iter().map(named))
    }

    /// The request for a normalised repository: the helper of its registry, else the store.
    pub fn request_for(&self, repository: &str) -> Option<HelperRequest> {
        let host = repository.split('/').next().unwrap_or_default();
        let (names, server): (&[&str], _) =
            if host == HUB { (&HUB_HOSTS, HUB_SERVER) } else { (&[host], host) };
        let own = names.iter().find_map(|name| {
            let with_path = self.by_host.iter().find(|(key, _)| key.split('/').next() == Some(name));
            self.by_host.get(*name).or(with_path.map(|(_, helper)| helper))
        });
        let helper = own.or(self.store.as_ref()).filter(|helper| !helper.is_empty())?;
        Some(HelperRequest { helper: helper.clone(), server: server.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(store: Option<&str>, helpers: &[(&str, &str)], repository: &str) -> Option<(String, String)> {
        let config = DockerConfig {
            creds_store: store.map(str::to_owned),
            cred_helpers: helpers.iter().map(|(at, helper)| ((*at).into(), (*helper).into())).collect(),
            ..DockerConfig::default()
        };
        HelperNames::from_config(&config).request_for(repository).map(|asked| (asked.helper, asked.server))
    }

    #[test]
    fn the_helper_of_a_registry_comes_before_the_store() {
        let helpers = [("r.example:5000", "ecr"), ("off.example", "")];
        let is = |repository, helper: &str, server: &str| {
            assert_eq!(asked(Some("pass"), &helpers, repository), Some((helper.into(), server.into())));
        };
        is("r.example:5000/team/app", "ecr", "r.example:5000");
        is("r.example/team/app", "pass", "r.example");
        assert_eq!(asked(Some("pass"), &helpers, "off.example/app"), None);
        assert_eq!(asked(None, &helpers, "quay.io/app"), None);
    }

    #[test]
    fn the_hub_is_asked_for_by_the_name_that_docker_uses() {
        let hub = |at| asked(None, &[(at, "pass")], "docker.io/library/busybox");
        for at in
            ["docker.io", "index.docker.io", "https://index.docker.io/v1/", "https://index.docker.io/v1"]
        {
            assert_eq!(hub(at), Some(("pass".into(), HUB_SERVER.into())), "{at}");
        }
        assert_eq!(hub("docker.io.example"), None);
    }
}
