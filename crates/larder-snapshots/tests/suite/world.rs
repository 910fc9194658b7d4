//! The service on a store of its own, called as containerd's proxy calls it, and mounts.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::StreamExt as _;
use larder_snapshots::proto::snapshots_server::Snapshots as _;
use larder_snapshots::proto::{
    CommitSnapshotRequest, Info, ListSnapshotsRequest, Mount, MountsRequest, PrepareSnapshotRequest,
    RemoveSnapshotRequest, StatSnapshotRequest, UpdateSnapshotRequest, UsageRequest, UsageResponse,
    ViewSnapshotRequest,
};
use larder_snapshots::{LayerFetcher, SnapshotService};
use larder_store::store::{Store, StoreConfig};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};
use tonic::{Request, Status};

/// A store, its service, and a directory to mount in.
pub(crate) struct SuiteWorld {
    service: Option<SnapshotService>,
    runtime: tokio::runtime::Runtime,
    dir: tempfile::TempDir,
}

impl SuiteWorld {
    /// `None`, after a loud message, without root outside of CI.
    pub(crate) fn new() -> Option<SuiteWorld> {
        if !rustix::process::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "CI must not skip mounts: run the tests as root");
            eprintln!("==== SKIPPED, NOT TESTED: mounting needs root; run the tests as root ====");
            return None;
        }
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let mut world = SuiteWorld { service: None, runtime, dir: tempfile::tempdir().unwrap() };
        world.reopen();
        Some(world)
    }

    /// As after a restart of larder.
    pub(crate) fn reopen(&mut self) {
        self.service = None;
        let store = Store::open(&self.root(), StoreConfig::default()).unwrap();
        self.service = Some(SnapshotService::new(store, None));
    }

    /// Serves from now on with what fetches the layers that the store lacks.
    pub(crate) fn fetch_with(&mut self, fetcher: impl FnOnce(Store) -> Arc<dyn LayerFetcher>) {
        self.service = None;
        let store = Store::open(&self.root(), StoreConfig::default()).unwrap();
        self.service = Some(SnapshotService::new(store.clone(), Some(fetcher(store))));
    }

    pub(crate) fn runtime(&self) -> &tokio::runtime::Runtime {
        &self.runtime
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn service(&self) -> &SnapshotService {
        self.service.as_ref().unwrap()
    }

    /// A new directory.
    pub(crate) fn work(&self, name: &str) -> PathBuf {
        let path = self.dir.path().join("work").join(name);
        fs_err::create_dir_all(&path).unwrap();
        path
    }

    pub(crate) fn prepare(&self, key: &str, parent: &str) -> Result<Vec<Mount>, Status> {
        self.prepare_with(key, parent, &[])
    }

    pub(crate) fn prepare_with(
        &self,
        key: &str,
        parent: &str,
        labels: &[(&str, &str)],
    ) -> Result<Vec<Mount>, Status> {
        let request = PrepareSnapshotRequest {
            key: key.into(),
            parent: parent.into(),
            labels: map(labels),
            ..PrepareSnapshotRequest::default()
        };
        let answer = self.runtime.block_on(self.service().prepare(Request::new(request)))?;
        Ok(answer.into_inner().mounts)
    }

    pub(crate) fn view(&self, key: &str, parent: &str) -> Result<Vec<Mount>, Status> {
        self.view_with(key, parent, &[])
    }

    pub(crate) fn view_with(
        &self,
        key: &str,
        parent: &str,
        labels: &[(&str, &str)],
    ) -> Result<Vec<Mount>, Status> {
        let request = ViewSnapshotRequest {
            key: key.into(),
            parent: parent.into(),
            labels: map(labels),
            ..ViewSnapshotRequest::default()
        };
        Ok(self.runtime.block_on(self.service().view(Request::new(request)))?.into_inner().mounts)
    }

    pub(crate) fn mounts(&self, key: &str) -> Result<Vec<Mount>, Status> {
        let request = MountsRequest { key: key.into(), ..MountsRequest::default() };
        Ok(self.runtime.block_on(self.service().mounts(Request::new(request)))?.into_inner().mounts)
    }

    pub(crate) fn commit(&self, name: &str, key: &str) -> Result<(), Status> {
        self.commit_with(name, key, &[])
    }

    pub(crate) fn commit_with(&self, name: &str, key: &str, labels: &[(&str, &str)]) -> Result<(), Status> {
        let request = CommitSnapshotRequest {
            name: name.into(),
            key: key.into(),
            labels: map(labels),
            ..CommitSnapshotRequest::default()
        };
        self.runtime.block_on(self.service().commit(Request::new(request))).map(drop)
    }

    pub(crate) fn remove(&self, key: &str) -> Result<(), Status> {
        let request = RemoveSnapshotRequest { key: key.into(), ..RemoveSnapshotRequest::default() };
        self.runtime.block_on(self.service().remove(Request::new(request))).map(drop)
    }

    pub(crate) fn stat(&self, key: &str) -> Result<Info, Status> {
        let request = StatSnapshotRequest { key: key.into(), ..StatSnapshotRequest::default() };
        let answer = self.runtime.block_on(self.service().stat(Request::new(request)))?;
        Ok(answer.into_inner().info.unwrap())
    }

    pub(crate) fn update(&self, info: Info, paths: &[&str]) -> Result<Info, Status> {
        let paths = paths.iter().map(|&path| path.to_owned()).collect();
        let request = UpdateSnapshotRequest {
            info: Some(info),
            update_mask: Some(prost_types::FieldMask { paths }),
            ..UpdateSnapshotRequest::default()
        };
        let answer = self.runtime.block_on(self.service().update(Request::new(request)))?;
        Ok(answer.into_inner().info.unwrap())
    }

    pub(crate) fn list(&self, filters: &[&str]) -> Result<Vec<Info>, Status> {
        let filters = filters.iter().map(|&filter| filter.to_owned()).collect();
        let request = ListSnapshotsRequest { filters, ..ListSnapshotsRequest::default() };
        self.runtime.block_on(async {
            let mut parts = self.service().list(Request::new(request)).await?.into_inner();
            let mut infos = Vec::new();
            while let Some(part) = parts.next().await {
                infos.extend(part?.info);
            }
            Ok(infos)
        })
    }

    pub(crate) fn usage(&self, key: &str) -> Result<UsageResponse, Status> {
        let request = UsageRequest { key: key.into(), ..UsageRequest::default() };
        Ok(self.runtime.block_on(self.service().usage(Request::new(request)))?.into_inner())
    }

    /// Prepares a snapshot and mounts it.
    pub(crate) fn prepare_mount(&self, key: &str, parent: &str) -> MountedSnapshot {
        let mounts = self.prepare(key, parent).unwrap();
        MountedSnapshot::of(&mounts, self.work(key))
    }

    /// Commits what `change` does on top of a parent; returns the name.
    pub(crate) fn layer(&self, name: &str, parent: &str, change: impl FnOnce(&Path)) -> String {
        let mounted = self.prepare_mount(&format!("{name}-active"), parent);
        change(mounted.path());
        drop(mounted);
        self.commit(name, &format!("{name}-active")).unwrap();
        name.to_owned()
    }
}

fn map(labels: &[(&str, &str)]) -> BTreeMap<String, String> {
    labels.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The options of an overlay. As containerd does it: where they do not fit on a page, the directory that the lower ones
/// share becomes that of the process. Nothing else in these tests depends on it.
fn short_options(options: &[String]) -> String {
    const PAGE: usize = 4096 - 512;
    let all = options.join(",");
    let Some(lowers) = options.iter().find_map(|option| option.strip_prefix("lowerdir=")) else { return all };
    if all.len() < PAGE {
        return all;
    }
    let first = Path::new(lowers.split(':').next().unwrap());
    let shared = first.parent().and_then(Path::parent).unwrap();
    std::env::set_current_dir(shared).unwrap();
    let short = lowers.replace(&format!("{}/", shared.display()), "");
    assert!(short.len() < PAGE, "{short}");
    all.replace(lowers, &short)
}

/// A snapshot mounted at a directory, until dropped.
pub(crate) struct MountedSnapshot(PathBuf);

impl MountedSnapshot {
    pub(crate) fn of(mounts: &[Mount], target: PathBuf) -> MountedSnapshot {
        let [only] = mounts else { panic!("one mount: {mounts:?}") };
        let has = |option: &str| only.options.iter().any(|given| given == option);
        match only.r#type.as_str() {
            "bind" => {
                let flags = MountFlags::BIND | MountFlags::REC;
                mount(only.source.as_str(), &target, "", flags, None).unwrap();
                if has("ro") {
                    mount_remount(&target, MountFlags::BIND | MountFlags::RDONLY, "").unwrap();
                }
            }
            kind => {
                let options = CString::new(short_options(&only.options)).unwrap();
                mount(only.source.as_str(), &target, kind, MountFlags::empty(), options.as_c_str()).unwrap();
            }
        }
        MountedSnapshot(target)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for MountedSnapshot {
    fn drop(&mut self) {
        unmount(&self.0, UnmountFlags::empty()).unwrap();
    }
}
