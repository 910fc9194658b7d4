//! The tags that a repository has instead of one that does not exist, for a hint. One bounded request.

use std::collections::BTreeSet;
use std::time::Duration;

use larder::suggestions::most_similar;
use reqwest::header::HeaderMap;
use serde::Deserialize;
use tokio::time;

use super::body::read_small;
use super::budget::RequestSize;
use super::error::FetchErrorKind;
use super::session::RepositorySession;

/// How long the request may take.
const WITHIN: Duration = Duration::from_secs(3);
/// Largest list that is read, in bytes.
const MAX_LIST: usize = 1 << 20;
/// How many tags are requested, and compared at most: a registry may send more.
const REQUESTED: usize = 1000;
/// How many tags a hint names.
const NAMED: usize = 5;
/// Longest tag in characters.
const MAX_TAG: usize = 128;

/// The answer to `tags/list`.
#[derive(Deserialize)]
struct TagList {
    #[serde(default)]
    tags: Option<Vec<String>>,
}

impl RepositorySession {
    /// The tags of the repository at this host that are most similar to `tag`; none if the host does not list them.
    pub(crate) async fn nearest_tags(&self, host: &str, tag: &str) -> Vec<String> {
        match time::timeout(WITHIN, self.tags(host)).await {
            Ok(Ok(tags)) => nearest_of(tag, &tags),
            Ok(Err(error)) => {
                tracing::debug!("cannot list the tags of {}: {error}", self.image().name());
                Vec::new()
            }
            Err(_) => Vec::new(),
        }
    }

    async fn tags(&self, host: &str) -> Result<Vec<String>, FetchErrorKind> {
        let link = self.links().iter().find(|link| link.host.name() == host).ok_or(FetchErrorKind::NoHost)?;
        let mut url = self.url(link, "tags", "list");
        url.query_pairs_mut().append_pair("n", &REQUESTED.to_string());
        let requested = self.get(link, url, HeaderMap::new(), RequestSize::Small).await;
        let (reply, _permit) = requested.map_err(|failed| failed.kind)?;
        let list = read_small(reply.response, MAX_LIST, &self.shared.config).await?;
        let list: TagList =
            serde_json::from_slice(&list).map_err(|error| FetchErrorKind::BadReply(error.to_string()))?;
        Ok(list.tags.unwrap_or_default())
    }
}

/// The most similar of the first tags that a registry sent, each once.
fn nearest_of(tag: &str, listed: &[String]) -> Vec<String> {
    let listed = listed.iter().map(String::as_str).filter(|tag| is_tag(tag)).take(REQUESTED);
    let tags: BTreeSet<&str> = listed.collect();
    most_similar(tag, tags, NAMED).into_iter().map(str::to_owned).collect()
}

/// Whether a text of a registry is a tag, and safe to print.
fn is_tag(text: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    (1..=MAX_TAG).contains(&text.len()) && text.bytes().all(is_word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requested_number_of_tags_is_compared_and_each_is_named_once() {
        let mut listed = vec!["1.36".to_owned(); 10];
        listed.extend(["1.37\u{1b}".to_owned(), "latest".to_owned()]);
        listed.extend((0..REQUESTED).map(|n| format!("nightly-{n}")));
        listed.push("1.37".to_owned());
        let nearest = nearest_of("1.38", &listed);
        assert_eq!(nearest.len(), NAMED);
        assert_eq!(nearest[..2], ["1.36", "latest"], "the last tag is beyond those requested");
    }
}
