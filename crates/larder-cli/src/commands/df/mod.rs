//! `larder df`.

mod docker;
mod store;

use larder::gc::filesystem_stats::used_percent;
use larder_agent::environment::DefaultPaths;
use larder_api::v1::{ImageTotal, UsageFileSystem, UsageImages, UsageRequest, UsageResponse};

use super::gc::usage_by_state;
use crate::args::DfArgs;
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output::table::TextTable;
use crate::output::{self, size};
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(args: &DfArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    if let Some(client) = session.open_to_list(&ImageAccess::collect()).await? {
        let usage = client.ask(async |mut calls| calls.usage(UsageRequest {}).await).await?;
        show(args, session.is_verbose(), &usage, out);
        return Ok(CommandOutcome::Done);
    }
    let usage = usage_of_nothing();
    match args.output.data() {
        Some(format) => output::data(out, format, &usage),
        None => out.table(&summary(&usage)),
    }
    Ok(CommandOutcome::Done)
}

/// Where nothing has been pulled yet.
fn usage_of_nothing() -> UsageResponse {
    let filesystem = UsageFileSystem {
        mountpoint: DefaultPaths::current().root.unwrap_or_default().display().to_string(),
        images_bytes: Some(0),
        images_inodes: Some(0),
        ..UsageFileSystem::default()
    };
    let nothing = Some(ImageTotal::default());
    UsageResponse {
        filesystem: Some(filesystem),
        images: Some(UsageImages { total: nothing, in_use: nothing, unused: nothing }),
        reclaimable_bytes: Some(0),
        ..UsageResponse::default()
    }
}

fn show(args: &DfArgs, verbose: bool, usage: &UsageResponse, out: &Printer) {
    if let Some(format) = args.output.data() {
        output::data(out, format, usage);
        return;
    }
    out.table(&summary(usage));
    if let Some(by_state) = &usage.usage_by_state
        && !(verbose || args.output.is_wide())
        && usage.reclaimable_bytes == Some(0)
    {
        let retained = usage_by_state::image_states(by_state);
        let retained: Vec<String> =
            retained.map(|(state, images)| format!("{} {state}", size::bytes(images.size_bytes))).collect();
        if !retained.is_empty() {
            out.info(format_args!(
                "note: not reclaimable: {}; larder explain IMAGE says why",
                retained.join(", ")
            ));
        }
    }
    out.line("");
    show_filesystem(usage.filesystem.as_ref(), args.output.is_wide(), out);
    if verbose || args.output.is_wide() {
        out.line("");
        show_details(args, usage, out);
    }
}

/// Bytes of images, and how many of them can be freed, as `docker system df` prints it.
fn summary(usage: &UsageResponse) -> TextTable {
    let mut table = TextTable::new(["TYPE", "TOTAL", "ACTIVE", "SIZE", "RECLAIMABLE"]);
    let row = |name: &str, counts: [Option<u64>; 2], bytes: u64, reclaimable: Option<u64>, about: &str| {
        let [total, active] = counts.map(|count| count.map(|count| count.to_string()).unwrap_or_default());
        let freed = reclaimable.map(|freed| {
            let percent =
                if bytes == 0 { String::new() } else { format!(" ({})", size::percent(freed, bytes)) };
            format!("{about}{}{percent}", size::bytes(freed))
        });
        [name.to_owned(), total, active, format!("{about}{}", size::bytes(bytes)), freed.unwrap_or_default()]
    };
    let beside = usage_by_state::reclaimable_kinds(usage.reclaimable_beside_images.as_ref());
    if let Some(by_state) = &usage.usage_by_state {
        let about = if by_state.estimated { "about " } else { "" };
        let all = usage_by_state::image_states(by_state).map(|(_, images)| images);
        let (count, bytes) =
            all.fold((0, 0), |sum, images| (sum.0 + images.count, sum.1 + images.size_bytes));
        let active = by_state.in_use.unwrap_or_default().count;
        let reclaimable = usage
            .reclaimable_bytes
            .unwrap_or_default()
            .saturating_sub(beside.iter().map(|(_, bytes)| bytes).sum());
        table.row(row("images", [Some(count), Some(active)], bytes, Some(reclaimable), about));
    } else {
        let images = usage.images.unwrap_or_default();
        let [total, active] = [images.total, images.in_use].map(Option::unwrap_or_default);
        let nothing = (total.count == 0).then_some(0);
        table.row(row("images", [Some(total.count), Some(active.count)], total.size_bytes, nothing, ""));
    }
    for (kind, bytes) in beside {
        table.row(row(kind, [None, None], bytes, Some(bytes), ""));
    }
    table
}

fn show_details(args: &DfArgs, usage: &UsageResponse, out: &Printer) {
    if let Some(by_state) = usage.usage_by_state {
        let reclaimable = usage.reclaimable_bytes.unwrap_or_default();
        out.table(&usage_by_state::table(&by_state, reclaimable, usage.reclaimable_beside_images.as_ref()));
        out.line("");
    }
    if let Some(store) = &usage.store {
        if !store.images.is_empty() {
            out.table(&store::images_table(&store.images, store.estimated));
            out.line("");
        }
        let disk = store.disk.unwrap_or_default();
        out.table(&store::disk_table(&disk, store.estimated, args.output.is_wide()));
        out.line(format_args!("layers: {}", store.new_layers));
        if usage.containerd_bytes > 0 {
            let bytes = size::bytes(usage.containerd_bytes);
            out.line(format_args!(
                "in containerd: {bytes} of images that other programs put there, beside the store"
            ));
        }
    } else if let Some(engine) = &usage.docker {
        out.table(&docker::table(engine));
        out.line("");
        out.line(docker::legend(engine));
    } else {
        out.table(&images_table(&usage.images.unwrap_or_default()));
        out.line("");
        out.line("SIZE counts a shared layer once for each image, as kubelet does");
    }
}

/// The table of the filesystem, and why GC sees another percentage, where it does.
fn show_filesystem(filesystem: Option<&UsageFileSystem>, wide: bool, out: &Printer) {
    let Some(filesystem) = filesystem else { return };
    out.table(&filesystem_table(filesystem, wide));
    if let (Some(all), Some(available), Some(reserved)) =
        (filesystem.size_bytes, filesystem.available_bytes, filesystem.reserved_bytes)
        && size::is_significant(reserved, all)
    {
        out.line(format_args!(
            "reserved for root or by the filesystem: {}; GC counts it as used, as kubelet does: {}% used",
            size::bytes(reserved),
            used_percent(all, available),
        ));
    }
}

/// As `df` counts: what is reserved is neither used nor available.
fn filesystem_table(filesystem: &UsageFileSystem, wide: bool) -> TextTable {
    let heads = ["FILESYSTEM", "SIZE", "USED", "AVAIL", "USE%", "INODES", "IUSED", "IUSE%", "IMAGES"];
    let more = ["IMAGES INODES"].into_iter().filter(|_| wide);
    let mut table = TextTable::new(heads.into_iter().chain(more));
    let bytes = |value: Option<u64>| value.map(size::bytes).unwrap_or_default();
    let number = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
    let percent = |part: Option<u64>, whole: Option<u64>| {
        part.zip(whole).map(|(part, whole)| size::percent(part, whole)).unwrap_or_default()
    };
    let used =
        filesystem.used_bytes.map(|used| used.saturating_sub(filesystem.reserved_bytes.unwrap_or_default()));
    let usable = used.zip(filesystem.available_bytes).map(|(used, available)| used.saturating_add(available));
    let inodes_used =
        filesystem.inodes.zip(filesystem.inodes_free).map(|(all, free)| all.saturating_sub(free));
    let cells = [
        filesystem.mountpoint.clone(),
        bytes(filesystem.size_bytes),
        bytes(used),
        bytes(filesystem.available_bytes),
        percent(used, usable),
        number(filesystem.inodes),
        number(inodes_used),
        percent(inodes_used, filesystem.inodes),
        bytes(filesystem.images_bytes),
    ];
    let more = [number(filesystem.images_inodes)].into_iter().filter(|_| wide);
    table.row(cells.into_iter().chain(more));
    table
}

fn images_table(images: &UsageImages) -> TextTable {
    let mut table = TextTable::new(["IMAGES", "COUNT", "SIZE"]);
    for (name, group) in [("total", images.total), ("in use", images.in_use), ("unused", images.unused)] {
        let group = group.unwrap_or_default();
        table.row([name.to_owned(), group.count.to_string(), size::bytes(group.size_bytes)]);
    }
    table
}
