//! Steps of the demo, each with a check from outside of the command: by the registry's log and by a walk over the
//! store's directory.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use larder_api::v1::StoreUsage;

use super::images::{DemoBlobKind, DemoImage, DemoImages, MODIFIED};
use super::registry::{DemoRegistry, FetchRecord};
use super::runner::{DemoRunner, ROOT};
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output::size;

/// How many bytes the database may take more or less after a removal.
const DATABASE_SLACK: u64 = 256 << 10;

/// Which of the images is damaged and then kept, and which one of the removed ones is explained.
const DAMAGED: usize = 1;
const KEPT: usize = 1;
const REMOVED: usize = 0;

pub(super) async fn all(stage: &mut DemoRunner) -> Result<(), Failure> {
    let registry = offer(stage).await?;
    pull(stage, &registry).await?;
    pull_again(stage, &registry).await?;
    disk_use(stage).await?;
    let damaged = damage(stage, &registry)?;
    find(stage, &damaged).await?;
    repair(stage, &registry, &damaged).await?;
    collect(stage, &registry).await
}

/// The image as larder's user names it.
fn name(registry: &DemoRegistry, image: &DemoImage) -> String {
    format!("{}/{}", registry.address(), image.name)
}

async fn offer(stage: &mut DemoRunner) -> Result<DemoRegistry, Failure> {
    stage.step("Start a registry on loopback, and write a pod with three images");
    let content = DemoImages::generate().map_err(|error| stage.failed(error))?;
    let registry = DemoRegistry::start(content).await.map_err(|error| stage.failed(error))?;
    let [web, api, migrate] = registry.content().images.as_slice() else {
        return Err(stage.failed("there are not three images"));
    };
    let mut pod = String::from("apiVersion: v1\nkind: Pod\nmetadata:\n  name: shop\nspec:\n");
    for (list, part, image) in
        [("  initContainers:\n", "migrate", migrate), ("  containers:\n", "web", web), ("", "api", api)]
    {
        let _ = write!(pod, "{list}  - name: {part}\n    image: {}\n", name(&registry, image));
    }
    fs_err::write("pod.yaml", &pod).map_err(|error| stage.failed(error))?;
    stage.show("cat pod.yaml", &pod);
    let DemoImages { images, base_size, layers: (count, sum), .. } = registry.content();
    stage.report_result(format_args!(
        "{} images of {count} layers, {} compressed; one layer of {} is shared by all. \
         The registry limits each layer to 13MB/s, so that progress is visible",
        images.len(),
        size::bytes(*sum as u64),
        size::bytes(*base_size as u64)
    ));
    Ok(registry)
}

/// How many of these were served, and their bytes.
fn count(log: &[FetchRecord], kind: DemoBlobKind) -> (usize, usize) {
    let of_kind = log.iter().filter(|served| served.kind == Some(kind) && served.bytes > 0);
    of_kind.fold((0, 0), |(count, bytes), served| (count + 1, bytes + served.bytes))
}

async fn pull(stage: &mut DemoRunner, registry: &DemoRegistry) -> Result<(), Failure> {
    stage.step("Pull the pod's images");
    stage.run("larder ensure -f pod.yaml", CommandOutcome::Done).await?;
    stage.run("larder images", CommandOutcome::Done).await?;
    let log = registry.take_log();
    let (layers, bytes) = count(&log, DemoBlobKind::Layer);
    stage.check((layers, bytes) == registry.content().layers, || {
        format!("the registry served {layers} layers of {bytes} bytes: {log:?}")
    })?;
    stage.report_result(format_args!(
        "the registry served {layers} layers, {}: the shared layer once for three pulls",
        size::bytes(bytes as u64)
    ));
    Ok(())
}

async fn pull_again(stage: &mut DemoRunner, registry: &DemoRegistry) -> Result<(), Failure> {
    stage.step("Repeat: all images are present");
    stage.run("larder ensure -f pod.yaml", CommandOutcome::Done).await?;
    let log = registry.take_log();
    stage.check(log.is_empty(), || format!("the registry was asked for something: {log:?}"))?;
    let (blobs, _) = count(&log, DemoBlobKind::Layer);
    stage.report_result(format_args!("the registry saw {} requests and served {blobs} blobs", log.len()));
    Ok(())
}

/// Sums the allocated bytes below the store's directory, each file once.
fn walked(stage: &DemoRunner) -> Result<u64, Failure> {
    fn walk(dir: &Path, known: &mut HashSet<(u64, u64)>) -> io::Result<u64> {
        let mut bytes = fs_err::symlink_metadata(dir)?.blocks() * 512;
        for entry in fs_err::read_dir(dir)? {
            let (path, found) = {
                let entry = entry?;
                (entry.path(), entry.metadata()?)
            };
            if found.is_dir() {
                bytes += walk(&path, known)?;
            } else if known.insert((found.dev(), found.ino())) {
                bytes += found.blocks() * 512;
            }
        }
        Ok(bytes)
    }
    walk(ROOT.as_ref(), &mut HashSet::new()).map_err(|error| stage.failed(error))
}

async fn disk_use(stage: &mut DemoRunner) -> Result<(), Failure> {
    stage.step("Show the disk usage");
    stage.run("larder df -v", CommandOutcome::Done).await?;
    let StoreUsage { images, disk, .. } = stage.usage().await?;
    let disk = disk.unwrap_or_default();
    let (said, walked) = (disk.total.unwrap_or_default().size_bytes, walked(stage)?);
    let each: u64 = images.iter().map(|image| image.size_bytes).sum();
    let shared = disk.shared_layers.unwrap_or_default().size_bytes;
    stage.check(said.abs_diff(walked) * 100 <= walked, || {
        format!("df reports {said} bytes, the files in the directory take {walked}")
    })?;
    let counted_once = images.iter().all(|image| image.shared_bytes == shared) && each > said && shared > 0;
    stage.check(counted_once, || format!("{each} bytes of images, {said} on disk, {shared} shared"))?;
    stage.report_result(format_args!(
        "{} if each image had its own layers, {} on disk: the shared {} are stored once",
        size::bytes(each),
        size::bytes(walked),
        size::bytes(shared)
    ));
    Ok(())
}

/// File that the demo damages on disk.
struct DamagedFile {
    path: PathBuf,
    /// How `fsck` names it.
    name: String,
    before: Vec<u8>,
}

/// Damages the topmost layer of an image: a file in it, or the EROFS file that it is.
fn damage(stage: &mut DemoRunner, registry: &DemoRegistry) -> Result<DamagedFile, Failure> {
    const PLACE: u64 = 8000;
    stage.step("Damage one byte on disk");
    let image = &registry.content().images[DAMAGED];
    let layer = Path::new(ROOT).join("layers").join(image.own_diff_id.hex());
    let in_directory = layer.join("fs").join(&image.file);
    let (file, name) = if in_directory.is_file() {
        (in_directory, image.file.clone())
    } else {
        (layer, image.own_diff_id.hex().to_owned())
    };
    let before = fs_err::read(&file).map_err(|error| stage.failed(error))?;
    let bad = !before[usize::try_from(PLACE).unwrap_or(0)];
    // Bit rot does not change the file's times.
    let write = || {
        let file = fs_err::OpenOptions::new().write(true).open(&file)?;
        file.file().write_all_at(&[bad], PLACE)?;
        file.file().set_modified(UNIX_EPOCH + Duration::from_secs(MODIFIED))
    };
    write().map_err(|error| stage.failed(error))?;
    let line =
        format!("printf '\\{bad:03o}' | dd of={} bs=1 seek={PLACE} conv=notrunc status=none", file.display());
    stage.show(&line, "");
    stage.show(&format!("touch -d @{MODIFIED} {}", file.display()), "");
    let now = fs_err::read(&file).map_err(|error| stage.failed(error))?;
    let changed = now.iter().zip(&before).filter(|(now, before)| now != before).count();
    stage.check(changed == 1 && now.len() == before.len(), || format!("{changed} bytes changed"))?;
    stage.report_result(format_args!("{changed} byte of {} differs", size::bytes(now.len() as u64)));
    Ok(DamagedFile { path: file, name, before })
}

async fn find(stage: &mut DemoRunner, damaged: &DamagedFile) -> Result<(), Failure> {
    stage.step("Find the damage");
    let name = &damaged.name;
    let printed = stage.run("larder fsck", CommandOutcome::Failed).await?;
    stage.check(printed.contains(name.as_str()), || format!("{name} is not named"))?;
    stage.report_result(format_args!(
        "{name} is named, and the exit code is {}",
        CommandOutcome::Failed.code()
    ));
    Ok(())
}

async fn repair(
    stage: &mut DemoRunner,
    registry: &DemoRegistry,
    damaged: &DamagedFile,
) -> Result<(), Failure> {
    stage.step("Repair it by fetching only that layer");
    registry.take_log();
    stage.run("larder fsck --repair", CommandOutcome::Done).await?;
    let log = registry.take_log();
    let (digest, size) = &registry.content().images[DAMAGED].own_layer;
    let (layers, bytes) = count(&log, DemoBlobKind::Layer);
    let that = log.iter().any(|served| served.digest.as_ref() == Some(digest) && served.bytes == *size);
    stage.check(layers == 1 && that, || format!("the registry served {layers} layers: {log:?}"))?;
    let DamagedFile { path, before, .. } = damaged;
    let now = fs_err::read(path).map_err(|error| stage.failed(error))?;
    stage.check(now == *before, || format!("{} is not as it was", path.display()))?;
    stage.report_result(format_args!(
        "the registry served {layers} layer of {}, and the file is restored",
        size::bytes(bytes as u64)
    ));
    let printed = stage.run("larder fsck", CommandOutcome::Done).await?;
    stage.check(printed.contains("no damage found"), || "fsck reports damage".into())
}

async fn collect(stage: &mut DemoRunner, registry: &DemoRegistry) -> Result<(), Failure> {
    stage.step("Keep one image, explain another, and collect what nothing uses");
    let [kept, removed] = [KEPT, REMOVED].map(|index| name(registry, &registry.content().images[index]));
    let images = stage.usage().await?.images;
    let unique =
        images.iter().filter(|usage| !usage.repo_tags.contains(&kept)).map(|usage| usage.unique_bytes);
    let unique: u64 = unique.sum();
    let before = walked(stage)?;
    stage.run(&format!("larder keep {kept}"), CommandOutcome::Done).await?;
    stage.run(&format!("larder explain {removed}"), CommandOutcome::Done).await?;
    stage.run("larder gc --all-unused --force --minimum-image-ttl-duration 0", CommandOutcome::Done).await?;
    let freed = before.saturating_sub(walked(stage)?);
    stage.check(freed.abs_diff(unique) <= DATABASE_SLACK, || {
        format!("{freed} bytes came free, the images alone had {unique}")
    })?;
    stage.run("larder images", CommandOutcome::Done).await?;
    stage.run("larder fsck", CommandOutcome::Done).await?;
    let log = registry.take_log();
    stage.check(log.is_empty(), || format!("the registry was asked for something: {log:?}"))?;
    stage.report_result(format_args!(
        "{} freed, the unshared layers of these images had {}; the kept image is undamaged. \
         By default GC spares images that are younger than two minutes or were pulled in the last ten",
        size::bytes(freed),
        size::bytes(unique)
    ));
    Ok(())
}
