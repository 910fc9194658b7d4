//! Opens kubelet's exec credential providers.

use std::path::Path;
use std::sync::Arc;

use larder::credentials::plugin::{ConfigDocument, NoServiceAccounts, Plugins, ServiceAccounts};

use crate::failure::Failure;

/// Those that a configuration names, with their programs in this folder.
pub(crate) fn plugins(config: &Path, programs: &Path) -> Result<Plugins, Failure> {
    let accounts: Arc<dyn ServiceAccounts> = Arc::new(NoServiceAccounts);
    let opened = Plugins::open(config, programs, &decode, &accounts);
    opened.map_err(|error| {
        let failure = Failure::bad_input(error.to_string());
        match error.hint() {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    })
}

/// Without an excerpt: the environment of a provider may hold passwords.
fn decode(text: &str) -> Result<ConfigDocument, String> {
    let options = serde_saphyr::options! { with_snippet: false };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let text = error.to_string();
        text.lines().next().unwrap_or_default().to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistake_is_told_with_its_place_and_without_the_secrets_around_it() {
        let text = "kind: CredentialProviderConfig\nproviders:\n- name: p\n  env: [{name: K, value: hunter2, more: hunter2}]\n";
        let error = decode(text).err().unwrap();
        assert!(error.contains("more") && error.contains("line 4"), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
}
