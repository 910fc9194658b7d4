//! Programs that give credentials: Docker's credential helpers and kubelet's exec credential providers.

use std::env;
use std::path::Path;
use std::sync::Arc;

use larder::credentials::TokenPolicy;
use larder::credentials::helpers::CredentialHelpers;
use larder::credentials::plugin::{
    CredentialProviderConfig, NoServiceAccountClient, Plugins, ServiceAccountClient,
};

use crate::Error;

/// The credential helpers on the `PATH`; none where tokens are ignored, as kubelet asks none.
pub fn helpers(tokens: TokenPolicy) -> Option<CredentialHelpers> {
    let path = env::var_os("PATH").unwrap_or_default();
    (tokens == TokenPolicy::Keep).then(|| CredentialHelpers::on_path(&path))
}

/// The credential providers that a configuration file names, with their programs in this directory. Without `accounts`
/// a provider gets no tokens.
pub fn plugins(
    config: &Path,
    programs: &Path,
    accounts: Option<Arc<dyn ServiceAccountClient>>,
) -> Result<Plugins, Error> {
    let accounts = accounts.unwrap_or_else(|| Arc::new(NoServiceAccountClient));
    let opened = Plugins::open(config, programs, &decode, &accounts);
    opened.map_err(|error| Error::bad_input(error.to_string()).hints(error.hint()))
}

/// Without an excerpt: the environment of a provider may hold passwords.
fn decode(text: &str) -> Result<CredentialProviderConfig, String> {
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
    fn a_provider_without_a_name_has_no_program() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("providers.yaml");
        fs_err::write(
            &config,
            "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n- name: ''\n  \
             matchImages: [registry.example]\n  defaultCacheDuration: 1m\n  \
             apiVersion: credentialprovider.kubelet.k8s.io/v1\n",
        )
        .unwrap();
        let error = plugins(&config, dir.path(), None).err().unwrap();
        let expected =
            format!("credential provider \"\": {} is not an executable file", dir.path().display());
        assert_eq!(error.message(), expected);
    }

    #[test]
    fn an_error_names_its_place_and_shows_no_secrets_around_it() {
        let text = "kind: CredentialProviderConfig\nproviders:\n- name: p\n  env: [{name: K, value: hunter2, more: hunter2}]\n";
        let error = decode(text).err().unwrap();
        assert!(error.contains("more") && error.contains("line 4"), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
}
