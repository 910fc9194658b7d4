//! `larder status`: the daemon's process, backend, pulls and last GC round.

use std::fmt::Write as _;
use std::time::Duration;

use larder::go_format;
use larder_api::v1::{
    DamagedImage, DiskUse, GcPhase, GcRound, GcStatus, IncompleteLayer, LazyPullStatus, OtherFilesystem,
    ReadVerificationStatus, RegistryStatus, StatusRequest, StatusResponse,
};
use larder_api::{EnumWord as _, convert};
use larder_store::store::damage_hint;
use tokio::time::{self, Instant};

use crate::args::StatusArgs;
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output::table::TextTable;
use crate::output::{self, DataFormat, progress, size};
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

use super::events::pipe_closed;
use super::images::short;

/// Incomplete layers that are shown without `-o wide`: the oldest.
const INCOMPLETE_LAYERS: usize = 3;
/// Time between two statuses of a watch.
const WATCH_PERIOD: Duration = Duration::from_secs(2);

pub(super) async fn run(args: &StatusArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let daemon = session.open(&ImageAccess::daemon()).await?;
    let mut is_first = true;
    loop {
        let status = daemon.ask(async |mut calls| calls.status(StatusRequest { look: true }).await).await?;
        if args.watch {
            separate(args, is_first, out);
        }
        match args.output.data() {
            Some(DataFormat::Json) if args.watch => output::json_line(out, &status),
            Some(format) => output::data(out, format, &status),
            None => print(&status, args.output.is_wide(), out),
        }
        if !args.watch {
            let available = status.backend_available;
            return Ok(if available { CommandOutcome::Done } else { CommandOutcome::Unreachable });
        }
        is_first = false;
        tokio::select! {
            () = time::sleep(WATCH_PERIOD) => {}
            () = pipe_closed() => return Ok(CommandOutcome::Done),
        }
    }
}

/// Wipes the previous status from a terminal; elsewhere separates it from the next one.
fn separate(args: &StatusArgs, is_first: bool, out: &Printer) {
    match args.output.data() {
        Some(DataFormat::Yaml) => out.line("---"),
        None if out.is_terminal() => out.raw(b"\x1b[H\x1b[J"),
        None if !is_first => out.line(""),
        Some(DataFormat::Json) | None => {}
    }
}

fn print(status: &StatusResponse, wide: bool, out: &Printer) {
    out.table(&table(status, wide));
    let now = Instant::now();
    for pull in &status.pulls {
        out.line(format_args!("  {}", progress::full_line(&convert::pull_from(pull.clone(), now), now)));
    }
    // Without this call itself.
    let calls = status.calls.iter().filter(|call| wide && !call.path.ends_with("/Status"));
    for call in calls {
        out.line(format_args!("  {}   {}", call.path, age(call.milliseconds)));
    }
}

fn table(status: &StatusResponse, wide: bool) -> TextTable {
    let mut table = TextTable::new(["DAEMON", &format!("larder {}", status.version)]);
    let up = age(status.uptime_seconds.saturating_mul(1000));
    table.row(["Process".to_owned(), format!("{}, up {up}", status.pid)]);
    table.row(["Socket".to_owned(), status.socket.clone().unwrap_or_else(|| "passed by systemd".to_owned())]);
    if let Some(dashboard) = &status.dashboard {
        table.row(["Dashboard".to_owned(), dashboard.clone()]);
    }
    table.row(["Serves".to_owned(), status.backend.clone()]);
    let health = if status.backend_available { "available" } else { "unavailable" };
    table.row(["Backend".to_owned(), format!("{health}: {}", status.backend_message)]);
    if let Some(containerd) = &status.containerd {
        table.row(["Containerd".to_owned(), containerd.to_string()]);
    }
    if let Some(cluster) = &status.kubernetes {
        table.row(["Kubernetes".to_owned(), cluster.to_string()]);
    }
    table.row(["State".to_owned(), status.state.clone()]);
    if let Some(configuration) = &status.configuration {
        table.row(["Configuration".to_owned(), configuration.clone()]);
    }
    if !status.needs_restart.is_empty() {
        table.row(["Needs restart".to_owned(), status.needs_restart.join(", ")]);
    }
    for warning in &status.warnings {
        table.row(["Warning".to_owned(), warning.clone()]);
    }
    if let Some(error) = &status.reload_error {
        table.row(["Last reload".to_owned(), format!("failed, previous configuration in effect: {error}")]);
    }
    table.row(["Disk".to_owned(), disk(status.disk.as_ref())]);
    for other in &status.other_filesystems {
        table.row(["Disk".to_owned(), other_filesystem(other)]);
    }
    if let Some(lazy) = &status.lazy_pulls {
        table.row(["Lazy pulls".to_owned(), lazy_pulls(lazy)]);
        let shown = if wide { usize::MAX } else { INCOMPLETE_LAYERS };
        for layer in lazy.layers.iter().take(shown) {
            table.row(["Incomplete".to_owned(), incomplete_layer(layer)]);
        }
    }
    for image in &status.damaged_images {
        table.row(["Damaged".to_owned(), damaged_image(image)]);
    }
    if let Some(reads) = &status.read_verification {
        table.row(["Verified reads".to_owned(), verified_reads(reads)]);
    }
    table.row(["Last GC".to_owned(), last_gc(status.gc.as_ref())]);
    if let Some(round) = status.gc.as_ref().and_then(|gc| gc.round.as_ref()) {
        table.row(["GC".to_owned(), running_round(round)]);
    }
    for registry in status.registries.iter().filter(|registry| wide || is_in_use(registry)) {
        table.row(["Registry".to_owned(), self::registry(registry)]);
    }
    table.row(["Connections".to_owned(), status.connections.to_string()]);
    table.row(["Next event".to_owned(), status.next_event.to_string()]);
    table.row(["Pulls".to_owned(), status.pulls.len().to_string()]);
    table
}

fn disk(disk: Option<&DiskUse>) -> String {
    let Some(disk) = disk else { return "unknown".to_owned() };
    let (size, available) = (go_format::bytes(disk.size_bytes), go_format::bytes(disk.available_bytes));
    let starts = match disk.gc_starts_at_percent {
        Some(percent) => format!("GC starts at {percent}%"),
        None => "GC does not start by usage".to_owned(),
    };
    format!("image filesystem: {}% used ({available} of {size} available), {starts}", disk.used_percent)
}

fn other_filesystem(other: &OtherFilesystem) -> String {
    let (size, available) = (go_format::bytes(other.size_bytes), go_format::bytes(other.available_bytes));
    let (content, mountpoint, used) = (other.content().word(), &other.mountpoint, other.used_percent);
    format!("{content} in {mountpoint}: {used}% used ({available} of {size} available), not freed by GC")
}

/// Whether images can be pulled lazily, and the layers that are not complete.
fn lazy_pulls(status: &LazyPullStatus) -> String {
    let LazyPullStatus { state, incomplete_layers, waiting_reads, .. } = status;
    if *incomplete_layers == 0 {
        return state.clone();
    }
    let (filled, total) = (go_format::bytes(status.filled_bytes), go_format::bytes(status.total_bytes));
    let layers = size::count(u64::from(*incomplete_layers), "incomplete layer");
    let reads = size::count(u64::from(*waiting_reads), "waiting read");
    format!("{state}, {layers} ({filled} of {total}), {reads}")
}

/// How much of a layer is here, from where the rest comes, and when it will be here.
fn incomplete_layer(layer: &IncompleteLayer) -> String {
    let fill = convert::fill_from(layer.fill.clone().unwrap_or_default());
    let here = fill.describe(layer.total_bytes);
    let key = short(&layer.layer);
    let name = match &layer.images[..] {
        [] => key.to_owned(),
        images => format!("{} (layer {key})", images.join(", ")),
    };
    format!("{name}: {here}, the rest follows {}", fill.describe_source())
}

/// An image with damaged layers, and the next step.
fn damaged_image(DamagedImage { image, layers }: &DamagedImage) -> String {
    let layers: Vec<&str> = layers.iter().map(|key| short(key)).collect();
    format!("{image} (layer {}): {}", layers.join(", "), damage_hint(image))
}

/// Whether layers are verified when they are read, and what was damaged.
fn verified_reads(status: &ReadVerificationStatus) -> String {
    if let Some(problem) = &status.problem {
        return format!("not possible, reads are not verified: {problem}");
    }
    let ReadVerificationStatus { unverified_layers, damaged_pieces, repaired_pieces, .. } = status;
    let verified = go_format::bytes(status.verified_bytes);
    let layers = size::count(*unverified_layers, "layer");
    let mut text = format!("{verified} verified, {layers} in part");
    if *damaged_pieces > 0 {
        let _ = write!(text, ", {damaged_pieces} MiB damaged, {repaired_pieces} repaired");
    }
    text
}

fn last_gc(status: Option<&GcStatus>) -> String {
    let Some(status) = status else { return String::new() };
    let mut parts = Vec::new();
    parts.extend(status.running.then(|| "running now".to_owned()));
    parts.extend(
        Some(status.failures).filter(|&count| count > 1).map(|count| format!("failed {count} times")),
    );
    let notes = if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) };
    match (&status.ended, &status.result) {
        (Some(ended), Some(last)) => format!("{ended}{notes}: {last}"),
        _ => format!("none yet{notes}"),
    }
}

/// Describes a running round.
fn running_round(round: &GcRound) -> String {
    let GcRound { removed_images, planned_images, .. } = round;
    let word = round.phase().word();
    if round.phase() != GcPhase::Removing {
        return format!("{word} for {}", age(round.milliseconds));
    }
    let (freed, promised) = (go_format::bytes(round.freed_bytes), go_format::bytes(round.promised_bytes));
    let image = round.removing.as_ref().map(|image| image.names.first().unwrap_or(&image.id));
    let image = image.map_or_else(String::new, |image| format!(", now {image}"));
    format!("{word} {removed_images} of {planned_images} images, {freed} of {promised} freed{image}")
}

/// Whether requests run, wait, or are limited.
fn is_in_use(registry: &RegistryStatus) -> bool {
    let RegistryStatus { connections, waiting_requests, .. } = registry;
    *connections > 0 || *waiting_requests > 0 || registry.retry_after_milliseconds.is_some()
}

/// The budget of a registry.
fn registry(registry: &RegistryStatus) -> String {
    let RegistryStatus { host, connections, connection_limit, waiting_requests, .. } = registry;
    let waiting =
        Some(waiting_requests).filter(|&&count| count > 0).map(|count| format!("{count} requests wait"));
    let limited = registry.retry_after_milliseconds.map(|wait| format!("rate limited for {}", age(wait)));
    let quota = registry.quota_remaining.map(|remaining| {
        let limit = registry.quota_limit.map_or_else(String::new, |limit| format!(" of {limit}"));
        format!("{remaining}{limit} requests left")
    });
    let parts = [
        Some(format!("{host}: {connections} of {connection_limit} connections")),
        waiting,
        limited,
        quota,
        Some(format!("{} received", go_format::bytes(registry.received_bytes))),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Whole seconds.
fn age(milliseconds: u64) -> String {
    go_format::duration(Duration::from_secs(milliseconds / 1000))
}

#[cfg(test)]
mod tests {
    use larder_api::v1::Removal;

    use super::*;

    #[test]
    fn a_running_round_has_its_phase_and_its_image() {
        let mut round = GcRound { milliseconds: 2500, ..GcRound::default() };
        round.set_phase(GcPhase::Planning);
        assert_eq!(running_round(&round), "planning for 2s");
        round.set_phase(GcPhase::Removing);
        let image = Removal { names: vec!["shop/web:1".into()], id: "sha256:1".into(), ..Removal::default() };
        let round = GcRound {
            removing: Some(image),
            planned_images: 7,
            removed_images: 2,
            freed_bytes: 120_000_000,
            promised_bytes: 300_000_000,
            ..round
        };
        assert_eq!(running_round(&round), "removing 2 of 7 images, 120MB of 300MB freed, now shop/web:1");
    }

    #[test]
    fn a_registry_has_its_budget_and_what_it_limits() {
        let idle = RegistryStatus {
            host: "reg.example".into(),
            connection_limit: 6,
            received_bytes: 1_500_000,
            ..RegistryStatus::default()
        };
        assert!(!is_in_use(&idle));
        assert_eq!(registry(&idle), "reg.example: 0 of 6 connections, 1.5MB received");
        let limited = RegistryStatus {
            connections: 6,
            waiting_requests: 3,
            retry_after_milliseconds: Some(12_900),
            quota_remaining: Some(0),
            quota_limit: Some(100),
            ..idle
        };
        assert!(is_in_use(&limited));
        assert_eq!(
            registry(&limited),
            "reg.example: 6 of 6 connections, 3 requests wait, rate limited for 12s, 0 of 100 requests left, \
             1.5MB received"
        );
    }

    #[test]
    fn lazy_pulls_have_their_state_and_what_is_missing() {
        let ready = LazyPullStatus { state: "ready".into(), ..LazyPullStatus::default() };
        assert_eq!(lazy_pulls(&ready), "ready");
        let filling = LazyPullStatus {
            incomplete_layers: 2,
            filled_bytes: 12_000_000,
            total_bytes: 1_300_000_000,
            waiting_reads: 3,
            ..ready
        };
        assert_eq!(lazy_pulls(&filling), "ready, 2 incomplete layers (12MB of 1.3GB), 3 waiting reads");
    }

    #[test]
    fn an_incomplete_layer_has_its_source_and_its_end_or_why_it_has_none() {
        let fill = larder_api::v1::ImageFill {
            missing_bytes: 900_000_000,
            hosts: vec!["r.example".into()],
            bytes_per_second: Some(5_000_000),
            ..Default::default()
        };
        let layer = |fill| IncompleteLayer {
            layer: "3f8a21b0c9d4".repeat(6),
            total_bytes: 1_000_000_000,
            fill: Some(fill),
            ..IncompleteLayer::default()
        };
        let text = incomplete_layer(&layer(fill.clone()));
        assert_eq!(
            text,
            "3f8a21b0c9d43: 10% of 1GB, the rest follows from r.example at 5MB/s, about 3m left"
        );
        let refused = larder_api::v1::ImageFill {
            problem: Some("refused".into()),
            retry_in_milliseconds: Some(12_000),
            ..fill
        };
        let expected =
            "3f8a21b0c9d43: 10% of 1GB, the rest follows from r.example: refused; next attempt in 12s";
        assert_eq!(incomplete_layer(&layer(refused)), expected);
    }

    #[test]
    fn a_damaged_image_has_the_command_that_replaces_its_layers() {
        let damaged =
            DamagedImage { image: "r.example/app:1".into(), layers: vec!["3f8a21b0c9d4".repeat(6)] };
        let shown =
            table(&StatusResponse { damaged_images: vec![damaged], ..StatusResponse::default() }, false);
        let shown = shown.to_string();
        for expected in ["r.example/app:1 (layer 3f8a21b0c9d43): ", "larder pull r.example/app:1 replaces"] {
            assert!(shown.contains(expected), "{expected}: {shown}");
        }
    }

    #[test]
    fn verified_reads_have_what_was_damaged_or_why_there_are_none() {
        let sound = ReadVerificationStatus {
            verified_bytes: 12_000_000,
            unverified_layers: 2,
            ..ReadVerificationStatus::default()
        };
        assert_eq!(verified_reads(&sound), "12MB verified, 2 layers in part");
        let damaged = ReadVerificationStatus { damaged_pieces: 3, repaired_pieces: 1, ..sound };
        let expected = "12MB verified, 2 layers in part, 3 MiB damaged, 1 repaired";
        assert_eq!(verified_reads(&damaged), expected);
        let problem = Some("it needs CAP_SYS_ADMIN".into());
        let none = ReadVerificationStatus { problem, ..ReadVerificationStatus::default() };
        let expected = "not possible, reads are not verified: it needs CAP_SYS_ADMIN";
        assert_eq!(verified_reads(&none), expected);
    }

    #[test]
    fn the_last_round_has_its_time_its_result_and_repeated_failures() {
        let row = |last: &str, failures, running| {
            let status = GcStatus {
                ended: Some("T".into()),
                result: Some(last.into()),
                failures,
                running,
                ..GcStatus::default()
            };
            last_gc(Some(&status))
        };
        assert_eq!(row("removed nothing", 0, false), "T: removed nothing");
        assert_eq!(row("The disk is full.", 1, false), "T: The disk is full.");
        assert_eq!(row("no answer", 3, true), "T (running now, failed 3 times): no answer");
        assert_eq!(
            last_gc(Some(&GcStatus { running: true, ..GcStatus::default() })),
            "none yet (running now)"
        );
    }
}
