//! Which credentials fit an image, and where they come from: printed with `-v`, and after a registry rejected them.
//! Names of sources, users and registries only, never a password or token.

use std::collections::BTreeSet;
use std::sync::Arc;

use larder::credentials::helpers::HelperNames;
use larder::credentials::plugin::Plugins;
use larder::credentials::{
    CredentialLocation, DockerConfig, Keyring, ProgramResult, ProgramResultLog, PullSecret, TokenPolicy,
};
use larder::hint::Hint;
use larder::reference::Reference;

/// The user's own credentials, beside the pull secrets that each request brings along.
#[derive(Default)]
pub struct UserCredentials {
    own: Option<CredentialPlace>,
    tokens: TokenPolicy,
    helpers: HelperNames,
    plugins: Option<Arc<Plugins>>,
    /// Answers of these programs so far.
    answers: ProgramResultLog,
}

/// One place with credentials.
#[derive(Debug)]
struct CredentialPlace {
    /// Such as `secret default/regcred`, or the path of a file.
    name: String,
    keyring: Keyring,
}

impl UserCredentials {
    /// Collects the candidates of this config, which comes from the place of this name. `tokens` is how pull secrets
    /// are read.
    pub fn new(own: Option<(String, &DockerConfig)>, tokens: TokenPolicy) -> Self {
        UserCredentials {
            own: own.map(|(name, config)| CredentialPlace::new(name, config)),
            tokens,
            ..UserCredentials::default()
        }
    }

    /// And those of these credential helpers.
    #[must_use]
    pub fn with_helpers(mut self, helpers: HelperNames) -> Self {
        self.helpers = helpers;
        self
    }

    /// And those of these providers.
    #[must_use]
    pub fn with_plugins(mut self, plugins: Arc<Plugins>) -> Self {
        self.plugins = Some(plugins);
        self
    }

    /// And what these programs answer is noted here.
    #[must_use]
    pub fn with_results(mut self, answers: ProgramResultLog) -> Self {
        self.answers = answers;
        self
    }

    /// Whose credentials are tried for an image, in order.
    pub fn report(&self, image: &str, secrets: &[PullSecret]) -> String {
        let mut matching_credentials = self.matching_credentials(image, secrets);
        if let Ok(name) = Reference::parse(image) {
            matching_credentials.extend(self.programs(name.name()));
        }
        if matching_credentials.is_empty() {
            "none, pulling anonymously".to_owned()
        } else {
            matching_credentials.join(", ")
        }
    }

    /// Returns the next step after the registry has denied an image.
    pub fn advice(&self, image: &str, secrets: &[PullSecret]) -> Hint {
        let failed: Vec<_> = self.failed(image).into_iter().map(|(_, why)| why).collect();
        let failed = failed.join("; ");
        let mut shown = self.matching_credentials(image, secrets);
        shown.extend(self.gave(image));
        match (failed.is_empty(), shown.is_empty()) {
            (true, _) => self.advice_of(image, secrets, &shown),
            (false, true) => format!("no credentials sent to the registry: {failed}").into(),
            (false, false) => self.advice_of(image, secrets, &shown).text(format!("; {failed}")),
        }
    }

    /// Returns the next step for credentials that were found and sent.
    fn advice_of(&self, image: &str, secrets: &[PullSecret], shown: &[String]) -> Hint {
        let registry =
            Reference::parse(image).map_or_else(|_| image.to_owned(), |name| name.registry().to_owned());
        let places = self.secret_places(secrets);
        let others: Vec<_> = places.iter().chain(&self.own).filter_map(CredentialPlace::content).collect();
        match (shown, others.as_slice()) {
            ([], []) => Hint::from(format!("no credentials for {registry}: log in with "))
                .command(["login".to_owned(), registry])
                .text(", or add a pull secret"),
            ([], others) => format!("no credential matches {registry} ({})", others.join("; ")).into(),
            (shown, _) => {
                let rejected = format!("the registry rejected the credentials of {}", shown.join(", "));
                match Reference::parse(image) {
                    Ok(name)
                        if self.own.iter().any(|own| !own.matching_credentials(name.name()).is_empty()) =>
                    {
                        let login = ["login".to_owned(), registry];
                        Hint::from(rejected + "; ").command(login).text(" replaces them")
                    }
                    _ => rejected.into(),
                }
            }
        }
    }

    /// Places with credentials of which none is for this image.
    pub fn other_registries(&self, image: &str, secrets: &[PullSecret]) -> Vec<String> {
        let Ok(name) = Reference::parse(image) else { return Vec::new() };
        let places = self.secret_places(secrets);
        let all = places.iter().chain(&self.own);
        all.filter(|place| place.matching_credentials(name.name()).is_empty())
            .filter_map(CredentialPlace::content)
            .collect()
    }

    /// Returns the source of the user's own credentials.
    pub fn own_name(&self) -> Option<&str> {
        self.own.as_ref().map(|own| own.name.as_str())
    }

    fn matching_credentials(&self, image: &str, secrets: &[PullSecret]) -> Vec<String> {
        let Ok(name) = Reference::parse(image) else { return Vec::new() };
        let places = self.secret_places(secrets);
        places.iter().chain(&self.own).flat_map(|place| place.matching_credentials(name.name())).collect()
    }

    /// The programs that gave a credential for an image.
    fn gave(&self, image: &str) -> Vec<String> {
        let gave = self.answers_of(image).into_iter().filter(|(_, answer)| *answer == ProgramResult::Found);
        gave.map(|(program, _)| program).collect()
    }

    /// The programs that were asked for an image and failed, each with its error.
    pub fn failed(&self, image: &str) -> Vec<(String, String)> {
        let failed = self.answers_of(image).into_iter().filter_map(|(program, answer)| match answer {
            ProgramResult::Failed(why) => Some((program, why)),
            ProgramResult::Found | ProgramResult::None => None,
        });
        failed.collect()
    }

    fn answers_of(&self, image: &str) -> Vec<(String, ProgramResult)> {
        let Ok(name) = Reference::parse(image) else { return Vec::new() };
        let printed = self.answers.results_for(name.name()).into_iter();
        printed.map(|(program, answer)| (program_name(&program), answer)).collect()
    }

    /// Whether some are with programs.
    pub fn has_programs(&self) -> bool {
        self.plugins.is_some() || !self.helpers.is_empty()
    }

    /// The programs that are asked. Whether they have a credential is known only to them.
    fn programs(&self, repository: &str) -> Vec<String> {
        let helper = self
            .helpers
            .request_for(repository)
            .map(|asked| program_name(&CredentialLocation::Helper(asked.helper)));
        let plugins = self.plugins.iter().flat_map(|plugins| plugins.for_image(repository));
        let plugins = plugins.map(|name| program_name(&CredentialLocation::Provider(name.to_owned())));
        helper.into_iter().chain(plugins).map(|name| format!("{name} (if it has credentials)")).collect()
    }

    /// A secret that cannot be read fails its pod before any pull, so there is nothing to say of it here.
    fn secret_places(&self, secrets: &[PullSecret]) -> Vec<CredentialPlace> {
        let place = |secret: &PullSecret| {
            let config = secret.docker_config(self.tokens).ok().flatten()?;
            Some(CredentialPlace::new(format!("secret {}", secret.coordinates), &config))
        };
        secrets.iter().filter_map(place).collect()
    }
}

fn program_name(program: &CredentialLocation) -> String {
    match program {
        CredentialLocation::Helper(name) => format!("docker-credential-{name}"),
        CredentialLocation::Provider(name) => format!("credential provider {name}"),
        _ => String::new(),
    }
}

impl CredentialPlace {
    fn new(name: impl Into<String>, config: &DockerConfig) -> Self {
        let mut keyring = Keyring::default();
        keyring.add(config, None, &CredentialLocation::default());
        CredentialPlace { name: name.into(), keyring }
    }

    /// `secret default/regcred (user larder)` for each credential that fits.
    fn matching_credentials(&self, repository: &str) -> Vec<String> {
        let found = self.keyring.lookup(repository);
        let printed = found.iter().map(|credential| match credential.username.as_str() {
            "" if credential.identity_token.is_empty() && credential.registry_token.is_empty() => {
                format!("{} (no user)", self.name)
            }
            "" => format!("{} (a token)", self.name),
            user => format!("{} (user {user})", self.name),
        });
        let mut known = BTreeSet::new();
        printed.filter(|text| known.insert(text.clone())).collect()
    }

    /// `secret default/regcred has: quay.io`; `None` without any credentials, as `larder logout` leaves a file.
    fn content(&self) -> Option<String> {
        let keys: Vec<_> = self.keyring.keys().collect();
        (!keys.is_empty()).then(|| format!("{} has: {}", self.name, keys.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use larder::credentials::{DockerConfigEntry, Secret, SecretCoordinates};

    use super::*;

    fn secret(registry: &str) -> PullSecret {
        let config = format!(
            "{{\"auths\": {{\"{registry}\": {{\"username\": \"bob\", \"password\": \"hunter2\"}}}}}}"
        );
        PullSecret {
            kind: "kubernetes.io/dockerconfigjson".into(),
            coordinates: SecretCoordinates {
                namespace: "default".into(),
                name: "reg".into(),
                ..SecretCoordinates::default()
            },
            data: BTreeMap::from([(".dockerconfigjson".into(), config.into())]),
        }
    }

    fn file(registry: &str) -> UserCredentials {
        let entry = DockerConfigEntry {
            username: "me".into(),
            password: Secret::new("hunter2"),
            ..DockerConfigEntry::default()
        };
        let config = DockerConfig::with_entry(registry, entry);
        UserCredentials::new(Some(("/home/me/config.json".into(), &config)), TokenPolicy::Keep)
    }

    const IMAGE: &str = "127.0.0.1:5056/team/app:1";

    #[test]
    fn a_credential_that_was_refused_is_named_by_its_source_and_user() {
        let secrets = [secret("127.0.0.1:5056")];
        assert_eq!(
            UserCredentials::default().advice(IMAGE, &secrets).to_string(),
            "the registry rejected the credentials of secret default/reg (user bob)"
        );
        assert_eq!(
            file("127.0.0.1:5056").advice(IMAGE, &secrets).to_string(),
            "the registry rejected the credentials of secret default/reg (user bob), /home/me/config.json (user me); \
             larder login 127.0.0.1:5056 replaces them"
        );
    }

    #[test]
    fn credentials_that_do_not_fit_are_named_by_what_they_fit() {
        let advice = file("r.example").advice(IMAGE, &[secret("https://bob:hunter2@quay.io")]);
        assert_eq!(
            advice.to_string(),
            "no credential matches 127.0.0.1:5056 (secret default/reg has: quay.io; /home/me/config.json has: r.example)"
        );
    }

    #[test]
    fn missing_credentials_have_a_hint_how_to_give_some() {
        let empty = DockerConfig::default();
        let after_logout =
            UserCredentials::new(Some(("/home/me/config.json".into(), &empty)), TokenPolicy::Keep);
        assert!(after_logout.other_registries(IMAGE, &[]).is_empty());
        for credentials in [UserCredentials::default(), after_logout] {
            let advice = credentials.advice(IMAGE, &[]).to_string();
            assert!(
                advice.starts_with(
                    "no credentials for 127.0.0.1:5056: log in with larder login 127.0.0.1:5056"
                ),
                "{advice}"
            );
        }
    }

    #[test]
    fn the_report_names_the_candidates_in_order_and_no_secret() {
        let printed = file("127.0.0.1:5056").report(IMAGE, &[secret("127.0.0.1:5056")]);
        assert_eq!(printed, "secret default/reg (user bob), /home/me/config.json (user me)");
        assert_eq!(file("r.example").report(IMAGE, &[]), "none, pulling anonymously");
    }
}
