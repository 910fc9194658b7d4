//! The tables and lines of `larder gc`.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use larder::artifact_type::type_word;
use larder::gc::ReclaimableSpace;
use larder::hint::Hint;
use larder_api::EnumWord as _;
use larder_api::convert::to_space_beside_images;
use larder_api::v1::{Collection, CollectionGoal, DecisionReason, FileSystem, ImageDecision};

use crate::output::table::TextTable;
use crate::output::{names, size};
use crate::printer::Printer;

/// Prints a plan, with a reason for each image.
pub(super) fn plan(report: &Collection, wide: bool, out: &Printer) {
    out.line(situation(report));
    if let Some(reclaimed) = reclaimed(report) {
        out.line(format_args!("would reclaim {reclaimed}{}", after_reclaim(report, "used after that")));
    }
    if !report.removals.is_empty() {
        print_removals(report, wide, out);
        let images = count(report.removals.len());
        let frees = format!("{}{}", about(report), size::bytes(report.promised_bytes));
        let after = report.after.map(|disk| format!(", {}% used after that", disk.used_percent));
        out.line(format_args!("would remove {images} and free {frees}{}", after.unwrap_or_default()));
    } else if removes_something(report) {
        out.line("would remove nothing");
    }
    print_retained(report, wide, out);
    if !report.reached {
        out.line(format_args!("\n{}", shortfall(report)));
    }
    if report.goal() == CollectionGoal::AllUnused || !report.reached {
        print_removal_hints(report, out);
    }
}

/// The bytes or inodes that a plan frees, and those that it had to.
fn shortfall(report: &Collection) -> String {
    if report.needed_bytes == 0 && report.needed_inodes > 0 {
        let inodes: u64 = report.removals.iter().map(|removal| removal.promised_inodes).sum();
        return format!("not enough reclaimable inodes: would free {inodes} of {}", report.needed_inodes);
    }
    let needed = size::bytes(report.needed_bytes);
    if !report.when_unreachable.is_empty() {
        let (all, rule) = (size::bytes(report.reclaimable_bytes), &report.when_unreachable);
        return format!(
            "not enough reclaimable space: all candidates would free {all} of {needed} (gc.whenUnreachable: {rule})"
        );
    }
    let frees = size::bytes(report.promised_bytes);
    format!("not enough reclaimable space: would free {}{frees} of {needed}", about(report))
}

/// Prints the result of a round.
pub(super) fn round(report: &Collection, wide: bool, out: &Printer) {
    out.line(situation(report));
    let reclaimed = reclaimed(report);
    if let Some(reclaimed) = reclaimed {
        out.line(format_args!("reclaimed {reclaimed}{}", after_reclaim(report, "used now")));
    }
    if !report.removals.is_empty() {
        print_removals(report, wide, out);
    }
    if report.removals.is_empty() {
        match reclaimed {
            None => out.line("removed nothing"),
            Some(_) if report.goal() == CollectionGoal::FailedPulls => {}
            Some(_) => out.line("removed no images"),
        }
    } else {
        let images = count(report.removals.len());
        let freed = u64::try_from(report.freed_bytes.unwrap_or_default()).unwrap_or_default();
        let after = report.after.map(|disk| format!(", {}% used now", disk.used_percent));
        out.line(format_args!(
            "removed {images} and freed {}{}",
            size::bytes(freed),
            after.unwrap_or_default()
        ));
        if differs_from_plan(report.promised_bytes, freed) {
            let expected = size::bytes(report.promised_bytes);
            out.line(format_args!("expected {}{expected}: {FREED_MEANING}", about(report)));
        }
        if let Some(change) = report.available_change_bytes
            && differs_from_plan(freed, u64::try_from(change).unwrap_or_default())
        {
            let sign = if change < 0 { "-" } else { "+" };
            let change = size::bytes(change.unsigned_abs());
            out.line(format_args!(
                "available: {sign}{change}, including writes and deletions of other processes"
            ));
        }
    }
    for id in &report.already_removed {
        let named = report.images.iter().find(|image| image.id == *id);
        let name = named.map_or(id.clone(), |image| names::image_names(&image.names, id, wide));
        out.line(format_args!("skipped {name}: removed by another process"));
    }
    for id in &report.skipped {
        out.line(format_args!("skipped {id}: now in use or kept by a rule"));
    }
    if wide {
        print_retained(report, wide, out);
    } else if report.goal() == CollectionGoal::AllUnused {
        count_retained(&report.images, out);
    }
    if report.goal() != CollectionGoal::AllUnused && !report.reached {
        print_removal_hints(report, out);
    }
}

/// Prints how to remove also what leases and the minimum age retain.
fn print_removal_hints(report: &Collection, out: &Printer) {
    let size = size::bytes(report.asked_bytes);
    let round = match report.goal() {
        CollectionGoal::AllUnused => &ALL_UNUSED[..],
        CollectionGoal::Free => &["gc", "--free", &size],
        _ => &["gc"],
    };
    let reasons: BTreeSet<_> =
        report.images.iter().filter(|image| !image.remove).map(ImageDecision::reason).collect();
    reasons.into_iter().filter_map(|reason| removal_hint(reason, round)).for_each(|hint| out.hint(hint));
}

/// The round that removes every unused image.
const ALL_UNUSED: [&str; 2] = ["gc", "--all-unused"];

/// Returns the space that was or would be reclaimed beside images, if any.
fn reclaimed(report: &Collection) -> Option<ReclaimableSpace> {
    let reclaimed = report.reclaimed.as_ref().map(to_space_beside_images)?;
    (reclaimed != ReclaimableSpace::default()).then_some(reclaimed)
}

/// The disk usage after that, where no image is removed.
fn after_reclaim(report: &Collection, when: &str) -> String {
    let after = report.after.filter(|_| report.removals.is_empty());
    after.map(|disk| format!(", {}% {when}", disk.used_percent)).unwrap_or_default()
}

/// Whether the goal is to remove something, whatever the disk usage.
fn removes_something(report: &Collection) -> bool {
    match report.goal() {
        CollectionGoal::AllUnused | CollectionGoal::Dangling => true,
        CollectionGoal::FailedPulls => reclaimed(report).is_none(),
        _ => false,
    }
}

/// Why freed bytes may differ from the expected ones.
pub(in crate::commands) const FREED_MEANING: &str = "where the runtime does not report the size of removed files, FREED is the \
     change of the whole filesystem, including writes and deletions of other processes";

/// Whether the measured bytes differ from the expected ones by more than other processes usually write.
pub(in crate::commands) fn differs_from_plan(promised: u64, freed: u64) -> bool {
    promised.abs_diff(freed) > NOISE.max(promised / 100)
}

/// Bytes that logs and databases write during a round.
const NOISE: u64 = 1 << 20;

/// Prints how many images a removal of all unused ones retains, by reason, and how to remove them too.
pub(in crate::commands) fn count_retained(images: &[ImageDecision], out: &Printer) {
    let mut counts: BTreeMap<DecisionReason, usize> = BTreeMap::new();
    for image in images.iter().filter(|image| !image.remove) {
        *counts.entry(image.reason()).or_default() += 1;
    }
    for (&reason, &count) in &counts {
        let images = self::count(count);
        out.info(format_args!("note: {images} retained: {}", retain_reason(reason)));
    }
    let (remedies, others): (Vec<_>, Vec<_>) =
        counts.into_keys().map(|reason| removal_hint(reason, &ALL_UNUSED)).partition(Option::is_some);
    remedies.into_iter().flatten().for_each(|hint| out.hint(hint));
    if !others.is_empty() {
        out.hint(Hint::new().command(["explain", "IMAGE"]).text(" shows the reason"));
    }
}

/// How to remove unused images in spite of this reason, where a command does; `round` is the command of the round.
fn removal_hint(reason: DecisionReason, round: &[&str]) -> Option<Hint> {
    let with =
        |flags: &[&str]| -> Vec<String> { round.iter().chain(flags).map(|&word| word.to_owned()).collect() };
    match reason {
        DecisionReason::Leased => {
            let hint = Hint::new().command(["lease", "rm", "IMAGE"]).text(" ends the leases on an image");
            Some(if round == ALL_UNUSED {
                hint.text("; ").command(with(&["--force-leases"])).text(" removes all")
            } else {
                hint
            })
        }
        DecisionReason::TooYoung => Some(
            Hint::new()
                .command(with(&["--minimum-image-ttl-duration", "0"]))
                .text(" ignores the minimum age"),
        ),
        _ => None,
    }
}

/// The reason to retain any number of images.
fn retain_reason(reason: DecisionReason) -> &'static str {
    match reason {
        DecisionReason::InUse => "in use",
        DecisionReason::Leased => "leased",
        DecisionReason::Pinned => "pinned by the runtime",
        DecisionReason::Kept => "kept by a rule",
        DecisionReason::TooYoung => "younger than the minimum age (imageMinimumGCAge)",
        DecisionReason::ClockWentBack => "last used in the future: the clock was set back",
        DecisionReason::FreesNothing => "frees no space",
        DecisionReason::Unreachable => "goal cannot be reached",
        DecisionReason::Recent => "recently used (gc.keepBytes)",
        DecisionReason::NotNeeded => "not needed to reach the goal",
        DecisionReason::InvalidId => "no valid image ID",
        DecisionReason::Failed => "removal failed",
        other => other.word(),
    }
}

fn print_removals(report: &Collection, wide: bool, out: &Printer) {
    out.line("");
    out.table(&removals(report, wide));
    out.line("");
}

fn print_retained(report: &Collection, wide: bool, out: &Printer) {
    let types = types(report);
    let heads = ["RETAINED"].into_iter().chain(types.is_some().then_some("TYPE")).chain(["REASON"]);
    let mut table = TextTable::new(heads);
    let retained = report.images.iter().filter(|image| !image.remove);
    let row = |image: &ImageDecision| {
        let name = names::image_names(&image.names, &image.id, wide);
        let cells = [name].into_iter().chain(type_of(types.as_ref(), &image.id)).chain([image.why.clone()]);
        cells.collect::<Vec<_>>()
    };
    let mut rows: Vec<_> = retained.map(row).collect();
    rows.sort();
    let any = !rows.is_empty();
    for row in rows {
        table.row(row);
    }
    if any {
        out.line("");
        out.table(&table);
    }
}

/// The disk usage of the image filesystem, and the goal of the round.
fn situation(report: &Collection) -> String {
    let used = |disk: &FileSystem| {
        let used = size::bytes(disk.size_bytes.saturating_sub(disk.available_bytes));
        let size = size::bytes(disk.size_bytes);
        let reserved = if size::is_significant(disk.reserved_bytes, disk.size_bytes) {
            format!(", {} reserved", size::bytes(disk.reserved_bytes))
        } else {
            String::new()
        };
        format!("{}% used ({used} of {size}{reserved})", disk.used_percent)
    };
    let usage = report.before.as_ref().map_or("usage unknown".to_owned(), used);
    let disk = format!("image filesystem: {usage}");
    // What has to be freed in all; the report has what is left to images.
    let reclaimed = reclaimed(report).unwrap_or_default().total().bytes;
    let needed_bytes =
        if report.needed_bytes == 0 { 0 } else { report.needed_bytes.saturating_add(reclaimed) };
    let (high, low) = (report.high_threshold_percent, report.low_threshold_percent);
    match report.goal() {
        CollectionGoal::AllUnused => format!("{disk}, goal: remove all unused images"),
        CollectionGoal::Dangling => format!("{disk}, goal: remove dangling images"),
        CollectionGoal::FailedPulls => format!("{disk}, goal: remove what failed pulls left"),
        CollectionGoal::Free => {
            let requested = size::bytes(report.asked_bytes);
            match needed_bytes.saturating_sub(report.asked_bytes) {
                0 => format!("{disk}, goal: free {requested}"),
                margin => format!("{disk}, goal: free {requested} and a margin of {}", size::bytes(margin)),
            }
        }
        _ if report.disabled => format!("{disk}, GC is off (high threshold 100%)"),
        _ if report.needed_bytes == 0 && report.needed_inodes == 0 => {
            format!("{disk}, GC starts at {high}%")
        }
        _ if report.needed_bytes == 0 => {
            format!("{disk}, goal: free {} inodes", report.needed_inodes)
        }
        _ => {
            let need = size::bytes(needed_bytes);
            format!("{disk}, goal: free {need} (high threshold {high}%, low threshold {low}%)")
        }
    }
}

/// The types of all images by ID, in words; `None` without artifacts.
fn types(report: &Collection) -> Option<HashMap<&str, &str>> {
    let has_artifact = report.images.iter().any(|image| !image.artifact_type.is_empty());
    has_artifact
        .then(|| report.images.iter().map(|image| (&*image.id, type_word(&image.artifact_type))).collect())
}

/// The cell with the type of an image; `None` without artifacts.
fn type_of(types: Option<&HashMap<&str, &str>>, id: &str) -> Option<String> {
    types.map(|types| types.get(id).copied().unwrap_or_default().to_owned())
}

fn removals(report: &Collection, wide: bool) -> TextTable {
    let freed = !report.dry_run;
    let types = types(report);
    let heads =
        [if freed { "REMOVED" } else { "REMOVE" }].into_iter().chain(types.is_some().then_some("TYPE"));
    let heads = heads.chain(["FREES", "INODES"]).chain(freed.then_some("FREED"));
    let mut table = TextTable::new(heads.chain(["REASON"]));
    for removal in &report.removals {
        let guess = if removal.estimated { "about " } else { "" };
        let name = names::image_names(&removal.names, &removal.id, wide);
        let name = [name].into_iter().chain(type_of(types.as_ref(), &removal.id));
        let cells = [
            format!("{guess}{}", size::bytes(removal.promised_bytes)),
            // An estimate of inodes may exceed those of the filesystem.
            if removal.estimated { String::new() } else { removal.promised_inodes.to_string() },
        ];
        let measured = removal.freed_bytes.map_or_else(String::new, size::bytes);
        let measured = freed.then_some(measured);
        table.row(name.chain(cells).chain(measured).chain([removal.why.clone()]));
    }
    table
}

fn count(images: usize) -> String {
    size::count(images as u64, "image")
}

/// Marks an estimate.
pub(super) fn about(report: &Collection) -> &'static str {
    if report.removals.iter().any(|removal| removal.estimated) { "about " } else { "" }
}

#[cfg(test)]
mod tests {
    use larder_api::v1::Removal;

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
    fn the_margin_beyond_the_requested_bytes_is_named() {
        let free = Collection {
            goal: CollectionGoal::Free.into(),
            asked_bytes: 1_000_000_000,
            needed_bytes: 1_050_000_000,
            ..report()
        };
        assert!(situation(&free).ends_with(", goal: free 1GB and a margin of 50MB"), "{}", situation(&free));
        let exactly = Collection { needed_bytes: 1_000_000_000, ..free };
        assert!(situation(&exactly).ends_with(", goal: free 1GB"));
    }

    #[test]
    fn estimates_have_no_inodes_and_are_marked_in_the_sum() {
        let removal =
            |estimated| Removal { id: "i".into(), promised_inodes: 15_674, estimated, ..Removal::default() };
        let of = |estimated| Collection { dry_run: true, removals: vec![removal(estimated)], ..report() };
        let printed = |estimated| {
            let page = TestWriter::default();
            plan(&of(estimated), false, &Printer::to(Box::new(page.clone()), Box::new(std::io::sink())));
            page.text()
        };
        let (measured, estimated) = (printed(false), printed(true));
        assert!(measured.contains("15674") && measured.contains(" and free 0B\n"), "{measured}");
        assert!(!estimated.contains("15674") && estimated.contains(" and free about 0B\n"), "{estimated}");
    }

    #[test]
    fn leases_and_the_minimum_age_have_hints_where_a_goal_is_missed() {
        let image =
            |reason: DecisionReason| ImageDecision { reason: reason.into(), ..ImageDecision::default() };
        let images = vec![image(DecisionReason::Leased), image(DecisionReason::TooYoung)];
        for (goal, reached, hints) in [
            (
                CollectionGoal::Free,
                false,
                &["lease rm IMAGE", "gc --free 1GB --minimum-image-ttl-duration 0 "][..],
            ),
            (CollectionGoal::Free, true, &[]),
            (CollectionGoal::Thresholds, false, &["lease rm IMAGE", "gc --minimum-image-ttl-duration 0 "]),
            (
                CollectionGoal::AllUnused,
                true,
                &["gc --all-unused --force-leases removes", "gc --all-unused --min"],
            ),
        ] {
            let images = images.clone();
            let goal = goal.into();
            let of = Collection { goal, images, reached, asked_bytes: 1_000_000_000, ..report() };
            for print in [plan, round] {
                let page = TestWriter::default();
                print(&of, false, &Printer::to(Box::new(std::io::sink()), Box::new(page.clone())));
                let text = page.text();
                assert!(hints.iter().all(|hint| text.contains(hint)), "{text}");
                assert!(!hints.is_empty() || text.is_empty(), "{text}");
            }
        }
    }

    #[test]
    fn a_plan_that_misses_the_goal_names_what_it_frees_and_what_was_needed() {
        let bytes =
            Collection { promised_bytes: 120_000_000, needed_bytes: 300_000_000, ..Collection::default() };
        assert_eq!(shortfall(&bytes), "not enough reclaimable space: would free 120MB of 300MB");
        let removals = vec![Removal { promised_inodes: 12, ..Removal::default() }];
        let inodes = Collection { removals, needed_inodes: 40, ..Collection::default() };
        assert_eq!(shortfall(&inodes), "not enough reclaimable inodes: would free 12 of 40");
    }

    #[test]
    fn reserved_bytes_are_printed_if_significant() {
        let mut full = report();
        assert!(situation(&full).starts_with("image filesystem: 86% used (86GB of 100GB), "));
        full.before.as_mut().unwrap().reserved_bytes = 26_000_000_000;
        assert!(situation(&full).contains("used (86GB of 100GB, 26GB reserved)"));
    }

    #[test]
    fn a_difference_to_the_plan_is_explained_unless_it_is_noise() {
        const GB: u64 = 1_000_000_000;
        assert!(!differs_from_plan(GB, GB - GB / 100));
        assert!(differs_from_plan(GB, GB - GB / 50) && differs_from_plan(GB, 2 * GB));
        assert!(!differs_from_plan(4096, 500_000), "other processes write that much");
    }
}
