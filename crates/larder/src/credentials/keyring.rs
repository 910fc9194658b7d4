//! Credentials by location, and the lookup for one repository.

use std::collections::BTreeMap;
use std::fmt;

use super::credential::{Credential, CredentialLocation, CredentialSource};
use super::docker_config::DockerConfig;
use super::matching::{self, RegistryLocation};

/// The key of Docker Hub's credentials in many files.
const HUB_KEY: &str = "index.docker.io";

/// Credentials of any number of docker configs.
#[derive(Clone, Default)]
pub struct Keyring {
    slots: BTreeMap<String, RegistryCredentials>,
}

#[derive(Clone)]
struct RegistryCredentials {
    /// `None` if the key, built from decoded parts, is not a URL: it then matches nothing.
    location: Option<RegistryLocation>,
    credentials: Vec<Credential>,
}

impl Keyring {
    /// Adds all entries of a config, found at `origin`, for `source`. Ignores entries whose location is not a URL; the
    /// reader of a config reports them once ([`DockerConfig::unusable_entries`]), because each lookup builds a keyring.
    /// Entries of one key are looked up in the order in which their configs were added.
    pub fn add(
        &mut self,
        config: &DockerConfig,
        source: Option<&CredentialSource>,
        origin: &CredentialLocation,
    ) {
        for (location, entry) in &config.entries {
            let Ok(key) = matching::key_of(location) else { continue };
            let location = RegistryLocation::parse(&key).ok();
            let slot = self
                .slots
                .entry(key)
                .or_insert_with(|| RegistryCredentials { location, credentials: Vec::new() });
            slot.credentials.push(Credential::of(entry, source, origin));
        }
    }

    /// The keys in lookup order: descending by bytes, so that a longer path comes before a shorter one.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.slots.keys().rev().map(String::as_str)
    }

    /// The credentials for a normalised repository, in the order to try them. Every key that covers it contributes;
    /// only if none does, an image of Docker Hub gets the credentials of `index.docker.io`.
    pub fn lookup(&self, repository: &str) -> Vec<Credential> {
        let target = RegistryLocation::parse(repository).ok();
        let covers = |slot: &RegistryCredentials| match (&slot.location, &target) {
            (Some(pattern), Some(target)) => pattern.covers(target),
            _ => false,
        };
        let mut found = Vec::new();
        for slot in self.slots.values().rev().filter(|slot| covers(slot)) {
            found.extend_from_slice(&slot.credentials);
        }
        if found.is_empty() && matching::is_default_registry(repository) {
            return self.slots.get(HUB_KEY).map_or_else(Vec::new, |slot| slot.credentials.clone());
        }
        found
    }
}

/// Counts only.
impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keyring").field("keys", &self.slots.len()).finish()
    }
}
