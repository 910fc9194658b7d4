//! The documents: what the control API answers, cut to what the page shows. Nothing else of it is served: no settings,
//! no names of pull secrets.

use futures_util::{Stream, StreamExt as _};
use larder_api::convert::fill_from;
use larder_api::v1 as api;
use larder_api::v1::events_response::Item;
use serde::Serialize;
use tonic::Status;

/// How many pulls a status has, and how many layers each.
const PULLS: usize = 50;
const LAYERS: usize = 64;
/// How many events, and how many removals, one response has at most.
pub(super) const EVENTS: u64 = 200;
const REMOVALS: usize = 100;
/// How many names of an image, uses of it, or warnings.
const ITEMS: usize = 20;
/// The longest text in bytes.
const TEXT: usize = 1000;

/// The parameters of a request.
pub(super) struct Query(Vec<(String, String)>);

impl Query {
    /// Of the part of a URL after the question mark.
    pub(super) fn of(text: &str) -> Query {
        Query(form_urlencoded::parse(text.as_bytes()).into_owned().collect())
    }

    /// The first value of this name; empty if there is none.
    pub(super) fn text(&self, name: &str) -> &str {
        self.0.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value)
    }

    /// The query's value as a number.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.text(name).parse().ok()
    }

    /// The number of the first item that is wanted.
    pub(super) fn offset(&self) -> usize {
        self.number("offset").and_then(|offset| usize::try_from(offset).ok()).unwrap_or(0)
    }
}

/// A text of at most so many bytes; what is cut ends with an ellipsis.
pub(super) fn cut(text: String, bytes: usize) -> String {
    if text.len() <= bytes {
        return text;
    }
    let end = (0..=bytes).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    format!("{}…", &text[..end])
}

/// The first texts of a list, each cut.
fn truncate_list(texts: Vec<String>) -> Vec<String> {
    texts.into_iter().take(ITEMS).map(|text| cut(text, TEXT)).collect()
}

/// State of the daemon: pulls, collection, registries.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct StatusDocument {
    /// Seconds since 1970, by the clock of the daemon.
    at: u64,
    version: String,
    uptime_seconds: u64,
    backend: String,
    backend_available: bool,
    backend_message: String,
    gc: Option<api::GcStatus>,
    disk: Option<api::DiskUse>,
    pulls: Vec<api::Pull>,
    /// Pulls that are left out.
    more_pulls: usize,
    registries: Vec<api::RegistryStatus>,
    next_event: u64,
    /// Images that were removed since the start.
    removals: u64,
    warnings: Vec<String>,
}

/// The status at this time, in seconds since 1970.
pub(super) fn status(status: api::StatusResponse, removals: u64, at: u64) -> StatusDocument {
    let all = status.pulls.len();
    StatusDocument {
        at,
        version: status.version,
        uptime_seconds: status.uptime_seconds,
        backend: match status.mode.as_str() {
            "store" | "snapshotter" => "larder's own store".to_owned(),
            _ => cut(status.backend, TEXT),
        },
        backend_available: status.backend_available,
        backend_message: cut(status.backend_message, TEXT),
        gc: status.gc.map(gc),
        disk: status.disk,
        pulls: status.pulls.into_iter().take(PULLS).map(pull).collect(),
        more_pulls: all.saturating_sub(PULLS),
        registries: status.registries.into_iter().take(PULLS).collect(),
        next_event: status.next_event,
        removals,
        warnings: truncate_list(status.warnings),
    }
}

fn gc(mut gc: api::GcStatus) -> api::GcStatus {
    gc.result = gc.result.map(|text| cut(text, TEXT));
    if let Some(removing) = gc.round.as_mut().and_then(|round| round.removing.as_mut()) {
        removing.names = truncate_list(std::mem::take(&mut removing.names));
        removing.why = cut(std::mem::take(&mut removing.why), TEXT);
    }
    gc
}

fn pull(mut pull: api::Pull) -> api::Pull {
    pull.layers.truncate(LAYERS);
    api::Pull { image: cut(pull.image, TEXT), waiting: cut(pull.waiting, TEXT), ..pull }
}

/// Why an image is present.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ExplanationDocument {
    decision: Option<api::ImageDecision>,
    shared_bytes: Option<u64>,
    removable: bool,
    under_pressure: String,
    /// How much of it is here, and from where the rest comes; `None` if it is complete.
    incomplete: Option<String>,
    milliseconds_since_first_seen: u64,
    milliseconds_since_last_used: Option<u64>,
}

pub(super) fn explanation(explained: api::Explanation) -> ExplanationDocument {
    let size = explained.decision.as_ref().map_or(0, |decision| decision.size_bytes);
    let decision = |decision: api::ImageDecision| api::ImageDecision {
        names: truncate_list(decision.names),
        used_by: truncate_list(decision.used_by),
        why: cut(decision.why, TEXT),
        ..decision
    };
    ExplanationDocument {
        decision: explained.decision.map(decision),
        shared_bytes: explained.shared_bytes,
        removable: explained.removable,
        under_pressure: cut(explained.under_pressure, TEXT),
        incomplete: explained.fill.map(|fill| cut(incomplete(fill, size), TEXT)),
        milliseconds_since_first_seen: explained.milliseconds_since_first_seen,
        milliseconds_since_last_used: explained.milliseconds_since_last_used,
    }
}

/// How much of an image is here, and from where the rest comes.
fn incomplete(fill: api::ImageFill, size_bytes: u64) -> String {
    let fill = fill_from(fill);
    format!("{}, the rest follows {}", fill.describe(size_bytes), fill.describe_source())
}

/// A page of the removals, newest first.
#[derive(Serialize)]
pub(super) struct RemovalsDocument {
    total: u64,
    entries: Vec<api::HistoryEntry>,
}

/// How many of the newest removals a page is cut from.
pub(super) fn newest_removals(query: &Query) -> u32 {
    u32::try_from(query.offset().saturating_add(REMOVALS)).unwrap_or(u32::MAX)
}

pub(super) fn removals(history: api::HistoryResponse, query: &Query) -> RemovalsDocument {
    let newest = history.entries.into_iter().rev().skip(query.offset()).take(REMOVALS);
    let entry = |entry: api::HistoryEntry| api::HistoryEntry {
        names: truncate_list(entry.names),
        why: cut(entry.why, TEXT),
        ..entry
    };
    RemovalsDocument { total: history.total, entries: newest.map(entry).collect() }
}

/// Events, oldest first.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EventsDocument {
    /// The number that the next event will have.
    next_event: u64,
    events: Vec<EventRow>,
}

/// One event.
#[derive(Serialize)]
struct EventRow {
    /// As `larder events` shows it.
    object: String,
    #[serde(flatten)]
    event: api::Event,
}

/// The events of a stream that ends.
pub(super) async fn events(
    stream: impl Stream<Item = Result<api::EventsResponse, Status>>,
    next_event: u64,
) -> EventsDocument {
    let event = |item: Result<api::EventsResponse, Status>| match item.ok()?.item? {
        Item::Event(event) => Some(EventRow {
            object: cut(event.object(), TEXT),
            event: api::Event {
                namespace: cut(event.namespace, TEXT),
                name: cut(event.name, TEXT),
                uid: cut(event.uid, TEXT),
                field_path: cut(event.field_path, TEXT),
                message: cut(event.message, TEXT),
                ..event
            },
        }),
        Item::Missed(_) => None,
    };
    let most = usize::try_from(EVENTS).unwrap_or(usize::MAX);
    let events = stream.filter_map(async |item| event(item)).take(most);
    EventsDocument { next_event, events: Box::pin(events).collect().await }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded_once() {
        let query = Query::of("image=sha256%3Aab&offset=12&image=other&filter=a%2Bb+c%00%FF");
        assert_eq!((query.text("image"), query.offset()), ("sha256:ab", 12));
        assert_eq!(query.text("filter"), "a+b c\0\u{fffd}");
        assert_eq!((query.text("none"), query.number("image")), ("", None));
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(cut("größe".into(), 10), "größe");
        assert_eq!(cut("größe".into(), 3), "gr…");
        assert_eq!(cut("größe".into(), 4), "grö…");
    }

    #[test]
    fn a_status_is_bounded() {
        let layer = api::PullLayer::default();
        let pull = api::Pull { image: "x".repeat(5000), layers: vec![layer; 500], ..api::Pull::default() };
        let full = api::StatusResponse {
            pulls: vec![pull; 1000],
            warnings: vec!["w".repeat(5000); 100],
            ..api::StatusResponse::default()
        };
        let document = status(full, 0, 0);
        assert_eq!((document.pulls.len(), document.more_pulls, document.warnings.len()), (PULLS, 950, ITEMS));
        assert!(super::super::json(&document).len() < 1_000_000);
    }

    #[tokio::test]
    async fn events_are_bounded() {
        let long = || "x".repeat(100_000);
        let event = || api::Event {
            namespace: long(),
            name: long(),
            uid: long(),
            field_path: long(),
            message: long(),
            ..api::Event::default()
        };
        let item = |_| Ok(api::EventsResponse { item: Some(Item::Event(event())) });
        let document = events(futures_util::stream::iter((0..2 * EVENTS).map(item)), 0).await;
        assert_eq!(document.events.len() as u64, EVENTS);
        assert!(super::super::json(&document).len() < 2_000_000);
    }

    #[test]
    fn removals_are_paged_newest_first() {
        let entry =
            |number: usize| api::HistoryEntry { id: number.to_string(), ..api::HistoryEntry::default() };
        // As the journal answers: only the newest that are asked for.
        let page = |offset: &str| {
            let query = Query::of(&format!("offset={offset}"));
            let newest = 250.min(newest_removals(&query) as usize);
            let entries = (250 - newest..250).map(entry).collect();
            removals(api::HistoryResponse { entries, total: 250, ..api::HistoryResponse::default() }, &query)
        };
        for (offset, first, count) in [("0", "249", 100), ("200", "49", 50), ("249", "0", 1)] {
            let page = page(offset);
            assert_eq!((page.total, page.entries.len(), page.entries[0].id.as_str()), (250, count, first));
        }
        assert!(page("99999999999999999999").entries.len() <= REMOVALS);
        assert!(page("250").entries.is_empty());
        assert_eq!(newest_removals(&Query::of("offset=4294967295")), u32::MAX);
    }
}
