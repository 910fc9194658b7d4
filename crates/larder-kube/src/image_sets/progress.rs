//! How far a node is with its sets, from the state of each image.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::node_images::{ImageFailure, NodeSetReport, NodeSetState};
use super::resource::{ImageSet, RetryPolicy, count};
use super::wanted::{admits, generation_of, name_of};
use crate::event_recorder::cut;

/// The longest text of a failure, in bytes, and how much of it is from the start of a longer one: the cause is at the
/// end.
const LONGEST_MESSAGE: usize = 256;
const START: usize = 80;

/// One image on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ImageState {
    /// It is missing and may not be pulled yet.
    Waiting,
    /// It is being looked for or pulled.
    Pulling,
    /// It is present; with `PullOnce`, it was.
    Present,
    /// The last attempt failed.
    Failed {
        /// Why.
        message: String,
    },
}

/// Since when each set, by name and generation, may be pulled.
pub(super) type AdmittedSince = BTreeMap<(String, i64), Instant>;

/// Notes which sets are admitted from now on, and forgets those that are not in use any more.
pub(super) fn note_admitted(since: &mut AdmittedSince, sets: &[&ImageSet], node: &str, now: Instant) {
    let key = |set: &ImageSet| (name_of(set).to_owned(), generation_of(set));
    since.retain(|known, _| sets.iter().any(|set| key(set) == *known));
    for set in sets.iter().filter(|set| admits(set, node)) {
        since.entry(key(set)).or_insert(now);
    }
}

/// Returns the node's report about these sets.
pub(super) fn report(
    sets: &[&ImageSet],
    node: &str,
    images: &BTreeMap<String, ImageState>,
    since: &AdmittedSince,
    now: Instant,
) -> Vec<NodeSetReport> {
    let of_set = |set: &&ImageSet| {
        let (name, generation) = (name_of(set).to_owned(), generation_of(set));
        let overdue = deadline(set, since).is_some_and(|at| at <= now);
        let (ready, failure) = outcome(set, images, overdue);
        let desired = count(set.spec.images.len());
        let state = match (&failure, ready == desired) {
            (_, true) => NodeSetState::Ready,
            (Some(_), _) => NodeSetState::Failing,
            (None, _) if admits(set, node) => NodeSetState::Pulling,
            (None, _) => NodeSetState::Waiting,
        };
        NodeSetReport { name, generation, state, ready, desired, failure }
    };
    sets.iter().map(of_set).collect()
}

/// The next deadline after now.
pub(super) fn next_deadline(sets: &[&ImageSet], since: &AdmittedSince, now: Instant) -> Option<Instant> {
    sets.iter().filter_map(|set| deadline(set, since)).filter(|at| *at > now).min()
}

/// How long to wait after so many failed attempts; `None` ends the attempts. `random` is from 0 up to 1: nodes that
/// failed together spread over half of the time.
pub(super) fn retry_after(retry: &RetryPolicy, attempts: u32, random: f64) -> Option<Duration> {
    if retry.limit.is_some_and(|limit| attempts >= limit) {
        return None;
    }
    let doubled = 1_u64.checked_shl(attempts.saturating_sub(1)).unwrap_or(u64::MAX);
    let longest = u64::from(retry.max_backoff_seconds);
    let seconds = u64::from(retry.backoff_seconds).saturating_mul(doubled).min(longest);
    Some(Duration::from_secs(seconds).mul_f64(1.0 - random / 2.0))
}

fn deadline(set: &ImageSet, since: &AdmittedSince) -> Option<Instant> {
    let admitted = since.get(&(name_of(set).to_owned(), generation_of(set)))?;
    Some(*admitted + Duration::from_secs(set.spec.deadline_seconds?.into()))
}

/// How many images are present, and the first failure.
fn outcome(
    set: &ImageSet,
    images: &BTreeMap<String, ImageState>,
    overdue: bool,
) -> (u32, Option<ImageFailure>) {
    let (mut ready, mut failed, mut missing) = (0, None, None);
    for SetImageState { image, state } in states(set, images) {
        match state {
            Some(ImageState::Present) => ready += 1,
            Some(ImageState::Failed { message }) => {
                failed.get_or_insert_with(|| failure(image, message));
            }
            _ => _ = missing.get_or_insert(image),
        }
    }
    let overdue_failure = || {
        let seconds = set.spec.deadline_seconds.unwrap_or_default();
        missing.filter(|_| overdue).map(|image| failure(image, &format!("not present after {seconds}s")))
    };
    (ready, failed.or_else(overdue_failure))
}

struct SetImageState<'a> {
    image: &'a str,
    state: Option<&'a ImageState>,
}

fn states<'a>(
    set: &'a ImageSet,
    images: &'a BTreeMap<String, ImageState>,
) -> impl Iterator<Item = SetImageState<'a>> {
    set.spec.images.iter().map(|of| SetImageState { image: &of.image, state: images.get(&of.image) })
}

fn failure(image: &str, message: &str) -> ImageFailure {
    // Texts of pulls begin with the name.
    let message = message.strip_prefix(image).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(message);
    let message = if message.len() <= LONGEST_MESSAGE {
        message.to_owned()
    } else {
        let end = message.len() - (LONGEST_MESSAGE - START);
        let end = (end..message.len()).find(|at| message.is_char_boundary(*at));
        cut(message, START, "...") + end.map_or("", |at| &message[at..])
    };
    ImageFailure { image: image.to_owned(), message }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::ImageState::{Present, Pulling, Waiting};
    use super::*;
    use crate::image_sets::wanted::tests::set;

    fn failed(message: &str) -> ImageState {
        ImageState::Failed { message: message.to_owned() }
    }

    #[test]
    fn a_set_is_ready_with_all_images_and_failing_with_the_first_failure() {
        let (now, spec) = (Instant::now(), json!({ "images": [{ "image": "a" }, { "image": "b" }] }));
        let limited = json!({ "images": [{ "image": "a" }, { "image": "b" }], "parallelism": 1 });
        let cases = [
            (&spec, Pulling, Present, NodeSetState::Pulling, 1, None),
            (&spec, Present, Present, NodeSetState::Ready, 2, None),
            (&spec, Pulling, failed("no route"), NodeSetState::Failing, 0, Some("b: no route")),
            (&spec, failed("x"), failed("y"), NodeSetState::Failing, 0, Some("a: x")),
            (&limited, Waiting, Present, NodeSetState::Waiting, 1, None),
            (&limited, Present, Present, NodeSetState::Ready, 2, None),
        ];
        for (spec, a, b, state, ready, failure) in cases {
            let set = set("s", spec.clone());
            let images = BTreeMap::from([("a".to_owned(), a), ("b".to_owned(), b)]);
            let found = report(&[&set], "n", &images, &AdmittedSince::new(), now).remove(0);
            assert_eq!((found.state, found.ready, found.desired), (state, ready, 2), "{images:?}");
            let text = found.failure.map(|failure| format!("{}: {}", failure.image, failure.message));
            assert_eq!(text.as_deref(), failure, "{images:?}");
        }
        assert_eq!(failure("a:1", "a:1: not found").message, "not found", "the name is beside it");
        let long = failure("a", &format!("cannot pull: {}: no route", "é".repeat(400))).message;
        assert!(long.starts_with("cannot pull: é") && long.ends_with("é: no route"), "{long}");
        assert!(long.contains("é...é") && long.len() <= LONGEST_MESSAGE, "{long}");
    }

    #[test]
    fn a_set_that_is_not_ready_at_its_deadline_is_failing() {
        let set = set("s", json!({ "images": [{ "image": "a" }], "deadlineSeconds": 60 }));
        let (now, mut since) = (Instant::now(), AdmittedSince::new());
        note_admitted(&mut since, &[&set], "n", now);
        note_admitted(&mut since, &[&set], "n", now + Duration::from_secs(30));
        assert_eq!(next_deadline(&[&set], &since, now), Some(now + Duration::from_secs(60)));
        let state = |seconds, image: ImageState| {
            let images = BTreeMap::from([("a".to_owned(), image)]);
            let found = report(&[&set], "n", &images, &since, now + Duration::from_secs(seconds)).remove(0);
            (found.state, found.failure.map(|failure| failure.message))
        };
        assert_eq!(state(59, Pulling), (NodeSetState::Pulling, None));
        let overdue_failure = Some("not present after 60s".to_owned());
        assert_eq!(state(60, Pulling), (NodeSetState::Failing, overdue_failure));
        assert_eq!(state(60, failed("x")), (NodeSetState::Failing, Some("x".to_owned())));
        assert_eq!(state(60, Present), (NodeSetState::Ready, None));
        note_admitted(&mut since, &[], "n", now);
        assert!(since.is_empty());
    }

    #[test]
    fn attempts_back_off_and_end_at_the_limit() {
        let retry = RetryPolicy { limit: Some(7), ..RetryPolicy::default() };
        let seconds = |attempts, random| retry_after(&retry, attempts, random).map(|time| time.as_secs());
        assert_eq!(
            [1, 2, 3, 6, 7].map(|attempts| seconds(attempts, 0.0)),
            [Some(10), Some(20), Some(40), Some(300), None]
        );
        assert_eq!(seconds(2, 0.5), Some(15));
        assert_eq!(retry_after(&RetryPolicy::default(), 1000, 0.0), Some(Duration::from_secs(300)));
    }
}
