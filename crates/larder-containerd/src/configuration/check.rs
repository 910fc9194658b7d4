//! Whether a containerd keeps its snapshots in larder's store, and kubelet asks larder for images.

use crate::{ContainerdInspector, SnapshotterPlugin};
use larder::backend::{Backend as _, BackendError, EndpointFailure};
use larder::error_chain;
use larder::hint::Hint;
use larder_cri::{CriBackend, Endpoint};
use serde_json::Value;

use super::edit::SNAPSHOTTER;
use super::{ConfigChange, ConfigurationError, ContainerdFiles, LarderSettings, plan};

const RESTART: &str = "systemctl restart containerd";

/// One part of the set-up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetupCheck {
    /// Part that was checked.
    pub name: &'static str,
    /// True if the part is as it should be.
    pub ok: bool,
    /// State of the part, as it was found.
    pub found: String,
    /// Next step if the part is not as it should be.
    pub next: Option<Hint>,
}

impl SetupCheck {
    fn ok(name: &'static str, found: impl Into<String>) -> SetupCheck {
        SetupCheck { name, ok: true, found: found.into(), next: None }
    }

    fn failed(name: &'static str, found: impl Into<String>, next: impl Into<Hint>) -> SetupCheck {
        let next: Hint = next.into();
        let next = next.parts().iter().cloned().fold(Hint::from(format!("{name}: ")), Hint::with);
        SetupCheck { name, ok: false, found: found.into(), next: Some(next) }
    }
}

/// Looks at each part, in the order in which they depend on each other.
pub async fn check(
    files: &ContainerdFiles,
    settings: &LarderSettings,
) -> Result<Vec<SetupCheck>, ConfigurationError> {
    let change = plan(files, settings).await?;
    let mut checks =
        vec![settings_check(settings), larder_socket(settings).await, configuration(&change, files)];
    let inspector = ContainerdInspector::new(&change.containerd.cri);
    let root = settings.root.display().to_string();
    checks.push(plugin(inspector.snapshotter(SNAPSHOTTER).await, &root));
    checks.push(snapshots(inspector.count_snapshots(SNAPSHOTTER).await));
    checks.push(image_filesystem(&change, settings).await);
    checks.extend(kubelet(files, settings));
    Ok(checks)
}

fn settings_check(settings: &LarderSettings) -> SetupCheck {
    let name = "larder's settings";
    let publishes = settings.containerd_socket.is_some();
    let next = "set backend: store, containerd.snapshotter: true and containerd.socket in larder's settings, and restart larder";
    if !settings.uses_store {
        return SetupCheck::failed(name, "the backend is not larder's own store", next);
    }
    match (settings.serves_snapshots, publishes) {
        (true, true) => SetupCheck::ok(name, "containerd.snapshotter is on, and images are published"),
        (true, false) => {
            SetupCheck::failed(name, "containerd.socket is not set: images are not published", next)
        }
        (false, _) => SetupCheck::failed(name, "containerd.snapshotter is off", next),
    }
}

async fn larder_socket(settings: &LarderSettings) -> SetupCheck {
    let name = "larder's socket";
    let path = settings.socket.display().to_string();
    let cri = CriBackend::new(Endpoint::at(&settings.socket), settings.runtime.clone());
    let problem = match cri.info().await {
        Err(BackendError::Unreachable { problem: EndpointFailure::Larder, .. }) => {
            return SetupCheck::ok(name, format!("{path}: answers"));
        }
        Ok(info) => format!("{path}: served by {}", info.name),
        Err(error) => error_chain(&error),
    };
    SetupCheck::failed(name, problem, "systemctl start larder")
}

fn configuration(change: &ConfigChange, files: &ContainerdFiles) -> SetupCheck {
    let (name, path) = ("configuration", files.config.display());
    if change.is_empty() {
        return SetupCheck::ok(name, path.to_string());
    }
    let next = Hint::new().command(files.command("--apply"));
    SetupCheck::failed(name, format!("{path}: larder is not, or not fully, configured"), next)
}

fn plugin(found: Result<Option<SnapshotterPlugin>, BackendError>, root: &str) -> SetupCheck {
    let name = "proxy plugin";
    let id = format!("io.containerd.snapshotter.v1.{SNAPSHOTTER}");
    match found {
        Ok(Some(plugin)) => match (plugin.error, plugin.root) {
            (Some(error), _) => SetupCheck::failed(name, format!("{id}: {error}"), "see containerd's log"),
            (None, Some(other)) if other != root => SetupCheck::failed(
                name,
                format!("{id} was loaded with root {other}, the store is {root}"),
                RESTART,
            ),
            (None, _) => SetupCheck::ok(name, format!("{id} is loaded")),
        },
        Ok(None) => SetupCheck::failed(name, format!("{id} is not loaded"), RESTART),
        Err(error) => SetupCheck::failed(name, error_chain(&error), RESTART),
    }
}

fn snapshots(count: Result<usize, BackendError>) -> SetupCheck {
    let name = "snapshots";
    match count {
        Ok(count) => SetupCheck::ok(name, format!("containerd lists {count} of larder")),
        Err(error) => SetupCheck::failed(
            name,
            error_chain(&error),
            "see the lines above; larder.socket starts before containerd",
        ),
    }
}

/// CRI reports the filesystem of its snapshotter: the directory that a plugin exports, or one with the plugin's name.
async fn image_filesystem(change: &ConfigChange, settings: &LarderSettings) -> SetupCheck {
    let name = "CRI";
    let root = settings.root.display().to_string();
    let is_own = |path: &String| *path == root || path.ends_with("/io.containerd.snapshotter.v1.larder");
    match change.containerd.cri.filesystems().await {
        Ok(found) => {
            let paths: Vec<String> =
                found.image.iter().map(|filesystem| filesystem.mountpoint.display().to_string()).collect();
            if paths.iter().any(is_own) {
                SetupCheck::ok(name, "its snapshotter is larder")
            } else {
                let found = format!("its snapshots are in {}", paths.join(", "));
                SetupCheck::failed(name, found, RESTART)
            }
        }
        Err(error) => SetupCheck::failed(name, error_chain(&error), "see containerd's log"),
    }
}

/// `None` where there is no kubelet, or its settings are not in this file.
fn kubelet(files: &ContainerdFiles, settings: &LarderSettings) -> Option<SetupCheck> {
    let name = "kubelet";
    let text = fs_err::read_to_string(&files.kubelet).ok()?;
    let path = files.kubelet.display();
    let wanted = format!("unix://{}", settings.socket.display());
    let next = format!("set imageServiceEndpoint: {wanted} in {path}, and systemctl restart kubelet");
    let parsed: Value = match serde_saphyr::from_str(&text) {
        Ok(parsed) => parsed,
        Err(error) => return Some(SetupCheck::failed(name, format!("{path}: {error}"), next)),
    };
    let found = parsed.get("imageServiceEndpoint").and_then(Value::as_str).unwrap_or_default();
    Some(match found {
        found if found == wanted => SetupCheck::ok(name, format!("{path}: imageServiceEndpoint is larder")),
        "" => SetupCheck::failed(name, format!("{path}: imageServiceEndpoint is not set"), next),
        other => SetupCheck::failed(name, format!("{path}: imageServiceEndpoint is {other}"), next),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_with_the_root_of_another_store_is_not_ok() {
        let loaded = |root: Option<&str>| {
            let plugin = SnapshotterPlugin { root: root.map(str::to_owned), error: None };
            super::plugin(Ok(Some(plugin)), "/var/lib/larder")
        };
        assert!(loaded(None).ok && loaded(Some("/var/lib/larder")).ok);
        let check = loaded(Some("/srv/larder"));
        assert!(!check.ok && check.found.contains("/srv/larder"), "{check:?}");
    }
}
