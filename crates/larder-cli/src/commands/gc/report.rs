//! What `larder gc` says to people.

use larder::hint::Hint;
use std::collections::BTreeMap;

use larder_api::EnumWord as _;
use larder_api::v1alpha1::{Collection, CollectionGoal, FileSystem, ImageVerdict, VerdictReason};

use crate::output::table::TextTable;
use crate::output::{names, size};
use crate::printer::Printer;

/// What would be done, and of each image why.
pub(super) fn plan(report: &Collection, wide: bool, out: &Printer) {
    out.line(situation(report));
    if !report.removals.is_empty() {
        out.line(format_args!("\n{}\n", removals(report, wide)));
        let images = count(report.removals.len());
        let frees = format!("{}{}", about(report), size::bytes(report.promised_bytes));
        let after = report.after.map(|disk| format!("; then {}% are in use", disk.used_percent));
        out.line(format_args!("Would remove {images} and free {frees}{}.", after.unwrap_or_default()));
    } else if report.goal() == CollectionGoal::AllUnused {
        out.line("Would remove nothing.");
    }
    print_retained(report, wide, out);
    if !report.reached {
        out.line("\nThat is all that may go, and it is not enough.");
    }
    if report.goal() == CollectionGoal::AllUnused && all_are_too_young(report) {
        out.hint(
            Hint::new()
                .command(["gc", "--all-unused", "--dry-run", "--minimum-image-ttl-duration"])
                .text(" 0 spares no image for its age"),
        );
    }
}

/// What was done.
pub(super) fn round(report: &Collection, wide: bool, out: &Printer) {
    out.line(situation(report));
    if !report.removals.is_empty() {
        out.line(format_args!("\n{}\n", removals(report, wide)));
    }
    if report.removals.is_empty() {
        out.line("Removed nothing.");
    } else {
        let images = count(report.removals.len());
        let freed = u64::try_from(report.freed_bytes.unwrap_or_default()).unwrap_or_default();
        let after = report.after.map(|disk| format!("; now {}% are in use", disk.used_percent));
        let told = size::bytes(freed);
        out.line(format_args!("Removed {images} and freed {told}{}.", after.unwrap_or_default()));
        if is_disturbed(report.promised_bytes, freed) {
            let guess = about(report);
            let promised = size::bytes(report.promised_bytes);
            out.line(format_args!("Promised were {guess}{promised}; {OF_THE_FILE_SYSTEM}."));
        }
    }
    for id in &report.gone {
        let named = report.images.iter().find(|image| image.id == *id);
        let name = named.map_or(id.clone(), |image| names::image_names(&image.names, id, wide));
        out.line(format_args!("{name} was gone before its turn: somebody else removed it meanwhile."));
    }
    for id in &report.spared {
        out.line(format_args!("Left {id} alone: it came into use, or is kept by now."));
    }
    if wide {
        print_retained(report, wide, out);
    } else if report.goal() == CollectionGoal::AllUnused {
        count_stays(report, out);
    }
}

/// Why what is freed may be more or less than promised.
pub(in crate::commands) const OF_THE_FILE_SYSTEM: &str =
    "FREED is the change of the whole file system, with what others wrote or deleted meanwhile";

/// Whether so much more or less was freed than promised that people ask why.
pub(in crate::commands) fn is_disturbed(promised: u64, freed: u64) -> bool {
    promised.abs_diff(freed) > NOISE.max(promised / 100)
}

/// Logs and databases write so much beside, in bytes.
const NOISE: u64 = 1 << 20;

/// Why images stay although all that may go was to go: beside the result, a line for each reason.
fn count_stays(report: &Collection, out: &Printer) {
    let mut counts: BTreeMap<VerdictReason, usize> = BTreeMap::new();
    for image in report.images.iter().filter(|image| !image.goes) {
        *counts.entry(image.reason()).or_default() += 1;
    }
    for (&reason, &count) in &counts {
        let stay = if count == 1 { "image stays" } else { "images stay" };
        out.info(format_args!("note: {count} {stay}: {}", words_for(reason)));
    }
    if !counts.is_empty() {
        out.hint(Hint::new().command(["explain", "IMAGE"]).text(" says why one stays"));
    }
}

/// A reason to stay, in words for any number of images.
fn words_for(reason: VerdictReason) -> &'static str {
    match reason {
        VerdictReason::InUse => "in use, leased or just ensured",
        VerdictReason::Pinned => "pinned by the runtime",
        VerdictReason::Kept => "kept by a rule",
        VerdictReason::TooYoung => "too young to go (imageMinimumGCAge)",
        VerdictReason::ClockWentBack => "used later than now: the clock went back",
        VerdictReason::FreesNothing => "would free nothing",
        VerdictReason::NotNeeded => "not needed to reach the goal",
        VerdictReason::InvalidId => "without a valid id",
        VerdictReason::Failed => "could not be removed",
        other => other.word(),
    }
}

fn print_retained(report: &Collection, wide: bool, out: &Printer) {
    let mut table = TextTable::new(["STAYS", "WHY"]);
    let stays = report.images.iter().filter(|image| !image.goes);
    let row = |image: &ImageVerdict| [names::image_names(&image.names, &image.id, wide), image.why.clone()];
    let mut rows: Vec<_> = stays.map(row).collect();
    rows.sort();
    let any = !rows.is_empty();
    for row in rows {
        table.row(row);
    }
    if any {
        out.line(format_args!("\n{table}"));
    }
}

/// How full the file system is, and what follows.
fn situation(report: &Collection) -> String {
    let used = |disk: &FileSystem| {
        let used = size::bytes(disk.size_bytes.saturating_sub(disk.available_bytes));
        let size = size::bytes(disk.size_bytes);
        let reserved = if size::is_significant(disk.reserved_bytes, disk.size_bytes) {
            format!(", {} of it reserved", size::bytes(disk.reserved_bytes))
        } else {
            String::new()
        };
        format!("{}% of the images' file system are in use ({used} of {size}{reserved})", disk.used_percent)
    };
    let disk = report.before.as_ref().map_or("How full the disk is is not known".to_owned(), used);
    let (high, low) = (report.high_threshold_percent, report.low_threshold_percent);
    match report.goal() {
        CollectionGoal::AllUnused => format!("{disk}; everything goes that nothing uses."),
        CollectionGoal::Free => {
            let asked = size::bytes(report.asked_bytes);
            match report.needed_bytes.saturating_sub(report.asked_bytes) {
                0 => format!("{disk}; {asked} are to be freed."),
                more => format!("{disk}; {asked} and a margin of {} are to be freed.", size::bytes(more)),
            }
        }
        _ if report.needed_bytes == 0 && report.needed_inodes == 0 && high == 100 => {
            format!("{disk}; with a high threshold of 100% nothing goes.")
        }
        _ if report.needed_bytes == 0 && report.needed_inodes == 0 => {
            format!("{disk}; images go for room from {high}%.")
        }
        _ if report.needed_bytes == 0 => {
            format!("{disk}, and inodes run short; {} must be freed.", report.needed_inodes)
        }
        _ => {
            let need = size::bytes(report.needed_bytes);
            format!("{disk}; from {high}% on it is brought down to {low}%, so {need} must be freed.")
        }
    }
}

fn removals(report: &Collection, wide: bool) -> TextTable {
    let freed = !report.dry_run;
    let heads = ["REMOVE", "FREES", "INODES"].into_iter();
    let mut table = TextTable::new(heads.chain(freed.then_some("FREED")).chain(["WHY"]));
    for removal in &report.removals {
        let guess = if removal.estimated { "about " } else { "" };
        let cells = [
            names::image_names(&removal.names, &removal.id, wide),
            format!("{guess}{}", size::bytes(removal.promised_bytes)),
            // What a guess says of inodes may be more than the file system has.
            if removal.estimated { String::new() } else { removal.promised_inodes.to_string() },
        ];
        let measured = removal.freed_bytes.map_or_else(String::new, size::bytes);
        let measured = freed.then_some(measured);
        table.row(cells.into_iter().chain(measured).chain([removal.why.clone()]));
    }
    table
}

fn count(images: usize) -> String {
    if images == 1 { "1 image".to_owned() } else { format!("{images} images") }
}

/// In front of what is promised, where that is a guess.
fn about(report: &Collection) -> &'static str {
    if report.removals.iter().any(|removal| removal.estimated) { "about " } else { "" }
}

/// Whether the minimum age alone keeps what is there.
fn all_are_too_young(report: &Collection) -> bool {
    !report.images.is_empty() && report.images.iter().all(|image| image.reason() == VerdictReason::TooYoung)
}

#[cfg(test)]
mod tests {
    use larder_api::v1alpha1::Removal;

    use super::*;
    use crate::printer::tests::TestWriter;

    fn report() -> Collection {
        let before = FileSystem {
            size_bytes: 100_000_000_000,
            available_bytes: 14_000_000_000,
            used_percent: 86,
            ..FileSystem::default()
        };
        Collection { before: Some(before), ..Collection::default() }
    }

    #[test]
    fn what_is_freed_beyond_what_was_asked_for_is_said() {
        let free = Collection {
            goal: CollectionGoal::Free.into(),
            asked_bytes: 1_000_000_000,
            needed_bytes: 1_050_000_000,
            ..report()
        };
        assert!(
            situation(&free).ends_with("; 1GB and a margin of 50MB are to be freed."),
            "{}",
            situation(&free)
        );
        let exactly = Collection { needed_bytes: 1_000_000_000, ..free };
        assert!(situation(&exactly).ends_with("; 1GB are to be freed."));
    }

    #[test]
    fn what_is_estimated_has_no_inodes_and_is_not_summed_up_as_if_measured() {
        let removal =
            |estimated| Removal { id: "i".into(), promised_inodes: 15_674, estimated, ..Removal::default() };
        let of = |estimated| Collection { dry_run: true, removals: vec![removal(estimated)], ..report() };
        let told = |estimated| {
            let page = TestWriter::default();
            plan(&of(estimated), false, &Printer::to(Box::new(page.clone()), Box::new(std::io::sink())));
            page.text()
        };
        assert!(told(false).contains("15674") && told(false).contains(" and free 0B."), "{}", told(false));
        assert!(
            !told(true).contains("15674") && told(true).contains(" and free about 0B."),
            "{}",
            told(true)
        );
    }

    #[test]
    fn what_is_reserved_for_root_is_said_where_it_is_much() {
        let mut full = report();
        assert!(situation(&full).contains("86% of the images' file system are in use (86GB of 100GB)"));
        full.before.as_mut().unwrap().reserved_bytes = 26_000_000_000;
        assert!(situation(&full).contains("in use (86GB of 100GB, 26GB of it reserved)"));
    }

    #[test]
    fn a_difference_to_the_promise_is_explained_where_it_is_no_noise() {
        const GB: u64 = 1_000_000_000;
        assert!(
            !is_disturbed(GB, GB - GB / 100) && is_disturbed(GB, GB - GB / 50) && is_disturbed(GB, 2 * GB)
        );
        assert!(!is_disturbed(4096, 500_000), "others write so much all the time");
    }
}
