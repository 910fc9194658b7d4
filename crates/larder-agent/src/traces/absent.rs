//! A larder without the feature `traces`.

use std::future;
use std::time::Duration;

use crate::config::{Config, SettingOrigin};
use crate::environment::variable;
use crate::error::Error;

const BUILT_WITHOUT: &str = "this larder was built without the feature traces";

/// Refuses larder's own settings, and warns of kubelet's and of those of the environment: they are for other programs
/// as well.
pub fn start(config: &Config) -> Result<(), Error> {
    if config.tracing.is_set() {
        let set = ["tracing.endpoint", "tracing.samplingRatePerMillion"].map(|key| (key, config.origin(key)));
        let own = set.iter().find(|(_, origin)| {
            !matches!(origin, SettingOrigin::Default | SettingOrigin::KubeletFile { .. })
        });
        if let Some((key, origin)) = own {
            return Err(Error::bad_input(format!("{origin}: {key}: {BUILT_WITHOUT}"))
                .hint("install a package of larder, or build it with cargo build --features traces"));
        }
        tracing::warn!("tracing in kubelet's file has no effect: {BUILT_WITHOUT}");
    }
    for name in ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"] {
        if variable(name).is_some() {
            tracing::warn!("{name} has no effect: {BUILT_WITHOUT}");
        }
    }
    Ok(())
}

/// Whether traces are exported.
pub fn is_on() -> bool {
    false
}

/// Always `None`.
pub fn counts() -> Option<super::TraceCounts> {
    None
}

/// Does nothing.
pub fn flush(_: Duration) -> future::Ready<()> {
    future::ready(())
}

/// The trace that this thread works for, as 32 hexadecimal digits, if it is sampled. `None` without the feature.
pub fn current_trace_id() -> Option<String> {
    None
}

#[cfg(test)]
mod tests {
    use larder::hint::Hint;

    use super::*;
    use crate::config::{self, SettingsSource, SettingsSources};
    use crate::environment::DefaultPaths;

    fn of(sources: Vec<SettingsSource>) -> Config {
        let places = DefaultPaths::of(true, |_| None);
        config::load(&SettingsSources { places, layers: sources }).unwrap()
    }

    #[test]
    fn settings_are_refused_and_those_of_kubelet_are_not() {
        let by = SettingOrigin::Variable("LARDER_TEST");
        let given = SettingsSource::Given { by, key: "tracing.endpoint", value: "localhost:4317".to_owned() };
        let error = start(&of(vec![given])).unwrap_err();
        assert_eq!(error.message(), format!("LARDER_TEST: tracing.endpoint: {BUILT_WITHOUT}"));
        let steps: Vec<Hint> = error.next_steps().to_vec();
        assert!(steps[0].to_string().contains("--features traces"), "{steps:?}");

        let mut config = of(Vec::new());
        config.tracing.sampled_per_million = 1;
        let (path, line) = ("kubelet.yaml".into(), 1);
        config.set_origin("tracing.samplingRatePerMillion", SettingOrigin::KubeletFile { path, line });
        start(&config).unwrap();
    }
}
