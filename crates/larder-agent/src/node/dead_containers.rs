//! Removes containers that exited long ago on hosts without kubelet, as old kubelets did: they keep their images in
//! use.

use std::time::{Duration, SystemTime};

use larder_cri::{CriBackend, ExitedContainer};
use tokio::task::spawn_blocking;
use tokio::time;

use super::Storage;
use super::settings::NodeSettings;

/// How often exited containers are looked for.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// The PID namespace of the host, which has the same number on every machine.
const HOST_PIDS: &str = "pid:[4026531836]";
/// Commands of kubelets, alone or as a part of a distribution; each is a prefix.
const KUBELETS: [&str; 5] = ["kubelet", "k3s", "rke2", "kubelite", "k0s"];

/// Removes them for as long as the setting says so, until dropped.
pub(super) async fn run(storage: &Storage, settings: &NodeSettings) {
    let Some(runtime) = storage.runtime() else { return };
    let mut logged = None;
    loop {
        time::sleep(CHECK_INTERVAL).await;
        let commands = async || spawn_blocking(host_commands).await.ok().flatten();
        let reason = remove_old_containers(runtime, settings, commands, SystemTime::now()).await;
        if let Some(why) = reason.filter(|_| reason != logged) {
            tracing::warn!("gc.exitedContainerAge has no effect: {why}");
        }
        logged = reason;
    }
}

/// Removes them once, if the setting says so. Returns why it has no effect.
async fn remove_old_containers(
    runtime: &CriBackend,
    settings: &NodeSettings,
    commands: impl AsyncFnOnce() -> Option<Vec<String>>,
    now: SystemTime,
) -> Option<&'static str> {
    let age = settings.now().exited_container_age?;
    let reason = refusal_reason(settings.reads_kubelet_file(), commands().await.as_deref());
    if reason.is_none() {
        remove_exited(runtime, age, now).await;
    }
    reason
}

async fn remove_exited(runtime: &CriBackend, age: Duration, now: SystemTime) {
    let exited = match runtime.exited_containers().await {
        Ok(exited) => exited,
        Err(error) => {
            tracing::warn!("cannot list exited containers: {error}");
            return;
        }
    };
    for ExitedContainer { id, name, .. } in removable(exited, age, now) {
        match runtime.remove_container(&id).await {
            Ok(()) => tracing::info!("removed exited container {name} ({id})"),
            Err(error) => tracing::warn!("cannot remove exited container {name} ({id}): {error}"),
        }
    }
}

/// Returns why no container may be removed; `None` if there is no kubelet.
fn refusal_reason(reads_kubelet: bool, commands: Option<&[String]>) -> Option<&'static str> {
    let is_kubelet = |command: &String| KUBELETS.iter().any(|kubelet| command.starts_with(kubelet));
    match commands {
        _ if reads_kubelet => Some("larder reads the settings of a kubelet"),
        None => Some("the processes of the host are not visible"),
        Some(commands) if commands.iter().any(is_kubelet) => Some("a kubelet runs"),
        Some(_) => None,
    }
}

/// The containers that no kubelet started and that exited longer ago than `age`.
fn removable(exited: Vec<ExitedContainer>, age: Duration, now: SystemTime) -> Vec<ExitedContainer> {
    let is_old = |finished: SystemTime| now.duration_since(finished).is_ok_and(|since| since > age);
    exited.into_iter().filter(|one| !one.of_kubelet && one.finished.is_some_and(is_old)).collect()
}

/// The commands of all processes of the host; `None` if they are not visible. Reads files of procfs.
fn host_commands() -> Option<Vec<String>> {
    let namespace = fs_err::read_link("/proc/self/ns/pid").ok()?;
    if namespace.as_os_str() != HOST_PIDS {
        return None;
    }
    // With the mount option `hidepid`, a user sees only its own processes.
    fs_err::read_to_string("/proc/1/comm").ok()?;
    let is_process = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    let processes = fs_err::read_dir("/proc").ok()?.flatten();
    let processes = processes.filter(|entry| entry.file_name().to_str().is_some_and(is_process));
    let commands = processes.filter_map(|entry| fs_err::read_to_string(entry.path().join("comm")).ok());
    Some(commands.map(|command| command.trim().to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use larder_cri::{CriConfig, proto};
    use larder_testkit::fake_backend::FakeBackend;
    use larder_testkit_peers::fake_cri::FakeCri;

    use super::super::testing;
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test]
    async fn containers_of_the_runtime_that_exited_long_ago_are_removed() {
        let fake = FakeCri::start();
        let exited = |id: &str| proto::Container {
            id: id.into(),
            state: proto::ContainerState::ContainerExited.into(),
            ..proto::Container::default()
        };
        fake.change(|contents| {
            let mut of_kubelet = exited("of kubelet");
            of_kubelet.labels.insert("io.kubernetes.pod.uid".into(), "u1".into());
            let running = proto::Container {
                state: proto::ContainerState::ContainerRunning.into(),
                ..exited("running")
            };
            contents.containers = vec![exited("old"), exited("young"), of_kubelet, running];
            for (id, seconds) in [("old", 1), ("of kubelet", 1), ("running", 1), ("young", 3600)] {
                contents.finished.insert(id.into(), seconds * 1_000_000_000);
            }
        });
        let runtime = CriBackend::new(fake.endpoint(), CriConfig::default());
        let remove = async |age: Option<Duration>, command: &str| {
            let dir = tempfile::tempdir().unwrap();
            let node = testing::node(&FakeBackend::new(), dir.path(), None, |config| {
                config.exited_container_age = age;
            });
            let commands = async || Some(vec![command.to_owned()]);
            let now = UNIX_EPOCH + Duration::from_secs(3602);
            let reason = remove_old_containers(&runtime, &node.settings, commands, now).await;
            let mut left = Vec::new();
            fake.change(|contents| left = contents.containers.iter().map(|one| one.id.clone()).collect());
            (reason, left.join(", "))
        };
        let all = "old, young, of kubelet, running".to_owned();
        assert_eq!(remove(None, "systemd").await, (None, all.clone()), "off by default");
        assert_eq!(remove(Some(HOUR), "kubelet").await, (Some("a kubelet runs"), all));
        assert_eq!(remove(Some(HOUR), "systemd").await, (None, "young, of kubelet, running".to_owned()));
    }

    #[test]
    fn containers_are_removed_only_where_there_is_certainly_no_kubelet() {
        let commands = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        assert_eq!(refusal_reason(false, Some(&commands(&["systemd", "containerd"]))), None);
        assert!(refusal_reason(true, Some(&commands(&["systemd"]))).is_some());
        assert!(refusal_reason(false, None).is_some());
        for kubelet in ["kubelet", "k3s-agent", "kubelite"] {
            assert!(refusal_reason(false, Some(&commands(&["systemd", kubelet]))).is_some(), "{kubelet}");
        }
    }

    #[test]
    fn only_old_containers_of_no_kubelet_are_removed() {
        let now = UNIX_EPOCH + 1000 * HOUR;
        let container = |id: &str, of_kubelet, ago: Option<Duration>| ExitedContainer {
            id: id.to_owned(),
            name: id.to_owned(),
            of_kubelet,
            finished: ago.and_then(|ago| now.checked_sub(ago)),
        };
        let exited = vec![
            container("old", false, Some(2 * HOUR)),
            container("young", false, Some(HOUR / 2)),
            container("of kubelet", true, Some(2 * HOUR)),
            container("unknown end", false, None),
        ];
        let removed: Vec<String> = removable(exited, HOUR, now).into_iter().map(|one| one.id).collect();
        assert_eq!(removed, ["old"]);
    }
}
