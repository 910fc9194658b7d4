//! `staticPodPath`: a file or a directory of manifests, watched, as kubelet has it.
//!
//! Every file that does not begin with a dot counts, whatever its ending. An invalid file is reported once, with
//! file and line; the images of the pods that it had before are released, as those of a deleted file. A directory that
//! cannot be read releases nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder::pod::{ObjectRef, SandboxConfig};
use larder::pull::{EnsureRequest, default_policy};
use notify::{RecursiveMode, Watcher as _};
use tokio::sync::mpsc;
use tokio::time;

use super::desired::{DesiredImages, DesiredKey, FirstScan};
use crate::manifest::{ManifestSource, Manifests};

/// How often the directory is read without a change notification, as in kubelet.
const PERIOD: Duration = Duration::from_secs(20);
/// How long to wait for more changes after one.
const SETTLE: Duration = Duration::from_millis(200);
/// Namespace of pods that name none.
const NAMESPACE: &str = "default";

/// Images of the manifests, and the problems of these.
struct StaticPodImages {
    /// `None` if unknown.
    wanted: Option<BTreeMap<DesiredKey, EnsureRequest>>,
    problems: BTreeSet<String>,
}

/// Ensures the images of the pods at this path until dropped; `desired` then keeps its last state. `first` is dropped
/// once all that was read first has been looked for.
pub(in crate::node) async fn run_static_pods(
    path: PathBuf,
    desired: &mut DesiredImages,
    mut first: Option<FirstScan>,
) {
    let (notify, mut changes) = mpsc::channel(1);
    let _watcher = watch(&path, notify.clone());
    let (mut reported, mut before) = (BTreeSet::new(), None);
    loop {
        let (of, known) = (path.clone(), before.take());
        // It fails only when the runtime stops.
        let Ok((state, reading)) =
            tokio::task::spawn_blocking(move || read_if_new(&of, known.as_ref())).await
        else {
            return;
        };
        before = state;
        let first = first.take();
        if let Some(StaticPodImages { wanted, problems }) = reading {
            for problem in problems.difference(&reported) {
                tracing::warn!("static pods: {problem}");
            }
            reported = problems;
            if let Some(wanted) = wanted {
                desired.set(wanted, first.as_ref());
            }
        }
        drop(first);
        let _ = time::timeout(PERIOD, changes.recv()).await;
        time::sleep(SETTLE).await;
        while changes.try_recv().is_ok() {}
    }
}

/// Notifies of changes in the directory. Without it, a change is found by the next periodic read.
fn watch(path: &Path, changed: mpsc::Sender<()>) -> Option<notify::RecommendedWatcher> {
    let on_event = move |event: notify::Result<notify::Event>| {
        // An access is not a change: larder itself reads the files.
        if !event.is_ok_and(|event| event.kind.is_access()) {
            // One change that waits is as good as many.
            let _ = changed.try_send(());
        }
    };
    let watched = notify::recommended_watcher(on_event).and_then(|mut watcher| {
        watcher.watch(path, RecursiveMode::NonRecursive)?;
        Ok(watcher)
    });
    watched
        .inspect_err(|error| {
            tracing::info!("static pods: cannot watch the directory, reading it periodically: {error}");
        })
        .ok()
}

/// Identifies a state of the manifests: name, inode, size and modification time of each file.
type ManifestFingerprint = Vec<(PathBuf, u64, u64, i64, i64)>;

/// Reads the manifests, unless they are as they were.
fn read_if_new(
    path: &Path,
    before: Option<&ManifestFingerprint>,
) -> (Option<ManifestFingerprint>, Option<StaticPodImages>) {
    let state = files(path)
        .ok()
        .and_then(|files| files.into_iter().map(state_of).collect::<Option<ManifestFingerprint>>());
    if state.is_some() && state.as_ref() == before {
        return (state, None);
    }
    (state, Some(read(path)))
}

fn state_of(file: PathBuf) -> Option<(PathBuf, u64, u64, i64, i64)> {
    let found = fs_err::metadata(&file).ok()?;
    Some((file, found.ino(), found.len(), found.mtime(), found.mtime_nsec()))
}

fn read(path: &Path) -> StaticPodImages {
    let (mut wanted, mut problems) = (BTreeMap::new(), BTreeSet::new());
    let files = match files(path) {
        Ok(files) => files,
        Err(error) => {
            problems.insert(error.to_string());
            let is_gone = error.kind() == io::ErrorKind::NotFound;
            return StaticPodImages { wanted: is_gone.then_some(wanted), problems };
        }
    };
    for file in files {
        let mut manifests = Manifests::default();
        manifests.read(&ManifestSource::File(file), NAMESPACE);
        problems.extend(manifests.problems.iter().map(ToString::to_string));
        for workload in manifests.workloads {
            let owner = format!("static pod {}/{}", workload.pod.namespace, workload.pod.name);
            for want in workload.wants {
                let policy = want.policy.unwrap_or_else(|| default_policy(&want.image));
                let key = DesiredKey {
                    owner: owner.clone(),
                    part: want.part,
                    image: want.image.clone(),
                    policy: policy.to_string(),
                    is_pinned: true,
                };
                let request = EnsureRequest {
                    target: Some(ObjectRef::new(&workload.pod, &want.field_path)),
                    sandbox: Some(SandboxConfig::of(&workload.pod)),
                    ..EnsureRequest::new(want.image, policy, workload.pod.clone())
                };
                wanted.insert(key, request);
            }
        }
    }
    StaticPodImages { wanted: Some(wanted), problems }
}

/// The manifests: the file itself, or the regular files of a directory that do not begin with a dot.
fn files(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !fs_err::metadata(path)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs_err::read_dir(path)? {
        let entry = entry?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if hidden {
            continue;
        }
        // A link counts as what it leads to, if that is there.
        match fs_err::metadata(entry.path()) {
            Ok(found) if found.is_file() => files.push(entry.path()),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(_) | Err(_) => {}
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use larder::pull::ImageManager;
    use larder::retention::RetentionSource as _;
    use larder_testkit::fake_backend::{FakeBackend, image};

    use super::super::desired::DesiredUses;
    use super::*;

    const POD: &str = "apiVersion: v1
kind: Pod
metadata: {name: proxy, namespace: kube-system}
spec:
  containers:
  - {name: app, image: 'a:1'}
  - {name: side, image: 'b:1', imagePullPolicy: Never}
";

    #[test]
    fn every_file_but_hidden_ones_counts_and_unusable_ones_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs_err::write(dir.path().join(name), text).unwrap();
        write("proxy", POD);
        write(".hidden.yaml", "junk");
        write("junk.yaml", "a: [");
        fs_err::create_dir(dir.path().join("directory")).unwrap();
        std::os::unix::fs::symlink("nowhere", dir.path().join("dangling")).unwrap();
        let reading = read(dir.path());
        let wanted: Vec<_> = reading
            .wanted
            .iter()
            .flat_map(BTreeMap::keys)
            .map(|key| format!("{} {} {} {}", key.owner, key.part, key.image, key.policy))
            .collect();
        assert_eq!(
            wanted,
            [
                "static pod kube-system/proxy app a:1 IfNotPresent",
                "static pod kube-system/proxy side b:1 Never"
            ]
        );
        assert_eq!(reading.problems.len(), 1, "{:?}", reading.problems);
        assert!(reading.problems.iter().all(|problem| problem.contains("junk.yaml")));
        let nowhere = read(&dir.path().join("nowhere"));
        assert_eq!((nowhere.problems.len(), nowhere.wanted.map(|wanted| wanted.len())), (1, Some(0)));
    }

    #[test]
    fn manifests_that_are_as_they_were_are_not_read_again() {
        let dir = tempfile::tempdir().unwrap();
        fs_err::write(dir.path().join("pod"), POD).unwrap();
        let (state, first) = read_if_new(dir.path(), None);
        assert!(first.is_some());
        let (state, again) = read_if_new(dir.path(), state.as_ref());
        assert!(again.is_none());
        fs_err::write(dir.path().join("pod"), "a: [").unwrap();
        assert!(read_if_new(dir.path(), state.as_ref()).1.is_some(), "another size");
    }

    #[tokio::test]
    async fn images_of_new_pods_are_ensured_and_those_of_removed_ones_released() {
        let dir = tempfile::tempdir().unwrap();
        let backend = FakeBackend::new();
        backend.offer("a:1", image("sha256:a", 1));
        let manager = Arc::new(ImageManager::new(Arc::new(backend.clone())));
        let held = DesiredUses::default();
        let mut desired = DesiredImages::new(manager, held.clone());
        let until = async |count: usize| {
            while held.retentions().await.unwrap().len() != count {
                time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            () = run_static_pods(dir.path().to_owned(), &mut desired, None) => {}
            () = async {
                fs_err::write(dir.path().join("pod"), POD).unwrap();
                until(1).await;
                fs_err::remove_file(dir.path().join("pod")).unwrap();
                until(0).await;
            } => {}
        }
    }

    #[tokio::test]
    async fn a_directory_that_cannot_be_read_now_releases_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("pods");
        fs_err::create_dir(&place).unwrap();
        fs_err::write(place.join("pod"), POD).unwrap();
        let backend = FakeBackend::new();
        backend.offer("a:1", image("sha256:a", 1));
        let manager = Arc::new(ImageManager::new(Arc::new(backend.clone())));
        let held = DesiredUses::default();
        let mut desired = DesiredImages::new(manager, held.clone());
        desired.set(read(&place).wanted.unwrap(), None);
        while held.retentions().await.unwrap().is_empty() {
            time::sleep(Duration::from_millis(5)).await;
        }
        // A link in a circle: an error that is not about what is not there.
        fs_err::remove_dir_all(&place).unwrap();
        std::os::unix::fs::symlink("pods", &place).unwrap();
        let reading = read(&place);
        assert_eq!(reading.problems.len(), 1);
        assert!(reading.wanted.is_none(), "the desired images are unknown");
        tokio::select! {
            () = run_static_pods(place, &mut desired, None) => {}
            () = time::sleep(Duration::from_millis(100)) => {}
        }
        assert_eq!(held.retentions().await.unwrap().len(), 1);
    }
}
