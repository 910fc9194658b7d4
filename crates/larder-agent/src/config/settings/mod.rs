//! The table of all settings.

mod kubelet;
mod kubernetes;
mod larder_settings;
mod store;
mod values;

use larder::config::KubeletImageConfig;
use serde_json::Value;

use super::Config;
use super::codecs::FlagValueKind;
use super::evictions::EvictionSignal;
use crate::manifest::InputProblem;
use crate::manifest::tree::NodeCursor;

/// One setting.
#[derive(Clone, Copy)]
pub(in crate::config) struct Setting {
    /// Its place in the file: `gc.period`.
    pub(in crate::config) key: &'static str,
    /// Name of the form of its values.
    pub(in crate::config) codec_name: fn() -> String,
    /// Kind of value that a flag's text is read as.
    pub(in crate::config) kind: FlagValueKind,
    /// Takes a value over.
    pub(in crate::config) read: SettingReader,
    /// The value as it is written.
    pub(in crate::config) show: fn(&Config) -> Value,
    /// Whether a running daemon can change it.
    pub(in crate::config) reload: ReloadSupport,
    /// True for a field of kubelet's file.
    pub(in crate::config) in_kubelet_file: bool,
    /// Kubelet's flag for it.
    pub(in crate::config) kubelet_flag: Option<&'static str>,
    /// The default in words, where it depends on something.
    pub(in crate::config) default: Option<&'static str>,
    /// Kubelet's value, where larder's default is another.
    pub(in crate::config) kubelet_default: Option<&'static str>,
    /// Description for the reference page.
    pub(in crate::config) description: &'static str,
}

type SettingReader = fn(&mut ConfigDraft, &NodeCursor<'_>) -> Result<(), Vec<InputProblem>>;

/// Whether a running daemon can change a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::config) enum ReloadSupport {
    /// It can.
    Live,
    /// It cannot.
    Restart,
}

/// Settings while they are read.
pub(in crate::config) struct ConfigDraft {
    /// Kubelet's settings as written.
    pub(in crate::config) written: KubeletImageConfig,
    /// Hard eviction signals of kubelet's file.
    pub(in crate::config) evictions: Vec<EvictionSignal>,
    /// Hosts that need no proxy, as written.
    pub(in crate::config) no_proxy: Option<String>,
    /// All else.
    pub(in crate::config) config: Config,
}

impl Setting {
    const fn new(
        key: &'static str,
        codec_name: fn() -> String,
        kind: FlagValueKind,
        read: SettingReader,
        show: fn(&Config) -> Value,
        reload: ReloadSupport,
        description: &'static str,
    ) -> Setting {
        Setting {
            key,
            codec_name,
            kind,
            read,
            show,
            reload,
            in_kubelet_file: false,
            kubelet_flag: None,
            default: None,
            kubelet_default: None,
            description,
        }
    }

    const fn of_kubelet(self) -> Setting {
        Setting { in_kubelet_file: true, ..self }
    }

    const fn kubelet_flag(self, flag: &'static str) -> Setting {
        Setting { kubelet_flag: Some(flag), ..self }
    }

    const fn default(self, words: &'static str) -> Setting {
        Setting { default: Some(words), ..self }
    }

    const fn kubelet_has(self, value: &'static str) -> Setting {
        Setting { kubelet_default: Some(value), ..self }
    }
}

/// All settings, in the order of the reference page.
pub(in crate::config) fn all() -> impl Iterator<Item = &'static Setting> {
    larder_settings::TOP
        .iter()
        .chain(kubelet::SETTINGS)
        .chain(larder_settings::SECTIONS)
        .chain(store::SETTINGS)
        .chain(larder_settings::REST)
        .chain(kubernetes::SETTINGS)
}

/// The setting of this key.
pub(in crate::config) fn find(key: &str) -> Option<&'static Setting> {
    all().find(|setting| setting.key == key)
}

/// A setting that is a field of the configuration: key, form, field, whether it can be reloaded, what it does.
macro_rules! setting {
    ($key:literal, $form:ty, $($field:ident).+, $reload:ident, $about:literal) => {
        Setting::new(
            $key,
            <$form as SettingCodec>::name,
            <$form as SettingCodec>::KIND,
            |draft, at| {
                draft.config.$($field).+ = <$form as SettingCodec>::parse(at).map_err(|problem| vec![problem])?;
                Ok(())
            },
            |config| <$form as SettingCodec>::print(&config.$($field).+),
            ReloadSupport::$reload,
            $about,
        )
    };
}
use setting;
