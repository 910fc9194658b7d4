//! `larder images`.

mod filter;
mod sort;
mod tree;

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use larder::age;
use larder::artifact_type::{IMAGE, type_word};
use larder::backend::ImageFill;
use larder::glob;
use larder::go_format;
use larder::reference::{ImageId, Reference};
use larder::retention::nearest_names;
use larder_agent::NodeOpenError;
use larder_agent::client::Client;
use larder_agent::image_name::digits_of_id;
use larder_api::v1 as api;
use larder_store::store::damage_hint;
use serde::Serialize;

use crate::args::{ImageFilter, ImagesArgs};
use crate::exit::CommandOutcome;
use crate::failure::{ErrorKind, Failure};
use crate::output::table::TextTable;
use crate::output::{self, ListFormat, size};
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

/// How docker and crictl write what is not there.
const NONE: &str = "<none>";
/// Digits of a shortened ID, as in crictl.
const SHORT_ID: usize = 13;

pub(super) async fn run(args: &ImagesArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let listed = match open(session, needs_details(args)).await? {
        Some(client) => {
            let details = needs_details(args);
            let label_keys = if details { filter::label_keys(&args.filter) } else { Vec::new() };
            let request = api::ImagesRequest { details, label_keys, ..Default::default() };
            client.ask(async |mut calls| calls.images(request).await).await?
        }
        None => api::ImagesResponse::default(),
    };
    listed.warnings.iter().for_each(|warning| out.warning(warning));
    let rows: Vec<ImageTableRow> = listed.images.iter().flat_map(rows).collect();
    let rows = selected(args, rows, out)?;
    warn_of_damage(&rows, out);
    if args.tree {
        out.table(&tree::table(&rows, &listed.layers));
    } else {
        show(args, &rows, out);
    }
    Ok(CommandOutcome::Done)
}

/// Names the images that cannot be used before a pull has replaced their damaged layers.
fn warn_of_damage(rows: &[ImageTableRow], out: &Printer) {
    let mut known = BTreeSet::new();
    for row in rows.iter().filter(|row| row.damaged && known.insert(&row.id)) {
        let name = row.name();
        out.warning(format_args!("{name} is damaged"));
        out.hint(damage_hint(&name));
    }
}

/// Opens the images to list them. With `details` their last use is known, unless the state directory cannot be used.
pub(super) async fn open(session: &CommandSession, details: bool) -> Result<Option<Client>, Failure> {
    if details {
        match session.open(&ImageAccess::list()).await {
            Ok(client) => return Ok(Some(client)),
            Err(NodeOpenError::NoStore(_)) => {}
            Err(NodeOpenError::Failed(error)) if error.kind() == ErrorKind::Unavailable => return Err(error),
            Err(NodeOpenError::Failed(error) | NodeOpenError::InUse(error)) => {
                tracing::info!("listing without the use of images: {}", error.message());
            }
        }
    }
    session.open_to_list(&ImageAccess::read()).await
}

/// Whether more is needed than names, IDs and sizes.
fn needs_details(args: &ImagesArgs) -> bool {
    !args.quiet || args.filter.iter().any(ImageFilter::needs_details) || args.sort.needs_details()
}

/// The rows that fit the pattern and the filters, in order.
fn selected(
    args: &ImagesArgs,
    mut rows: Vec<ImageTableRow>,
    out: &Printer,
) -> Result<Vec<ImageTableRow>, Failure> {
    let names: Vec<String> = rows.iter().map(ImageTableRow::name).collect();
    rows.retain(|row| args.pattern.as_deref().is_none_or(|pattern| row.fits(pattern)));
    if let (false, true, Some(pattern)) = (names.is_empty(), rows.is_empty(), &args.pattern) {
        out.info(no_match(pattern, &names));
    }
    let mut rows = filter::apply(&args.filter, rows)?;
    sort::sort(args.sort, &mut rows);
    Ok(rows)
}

fn show(args: &ImagesArgs, images: &[ImageTableRow], out: &Printer) {
    if args.quiet {
        let mut known = BTreeSet::new();
        for row in images.iter().filter(|row| known.insert(&row.id)) {
            out.line(&row.id);
        }
    } else if args.output == ListFormat::Name {
        for row in images {
            out.line(row.name());
        }
    } else {
        output::show(out, args.output.print_format(), &images, || table(images, args, Timestamp::now()));
    }
}

/// A note that only the pattern is the reason for an empty list, with similar names or a wider pattern.
fn no_match(pattern: &str, names: &[String]) -> String {
    let note = format!("note: no image matches {}", go_format::quote(pattern));
    let near = nearest_names(pattern, names);
    if !near.is_empty() {
        return format!("{note}; similar images: {}", near.join(", "));
    }
    if pattern.contains('*') {
        return note;
    }
    let (name, slash) = (pattern.trim_matches('/'), if pattern.contains('/') { "" } else { "/" });
    format!("{note}; try '*{slash}{name}*'")
}

/// One name of one image, or an image without any. The shape of `-o json`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct ImageTableRow {
    #[serde(serialize_with = "larder_api::or_null")]
    repository: String,
    tag: Option<String>,
    digest: Option<String>,
    /// Of an image for other machines, such as `linux/arm64`.
    platform: Option<String>,
    id: ImageId,
    /// In a word, such as `image` or `model`.
    r#type: String,
    #[serde(skip)]
    artifact_type: String,
    size_bytes: u64,
    /// Bytes that are still to come; `None` if it is complete.
    missing_bytes: Option<u64>,
    pinned: bool,
    /// When it was built.
    created: Option<String>,
    last_used: Option<String>,
    /// Bytes that removing just this image frees.
    unique_bytes: Option<u64>,
    /// Whether a container or a mount uses it.
    in_use: Option<bool>,
    hidden: bool,
    /// Whether layers of it are damaged.
    damaged: bool,
    #[serde(skip)]
    labels: BTreeMap<String, String>,
    #[serde(skip)]
    layers: Vec<u32>,
}

/// An image under each of its names: all tags, or its digests if it has no tag.
fn rows(image: &api::Image) -> Vec<ImageTableRow> {
    let details = image.details.clone();
    let in_use = details.as_ref().map(|details| details.in_use);
    let details = details.unwrap_or_default();
    let row = |repository: &str, tag: Option<&str>, platform: Option<&str>| ImageTableRow {
        repository: repository.to_owned(),
        tag: tag.map(str::to_owned),
        digest: digest_of(image, repository, platform),
        platform: platform.map(str::to_owned),
        id: image.id.clone().into(),
        r#type: type_word(&image.artifact_type).to_owned(),
        artifact_type: image.artifact_type.clone(),
        size_bytes: image.size_bytes,
        missing_bytes: image.fill.as_ref().map(|fill| fill.missing_bytes),
        pinned: image.pinned,
        created: details.created.clone(),
        last_used: details.last_used.clone(),
        unique_bytes: details.unique_bytes,
        in_use,
        hidden: image.hidden,
        damaged: details.damaged,
        labels: details.labels.clone().into_iter().collect(),
        layers: details.layers.clone(),
    };
    let tagged = image.repo_tags.iter().map(|name| {
        let (name, platform) = split_platform(name);
        let (repository, tag) = split_tag(name);
        row(repository, tag, platform)
    });
    let tagged: Vec<_> = tagged.collect();
    if !tagged.is_empty() {
        return tagged;
    }
    let repositories = image.repo_digests.iter().filter_map(|name| {
        let (name, platform) = split_platform(name);
        Some((name.split_once('@')?.0, platform))
    });
    let repositories: BTreeSet<_> = repositories.collect();
    if repositories.is_empty() {
        return vec![row("", None, None)];
    }
    repositories.into_iter().map(|(repository, platform)| row(repository, None, platform)).collect()
}

/// A name, split before the platform of an image for other machines.
fn split_platform(name: &str) -> (&str, Option<&str>) {
    name.split_once('#').map_or((name, None), |(name, platform)| (name, Some(platform)))
}

/// A name from the runtime, split at its tag.
fn split_tag(name: &str) -> (&str, Option<&str>) {
    let last_part = name.rfind('/').map_or(0, |slash| slash + 1);
    match name[last_part..].rfind(':') {
        Some(colon) => (&name[..last_part + colon], Some(&name[last_part + colon + 1..])),
        None => (name, None),
    }
}

/// The digest that an image has in a repository, for this platform.
fn digest_of(image: &api::Image, repository: &str, platform: Option<&str>) -> Option<String> {
    let mut digests = image.repo_digests.iter().map(|name| split_platform(name));
    let of_repository = |name: &str| name.strip_prefix(repository)?.strip_prefix('@').map(str::to_owned);
    digests.find_map(|(name, of)| of_repository(name).filter(|_| of == platform))
}

impl ImageTableRow {
    /// The last use, as seen at `now`; empty if unknown.
    fn last_use(&self, now: Timestamp) -> String {
        match (self.in_use, &self.last_used) {
            (Some(true), _) => "in use".to_owned(),
            _ if self.hidden => "hidden".to_owned(),
            (_, Some(used)) => age::ago(used, now),
            (Some(false), None) => "never".to_owned(),
            (None, None) => String::new(),
        }
    }

    /// How many percent of its data are here.
    fn percent_here(&self) -> u64 {
        let fill = ImageFill { missing_bytes: self.missing_bytes.unwrap_or(0), ..ImageFill::default() };
        fill.percent_of(self.size_bytes)
    }

    /// The end of its name for other machines, such as `#linux/arm64`; else empty.
    fn platform_suffix(&self) -> String {
        self.platform.as_ref().map_or_else(String::new, |platform| format!("#{platform}"))
    }

    /// Its name with tag or digest, else its ID.
    fn name(&self) -> String {
        let platform = self.platform_suffix();
        match (&self.tag, &self.digest) {
            (Some(tag), _) => format!("{}:{tag}{platform}", self.repository),
            (None, Some(digest)) => format!("{}@{digest}{platform}", self.repository),
            (None, None) => self.id.to_string(),
        }
    }

    /// Whether repository or repository:tag fits, in full or as docker shortens it; without wildcards also their ends
    /// at a slash, and the start of the ID.
    fn fits(&self, pattern: &str) -> bool {
        let plain = !pattern.contains(['*', '?']);
        let short = Reference::parse(&self.repository).map(|name| name.familiar().to_owned()).ok();
        let repositories = [Some(self.repository.clone()), short];
        let by_name = repositories.into_iter().flatten().any(|repository| {
            let with_tag = self.tag.as_ref().map(|tag| format!("{repository}:{tag}"));
            [Some(repository), with_tag].into_iter().flatten().any(|name| {
                let ends = name.strip_suffix(pattern).is_some_and(|before| before.ends_with('/'));
                glob(pattern, &name) || (plain && ends)
            })
        });
        let id = self.id.as_str().rsplit(':').next().unwrap_or_default();
        by_name || digits_of_id(pattern).is_some_and(|digits| id.starts_with(digits))
    }
}

fn table(images: &[ImageTableRow], args: &ImagesArgs, now: Timestamp) -> TextTable {
    let wide = args.output.print_format().is_wide();
    let digests = args.digests || wide;
    let types = images.iter().any(|row| row.r#type != IMAGE);
    let mut heads = vec!["IMAGE", "TAG"];
    heads.extend(types.then_some("TYPE"));
    heads.extend(digests.then_some("DIGEST"));
    heads.extend(["IMAGE ID", "CREATED", "LAST USED", "SIZE", "UNIQUE"]);
    let incomplete = images.iter().any(|row| row.missing_bytes.is_some());
    heads.extend(incomplete.then_some("HERE"));
    heads.extend(wide.then_some("PINNED"));
    let mut table = TextTable::new(heads).optional(["CREATED", "LAST USED", "IMAGE ID"]);
    for row in images {
        let or_none = |text: Option<&String>| text.cloned().unwrap_or_else(|| NONE.to_owned());
        let platform = row.platform_suffix();
        let tag = format!("{}{platform}", row.tag.as_deref().unwrap_or(NONE));
        let mut cells = vec![or_none(Some(&row.repository).filter(|name| !name.is_empty())), tag];
        cells.extend(types.then(|| row.r#type.clone()));
        cells.extend(digests.then(|| {
            let digest = row
                .digest
                .as_deref()
                .map(|digest| if args.no_trunc || wide { digest } else { short(digest) });
            or_none(digest.map(str::to_owned).as_ref())
        }));
        cells.push(if args.no_trunc { row.id.to_string() } else { short(row.id.as_str()).to_owned() });
        cells.push(row.created.as_ref().map(|created| age::ago(created, now)).unwrap_or_default());
        cells.push(row.last_use(now));
        cells.push(size::bytes(row.size_bytes));
        cells.push(row.unique_bytes.map(size::bytes).unwrap_or_default());
        cells.extend(incomplete.then(|| format!("{}%", row.percent_here())));
        cells.extend(wide.then(|| if row.pinned { "yes" } else { "no" }.to_owned()));
        table.row(cells);
    }
    table
}

/// The first digits of an id or digest.
pub(super) fn short(id: &str) -> &str {
    let digits = id.split_once(':').map_or(id, |(_, digits)| digits);
    digits.get(..SHORT_ID).unwrap_or(digits)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command};
    use crate::printer::tests::TestWriter;

    #[test]
    fn names_are_split_at_the_tag_and_not_at_a_port() {
        assert_eq!(split_tag("127.0.0.1:5000/app"), ("127.0.0.1:5000/app", None));
        assert_eq!(split_tag("127.0.0.1:5000/app:v1"), ("127.0.0.1:5000/app", Some("v1")));
        assert_eq!(split_platform("r.example/app:v1#linux/arm64"), ("r.example/app:v1", Some("linux/arm64")));
    }

    #[test]
    fn an_image_has_a_row_for_each_tag_or_else_for_its_repository() {
        let image = api::Image {
            id: "sha256:1".into(),
            repo_tags: vec!["r.example/a:1".into(), "r.example/a:2".into()],
            repo_digests: vec!["r.example/a@sha256:d".into()],
            ..api::Image::default()
        };
        let named: Vec<_> =
            rows(&image).into_iter().map(|row| (row.repository, row.tag, row.digest)).collect();
        let digest = Some("sha256:d".to_owned());
        assert_eq!(
            named,
            [
                ("r.example/a".into(), Some("1".into()), digest.clone()),
                ("r.example/a".into(), Some("2".into()), digest.clone()),
            ]
        );
        let untagged = rows(&api::Image { repo_tags: Vec::new(), ..image });
        assert_eq!((untagged.len(), &untagged[0].tag, &untagged[0].digest), (1, &None, &digest));
        assert_eq!(rows(&api::Image::default()).len(), 1, "an image without names is listed, too");
    }

    #[test]
    fn a_damaged_image_is_named_once_with_the_command_that_replaces_its_layers() {
        let page = TestWriter::default();
        let out = Printer::to(Box::new(std::io::sink()), Box::new(page.clone()));
        let row = |tag: &str, id: &str, damaged| ImageTableRow {
            repository: "r.example/app".into(),
            tag: Some(tag.to_owned()),
            id: id.into(),
            damaged,
            ..ImageTableRow::default()
        };
        warn_of_damage(&[row("1", "a", true), row("latest", "a", true), row("2", "b", false)], &out);
        let shown = page.text();
        assert!(
            shown.starts_with("warning: r.example/app:1 is damaged\nhint: larder pull r.example/app:1 "),
            "{shown}"
        );
        assert_eq!(shown.lines().count(), 2, "{shown}");
    }

    #[test]
    fn only_a_list_with_an_incomplete_image_says_how_much_is_here() {
        let args = |flags: &[&str]| {
            let cli = Cli::try_parse_from(["larder", "images"].iter().chain(flags)).unwrap();
            let Command::Images(args) = cli.command else { panic!("not images") };
            args
        };
        let row =
            |missing_bytes| ImageTableRow { size_bytes: 1000, missing_bytes, ..ImageTableRow::default() };
        let text = |rows: &[ImageTableRow]| table(rows, &args(&[]), Timestamp::UNIX_EPOCH).to_string();
        assert!(!text(&[row(None)]).contains("HERE"));
        let listed = text(&[row(None), row(Some(999)), row(Some(1))]);
        for expected in ["HERE", "100%", " 0%", "99%"] {
            assert!(listed.contains(expected), "{expected}: {listed}");
        }
    }

    #[test]
    fn short_names_and_patterns_find_images() {
        let row = ImageTableRow {
            repository: "docker.io/library/busybox".into(),
            tag: Some("1.36".into()),
            ..ImageTableRow::default()
        };
        let row = ImageTableRow { id: "sha256:c0ffee".into(), ..row };
        for pattern in [
            "busybox",
            "busybox:1.36",
            "docker.io/library/busybox",
            "library/busybox",
            "*busy*",
            "busybox:1.??",
            "*",
            "c0f",
            "sha256:c0",
        ] {
            assert!(row.fits(pattern), "{pattern}");
        }
        for pattern in ["busy", "busybox:1", "library", "", "busybox:1.3", "ybox", "0ff"] {
            assert!(!row.fits(pattern), "{pattern}");
        }
    }

    #[test]
    fn many_stars_cost_no_more_than_a_walk() {
        assert!(!glob(&"*a".repeat(1000), &"b".repeat(10_000)));
        assert!(glob("a*b*c", "a--b--b--c"));
        assert!(!glob("a*b*c", "a--c--b"));
    }
}
