//! The table of all settings.

mod kubelet;
mod own;
mod store;
mod values;

use larder::config::KubeletImageConfig;
use serde_json::Value;

use super::Config;
use super::forms::Kind;
use crate::manifest::Problem;
use crate::manifest::tree::At;

/// One setting.
#[derive(Clone, Copy)]
pub(in crate::config) struct Setting {
    /// Its place in the file: `gc.period`.
    pub(in crate::config) key: &'static str,
    /// What values look like.
    pub(in crate::config) form: fn() -> String,
    /// What the text of a flag stands for.
    pub(in crate::config) kind: Kind,
    /// Takes a value over.
    pub(in crate::config) read: Read,
    /// The value as it is written.
    pub(in crate::config) show: fn(&Config) -> Value,
    /// Whether a running daemon can change it.
    pub(in crate::config) reload: Reload,
    /// Whether it is a field of kubelet's file.
    pub(in crate::config) in_kubelet_file: bool,
    /// Kubelet's flag for it.
    pub(in crate::config) kubelet_flag: Option<&'static str>,
    /// The default in words, where it depends on something.
    pub(in crate::config) default: Option<&'static str>,
    /// Kubelet's value, where larder's default is another.
    pub(in crate::config) kubelet_default: Option<&'static str>,
    /// What it does.
    pub(in crate::config) about: &'static str,
    /// Why it has no effect yet.
    pub(in crate::config) idle: Option<&'static str>,
}

type Read = fn(&mut Draft, &At<'_>) -> Result<(), Vec<Problem>>;

/// Whether a running daemon can change a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::config) enum Reload {
    /// It can.
    Live,
    /// It cannot.
    Restart,
}

/// Settings while they are read.
pub(in crate::config) struct Draft {
    /// Kubelet's settings as written.
    pub(in crate::config) written: KubeletImageConfig,
    /// Hosts that need no proxy, as written.
    pub(in crate::config) no_proxy: Option<String>,
    /// All else.
    pub(in crate::config) config: Config,
}

impl Setting {
    const fn new(
        key: &'static str,
        (form, kind): (fn() -> String, Kind),
        read: Read,
        show: fn(&Config) -> Value,
        reload: Reload,
        about: &'static str,
    ) -> Setting {
        Setting {
            key,
            form,
            kind,
            read,
            show,
            reload,
            in_kubelet_file: false,
            kubelet_flag: None,
            default: None,
            kubelet_default: None,
            about,
            idle: None,
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

    const fn idle(self, why: &'static str) -> Setting {
        Setting { idle: Some(why), ..self }
    }
}

/// All settings, in the order of the reference page.
pub(in crate::config) fn all() -> impl Iterator<Item = &'static Setting> {
    own::TOP.iter().chain(kubelet::SETTINGS).chain(own::SECTIONS).chain(store::SETTINGS).chain(own::REST)
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
            (<$form as Form>::name, <$form as Form>::KIND),
            |draft, at| {
                draft.config.$($field).+ = <$form as Form>::read(at).map_err(|problem| vec![problem])?;
                Ok(())
            },
            |config| <$form as Form>::show(&config.$($field).+),
            Reload::$reload,
            $about,
        )
    };
}
use setting;
