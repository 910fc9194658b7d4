//! The images, sorted, filtered and cut for each page.

use std::cmp::Ordering;

use larder::artifact_type::type_word;
use larder_api::convert::{self, image_state};
use larder_api::v1 as api;
use serde::Serialize;
use tonic::Status;

use super::data::{Query, cut};
use super::layers::{LayerMap, layer_map};
use crate::control::ControlApi;

/// How many rows one response has at most.
const ROWS: usize = 200;
/// The longest name in bytes, and the longest warning.
const NAME: usize = 300;
const WARNINGS: usize = 10;

/// The images that are present.
pub(super) struct Listing {
    rows: Vec<ImageRow>,
    layers: LayerMap,
    warnings: Vec<String>,
}

/// One image.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ImageRow {
    id: String,
    name: String,
    more_names: usize,
    /// In a word.
    r#type: String,
    size_bytes: u64,
    unique_bytes: Option<u64>,
    last_used: Option<String>,
    state: &'static str,
    /// How many percent of its data are here; `None` if it is complete.
    percent_here: Option<u64>,
}

/// Some of the images.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ImagesDocument {
    /// How many there are.
    total: usize,
    /// How many match.
    matching: usize,
    offset: usize,
    size_bytes: u64,
    rows: Vec<ImageRow>,
    warnings: Vec<String>,
}

impl Listing {
    pub(super) async fn read(control: &ControlApi) -> Result<Listing, Status> {
        let wanted = api::ImagesRequest { details: true, without_configs: true, ..Default::default() };
        Ok(Listing::of(control.list_images(&wanted).await?))
    }

    fn of(images: api::ImagesResponse) -> Listing {
        let layers = layer_map(&images);
        let warnings = images.warnings.into_iter().take(WARNINGS).map(|text| cut(text, NAME)).collect();
        Listing { rows: images.images.into_iter().map(row).collect(), layers, warnings }
    }

    pub(super) fn layers(&self) -> &LayerMap {
        &self.layers
    }

    /// The rows that a request asks for: `filter`, `sort`, `ascending`, `offset` and `limit`.
    pub(super) fn page(&self, query: &Query) -> ImagesDocument {
        let wanted = query.text("filter").to_lowercase();
        let matches = |row: &&ImageRow| {
            row.id.contains(&wanted) || row.name.to_lowercase().contains(&wanted) || row.r#type == wanted
        };
        let mut rows: Vec<&ImageRow> = self.rows.iter().filter(matches).collect();
        let order = order_of(query.text("sort"));
        let ascending = query.text("ascending") == "true";
        rows.sort_by(|a, b| {
            let by = if ascending { order(a, b) } else { order(b, a) };
            by.then_with(|| (&a.name, &a.id).cmp(&(&b.name, &b.id)))
        });
        let offset = query.offset().min(rows.len());
        let limit = query.number("limit").and_then(|limit| usize::try_from(limit).ok()).unwrap_or(ROWS);
        ImagesDocument {
            total: self.rows.len(),
            matching: rows.len(),
            offset,
            size_bytes: self.rows.iter().fold(0, |sum, row| sum.saturating_add(row.size_bytes)),
            rows: rows.into_iter().skip(offset).take(limit.min(ROWS)).cloned().collect(),
            warnings: self.warnings.clone(),
        }
    }
}

/// By size, if not by what the word says.
fn order_of(sort: &str) -> fn(&ImageRow, &ImageRow) -> Ordering {
    match sort {
        "name" => |a, b| a.name.cmp(&b.name),
        "unique" => |a, b| a.unique_bytes.cmp(&b.unique_bytes),
        // Times of one form and zone sort as texts; an image that was never used is the oldest.
        "lastUsed" => |a, b| a.last_used.cmp(&b.last_used),
        "status" => |a, b| a.state.cmp(b.state).reverse(),
        _ => |a, b| a.size_bytes.cmp(&b.size_bytes),
    }
}

fn row(image: api::Image) -> ImageRow {
    // An image with tags is known by them.
    let names = if image.repo_tags.is_empty() { image.repo_digests.len() } else { image.repo_tags.len() };
    let name = image.repo_tags.into_iter().chain(image.repo_digests).next();
    let details = image.details.unwrap_or_default();
    let percent_of = |fill| convert::fill_from(fill).percent_of(image.size_bytes);
    ImageRow {
        percent_here: image.fill.map(percent_of),
        state: image_state(&details),
        name: cut(name.unwrap_or_default(), NAME),
        more_names: names.saturating_sub(1),
        r#type: cut(type_word(&image.artifact_type).to_owned(), NAME),
        id: cut(image.id, NAME),
        size_bytes: image.size_bytes,
        unique_bytes: details.unique_bytes,
        last_used: details.last_used,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(count: u64) -> Listing {
        let image = |number: u64| api::Image {
            id: format!("sha256:{number:064}"),
            repo_tags: vec![format!("r.example/app-{number:05}:1"), "other:1".into()],
            size_bytes: number * 10,
            fill: (number == 8).then(|| api::ImageFill { missing_bytes: 20, ..Default::default() }),
            artifact_type: if number == 7 { "application/vnd.cncf.helm.config.v1+json" } else { "" }
                .to_owned(),
            details: Some(api::ImageListDetails {
                last_used: number.is_multiple_of(2).then(|| format!("2026-01-01T00:00:{:02}Z", number % 60)),
                unique_bytes: Some(1000 - number.min(1000)),
                reason: if number == 4 { api::DecisionReason::InUse } else { api::DecisionReason::Unused }
                    .into(),
                ..api::ImageListDetails::default()
            }),
            ..api::Image::default()
        };
        Listing::of(api::ImagesResponse {
            images: (0..count).map(image).collect(),
            ..api::ImagesResponse::default()
        })
    }

    fn first(listing: &Listing, query: &str) -> (usize, usize, String) {
        let page = listing.page(&Query::of(query));
        let name = page.rows.first().map(|row| row.name.clone()).unwrap_or_default();
        (page.matching, page.rows.len(), name)
    }

    #[test]
    fn images_are_sorted_filtered_and_paged() {
        let listing = listing(10_000);
        let app = |number: u32| format!("r.example/app-{number:05}:1");
        assert_eq!(first(&listing, ""), (10_000, ROWS, app(9999)), "the largest first");
        assert_eq!(first(&listing, "ascending=true&limit=5"), (10_000, 5, app(0)));
        assert_eq!(first(&listing, "sort=name&offset=10"), (10_000, ROWS, app(9989)));
        assert_eq!(first(&listing, "filter=APP-0001"), (10, 10, app(19)));
        assert_eq!(first(&listing, "filter=sha256:000"), (10_000, ROWS, app(9999)));
        assert_eq!(first(&listing, "filter=chart"), (1, 1, app(7)), "by type");
        assert_eq!(first(&listing, "sort=unique"), (10_000, ROWS, app(0)));
        assert_eq!(first(&listing, "sort=status"), (10_000, ROWS, app(4)));
        assert_eq!(first(&listing, "sort=lastUsed&ascending=true"), (10_000, ROWS, app(1)));
        assert_eq!(first(&listing, "offset=20000"), (10_000, 0, String::new()));
        assert_eq!(first(&listing, "limit=100000"), (10_000, ROWS, app(9999)));
        let here = |query| listing.page(&Query::of(query)).rows[0].percent_here;
        assert_eq!((here("filter=app-00008"), here("filter=app-00009")), (Some(75), None));
        let page = super::super::json(&listing.page(&Query::of("")));
        assert!(page.len() < 200_000, "{}", page.len());
    }
}
