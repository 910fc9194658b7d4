//! The table of images: rows, order, filter, selection. Pure.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

use jiff::Timestamp;
use larder::artifact_type::type_word;
use larder_api::convert::{fill_from, image_state};
use larder_api::v1::{self as api, DecisionReason};

use crate::text;

/// One image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ImageRow {
    pub(crate) id: String,
    /// As requests name it.
    pub(crate) names: Vec<String>,
    /// As the table shows it.
    pub(crate) name: String,
    pub(crate) size: u64,
    /// Bytes that removing just this image frees.
    pub(crate) unique: Option<u64>,
    /// Bytes of layers on disk that other images have as well.
    pub(crate) shared: Option<u64>,
    pub(crate) last_used: Option<Timestamp>,
    pub(crate) in_use: bool,
    /// The keep rule that retains it, with its number.
    pub(crate) kept: Option<String>,
    /// In a word.
    pub(crate) state: &'static str,
    /// Text that the filter searches, in lower case.
    search: String,
}

/// The order of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum ImageSort {
    Name,
    #[default]
    Size,
    Unique,
    Shared,
    LastUsed,
    State,
}

/// Sums over all images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ImageTotals {
    pub(crate) images: u64,
    pub(crate) in_use: u64,
    /// Each layer once.
    pub(crate) bytes: u64,
}

#[derive(Debug, Default)]
pub(crate) struct ImageList {
    all: Vec<ImageRow>,
    /// Indices of the rows that the filter matches, in order.
    shown: Vec<usize>,
    pub(crate) sort: ImageSort,
    pub(crate) reverse: bool,
    pub(crate) filter: String,
    pub(crate) totals: ImageTotals,
    selected: usize,
    /// The first row in view.
    top: usize,
}

impl ImageSort {
    pub(crate) const ALL: [ImageSort; 6] = [
        ImageSort::Name,
        ImageSort::Size,
        ImageSort::Unique,
        ImageSort::Shared,
        ImageSort::LastUsed,
        ImageSort::State,
    ];

    /// The column so many places to the right.
    pub(crate) fn step(self, by: usize) -> ImageSort {
        let at = ImageSort::ALL.iter().position(|sort| *sort == self).unwrap_or_default();
        ImageSort::ALL[(at + by) % ImageSort::ALL.len()]
    }

    /// The largest, or the one used longest ago, comes first; names and states are in the order of the alphabet.
    fn compare(self, a: &ImageRow, b: &ImageRow) -> Ordering {
        match self {
            ImageSort::Name => Ordering::Equal,
            ImageSort::Size => b.size.cmp(&a.size),
            ImageSort::Unique => b.unique.cmp(&a.unique),
            ImageSort::Shared => b.shared.cmp(&a.shared),
            ImageSort::LastUsed => (a.in_use, a.last_used).cmp(&(b.in_use, b.last_used)),
            ImageSort::State => a.state.cmp(b.state),
        }
        .then_with(|| a.name.cmp(&b.name))
        .then_with(|| a.id.cmp(&b.id))
    }
}

impl ImageRow {
    fn of(image: api::Image, shared: Option<u64>) -> ImageRow {
        let api::Image { id, repo_tags, repo_digests, size_bytes, details, artifact_type, fill, .. } = image;
        let details = details.unwrap_or_default();
        let short_id =
            id.split_once(':').map_or(&*id, |(_, digits)| digits).chars().take(13).collect::<String>();
        let name = match (&repo_tags[..], &repo_digests[..]) {
            ([tag], _) => tag.clone(),
            ([tag, more @ ..], _) => format!("{tag} (+{})", more.len()),
            ([], [digest, ..]) => {
                format!("{}@{short_id}", digest.split_once('@').map_or(&**digest, |(name, _)| name))
            }
            ([], []) => format!("<none> {short_id}"),
        };
        let of_type = if artifact_type.is_empty() { "" } else { type_word(&artifact_type) };
        let name = if of_type.is_empty() { name } else { format!("{name} ({of_type})") };
        let name = match fill.map(fill_from) {
            Some(fill) => format!("{name} ({}% here)", fill.percent_of(size_bytes)),
            None => name,
        };
        let search = [&repo_tags[..], &repo_digests[..], &[id.clone(), of_type.to_owned()]];
        let search = search.concat().join("\n").to_lowercase();
        ImageRow {
            state: image_state(&details),
            kept: (details.reason() == DecisionReason::Kept).then(|| text::cell(&details.why)),
            name: text::cell(&name),
            names: if repo_tags.is_empty() { repo_digests } else { repo_tags },
            size: size_bytes,
            unique: details.unique_bytes,
            shared,
            last_used: details.last_used.and_then(|time| time.parse().ok()),
            in_use: details.in_use,
            id,
            search,
        }
    }

    /// Returns the names of the image in a request: its tags; the ID where it has none.
    pub(crate) fn requested(&self) -> Vec<String> {
        let is_tagged = self.names.iter().any(|name| !name.contains('@'));
        if is_tagged { self.names.clone() } else { vec![self.id.clone()] }
    }

    /// Time since the last use.
    pub(crate) fn unused_for(&self, now: Timestamp) -> Option<Duration> {
        let since = now.duration_since(self.last_used?);
        Some(Duration::try_from(since).unwrap_or_default())
    }
}

/// Of each image, the bytes of layers that other images have as well; `None` where its layers are unknown.
fn shared_bytes(found: &api::ImagesResponse) -> Vec<Option<u64>> {
    let layers =
        found.images.iter().map(|image| image.details.as_ref().map_or(&[][..], |known| &known.layers));
    let layers: Vec<&[u32]> = layers.collect();
    // An image of several runtime handlers has an entry for each.
    let mut users: HashMap<u32, HashSet<&str>> = HashMap::new();
    for (image, layers) in found.images.iter().zip(&layers) {
        for &layer in *layers {
            users.entry(layer).or_default().insert(&image.id);
        }
    }
    let size = |&layer: &u32| found.layers.get(layer as usize).map_or(0, |layer| layer.size_bytes);
    let shared = |layers: &[u32]| layers.iter().filter(|layer| users[layer].len() > 1).map(size).sum();
    layers.into_iter().map(|layers| (!layers.is_empty()).then(|| shared(layers))).collect()
}

impl ImageList {
    /// Takes a new list; the selected image stays selected while it exists.
    pub(crate) fn replace(&mut self, found: api::ImagesResponse) {
        let selected = self.selected().map(|row| row.id.clone());
        let shared = shared_bytes(&found);
        self.all =
            found.images.into_iter().zip(shared).map(|(image, shared)| ImageRow::of(image, shared)).collect();
        let used = self.all.iter().filter(|row| row.in_use).count();
        let layers: u64 = found.layers.iter().map(|layer| layer.size_bytes).sum();
        let nominal = || self.all.iter().map(|row| row.size).sum();
        self.totals = ImageTotals {
            images: self.all.len() as u64,
            in_use: used as u64,
            bytes: if layers > 0 { layers } else { nominal() },
        };
        self.arrange(selected.as_deref());
    }

    pub(crate) fn set_filter(&mut self, filter: String) {
        let selected = self.selected().map(|row| row.id.clone());
        self.filter = filter;
        self.arrange(selected.as_deref());
    }

    pub(crate) fn set_sort(&mut self, sort: ImageSort, reverse: bool) {
        (self.sort, self.reverse) = (sort, reverse);
        self.arrange(None);
    }

    /// The rows that the filter matches, in order.
    pub(crate) fn rows(&self) -> impl ExactSizeIterator<Item = &ImageRow> {
        self.shown.iter().map(|&index| &self.all[index])
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn selected(&self) -> Option<&ImageRow> {
        self.shown.get(self.selected).map(|&index| &self.all[index])
    }

    pub(crate) fn position(&self) -> usize {
        self.selected
    }

    /// Moves the selection by so many rows.
    pub(crate) fn step(&mut self, by: isize) {
        let last = self.shown.len().saturating_sub(1);
        self.selected = self.selected.saturating_add_signed(by).min(last);
    }

    /// The first row in view when so many are.
    pub(crate) fn top(&self) -> usize {
        self.top
    }

    /// Scrolls as little as it takes to have the selection among so many rows.
    pub(crate) fn scroll(&mut self, height: usize) {
        let least = (self.selected + 1).saturating_sub(height.max(1));
        let most = self.shown.len().saturating_sub(height);
        self.top = self.top.min(most).clamp(least, self.selected.max(least));
    }

    fn arrange(&mut self, selected: Option<&str>) {
        let words: Vec<String> = self.filter.split_whitespace().map(str::to_lowercase).collect();
        let matches = |row: &ImageRow| {
            words.iter().all(|word| row.search.contains(&**word) || row.state.contains(&**word))
        };
        self.shown = (0..self.all.len()).filter(|&index| matches(&self.all[index])).collect();
        let (all, sort) = (&self.all, self.sort);
        self.shown.sort_unstable_by(|&a, &b| sort.compare(&all[a], &all[b]));
        if self.reverse {
            self.shown.reverse();
        }
        let position = selected.and_then(|id| self.shown.iter().position(|&index| self.all[index].id == id));
        self.selected = position.unwrap_or(if selected.is_some() { self.selected } else { 0 });
        self.step(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(name: &str, size: u64, unique: u64, last_used: &str) -> api::Image {
        api::Image {
            id: format!("sha256:{name}"),
            repo_tags: vec![format!("reg.example/{name}")],
            size_bytes: size,
            details: Some(api::ImageListDetails {
                unique_bytes: Some(unique),
                last_used: Some(last_used.to_owned()),
                ..api::ImageListDetails::default()
            }),
            ..api::Image::default()
        }
    }

    fn list() -> ImageList {
        let mut list = ImageList::default();
        let mut images = vec![
            image("a:1", 10, 5, "2026-11-23T12:00:00Z"),
            image("b:1", 30, 1, "2026-11-21T12:00:00Z"),
            image("c:1", 20, 20, "2026-11-22T12:00:00Z"),
        ];
        let layers = [5, 24, 1].map(|size_bytes| api::ImageLayer { size_bytes, ..Default::default() });
        for (image, layers) in images.iter_mut().zip([vec![0], vec![0, 1, 2], vec![1]]) {
            image.details.get_or_insert_default().layers = layers;
        }
        list.replace(api::ImagesResponse { images, layers: layers.into(), ..Default::default() });
        list
    }

    fn names(list: &ImageList) -> Vec<char> {
        list.rows().filter_map(|row| row.name.chars().nth("reg.example/".len())).collect()
    }

    #[test]
    fn rows_have_an_order_and_its_reverse() {
        let mut list = list();
        for (sort, order) in [
            (ImageSort::Size, ['b', 'c', 'a']),
            (ImageSort::Name, ['a', 'b', 'c']),
            (ImageSort::Unique, ['c', 'a', 'b']),
            (ImageSort::Shared, ['b', 'c', 'a']),
            (ImageSort::LastUsed, ['b', 'c', 'a']),
        ] {
            list.set_sort(sort, false);
            assert_eq!(names(&list), order, "{sort:?}");
            list.set_sort(sort, true);
            assert_eq!(names(&list), order.into_iter().rev().collect::<Vec<_>>(), "{sort:?}");
        }
    }

    #[test]
    fn layers_of_several_images_are_shared_whatever_size_the_backend_reports() {
        let shared = |list: &ImageList| list.all.iter().map(|row| row.shared).collect::<Vec<_>>();
        assert_eq!(shared(&list()), [Some(5), Some(29), Some(24)]);
        let mut unknown = ImageList::default();
        let images = vec![image("a:1", 10, 5, "")];
        unknown.replace(api::ImagesResponse { images, ..Default::default() });
        assert_eq!(shared(&unknown), [None]);
    }

    #[test]
    fn a_filter_matches_names_ids_and_states_and_keeps_the_selection() {
        let mut list = list();
        list.step(1);
        assert_eq!(list.selected().unwrap().id, "sha256:c:1");
        list.set_filter("C:1 unknown".into());
        assert_eq!((names(&list), list.position()), (vec!['c'], 0));
        list.set_filter("no such".into());
        assert_eq!((names(&list), list.selected()), (vec![], None));
        list.set_filter(String::new());
        list.step(2);
        list.replace(api::ImagesResponse {
            images: vec![image("z:1", 99, 1, ""), image("a:1", 10, 5, "")],
            ..api::ImagesResponse::default()
        });
        assert_eq!(list.selected().unwrap().id, "sha256:a:1", "it stays selected");
    }

    #[test]
    fn an_artifact_is_named_with_its_type_and_found_by_it() {
        let artifact_type = "application/vnd.cncf.model.manifest.v1+json".to_owned();
        let model = api::Image { artifact_type, ..image("llm:1", 5, 5, "") };
        let mut list = list();
        list.replace(api::ImagesResponse {
            images: vec![image("a:1", 10, 5, ""), model],
            ..api::ImagesResponse::default()
        });
        list.set_filter("model".into());
        assert_eq!(list.rows().map(|row| &*row.name).collect::<Vec<_>>(), ["reg.example/llm:1 (model)"]);
        assert_eq!(list.selected().unwrap().names, ["reg.example/llm:1"], "requests have the name alone");
    }

    #[test]
    fn an_incomplete_image_says_how_much_is_here() {
        let fill = Some(api::ImageFill { missing_bytes: 3, ..api::ImageFill::default() });
        let row = ImageRow::of(api::Image { fill, ..image("a:1", 10, 5, "") }, None);
        assert_eq!(row.name, "reg.example/a:1 (70% here)");
    }

    #[test]
    fn the_selection_stays_in_view() {
        let mut list = list();
        list.step(2);
        list.scroll(2);
        assert_eq!(list.top(), 1);
        list.step(-1);
        list.scroll(2);
        assert_eq!(list.top(), 1, "it scrolls only where it must");
        list.step(-1);
        list.scroll(2);
        assert_eq!(list.top(), 0);
        list.step(2);
        list.scroll(0);
        assert_eq!(list.top(), 2);
    }

    #[test]
    fn names_cannot_control_the_terminal() {
        let row = ImageRow::of(image("x\u{1b}[2J\u{202e}:1", 1, 1, ""), None);
        assert_eq!(row.name, "reg.example/x\\u{1b}[2J\\u{202e}:1");
        assert_eq!(row.names, ["reg.example/x\u{1b}[2J\u{202e}:1"], "requests have the name as it is");
    }
}
