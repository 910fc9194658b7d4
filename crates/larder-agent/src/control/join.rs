//! Whether a client with settings and credential programs of its own can work through this process.

use larder_api::v1::SettingValue;

use super::ServingProcess;
use crate::config::{self, BackendSetting, Config};
use crate::error::Error;

/// Settings that concern only the process that has them, and those by which the client came here.
const OWN: [&str; 7] =
    ["listen.", "metrics.", "log.", "events.", "root", "backend", "containerRuntimeEndpoint"];

/// Fails where a setting that the client was given has another value here, and names all of them. A client works
/// through a daemon nevertheless, and warns.
pub(super) fn check(config: &Config, process: &ServingProcess, theirs: &[SettingValue]) -> Result<(), Error> {
    let differences: Vec<String> = theirs
        .iter()
        .filter(|setting| !OWN.iter().any(|section| setting.key.starts_with(section)))
        // A runtime's images are found by the state directory.
        .filter(|setting| setting.key != "state" || matches!(config.backend, BackendSetting::Store))
        .filter_map(|setting| {
            let SettingValue { key, value, origin } = setting;
            // A setting of a newer client is a difference: it may guard images.
            let here =
                config::value_of(config, key).map_or_else(|| "unknown".to_owned(), |here| here.to_string());
            (here != *value).then(|| format!("{key} is {value} ({origin}), and {here} there"))
        })
        .collect();
    if differences.is_empty() {
        return Ok(());
    }
    let differences = differences.join("; ");
    Err(match process {
        ServingProcess::Command => Error::failed(format!(
            "another larder command uses these images with other settings: {differences}"
        ))
        .hint("rerun after the other command ends, or use the same settings"),
        ServingProcess::Daemon(_) => {
            Error::failed(format!("the daemon's settings apply, not those of this command: {differences}"))
                .hint("change them in the daemon's configuration")
        }
    })
}

/// Fails where pulls of this process ask other programs for credentials than the client would.
pub(super) fn check_programs(here: &[String], theirs: &[String]) -> Result<(), Error> {
    if here == theirs {
        return Ok(());
    }
    let list = |programs: &[String]| match programs {
        [] => "none".to_owned(),
        programs => programs.join(", "),
    };
    Err(Error::failed(format!(
        "another larder command uses these images with other credential helpers or providers: {}, and {} there",
        list(theirs),
        list(here)
    ))
    .hint("rerun after the other command ends, or use the same docker config and providers"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::insisted_on;
    use crate::config::{SettingsSource, SettingsSources};
    use crate::environment::DefaultPaths;

    /// The configuration of a process that was given these settings by flags.
    fn given(settings: &[(&'static str, &str)]) -> Config {
        let layer = |(key, value): &(&'static str, &str)| SettingsSource::Given {
            by: config::SettingOrigin::Flag("--flag"),
            key,
            value: (*value).to_owned(),
        };
        let layers = settings.iter().map(layer).collect();
        config::load(&SettingsSources { places: DefaultPaths::of(true, |_| None), layers }).unwrap()
    }

    fn joins(owner: &[(&'static str, &str)], joiner: &[(&'static str, &str)]) -> Result<(), String> {
        let theirs = insisted_on(&given(joiner), |_| true);
        check(&given(owner), &ServingProcess::Command, &theirs)
            .map_err(|refused| refused.message().to_owned())
    }

    #[test]
    fn a_joiner_insists_on_what_guards_images_also_where_that_is_a_default() {
        for (guard, value, theirs) in [
            ("imagePullCredentialsVerificationPolicy", "NeverVerify", "\"NeverVerifyPreloadedImages\""),
            ("pull.credentialTokens", "ignore", "\"keep\""),
            ("featureGates.KubeletEnsureSecretPulledImages", "false", "true"),
        ] {
            let refused = joins(&[(guard, value)], &[]).unwrap_err();
            assert!(refused.contains(&format!("is {theirs} (default), and ")), "{guard}: {refused}");
            assert_eq!(joins(&[(guard, value)], &[(guard, value)]), Ok(()), "{guard}");
        }
        let programs = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        assert_eq!(check_programs(&programs(&["a", "b"]), &programs(&["a", "b"])), Ok(()));
        let refused = check_programs(&programs(&["a", "b"]), &[]).unwrap_err();
        assert!(refused.message().ends_with(": none, and a, b there"), "{}", refused.message());
        assert!(check_programs(&[], &programs(&["a"])).is_err());
        assert_eq!(joins(&[("registryPullQPS", "7")], &[]), Ok(()), "a default that guards nothing");
        assert!(joins(&[], &[("registryPullQPS", "7")]).is_err());
        let newer =
            SettingValue { key: "pull.newGuard".into(), value: "true".into(), origin: "default".into() };
        let refused = check(&given(&[]), &ServingProcess::Command, &[newer]).unwrap_err();
        assert!(refused.message().contains("pull.newGuard is true (default), and unknown there"));
    }
}
