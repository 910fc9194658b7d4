//! Reads all sources in order of precedence, the lowest first, and collects their errors.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder::config::{FeatureGates, KubeletImageConfig, Verification};
use larder::credentials::TokenPolicy;
use larder::gc::{GcIntervals, GcPolicy};
use larder::hint::Hint;
use larder::pull::PullConfig;
use larder::suggestions::nearest;
use larder_cri::{CONFIGURED_SANDBOX_IMAGE, CriConfig};
use larder_registry::RegistryConfig;
use larder_store::store::StoreConfig;

use super::check;
use super::config_errors::ConfigErrors;
use super::evictions;
use super::file;
use super::settings::{self, ConfigDraft, Setting};
use super::{
    API_VERSION, BackendSetting, Config, ContainerdSettings, CredentialPlugins, CriPinSettings,
    DashboardServing, DashboardSettings, KIND, KubeletImageService, KubernetesSettings, LazySettings,
    ListenSettings, LogFormat, LogSettings, MetricsSettings, SettingOrigin, StoreSettings, TracingSettings,
};
use crate::environment::DefaultPaths;
use crate::manifest::tree::{NodeCursor, YamlNode, parse_open};
use crate::manifest::{InputPlace, InputProblem, LocatedProblem};

const KUBELET_API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
const KUBELET_KIND: &str = "KubeletConfiguration";
/// Images that a runtime needs to start pods: kubelet's, and what the runtime's configuration names.
const SANDBOX_IMAGES: [&str; 3] = ["registry.k8s.io/pause:*", "k8s.gcr.io/pause:*", CONFIGURED_SANDBOX_IMAGE];
/// Minimum length of a prefix that is completed to a key.
const MIN_PREFIX: usize = 4;
/// Limit of suggestions for an unknown key.
const MAX_MEANT: usize = 3;

/// A source of settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingsSource {
    /// A file of larder's.
    File {
        /// As the user named it.
        path: PathBuf,
        /// Whether a missing file is an error.
        required: bool,
    },
    /// A file of kubelet's. What has nothing to do with images is passed over.
    KubeletFile(PathBuf),
    /// A flag or a variable.
    Given {
        /// Which.
        by: SettingOrigin,
        /// The setting that it is for.
        key: &'static str,
        /// Its text.
        value: String,
    },
    /// A flag that may be given several times.
    GivenList {
        /// Which.
        by: SettingOrigin,
        /// The setting, a list of strings.
        key: &'static str,
        /// Its items.
        values: Vec<String>,
    },
}

/// All sources of settings. The daemon keeps them to [`load`] again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SettingsSources {
    /// Default paths.
    pub places: DefaultPaths,
    /// In order of precedence, the lowest first.
    pub layers: Vec<SettingsSource>,
}

/// Texts of settings files by path; `None` for a file that does not exist and need not.
pub(crate) type SettingsFiles = BTreeMap<PathBuf, Option<String>>;

/// Reads a settings file, which may be required.
type FileReader<'a> = &'a dyn Fn(&Path, bool) -> Result<Option<String>, InputProblem>;

/// Reads everything again. Reads files and changes nothing.
pub fn load(sources: &SettingsSources) -> Result<Config, ConfigErrors> {
    load_with_files(sources).map(|(config, _)| config)
}

/// Like [`load`], with the texts of the files.
pub(crate) fn load_with_files(sources: &SettingsSources) -> Result<(Config, SettingsFiles), ConfigErrors> {
    load_from(sources, &file::read)
}

/// Like [`load_with_files`], from files that `read` reads.
pub(super) fn load_from(
    sources: &SettingsSources,
    read: FileReader<'_>,
) -> Result<(Config, SettingsFiles), ConfigErrors> {
    let mut reading = ConfigReader::new(&sources.places);
    for source in &sources.layers {
        reading.apply(source, read);
    }
    let files = std::mem::take(&mut reading.files);
    Ok((reading.finish()?, files))
}

/// The settings that decide which images are verified.
const VERIFICATION: [&str; 3] =
    ["imagePullCredentialsVerificationPolicy", "preloadedImagesVerificationAllowlist", "featureGates"];

/// Errors in the sources may hide which images are verified.
pub(super) struct HiddenVerification;

/// Settings and problems of the sources that were read so far.
pub(super) struct ConfigReader {
    draft: ConfigDraft,
    /// Settings with invalid values: conflicts with them are not reported.
    broken: HashSet<&'static str>,
    /// Whether a file may have settings that were not read: it is no settings file, or has unknown keys.
    incomplete: bool,
    files: SettingsFiles,
    errors: Vec<LocatedProblem>,
}

impl ConfigReader {
    pub(super) fn new(places: &DefaultPaths) -> ConfigReader {
        ConfigReader {
            draft: ConfigDraft::new(places),
            broken: HashSet::new(),
            incomplete: false,
            files: SettingsFiles::new(),
            errors: Vec::new(),
        }
    }

    /// Which images are verified, by sources that have errors; fails if these may hide it.
    pub(super) fn verification_in(
        sources: &SettingsSources,
    ) -> Result<Option<Verification>, HiddenVerification> {
        let mut reading = ConfigReader::new(&sources.places);
        for source in &sources.layers {
            reading.apply(source, &file::read);
        }
        let is_hidden = |key: &&str| reading.broken.iter().any(|broken| broken.starts_with(key));
        if reading.incomplete || VERIFICATION.iter().any(is_hidden) {
            return Err(HiddenVerification);
        }
        let gates = reading.draft.config.gates;
        reading.draft.written.defaulted(gates).verification(gates).map_err(|_| HiddenVerification)
    }

    fn apply(&mut self, source: &SettingsSource, read: FileReader<'_>) {
        match source {
            SettingsSource::File { path, required } => self.take_file(path, *required, false, read),
            SettingsSource::KubeletFile(path) => self.take_file(path, true, true, read),
            SettingsSource::Given { by, key, value } => {
                if let Some(setting) = settings::find(key) {
                    self.take_given(by, setting, &setting.kind.node(value));
                }
            }
            SettingsSource::GivenList { by, key, values } => {
                if let Some(setting) = settings::find(key) {
                    self.take_given(by, setting, &YamlNode::texts(values));
                }
            }
        }
    }

    fn take_file(&mut self, path: &Path, required: bool, of_kubelet: bool, read: FileReader<'_>) {
        let text = read(path, required);
        self.incomplete |= text.is_err();
        match text {
            Ok(text) => {
                if let Some(text) = &text {
                    self.take_text(path, text, of_kubelet);
                }
                self.files.insert(path.to_owned(), text);
            }
            Err(problem) => self.errors.push(InputPlace::file(path.display().to_string()).locate(problem)),
        }
    }

    /// Takes the text of a file over.
    pub(super) fn take_text(&mut self, path: &Path, text: &str, of_kubelet: bool) {
        let mut problems = Vec::new();
        match parse_open(text) {
            Err(problem) => {
                self.incomplete = true;
                problems.push(problem);
            }
            Ok(node) => {
                let root = NodeCursor::root(&node);
                if has_kind(&root, of_kubelet, &mut problems) {
                    self.take_settings(path, &root, of_kubelet, &mut problems);
                } else {
                    self.incomplete = true;
                }
            }
        }
        problems.sort_by_key(InputProblem::line);
        let place = InputPlace::file(path.display().to_string());
        self.errors.extend(problems.into_iter().map(|problem| place.locate(problem)));
    }

    fn take_settings(
        &mut self,
        path: &Path,
        root: &NodeCursor<'_>,
        of_kubelet: bool,
        problems: &mut Vec<InputProblem>,
    ) {
        if of_kubelet {
            self.draft.evictions.extend(evictions::read(path, root));
            let is_set = matches!(root.descend(&["tracing"]), Ok(Some(section)) if section.is_mapping());
            self.draft.config.tracing.in_kubelet_file |= is_set;
        }
        let before = problems.len();
        let closed = if of_kubelet { Vec::new() } else { unknown_keys(root, "", problems) };
        self.incomplete |= problems.len() > before;
        for setting in settings::all().filter(|setting| !of_kubelet || setting.in_kubelet_file) {
            if closed.iter().any(|section| setting.key.starts_with(section.as_str())) {
                continue;
            }
            let names: Vec<&str> = setting.key.split('.').collect();
            match root.descend(&names) {
                Ok(None) => {}
                Ok(Some(at)) => {
                    let (path, line) = (path.to_owned(), at.line());
                    let origin = if of_kubelet {
                        SettingOrigin::KubeletFile { path, line }
                    } else {
                        SettingOrigin::File { path, line }
                    };
                    problems.extend(self.take_value(setting, &at, origin));
                }
                // A section of kubelet's file that is not a mapping is reported once.
                Err(problem) if problems.contains(&problem) => {}
                Err(problem) => problems.push(problem),
            }
        }
    }

    fn take_value(
        &mut self,
        setting: &'static Setting,
        at: &NodeCursor<'_>,
        origin: SettingOrigin,
    ) -> Vec<InputProblem> {
        let ignored = self.ignored_backend(setting, &origin);
        match (setting.read)(&mut self.draft, at) {
            Ok(()) => {
                self.broken.remove(setting.key);
                self.draft.config.warnings.extend(ignored);
                self.draft.config.origins.insert(setting.key, origin);
                let lines = at.items().map(|items| items.iter().map(NodeCursor::line).collect());
                self.draft.config.lines.insert(setting.key, lines.unwrap_or_default());
                Vec::new()
            }
            Err(problems) => {
                self.broken.insert(setting.key);
                problems
            }
        }
    }

    /// Warns of a backend that is overridden by the flag for the root of larder's own store, which does not name it.
    fn ignored_backend(&self, setting: &Setting, by: &SettingOrigin) -> Option<String> {
        let SettingOrigin::Flag(flag) = by else { return None };
        let before = self.draft.config.origins.get(setting.key)?;
        let is_ignored = setting.key == "backend"
            && *flag == "--root"
            && self.draft.config.backend != BackendSetting::Store;
        is_ignored.then(|| format!("{before}: backend has no effect: {flag} selects larder's own store"))
    }

    fn take_given(&mut self, by: &SettingOrigin, setting: &'static Setting, node: &YamlNode) {
        let problems = self.take_value(setting, &NodeCursor::given(node, setting.key), by.clone());
        let place = InputPlace::file(by.to_string());
        self.errors.extend(problems.into_iter().map(|problem| place.locate(problem)));
    }

    /// Checks what was read as a whole.
    pub(super) fn finish(self) -> Result<Config, ConfigErrors> {
        let ConfigReader { draft, broken, mut errors, .. } = self;
        let config = check::finish(draft, &broken, &mut errors);
        if errors.is_empty() { Ok(config) } else { Err(ConfigErrors(errors)) }
    }
}

impl ConfigDraft {
    /// The defaults.
    pub(super) fn new(places: &DefaultPaths) -> ConfigDraft {
        let pull = larder_store::pull::StorePullConfig::default();
        let mut registry = RegistryConfig::default();
        registry.config_dirs.splice(..0, places.certs.clone());
        let config = Config {
            images: KubeletImageConfig::default().defaulted(FeatureGates::default()),
            gates: FeatureGates::default(),
            credential_plugins: CredentialPlugins { config: None, bin_dir: None },
            static_pod_path: None,
            root: places.root.clone().unwrap_or_default(),
            state: None,
            backend: BackendSetting::Store,
            listen: ListenSettings {
                socket: places.socket.clone().unwrap_or_default(),
                mode: 0o660,
                group: None,
            },
            metrics: MetricsSettings {
                address: Some(([127, 0, 0, 1], 9464).into()),
                allow_remote: false,
                kubelet_names: false,
            },
            dashboard: DashboardSettings { serve: DashboardServing::Loopback, hosts: Vec::new() },
            kubelet_images: KubeletImageService::Runtime,
            cri_pins: CriPinSettings { kept: true, mounted: true, leased: false },
            containerd: ContainerdSettings { snapshotter: false, fetch_layers: true, socket: None },
            log: LogSettings { level: tracing::Level::INFO, format: LogFormat::Text },
            tracing: TracingSettings::default(),
            pull: PullConfig::default(),
            credential_tokens: TokenPolicy::Keep,
            ensured_lease: Duration::from_secs(600),
            lazy: LazySettings {
                images: Vec::new(),
                minimum_size: 1 << 20,
                read_timeout: Duration::from_secs(60),
            },
            verification: None,
            degraded: None,
            exited_container_age: None,
            gc: GcPolicy::default(),
            gc_intervals: GcIntervals::default(),
            registry,
            store: StoreSettings {
                config: StoreConfig::default(),
                layers_at_once: larder_store::pull::StorePullConfig::LAYERS_AT_ONCE,
                minimum_rate: pull.minimum_rate,
                reserve_bytes: pull.reserve.bytes,
                reserve_inodes: pull.reserve.inodes,
                max_layer_bytes: pull.limits.max_plain_bytes,
                max_image_bytes: pull.limits.max_image_bytes,
                max_expansion: pull.limits.max_expansion,
                verify_reads: pull.verify_reads,
            },
            runtime: CriConfig {
                sandbox_images: SANDBOX_IMAGES.map(str::to_owned).to_vec(),
                ..CriConfig::default()
            },
            prune_build_cache: false,
            kubernetes: KubernetesSettings::default(),
            prefetch: Vec::new(),
            drain_grace_period: Duration::from_secs(30),
            event_ring_size: 1000,
            warnings: Vec::new(),
            origins: BTreeMap::new(),
            lines: BTreeMap::new(),
        };
        ConfigDraft { written: KubeletImageConfig::default(), evictions: Vec::new(), no_proxy: None, config }
    }
}

/// Whether a file is of the kind that is wanted, or near enough to go on.
fn has_kind(root: &NodeCursor<'_>, of_kubelet: bool, problems: &mut Vec<InputProblem>) -> bool {
    let (api_version, kind, other_kind, other_option) = if of_kubelet {
        (KUBELET_API_VERSION, KUBELET_KIND, KIND, "config")
    } else {
        (API_VERSION, KIND, KUBELET_KIND, "kubelet-config")
    };
    let wanted = format!("begin with apiVersion: {api_version} and kind: {kind}");
    if root.is_empty() {
        problems.push(InputProblem::new("is empty").hint(wanted));
        return false;
    }
    if !root.is_mapping() {
        problems.push(root.must_be("a mapping of settings").hint(wanted));
        return false;
    }
    if root.text_of("kind").ok().flatten() == Some(other_kind) {
        let hint = Hint::from("use it with ").setting(other_option, "");
        problems.push(root.problem(format!("this is a {other_kind}")).hint(hint));
        return false;
    }
    for (field, wanted) in [("apiVersion", api_version), ("kind", kind)] {
        match root.field(field) {
            Ok(Some(at)) => match at.text() {
                Ok(text) if text == wanted => {}
                Ok(_) => problems.push(at.problem(format!("must be {wanted}"))),
                Err(problem) => problems.push(problem),
            },
            Ok(None) => problems.push(root.missing(field).hint(format!("write {field}: {wanted}"))),
            Err(problem) => problems.push(problem),
        }
    }
    true
}

/// Reports unknown keys. Returns the sections that are not mappings, as prefixes of keys.
fn unknown_keys(at: &NodeCursor<'_>, section: &str, problems: &mut Vec<InputProblem>) -> Vec<String> {
    let mut closed = Vec::new();
    let known = keys_of(section);
    for (key, field) in at.entries().unwrap_or_default() {
        let below = format!("{section}{key}.");
        if section.is_empty() && matches!(key, "apiVersion" | "kind") {
            continue;
        }
        if !known.contains(&key) {
            problems.push(field.problem("unknown setting").hint(meant(key, section, &known)));
        } else if settings::all().any(|setting| setting.key.starts_with(&below)) && !field.is_empty() {
            if field.is_mapping() {
                closed.append(&mut unknown_keys(&field, &below, problems));
            } else {
                problems.push(field.must_be("a mapping of settings"));
                closed.push(below);
            }
        }
    }
    closed
}

/// The keys that a section may have; the empty section is the document.
fn keys_of(section: &str) -> Vec<&'static str> {
    let mut keys: Vec<&'static str> =
        settings::all().filter_map(|setting| setting.key.strip_prefix(section)?.split('.').next()).collect();
    keys.dedup();
    keys
}

/// Suggests a similar key, or the same key in another section.
fn meant(key: &str, section: &str, known: &[&'static str]) -> Hint {
    let near =
        nearest(key, known.iter().copied()).map_or_else(|| beginning_with(key, known), |near| vec![near]);
    if !near.is_empty() {
        let near: Vec<String> = near.iter().map(|near| format!("{section}{near}")).collect();
        return format!("did you mean {}?", near.join(" or ")).into();
    }
    let in_other_section = settings::all().find(|setting| {
        setting.key.rsplit('.').next() == Some(key) || setting.key == format!("{section}{key}")
    });
    match in_other_section {
        Some(setting) => match setting.key.split_once('.') {
            Some((section, name)) => format!("write {name} below {section}:").into(),
            None => format!("write {key} at the top of the file").into(),
        },
        None if section.is_empty() => {
            Hint::new().command(["config", "--reference"]).text(" lists all settings")
        }
        None => format!("known below {}: {}", section.trim_end_matches('.'), known.join(", ")).into(),
    }
}

/// The few keys that begin with this text, such as `imageGCLowThresholdPercent` with `imageGCLowThreshold`.
fn beginning_with(text: &str, known: &[&'static str]) -> Vec<&'static str> {
    let begins = |key: &&str| key.get(..text.len()).is_some_and(|start| start.eq_ignore_ascii_case(text));
    let found: Vec<_> = known.iter().copied().filter(begins).collect();
    if text.len() < MIN_PREFIX || found.len() > MAX_MEANT { Vec::new() } else { found }
}
