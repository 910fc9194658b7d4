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

/// A table of settings. A row has the description, which the reference page prints, the key, the codec, the field of
/// the configuration (or how a value is set and shown), and whether a running daemon can change it.
macro_rules! settings {
    ($(#[$doc:meta])* $table:ident: $(
        $(#[doc = $description:literal])+
        $key:literal: $codec:ty => $($place:tt).+, $reload:ident $(, $attribute:ident($($value:literal)?))*;
    )+) => {
        $(#[$doc])*
        pub(super) const $table: &[Setting] = &[$(
            Setting {
                key: $key,
                codec_name: <$codec as SettingCodec>::name,
                kind: <$codec as SettingCodec>::KIND,
                read: |draft, at| {
                    let value = <$codec as SettingCodec>::parse_all(at)?;
                    settings!(set draft, value, $($place).+);
                    Ok(())
                },
                show: settings!(show $codec, $($place).+),
                reload: ReloadSupport::$reload,
                in_kubelet_file: settings!(in_kubelet_file $($place).+),
                kubelet_flag: None,
                default: None,
                kubelet_default: None,
                description: concat!($($description),+).trim_ascii_start(),
            }
            $(.$attribute($($value)?))*
        ),+];
    };
    (set $draft:ident, $value:ident, { $set:expr, $show:expr }) => {{
        let set: fn(&mut ConfigDraft, _) = $set;
        set($draft, $value);
    }};
    (set $draft:ident, $value:ident, images.$field:ident) => { $draft.written.$field = Some($value) };
    (set $draft:ident, $value:ident, $($field:ident).+) => { $draft.config.$($field).+ = $value };
    (show $codec:ty, { $set:expr, $show:expr }) => { $show };
    (show $codec:ty, images.$field:ident) => {
        |config| {
            let value: Option<<$codec as SettingCodec>::Value> = config.images.$field.clone().into();
            value.map_or(serde_json::Value::Null, |value| <$codec as SettingCodec>::print(&value))
        }
    };
    (show $codec:ty, $($field:ident).+) => {
        |config| <$codec as SettingCodec>::print(&config.$($field).+)
    };
    (in_kubelet_file images.$field:ident) => { true };
    (in_kubelet_file $($place:tt).+) => { false };
}
use settings;
