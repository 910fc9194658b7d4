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
        show(args, &usage, out);
        return Ok(CommandOutcome::Done);
    }
    let usage = usage_of_nothing();
    match args.output.data() {
        Some(format) => output::data(out, format, &usage),
        None => out.table(&images_table(&usage.images.unwrap_or_default())),
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

fn show(args: &DfArgs, usage: &UsageResponse, out: &Printer) {
    if let Some(format) = args.output.data() {
        output::data(out, format, usage);
        return;
    }
    let filesystem = || show_filesystem(usage.filesystem.as_ref(), args.output.is_wide(), out);
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
        out.line("");
        filesystem();
    } else if let Some(engine) = &usage.docker {
        filesystem();
        out.line("");
        out.table(&docker::table(engine));
        out.line("");
        out.line(docker::legend(engine));
    } else {
        filesystem();
        out.line("");
        out.table(&images_table(&usage.images.unwrap_or_default()));
        out.line("");
        out.line("SIZE counts a shared layer once for each image, as kubelet does");
    }
    if let Some(by_state) = usage.usage_by_state {
        let reclaimable = usage.reclaimable_bytes.unwrap_or_default();
        let beside_images = usage.reclaimable_beside_images.as_ref().and_then(|space| space.total);
        let beside_images = beside_images.unwrap_or_default().size_bytes;
        let table = usage_by_state::table(&by_state, reclaimable, beside_images);
        out.line("");
        out.table(&table);
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
