//! `--filter` of `larder images`, with docker's and podman's keys.

use larder::artifact_type::type_matches;
use larder::reference::Reference;

use super::ImageTableRow;
use crate::args::ImageFilter;
use crate::failure::Failure;

/// Whether an image fits a filter.
type RowTest = Box<dyn Fn(&ImageTableRow) -> bool>;

/// The keys of the labels that these filters compare.
pub(super) fn label_keys(filters: &[ImageFilter]) -> Vec<String> {
    let key = |filter: &ImageFilter| match filter {
        ImageFilter::Label(key, _) => Some(key.clone()),
        _ => None,
    };
    filters.iter().filter_map(key).collect()
}

/// The rows that fit all filters; of several references one is enough, as in docker.
pub(super) fn apply(
    filters: &[ImageFilter],
    rows: Vec<ImageTableRow>,
) -> Result<Vec<ImageTableRow>, Failure> {
    let mut tests: Vec<RowTest> = Vec::new();
    let mut references = Vec::new();
    for filter in filters {
        match filter.clone() {
            ImageFilter::Dangling(wanted) => tests.push(Box::new(move |row| row.tag.is_none() == wanted)),
            ImageFilter::InUse(wanted) => tests.push(Box::new(move |row| row.in_use == Some(wanted))),
            ImageFilter::Reference(pattern) => references.push(pattern),
            ImageFilter::Type(of) => tests.push(Box::new(move |row| type_matches(&of, &row.artifact_type))),
            ImageFilter::Before(image) => {
                let limit = created(&image, &rows)?;
                tests.push(Box::new(move |row| moment(row).is_some_and(|moment| moment < limit)));
            }
            ImageFilter::Since(image) => {
                let limit = created(&image, &rows)?;
                tests.push(Box::new(move |row| moment(row).is_some_and(|moment| moment > limit)));
            }
            ImageFilter::Label(key, value) => tests.push(Box::new(move |row| {
                row.labels.get(&key).is_some_and(|found| value.as_ref().is_none_or(|value| value == found))
            })),
        }
    }
    let fits = |row: &ImageTableRow| {
        let named = references.is_empty() || references.iter().any(|pattern| row.fits(pattern));
        named && tests.iter().all(|test| test(row))
    };
    Ok(rows.into_iter().filter(|row| fits(row)).collect())
}

fn moment(row: &ImageTableRow) -> Option<jiff::Timestamp> {
    row.created.as_ref()?.parse().ok()
}

/// When this image was built.
fn created(image: &str, rows: &[ImageTableRow]) -> Result<jiff::Timestamp, Failure> {
    let wanted = Reference::parse(image).ok();
    let is_named = |row: &&ImageTableRow| {
        row.name() == image
            || (wanted.is_some() && Reference::parse(&row.name()).ok() == wanted)
            || (image.len() >= 4 && row.id.as_str().trim_start_matches("sha256:").starts_with(image))
            || row.id.as_str() == image
    };
    let Some(row) = rows.iter().find(is_named) else {
        return Err(Failure::failed(format!("--filter: {image}: image not found")));
    };
    moment(row).ok_or_else(|| Failure::failed(format!("--filter: {image}: creation time unknown")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<ImageTableRow> {
        let row = |name: &str, tag: Option<&str>, created: &str, in_use| ImageTableRow {
            repository: format!("docker.io/library/{name}"),
            tag: tag.map(str::to_owned),
            digest: Some(format!("sha256:{name}")),
            id: format!("sha256:{name}{}", "0".repeat(60)).into(),
            created: Some(created.to_owned()),
            in_use: Some(in_use),
            artifact_type: if name == "cccc" { "application/vnd.cncf.model.manifest.v1+json" } else { "" }
                .into(),
            labels: [("team".to_owned(), name.to_owned())].into(),
            ..ImageTableRow::default()
        };
        vec![
            row("aaaa", Some("1"), "2024-01-01T00:00:00Z", true),
            row("bbbb", None, "2025-01-01T00:00:00+01:00", false),
            row("cccc", Some("2"), "2026-01-01T00:00:00.123456789Z", false),
        ]
    }

    fn named(filters: &[&str]) -> Vec<String> {
        let filters: Vec<_> = filters.iter().map(|text| ImageFilter::parse(text).unwrap()).collect();
        let rows = apply(&filters, rows()).unwrap();
        rows.iter().map(|row| row.repository.rsplit('/').next().unwrap().to_owned()).collect()
    }

    #[test]
    fn filters_select_by_tag_use_name_age_and_label() {
        for (filters, expected) in [
            (&["dangling=true"][..], &["bbbb"][..]),
            (&["dangling=false"], &["aaaa", "cccc"]),
            (&["in-use=true"], &["aaaa"]),
            (&["in-use=false"], &["bbbb", "cccc"]),
            (&["reference=aaaa", "reference=cccc:*"], &["aaaa", "cccc"]),
            (&["before=cccc:2"], &["aaaa", "bbbb"]),
            (&["before=bbbb0000"], &["aaaa"]),
            (&["since=aaaa:1"], &["bbbb", "cccc"]),
            (&["label=team"], &["aaaa", "bbbb", "cccc"]),
            (&["label=team=cccc"], &["cccc"]),
            (&["label=other"], &[]),
            (&["dangling=false", "in-use=false"], &["cccc"]),
            (&["type=model"], &["cccc"]),
            (&["type=image"], &["aaaa", "bbbb"]),
            (&["type=application/vnd.cncf.*"], &["cccc"]),
        ] {
            assert_eq!(named(filters), expected, "{filters:?}");
        }
    }

    #[test]
    fn a_filter_that_cannot_work_is_an_error() {
        let error = apply(&[ImageFilter::Before("nowhere:1".into())], rows()).unwrap_err();
        assert_eq!(error.message(), "--filter: nowhere:1: image not found");
    }
}
