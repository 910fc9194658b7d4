//! Checks settings against each other, and derives values that depend on several.

use std::collections::HashSet;

use larder::config::{ConfigProblem, FeatureGates, GoDuration, ImageSettings, Verification};
use larder::gc::PolicyError;
use larder::go_format::quote;
use larder::hint::Hint;
use larder::pull::PullConfig;
use larder_cri::Endpoint;
use larder_registry::Proxy;

use super::settings::ConfigDraft;
use super::{BackendSetting, Config, DashboardServing, KubeletImageService, SettingOrigin, evictions};
use crate::manifest::{InputPlace, InputProblem, LocatedProblem};

/// The longest path that a socket can be bound to, in bytes.
const MAX_SOCKET_BYTES: usize = 107;

/// Completes the configuration and adds what is wrong with it. Settings that could not be read are `broken`: nothing
/// is said about them again.
pub(super) fn finish(
    draft: ConfigDraft,
    broken: &HashSet<&'static str>,
    errors: &mut Vec<LocatedProblem>,
) -> Config {
    let mut checking = ConfigCheck { broken, errors, config: draft.config };
    checking.images(&draft.written);
    checking.endpoints();
    checking.places();
    checking.own(draft.no_proxy);
    if checking.errors.is_empty() {
        warn_of_no_collector(&mut checking.config);
        warn_of_no_store(&mut checking.config);
        evictions::warn_of_early_evictions(&mut checking.config, &draft.evictions);
    }
    checking.config
}

/// The verification policy. One that cannot be read is among the problems of the settings; should they be used in spite
/// of that, each image is verified.
fn verification_of(kubelet: &ImageSettings, gates: FeatureGates) -> Option<Verification> {
    kubelet.verification(gates).unwrap_or_else(|_| Some(Verification::always_verify()))
}

struct ConfigCheck<'a> {
    broken: &'a HashSet<&'static str>,
    errors: &'a mut Vec<LocatedProblem>,
    config: Config,
}

impl ConfigCheck<'_> {
    /// Kubelet's settings: kubelet's checks on kubelet's defaults, then larder's defaults and what they mean for
    /// pulls and collection.
    fn images(&mut self, written: &larder::config::KubeletImageConfig) {
        let gates = self.config.gates;
        let kubelet = written.defaulted(gates);
        for problem in kubelet.problems(gates) {
            self.kubelet_config_error(&problem);
        }
        self.config.verification = verification_of(&kubelet, gates);
        if kubelet.runtime_request_timeout.is_negative() {
            let what = format!("must not be negative, is {}", kubelet.runtime_request_timeout);
            self.report(&["runtimeRequestTimeout"], what, None);
        }
        let default = PullConfig::default();
        let config = &mut self.config;
        config.images = kubelet;
        if written.serialize_image_pulls.is_none() {
            config.images.serialize_image_pulls = default.serialize_image_pulls;
        }
        if written.max_parallel_image_pulls.is_none() && !config.images.serialize_image_pulls {
            let bound = default.max_parallel_image_pulls.map(std::num::NonZero::get);
            config.images.max_parallel_image_pulls = bound.and_then(|bound| i32::try_from(bound).ok());
        }
        config.images.container_runtime_endpoint =
            written.container_runtime_endpoint.clone().unwrap_or_default();
        let images = &config.images;
        let number = |number: i32| u32::try_from(number).unwrap_or_default();
        config.pull.serialize_image_pulls = images.serialize_image_pulls;
        config.pull.max_parallel_image_pulls = PullConfig::parallel_bound(images.max_parallel_image_pulls);
        config.pull.registry_pull_qps = number(images.registry_pull_qps);
        config.pull.registry_burst = number(images.registry_burst);
        let time = |time: GoDuration| time.to_std().unwrap_or_default();
        config.gc.high_threshold_percent = images.image_gc_high_threshold_percent;
        config.gc.low_threshold_percent = images.image_gc_low_threshold_percent;
        config.gc.minimum_age = time(images.image_minimum_gc_age);
        config.gc.maximum_age = time(images.image_maximum_gc_age);
    }

    fn kubelet_config_error(&mut self, problem: &ConfigProblem) {
        let keys: Vec<_> = [Some(problem.field()), problem.other_field()]
            .into_iter()
            .flatten()
            .map(larder::config::ConfigField::name)
            .collect();
        // The place is that of one of the two.
        let origins = keys.iter().map(|key| format!("{key} is set by {}", self.config.origin(key)));
        let origins = origins.collect::<Vec<_>>().join(", ");
        self.report(&keys, problem.to_string(), (keys.len() > 1).then(|| origins.into()));
    }

    /// Where runtimes are. Larder is no runtime of its own.
    fn endpoints(&mut self) {
        self.backend();
        let own = Endpoint::at(&self.config.listen.socket);
        let is_own = |text: &str| Endpoint::parse(text).is_ok_and(|endpoint| endpoint == own);
        let from_kubelet =
            matches!(self.config.origin("imageServiceEndpoint"), SettingOrigin::KubeletFile { .. });
        if from_kubelet && is_own(&self.config.images.image_service_endpoint) {
            // Kubelet is configured to call larder; this is not the endpoint of larder's backend.
            self.config.images.image_service_endpoint.clear();
            self.config.origins.remove("imageServiceEndpoint");
            if *self.config.origin("cri.kubelet") == SettingOrigin::Default {
                self.config.kubelet_images = KubeletImageService::Larder;
            } else if self.config.kubelet_images == KubeletImageService::None {
                self.report(
                    &["cri.kubelet"],
                    "is none, but kubelet's file has larder's socket as imageServiceEndpoint",
                    Some(
                        "set it to larder: kubelet must not see images that it has no credentials for".into(),
                    ),
                );
            }
        }
        let images = &self.config.images;
        let named = [
            ("containerRuntimeEndpoint", images.container_runtime_endpoint.clone()),
            ("imageServiceEndpoint", images.image_service_endpoint.clone()),
            ("containerd.socket", self.config.containerd.socket.clone().unwrap_or_default()),
        ];
        for (key, text) in named.iter().filter(|(_, text)| !text.is_empty()) {
            match Endpoint::parse(text) {
                Err(error) => self.report(
                    &[key],
                    format!("{}: {error}", quote(text)),
                    Some("write it as unix:///path/to.sock".into()),
                ),
                Ok(endpoint) if endpoint == own => self.own_socket(key),
                Ok(_) => {}
            }
        }
        if matches!(&self.config.backend, BackendSetting::Runtime(endpoint) if *endpoint == own) {
            self.own_socket("backend");
        }
    }

    /// Who names a runtime, or has kubelet ask larder, and says no more means images of that runtime: those of larder's
    /// own store no container would find.
    fn backend(&mut self) {
        let images = &self.config.images;
        let endpoints = [
            ("containerRuntimeEndpoint", &images.container_runtime_endpoint),
            ("imageServiceEndpoint", &images.image_service_endpoint),
        ];
        let written = |key: &str| *self.config.origin(key) != SettingOrigin::Default;
        let named = endpoints.into_iter().find(|(key, text)| written(key) && !text.is_empty());
        if let Some((key, _)) = named
            && !written("backend")
        {
            let origin = self.config.origin(key).clone();
            self.config.backend = BackendSetting::Cri;
            self.config.origins.insert("backend", origin);
        }
    }

    fn own_socket(&mut self, key: &'static str) {
        self.report(
            &[key, "listen.socket"],
            "is the socket that larder listens on",
            Some("name the runtime's socket".into()),
        );
    }

    fn places(&mut self) {
        if self.config.root.as_os_str().is_empty() {
            let what = "no default: neither XDG_DATA_HOME nor HOME is set";
            self.report(&["root"], what, Some(Hint::from("name a directory: ").setting("root", "DIR")));
        }
        let socket = self.config.listen.socket.as_os_str().len();
        if socket == 0 {
            let what = "no default: neither XDG_RUNTIME_DIR nor HOME is set";
            self.report(
                &["listen.socket"],
                what,
                Some(Hint::from("name a socket: ").setting("socket", "PATH")),
            );
        } else if socket > MAX_SOCKET_BYTES && *self.config.origin("listen.socket") != SettingOrigin::Default
        {
            // The default one concerns the daemon alone, which checks it when it listens.
            let what = format!("path too long for a socket: {socket} bytes, the limit is {MAX_SOCKET_BYTES}");
            self.report(&["listen.socket"], what, Some("use a shorter path".into()));
        }
        let (config, bin_dir) = ("imageCredentialProviderConfig", "imageCredentialProviderBinDir");
        match (&self.config.credential_plugins.config, &self.config.credential_plugins.bin_dir) {
            (Some(_), None) => self.report(&[config, bin_dir], format!("requires {bin_dir}"), None),
            (None, Some(_)) => self.report(&[bin_dir, config], format!("requires {config}"), None),
            _ => {}
        }
    }

    fn own(&mut self, no_proxy: Option<String>) {
        if let Some(address) = self.config.metrics.address
            && !address.ip().is_loopback()
            && !self.config.metrics.allow_remote
        {
            self.report(
                &["metrics.address", "metrics.allowRemote"],
                format!("{address} is reachable from other machines, without encryption or authentication"),
                Some("use 127.0.0.1, or set metrics.allowRemote: true to allow it".into()),
            );
        }
        self.dashboard();
        for problem in self.config.gc.problems() {
            if matches!(problem, PolicyError::InodeLowAboveHigh { .. }) {
                let keys = ["gc.inodeLowThresholdPercent", "gc.inodeHighThresholdPercent"];
                self.report(&keys, problem.to_string(), None);
            }
        }
        // Usage is rounded up, so that a threshold of 100 would still be reached. An operator who sets kubelet's
        // threshold to 100 wants no GC: the default thresholds of inodes follow it, and others are meant.
        let by_default = |key| *self.config.origin(key) == SettingOrigin::Default;
        let follows = by_default("gc.inodeHighThresholdPercent") && by_default("gc.inodeLowThresholdPercent");
        let never = self.config.gc.high_threshold_percent == 100 && follows;
        if never || self.config.gc.inodes.is_some_and(|inodes| inodes.high_percent == 100) {
            self.config.gc.inodes = None;
        }
        let (pull, registry) = (&self.config.pull, &self.config.registry);
        if pull.backoff_max < pull.backoff_initial {
            self.report(
                &["pull.backoffMax", "pull.backoffInitial"],
                "pull.backoffMax is below pull.backoffInitial",
                None,
            );
        } else if registry.retry_max < registry.retry_initial {
            self.report(
                &["registry.retryMax", "registry.retryInitial"],
                "registry.retryMax is below registry.retryInitial",
                None,
            );
        }
        self.no_proxy(no_proxy);
    }

    /// A build without the dashboard cannot serve it. The default, which `larder config` prints, asks for it where it
    /// is built in.
    fn dashboard(&mut self) {
        if lacks_dashboard(self.config.dashboard.serve, cfg!(feature = "dashboard")) {
            self.report(
                &["dashboard.serve"],
                "this larder was built without the dashboard",
                Some("install a package of larder, or build it with the feature dashboard".into()),
            );
        }
        let is_name = |host: &&String| {
            let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
            !host.is_empty() && host.chars().all(is_part)
        };
        if let Some(host) = self.config.dashboard.hosts.iter().find(|host| !is_name(host)) {
            let what = format!("{}: not a host name", quote(host));
            self.report(&["dashboard.hosts"], what, Some("write it without scheme and port".into()));
        }
    }

    /// Hosts without a proxy mean something only beside a proxy.
    fn no_proxy(&mut self, no_proxy: Option<String>) {
        match (no_proxy, &mut self.config.registry.proxy) {
            (None, _) => {}
            (Some(hosts), Proxy::Fixed { except, .. }) => *except = hosts,
            (Some(_), Proxy::FromEnvironment | Proxy::None) => self.report(
                &["registry.noProxy", "registry.proxy"],
                "requires a URL as registry.proxy",
                Some("set NO_PROXY in larder's environment".into()),
            ),
        }
    }

    /// Adds an error about these settings, at the first that is not a default.
    fn report(&mut self, keys: &[&'static str], what: impl Into<String>, hint: Option<Hint>) {
        if keys.iter().any(|key| self.broken.contains(key)) {
            return;
        }
        let written = keys.iter().copied().find(|key| *self.config.origin(key) != SettingOrigin::Default);
        let key = written.or_else(|| keys.first().copied()).unwrap_or_default();
        let problem = InputProblem::new(what).at_field(key).hints(hint);
        let (file, line) = match self.config.origin(key) {
            SettingOrigin::Default => ("configuration".to_owned(), 0),
            SettingOrigin::File { path, line } | SettingOrigin::KubeletFile { path, line } => {
                (path.display().to_string(), *line)
            }
            SettingOrigin::Flag(name) | SettingOrigin::Variable(name) => ((*name).to_owned(), 0),
        };
        self.errors.push(InputPlace::file(file).locate(problem.at_line(line)));
    }
}

/// Whether a dashboard is requested that this build lacks.
fn lacks_dashboard(serving: DashboardServing, is_built_in: bool) -> bool {
    serving == DashboardServing::Always && !is_built_in
}

/// Warns of a node where no process collects images.
fn warn_of_no_collector(config: &mut Config) {
    let key = "imageGCHighThresholdPercent";
    let origin = config.origin(key).clone();
    if !config.gc.is_enabled() && matches!(origin, SettingOrigin::KubeletFile { .. }) {
        config.warnings.push(format!(
            "{origin}: {key} 100 disables kubelet's GC and larder's: no process collects images; set {key} in larder's file"
        ));
    }
}

/// Warns of lazy pulls and verified reads where a runtime has the images.
fn warn_of_no_store(config: &mut Config) {
    let settings = [
        ("pull.lazy.images", !config.lazy.images.is_empty()),
        ("store.verifyReads", config.store.verify_reads),
    ];
    for (key, is_set) in settings {
        if is_set && !matches!(config.backend, BackendSetting::Store) {
            let origin = config.origin(key).clone();
            config
                .warnings
                .push(format!("{origin}: {key} has no effect: it needs larder's own store (backend: store)"));
        }
    }
}

#[cfg(test)]
mod tests {
    use larder::config::KubeletImageConfig;
    use larder::reference::ImageName;

    use super::*;

    #[test]
    fn a_build_without_the_dashboard_refuses_to_serve_it() {
        use DashboardServing::{Always, Loopback, Never};
        for serving in [Always, Loopback, Never] {
            assert!(!lacks_dashboard(serving, true));
            assert_eq!(
                lacks_dashboard(serving, false),
                serving == Always,
                "Loopback is the default of every build"
            );
        }
    }

    #[test]
    fn a_policy_that_cannot_be_read_verifies_each_image() {
        let policy = Some("NeverVerfy".to_owned());
        let written = KubeletImageConfig {
            image_pull_credentials_verification_policy: policy,
            ..KubeletImageConfig::default()
        };
        let gates = FeatureGates { ensure_secret_pulled_images: true };
        let kubelet = written.defaulted(gates);
        assert!(kubelet.verification(gates).is_err());
        let verification = verification_of(&kubelet, gates).expect("records are kept");
        for pulled_here in [false, true] {
            assert!(verification.required(&ImageName::from("private.example/app:1"), pulled_here));
        }
    }
}
