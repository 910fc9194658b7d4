//! Differences between two configurations, and which of them a running daemon can take over. Pure.

use serde_json::Value;

use super::Config;
use super::settings::{self, ReloadSupport};

/// Changed settings, in the order of the reference page.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConfigDiff {
    /// Settings that a running daemon takes over.
    pub reloadable: Vec<SettingChange>,
    /// Settings that keep their old value until larder is started again.
    pub needs_restart: Vec<SettingChange>,
}

/// One setting that changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SettingChange {
    /// Its key.
    pub key: &'static str,
    /// The value before.
    pub old: Value,
    /// The value now.
    pub new: Value,
}

impl ConfigDiff {
    /// Whether nothing changed.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.reloadable.is_empty() && self.needs_restart.is_empty()
    }
}

/// Compares the values of all settings; where they came from does not count.
pub fn diff(old: &Config, new: &Config) -> ConfigDiff {
    let mut changes = ConfigDiff::default();
    for setting in settings::all() {
        let change = SettingChange { key: setting.key, old: (setting.show)(old), new: (setting.show)(new) };
        if change.old == change.new {
            continue;
        }
        match setting.reload {
            ReloadSupport::Live => changes.reloadable.push(change),
            ReloadSupport::Restart => changes.needs_restart.push(change),
        }
    }
    changes
}
