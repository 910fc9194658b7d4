//! `larder df`.

mod docker;
mod store;

use std::path::Path;
use std::sync::Arc;

use larder::backend::{Backend, BackendError};
use larder::gc::disk::used_percent;
use larder::gc::{Collector, GcPolicy, Holders, holders as who_holds};
use larder::image_service::{Disk, FilesystemError, ImageService, local_disk};
use larder_control::v1alpha1::{HeldBy, UsageRequest};
use larder_store::store::Store;
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;

use super::gc::holders;
use super::rm::users;
use crate::args::{Connection, DfArgs};
use crate::collect;
use crate::connect::{self, Chosen};
use crate::daemon::Daemon;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::output::table::Table;
use crate::output::{self, size};
use docker::EngineReport;
use store::StoreReport;

pub(super) async fn run(args: &DfArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let report = if let Some(daemon) = Daemon::find(connection)? {
        asked(&daemon).await?
    } else {
        let Some(chosen) = connect::chosen_to_list(connection, out)? else {
            let report = Report::of_nothing(&connect::store_root(connection)?);
            match args.output.data() {
                Some(format) => output::data(out, format, &report),
                None => out.line(report.images.table()),
            }
            return Ok(Outcome::Done);
        };
        let source = UsageSource::of(&chosen);
        let looking = collect::looking(connection, chosen)?;
        usage(looking.backend.clone(), &source, &looking.collector, &looking.collector.policy()).await?
    };
    show(args, &report, out);
    Ok(Outcome::Done)
}

async fn asked(daemon: &Daemon) -> Result<Report, Failure> {
    let answer = daemon.ask(async |mut client| client.usage(UsageRequest {}).await).await?;
    serde_json::from_str(&answer.document).map_err(|error| {
        Failure::failed(format!(
            "the answer of the daemon at {} cannot be read: {error}",
            daemon.socket().display()
        ))
        .hint("it is of another version: restart it after an update")
    })
}

/// Who knows more of the room that images take than every backend tells.
#[derive(Clone)]
pub(crate) enum UsageSource {
    /// Nobody.
    Nothing,
    /// Larder's own store.
    Store(Store),
    /// A Docker Engine.
    #[cfg(feature = "docker")]
    Docker(Arc<larder_docker::DockerBackend>),
}

impl UsageSource {
    /// That of this backend.
    pub(crate) fn of(chosen: &Chosen) -> UsageSource {
        match chosen {
            Chosen::Store(store) => UsageSource::Store(store.store().clone()),
            Chosen::Runtime(_) => UsageSource::Nothing,
            #[cfg(feature = "docker")]
            Chosen::Docker(engine) => UsageSource::Docker(engine.clone()),
        }
    }

    async fn store(&self) -> Result<Option<StoreReport>, Failure> {
        let UsageSource::Store(store) = self.clone() else { return Ok(None) };
        let measured = spawn_blocking(move || StoreReport::measure(&store)).await;
        measured
            .map_err(|error| Failure::failed(format!("the store could not be measured: {error}")))?
            .map(Some)
    }

    #[cfg(feature = "docker")]
    async fn docker(&self) -> Result<Option<EngineReport>, Failure> {
        let UsageSource::Docker(engine) = self else { return Ok(None) };
        Ok(Some(engine.usage().await?.into()))
    }

    #[cfg(not(feature = "docker"))]
    #[expect(clippy::unused_async, reason = "as with the feature")]
    async fn docker(&self) -> Result<Option<EngineReport>, Failure> {
        Ok(None)
    }
}

/// The room that images take.
pub(crate) async fn usage(
    backend: Arc<dyn Backend>,
    source: &UsageSource,
    collector: &Collector,
    policy: &GcPolicy,
) -> Result<Report, Failure> {
    let store = source.store().await?;
    let mut report = measure(backend, store).await?;
    if let Some(engine) = source.docker().await? {
        report.filesystem.images_bytes = Some(engine.images.size_bytes);
        report.filesystem.images_inodes = engine.images.measured_inodes();
        report.docker = Some(engine);
    }
    if let Some(held) = held_by(collector, policy, report.filesystem.size_bytes.is_some()).await {
        report.reclaimable_bytes = Some(held.reclaimable.bytes);
        report.held_by = Some(holders::held_by(&held));
    }
    Ok(report)
}

fn show(args: &DfArgs, report: &Report, out: &Out) {
    if let Some(format) = args.output.data() {
        output::data(out, format, report);
        return;
    }
    let filesystem = report.filesystem.told(args.output.is_wide());
    if let Some(store) = &report.store {
        if !store.images.is_empty() {
            out.line(format_args!("{}\n", store.images_table()));
        }
        out.line(format_args!("{}\n\n{filesystem}", store.holders_table(args.output.is_wide())));
    } else if let Some(engine) = &report.docker {
        out.line(format_args!("{filesystem}\n\n{}\n", engine.table()));
        out.line(engine.words());
    } else {
        out.line(format_args!("{filesystem}\n\n{}\n", report.images.table()));
        out.line("The sum is kubelet's: a layer that several images share counts once for each of them.");
    }
    if let Some(held_by) = report.held_by {
        let reclaimable_bytes = report.reclaimable_bytes.unwrap_or_default();
        out.line(format_args!("\n{}", holders::table(&HeldBy { reclaimable_bytes, ..held_by })));
    }
}

/// Who holds the disk; `None`, after a warning, where that cannot be told.
async fn held_by(collector: &Collector, policy: &GcPolicy, disk_is_here: bool) -> Option<Holders> {
    let scene = if disk_is_here { collector.scene_with_disk().await } else { collector.scene().await };
    let scene = match scene {
        Ok(scene) => scene,
        Err(error) => {
            tracing::warn!("who holds the disk is not known: {error}");
            return None;
        }
    };
    Some(who_holds(&scene, policy))
}

/// The room that images take. The shape of `-o json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    filesystem: Filesystem,
    images: Images,
    /// Only larder's own store tells so much.
    store: Option<StoreReport>,
    /// Only a Docker Engine tells this.
    #[serde(default)]
    docker: Option<EngineReport>,
    held_by: Option<HeldBy>,
    /// What removing all that nothing uses and nothing keeps would free.
    reclaimable_bytes: Option<u64>,
}

/// Where images live. Sizes in bytes; absent when not known here.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Filesystem {
    mountpoint: String,
    /// What images take, as the runtime reports it.
    images_bytes: Option<u64>,
    images_inodes: Option<u64>,
    size_bytes: Option<u64>,
    /// All that is not available.
    used_bytes: Option<u64>,
    available_bytes: Option<u64>,
    /// The part of what is used that nobody has written: it is kept for root.
    #[serde(default)]
    reserved_bytes: Option<u64>,
    inodes: Option<u64>,
    inodes_free: Option<u64>,
}

/// How many images there are, and the sum of their sizes.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Images {
    total: Group,
    in_use: Group,
    unused: Group,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Group {
    count: usize,
    size_bytes: u64,
}

impl Report {
    /// Where nothing has been pulled yet.
    fn of_nothing(root: &Path) -> Report {
        let filesystem = Filesystem {
            mountpoint: root.display().to_string(),
            images_bytes: Some(0),
            images_inodes: Some(0),
            ..Filesystem::default()
        };
        let reclaimable_bytes = Some(0);
        Report {
            filesystem,
            images: Images::default(),
            store: None,
            docker: None,
            held_by: None,
            reclaimable_bytes,
        }
    }
}

async fn measure(backend: Arc<dyn Backend>, store: Option<StoreReport>) -> Result<Report, Failure> {
    let service = ImageService::new(backend);
    let (list, in_use) = (service.list().await?, service.backend().in_use().await?);
    let found = service.image_filesystem(local_disk).await.map_err(filesystem_failure)?;
    let mut images = Images::default();
    for image in &list {
        images.total.add(image.size);
        let used = !users(image, &in_use).is_empty();
        if used { &mut images.in_use } else { &mut images.unused }.add(image.size);
    }
    let disk = found.disk;
    let filesystem = Filesystem {
        mountpoint: found.usage.mountpoint.display().to_string(),
        images_bytes: found.usage.used_bytes,
        images_inodes: found.usage.inodes_used,
        size_bytes: disk.map(|disk| disk.capacity),
        used_bytes: disk.map(|disk| disk.capacity.saturating_sub(disk.available)),
        available_bytes: disk.map(|disk| disk.available),
        reserved_bytes: disk.map(|disk| disk.reserved),
        inodes: disk.map(|disk| disk.inodes),
        inodes_free: disk.map(|Disk { inodes_free, .. }| inodes_free),
    };
    Ok(Report { filesystem, images, store, docker: None, held_by: None, reclaimable_bytes: None })
}

fn filesystem_failure(error: FilesystemError) -> Failure {
    match error {
        FilesystemError::Backend(error @ BackendError::Unreachable { .. }) => error.into(),
        other => Failure::failed(other.to_string()),
    }
}

impl Group {
    fn add(&mut self, size: u64) {
        self.count += 1;
        self.size_bytes = self.size_bytes.saturating_add(size);
    }
}

impl Filesystem {
    /// The table, and why collection sees another percentage, where it does.
    fn told(&self, wide: bool) -> String {
        let table = self.table(wide);
        match (self.size_bytes, self.available_bytes, self.reserved_bytes) {
            (Some(all), Some(available), Some(reserved)) if size::is_worth_a_word(reserved, all) => format!(
                "{table}\n{} are reserved, for root or by the file system. Collection counts them as used, as kubelet does: for it {}% are in use.",
                size::bytes(reserved),
                used_percent(all, available),
            ),
            _ => table.to_string(),
        }
    }

    /// As `df` counts: what is reserved is neither used nor available.
    fn table(&self, wide: bool) -> Table {
        let heads = ["FILESYSTEM", "SIZE", "USED", "AVAIL", "USE%", "INODES", "IUSED", "IUSE%", "IMAGES"];
        let more = ["IMAGES INODES"].into_iter().filter(|_| wide);
        let mut table = Table::new(heads.into_iter().chain(more));
        let bytes = |value: Option<u64>| value.map(size::bytes).unwrap_or_default();
        let number = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
        let percent = |part: Option<u64>, whole: Option<u64>| {
            part.zip(whole).map(|(part, whole)| size::percent(part, whole)).unwrap_or_default()
        };
        let used = self.used_bytes.map(|used| used.saturating_sub(self.reserved_bytes.unwrap_or_default()));
        let usable = used.zip(self.available_bytes).map(|(used, available)| used.saturating_add(available));
        let inodes_used = self.inodes.zip(self.inodes_free).map(|(all, free)| all.saturating_sub(free));
        let cells = [
            self.mountpoint.clone(),
            bytes(self.size_bytes),
            bytes(used),
            bytes(self.available_bytes),
            percent(used, usable),
            number(self.inodes),
            number(inodes_used),
            percent(inodes_used, self.inodes),
            bytes(self.images_bytes),
        ];
        let more = [number(self.images_inodes)].into_iter().filter(|_| wide);
        table.row(cells.into_iter().chain(more));
        table
    }
}

impl Images {
    fn table(&self) -> Table {
        let mut table = Table::new(["IMAGES", "COUNT", "SIZE"]);
        for (name, group) in [("total", &self.total), ("in use", &self.in_use), ("unused", &self.unused)] {
            table.row([name.to_owned(), group.count.to_string(), size::bytes(group.size_bytes)]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filesystem(reserved: u64) -> Filesystem {
        Filesystem {
            mountpoint: "/images".into(),
            size_bytes: Some(100_000_000_000),
            used_bytes: Some(86_000_000_000),
            available_bytes: Some(14_000_000_000),
            reserved_bytes: Some(reserved),
            ..Filesystem::default()
        }
    }

    #[test]
    fn the_table_has_the_figures_of_df_and_says_what_collection_counts_otherwise() {
        let told = filesystem(65_000_000_000).told(false);
        let row = told.lines().nth(1).unwrap();
        assert_eq!(
            row.split_whitespace().collect::<Vec<_>>()[..5],
            ["/images", "100GB", "21GB", "14GB", "60%"]
        );
        assert!(told.ends_with("65GB are reserved, for root or by the file system. Collection counts them as used, as kubelet does: for it 86% are in use."));
        let told = filesystem(1_000_000_000).told(false);
        assert_eq!(told.lines().count(), 2, "so little is not worth a word: {told}");
    }
}
