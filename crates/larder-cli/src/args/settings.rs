//! Flags about settings, for every command that reads them.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::env;
use std::path::{Path, PathBuf};

use clap::Args;

use larder_agent::config::{SettingOrigin, SettingsSource, SettingsSources};
use larder_agent::environment::DefaultPaths;

use super::GlobalFlags;

const CONFIG_VARIABLE: &str = "LARDER_CONFIG";
/// Names the backend where no flag does.
pub(crate) const BACKEND_VARIABLE: &str = "LARDER_BACKEND";
/// crictl reads these, too. They select the runtime that `cri` means, but do not select the backend.
pub(crate) const RUNTIME_VARIABLE: &str = "CONTAINER_RUNTIME_ENDPOINT";
pub(crate) const IMAGE_VARIABLE: &str = "IMAGE_SERVICE_ENDPOINT";

/// The sources of settings.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Configuration")]
pub(crate) struct SettingFlags {
    /// Settings file [env: LARDER_CONFIG]
    /// [default: /etc/larder/config.yaml, without root ~/.config/larder/config.yaml, if it exists].
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Kubelet's configuration file, for its settings about images. Larder's own file overrides it.
    #[arg(long, value_name = "FILE")]
    pub(crate) kubelet_config: Option<PathBuf>,

    /// Socket to listen on [default: /run/larder/larder.sock, without root
    /// $XDG_RUNTIME_DIR/larder/larder.sock; with --root, larder.sock in that directory].
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// Address for metrics, or "" for none [default: 127.0.0.1:9464].
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics_address: Option<String>,

    /// Log level: error, warn, info, debug or trace [default: info].
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,

    /// Log format: text or json [default: text].
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,

    #[command(flatten)]
    kubelet: KubeletFlags,
}

/// Kubelet's flags, named after the settings that they change.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Kubelet's flags (prefer a settings file, see docs/configuration.md)")]
struct KubeletFlags {
    /// registryPullQPS
    #[arg(long, value_name = "N", allow_negative_numbers = true, hide_short_help = true)]
    registry_qps: Option<String>,
    /// registryBurst
    #[arg(long, value_name = "N", allow_negative_numbers = true, hide_short_help = true)]
    registry_burst: Option<String>,
    /// serializeImagePulls
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_short_help = true)]
    serialize_image_pulls: Option<String>,
    /// imageMinimumGCAge
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, hide_short_help = true)]
    minimum_image_ttl_duration: Option<String>,
    /// imageGCHighThresholdPercent
    #[arg(long, value_name = "PERCENT", allow_negative_numbers = true, hide_short_help = true)]
    image_gc_high_threshold: Option<String>,
    /// imageGCLowThresholdPercent
    #[arg(long, value_name = "PERCENT", allow_negative_numbers = true, hide_short_help = true)]
    image_gc_low_threshold: Option<String>,
    /// nodeStatusMaxImages
    #[arg(long, value_name = "N", allow_negative_numbers = true, hide_short_help = true)]
    node_status_max_images: Option<String>,
    /// runtimeRequestTimeout
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, hide_short_help = true)]
    runtime_request_timeout: Option<String>,
    /// containerRuntimeEndpoint
    #[arg(long, value_name = "ENDPOINT", hide_short_help = true)]
    container_runtime_endpoint: Option<String>,
    /// imageServiceEndpoint
    #[arg(long, value_name = "ENDPOINT", hide_short_help = true)]
    image_service_endpoint: Option<String>,
    /// imageCredentialProviderConfig
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    image_credential_provider_config: Option<String>,
    /// imageCredentialProviderBinDir
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    image_credential_provider_bin_dir: Option<String>,
    /// staticPodPath
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pod_manifest_path: Option<String>,
}

impl SettingFlags {
    /// Returns these flags with this settings file of larder's.
    pub(crate) fn with_file(&self, file: &Path) -> SettingFlags {
        SettingFlags { config: Some(file.to_owned()), ..self.clone() }
    }

    /// All sources, with the variables and the user of this process.
    pub(crate) fn sources(&self, connection: &GlobalFlags) -> SettingsSources {
        let variable = |name: &str| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        self.sources_with(connection, rustix::process::geteuid().is_root(), variable)
    }

    /// Returns the sources of settings for commands that work on larder's own store only, regardless of variables and
    /// files.
    pub(crate) fn sources_of_store(&self, connection: &GlobalFlags) -> SettingsSources {
        let mut sources = self.sources(connection);
        let (by, value) = (SettingOrigin::Default, "store".to_owned());
        sources.layers.push(SettingsSource::Given { by, key: "backend", value });
        sources
    }

    /// Returns the sources of settings with these variables. An empty variable counts as unset.
    fn sources_with(
        &self,
        connection: &GlobalFlags,
        is_root: bool,
        variable: impl Fn(&str) -> Option<String>,
    ) -> SettingsSources {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let mut places = DefaultPaths::of(is_root, variable);
        if let Some(root) = &connection.root {
            places.socket = Some(Path::new(&absolute(root)).join("larder.sock"));
        }
        let mut layers: Vec<SettingsSource> =
            self.kubelet_config.iter().cloned().map(SettingsSource::KubeletFile).collect();
        let named = self.config.clone().or_else(|| variable(CONFIG_VARIABLE).map(PathBuf::from));
        layers.extend(match named {
            Some(path) => Some(SettingsSource::File { path, required: true }),
            None => places.file.clone().map(|path| SettingsSource::File { path, required: false }),
        });
        if let Some(root) = &connection.root {
            // It selects larder's own store, whatever LARDER_BACKEND says.
            let given = [("root", absolute(root)), ("backend", "store".to_owned())];
            let by = connection.root_origin();
            layers.extend(given.map(|(key, value)| SettingsSource::Given { by: by.clone(), key, value }));
        } else {
            layers.extend(variable(BACKEND_VARIABLE).map(|value| SettingsSource::Given {
                by: SettingOrigin::Variable(BACKEND_VARIABLE),
                key: "backend",
                value,
            }));
            let named = connection.backend.clone().or_else(|| variable(BACKEND_VARIABLE));
            if named.as_deref() == Some("cri") {
                layers.extend(endpoints(variable));
            }
        }
        layers.extend(self.given(connection).into_iter().filter_map(|(name, key, value)| {
            Some(SettingsSource::Given { by: SettingOrigin::Flag(name), key, value: value? })
        }));
        SettingsSources { places, layers }
    }

    /// Flag, setting and value of each flag.
    fn given(&self, connection: &GlobalFlags) -> Vec<(&'static str, &'static str, Option<String>)> {
        let path = |path: &Option<PathBuf>| path.as_deref().map(absolute);
        let kubelet = self.kubelet.clone();
        let timeout = connection.timeout.map(larder::go_format::duration);
        vec![
            ("--backend", "backend", connection.backend.as_deref().map(backend)),
            ("--certs-d", "registry.certsDirs", path(&connection.certs_d)),
            ("--state", "state", path(&connection.state)),
            ("--timeout", "runtimeRequestTimeout", timeout),
            ("--socket", "listen.socket", path(&self.socket)),
            ("--metrics-address", "metrics.address", self.metrics_address.clone()),
            ("--log-level", "log.level", self.log_level.clone()),
            ("--log-format", "log.format", self.log_format.clone()),
            ("--registry-qps", "registryPullQPS", kubelet.registry_qps),
            ("--registry-burst", "registryBurst", kubelet.registry_burst),
            ("--serialize-image-pulls", "serializeImagePulls", kubelet.serialize_image_pulls),
            ("--minimum-image-ttl-duration", "imageMinimumGCAge", kubelet.minimum_image_ttl_duration),
            ("--image-gc-high-threshold", "imageGCHighThresholdPercent", kubelet.image_gc_high_threshold),
            ("--image-gc-low-threshold", "imageGCLowThresholdPercent", kubelet.image_gc_low_threshold),
            ("--node-status-max-images", "nodeStatusMaxImages", kubelet.node_status_max_images),
            ("--runtime-request-timeout", "runtimeRequestTimeout", kubelet.runtime_request_timeout),
            ("--container-runtime-endpoint", "containerRuntimeEndpoint", kubelet.container_runtime_endpoint),
            ("--image-service-endpoint", "imageServiceEndpoint", kubelet.image_service_endpoint),
            (
                "--image-credential-provider-config",
                "imageCredentialProviderConfig",
                kubelet.image_credential_provider_config,
            ),
            (
                "--image-credential-provider-bin-dir",
                "imageCredentialProviderBinDir",
                kubelet.image_credential_provider_bin_dir,
            ),
            ("--pod-manifest-path", "staticPodPath", kubelet.pod_manifest_path),
        ]
    }
}

/// The name of a backend; the path of a socket may start at the current directory.
fn backend(text: &str) -> String {
    let is_path = text.contains('/') && !text.contains("://");
    if is_path { absolute(Path::new(text)) } else { text.to_owned() }
}

/// On a command line a path may start at the current directory.
fn absolute(path: &Path) -> String {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).to_string_lossy().into_owned()
}

/// The runtime that crictl's variables name. An image service alone is where images are.
fn endpoints(variable: impl Fn(&str) -> Option<String>) -> impl Iterator<Item = SettingsSource> {
    let (runtime, image) = ("containerRuntimeEndpoint", "imageServiceEndpoint");
    let image = if variable(RUNTIME_VARIABLE).is_some() { image } else { runtime };
    [(RUNTIME_VARIABLE, runtime), (IMAGE_VARIABLE, image)].into_iter().filter_map(move |(name, key)| {
        Some(SettingsSource::Given { by: SettingOrigin::Variable(name), key, value: variable(name)? })
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use larder_agent::config::kubelet_flags;

    use crate::args::{Cli, Command};

    fn sources(arguments: &[&str], variables: &[(&str, &str)]) -> SettingsSources {
        let cli = Cli::try_parse_from(["larder", "config"].iter().chain(arguments)).unwrap();
        let Command::Config(args) = cli.command else { panic!("not config") };
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        args.flags.sources_with(&cli.connection, true, variable)
    }

    fn flag(name: &'static str, key: &'static str, value: &str) -> SettingsSource {
        SettingsSource::Given { by: SettingOrigin::Flag(name), key, value: value.to_owned() }
    }

    fn file(path: &str, required: bool) -> SettingsSource {
        SettingsSource::File { path: path.into(), required }
    }

    #[test]
    fn each_flag_of_kubelet_that_the_table_names_sets_its_setting() {
        for (name, key) in kubelet_flags() {
            let layers = sources(&[&format!("{name}=-1")], &[]).layers;
            assert_eq!(layers.last(), Some(&flag(name, key, "-1")), "{name}");
        }
        let serial = sources(&["--serialize-image-pulls"], &[]).layers;
        assert_eq!(serial.last(), Some(&flag("--serialize-image-pulls", "serializeImagePulls", "true")));
    }

    #[test]
    fn later_sources_override_earlier_ones() {
        let given = ["--kubelet-config", "k", "--config", "c", "--backend", "cri", "--log-level", "debug"];
        let layers = sources(&given, &[("LARDER_BACKEND", "/x"), ("LARDER_CONFIG", "v")]).layers;
        let variable = SettingOrigin::Variable("LARDER_BACKEND");
        assert_eq!(
            layers,
            [
                SettingsSource::KubeletFile("k".into()),
                file("c", true),
                SettingsSource::Given { by: variable, key: "backend", value: "/x".into() },
                flag("--backend", "backend", "cri"),
                flag("--log-level", "log.level", "debug"),
            ]
        );
    }

    #[test]
    fn the_file_is_the_one_that_is_named_or_the_usual_one() {
        assert_eq!(sources(&[], &[]).layers, [file("/etc/larder/config.yaml", false)]);
        assert_eq!(sources(&[], &[("LARDER_CONFIG", "v")]).layers, [file("v", true)]);
        assert_eq!(sources(&[], &[("LARDER_CONFIG", "")]).layers, [file("/etc/larder/config.yaml", false)]);
    }

    #[test]
    fn a_root_is_larders_own_store_with_its_own_socket() {
        let sources = sources(&["--root", "/r"], &[("LARDER_BACKEND", "/x")]);
        assert_eq!(sources.places.socket, Some("/r/larder.sock".into()));
        let certs = self::sources(&["--certs-d", "/c"], &[]).layers;
        assert_eq!(certs.last(), Some(&flag("--certs-d", "registry.certsDirs", "/c")));
        let flags = [flag("--root", "root", "/r"), flag("--root", "backend", "store")];
        assert_eq!(sources.layers[1..], flags);
    }
}
