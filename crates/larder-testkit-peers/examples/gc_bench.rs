//! Measures garbage collection: CPU time to detect and plan, and nominal against exact accounting on shared layers.
//!
//! `cargo run --profile dist -p larder-testkit-peers --example gc_bench`

#![allow(clippy::cast_precision_loss, reason = "figures for people")]

use std::collections::BTreeMap;
use std::io::Write as _;
use std::time::Duration;

use larder::backend::Image;
use larder::gc::{
    ClockReading, DiskSpace, GcGoal, GcImage, GcPlan, GcPolicy, GcSnapshot, GcStrategy, ImageLabels,
    ImageUsageRecords, LayerUsageIndex, MeasuredLayer, UnixMillis, plan,
};
use larder::image_service::FsStats;
use larder::reference::ImageId;
use larder::retention::{Retention, RetentionPurpose, RetentionSet};
use rustix::time::{ClockId, clock_gettime};

const NOW: i64 = 1_000_000_000;
const RUNS: usize = 9;

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "CPU milliseconds, median of {RUNS}; 10 layers to an image, as many containers as images")?;
    writeln!(out, "{:>8} {:>8} {:>8} {:>8} {:>9}", "images", "detect", "plan", "sum", "removals")?;
    for images in [1_000, 10_000, 100_000] {
        let mut costs: Vec<(f64, f64, usize)> = (0..RUNS).map(|_| round(images)).collect();
        costs.sort_by(|a, b| (a.0 + a.1).total_cmp(&(b.0 + b.1)));
        let (detect, planning, removals) = costs[RUNS / 2];
        writeln!(out, "{images:>8} {detect:>8.1} {planning:>8.1} {:>8.1} {removals:>9}", detect + planning)?;
    }
    writeln!(out)?;
    writeln!(out, "40 applications on 2 runtimes on 1 base; high 65, low 45")?;
    writeln!(
        out,
        "{:>8} {:>7} {:>8} {:>12} {:>12} {:>10}",
        "", "passes", "removed", "wanted", "freed", "overshoot"
    )?;
    for (name, policy) in [("nominal", GcPolicy::kubelet()), ("exact", GcPolicy::default())] {
        let policy =
            GcPolicy { high_threshold_percent: 65, low_threshold_percent: 45, inodes: None, ..policy };
        let report = family(&policy);
        let over = i128::from(report.freed) - i128::from(report.wanted);
        let (passes, removed) = (report.passes, report.removed);
        writeln!(
            out,
            "{name:>8} {passes:>7} {removed:>8} {:>12} {:>12} {over:>10}",
            report.wanted, report.freed
        )?;
        for (pass, (removed, freed)) in (1..).zip(&report.each).take(5) {
            writeln!(out, "           pass {pass}: {removed} images, {freed} bytes really freed")?;
        }
    }
    Ok(())
}

/// Milliseconds that this process was on a CPU.
fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}

fn id(n: usize) -> ImageId {
    format!("sha256:{n:064x}").into()
}

/// One detection and one plan; half of the images are used.
fn round(count: usize) -> (f64, f64, usize) {
    let image = |n: usize| Image {
        id: id(n),
        repo_tags: vec![format!("registry.example/team/app{n}:v1")],
        repo_digests: vec![format!("registry.example/team/app{n}@sha256:{n:064x}")],
        size: 50_000_000 + n as u64,
        ..Image::default()
    };
    let images: Vec<Image> = (0..count).map(image).collect();
    let container = |n: usize| Retention {
        image: id(n / 2),
        handler: Some(String::new()),
        purpose: RetentionPurpose::Container {
            id: n.to_string(),
            name: "app".into(),
            pod: format!("ns/pod{n}"),
            running: true,
        },
    };
    let found: Vec<Retention> = (0..count).map(container).collect();
    let mut layers = LayerUsageIndex::unknown();
    for n in 0..count * 3 {
        let amount = DiskSpace { bytes: 1_000_000 + n as u64, inodes: 100 };
        layers.add(MeasuredLayer {
            id: format!("{n:064x}").into(),
            amount,
            estimated: false,
            referenced_by: None,
        });
    }
    for n in 0..count {
        let of: Vec<String> = (0..10)
            .map(|layer| if layer < 3 { n * 3 + layer } else { (n / 10 * 7 + layer) % (count * 3) })
            .map(|layer| format!("{layer:064x}"))
            .collect();
        layers.add_image(id(n), of, DiskSpace { bytes: 5_000, inodes: 3 });
    }
    let mut records = ImageUsageRecords::default();
    records.observe(
        &images,
        &RetentionSet::default(),
        &ClockReading::wall(UnixMillis(0)),
        GcStrategy::Larder,
    );

    let start = cpu();
    let uses = RetentionSet::new(found, &images, GcStrategy::Larder);
    records.observe(&images, &uses, &ClockReading::wall(UnixMillis(NOW)), GcStrategy::Larder);
    let detected = cpu();
    let scene = scene(&images, &records, &uses, layers);
    let policy = GcPolicy { minimum_age: Duration::ZERO, ..GcPolicy::default() };
    let plan = plan(&scene, &policy, GcGoal::Thresholds);
    (detected - start, cpu() - detected, plan.removals.len())
}

fn scene(
    images: &[Image],
    records: &ImageUsageRecords,
    uses: &RetentionSet,
    layers: LayerUsageIndex,
) -> GcSnapshot {
    let subject = |image: &Image| {
        let record = records.get(&image.id, "").expect("it was just observed");
        GcImage {
            id: image.id.clone(),
            handler: String::new(),
            artifact_type: String::new(),
            names: image.repo_tags.iter().chain(&image.repo_digests).cloned().collect(),
            size: image.size,
            pinned: image.pinned,
            first_seen: record.first_seen,
            last_used: record.last_used,
            retained_by: uses.of_image(&image.id, "").cloned().collect(),
            failed: None,
        }
    };
    let capacity = layers.all().iter().map(|layer| layer.amount.bytes).sum();
    let disk = FsStats { capacity, available: capacity / 10, inodes: 0, inodes_free: 0, reserved: 0 };
    GcSnapshot {
        now: UnixMillis(NOW),
        began: UnixMillis(0),
        watched: UnixMillis(0),
        images: images.iter().map(subject).collect(),
        layers,
        labels: ImageLabels::new(),
        disk: Some(disk),
        reclaimed: DiskSpace::ZERO,
    }
}

struct GcBenchReport {
    passes: usize,
    removed: usize,
    wanted: u64,
    freed: u64,
    each: Vec<(usize, u64)>,
}

/// Passes until the low mark is really reached; what is freed follows from the layers, whatever a plan promises.
fn family(policy: &GcPolicy) -> GcBenchReport {
    const MB: u64 = 1_000_000;
    let mut sizes: BTreeMap<String, u64> = BTreeMap::from([("base".into(), 180 * MB)]);
    let mut images: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for n in 0..40_usize {
        let (runtime, own) = (format!("runtime{}", n % 2), format!("app{n}"));
        sizes.insert(runtime.clone(), 120 * MB);
        sizes.insert(own.clone(), MB + (n as u64 * 7 % 11) * MB);
        images.insert(n, vec!["base".into(), runtime, own]);
    }
    let on_disk = |images: &BTreeMap<usize, Vec<String>>| {
        let layers: std::collections::BTreeSet<&String> = images.values().flatten().collect();
        layers.into_iter().map(|layer| sizes[layer]).sum::<u64>()
    };
    let capacity = on_disk(&images) * 100 / 70;
    let mut report = GcBenchReport { passes: 0, removed: 0, wanted: 0, freed: 0, each: Vec::new() };
    let before = on_disk(&images);
    report.wanted = before - capacity * 45 / 100;
    while report.passes < 100 {
        let used = on_disk(&images);
        let disk = FsStats { capacity, available: capacity - used, inodes: 0, inodes_free: 0, reserved: 0 };
        let plan = planned(&images, &sizes, disk, policy);
        if plan.removals.is_empty() {
            break;
        }
        for removal in &plan.removals {
            images.retain(|n, _| id(*n) != removal.id);
        }
        report.passes += 1;
        report.removed += plan.removals.len();
        report.each.push((plan.removals.len(), used - on_disk(&images)));
    }
    report.freed = before - on_disk(&images);
    report
}

fn planned(
    images: &BTreeMap<usize, Vec<String>>,
    sizes: &BTreeMap<String, u64>,
    disk: FsStats,
    policy: &GcPolicy,
) -> GcPlan {
    let mut layers = LayerUsageIndex::unknown();
    for (id, bytes) in sizes {
        let amount = DiskSpace { bytes: *bytes, inodes: 0 };
        layers.add(MeasuredLayer { id: id.into(), amount, estimated: false, referenced_by: None });
    }
    let mut subjects = Vec::new();
    for (n, of) in images {
        layers.add_image(id(*n), of, DiskSpace::ZERO);
        subjects.push(GcImage {
            id: id(*n),
            handler: String::new(),
            artifact_type: String::new(),
            names: [].into(),
            size: of.iter().map(|layer| sizes[layer]).sum(),
            pinned: false,
            first_seen: UnixMillis(0),
            last_used: None,
            retained_by: Vec::new(),
            failed: None,
        });
    }
    let scene = GcSnapshot {
        now: UnixMillis(NOW),
        began: UnixMillis(0),
        watched: UnixMillis(0),
        images: subjects,
        layers,
        labels: ImageLabels::new(),
        disk: Some(disk),
        reclaimed: DiskSpace::ZERO,
    };
    plan(&scene, policy, GcGoal::Thresholds)
}
