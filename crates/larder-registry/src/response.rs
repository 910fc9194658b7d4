//! Interprets the answers of a registry.

use std::time::Duration;

use reqwest::header::{CONTENT_ENCODING, CONTENT_RANGE};
use reqwest::{Response, StatusCode};

use super::body::BlobRange;
use super::content_range::ContentRange;
use super::error::{ErrorResponse, FetchErrorKind};
use crate::manifest::{ACCEPTED_MANIFESTS, ManifestOrIndex, MediaType};

/// Classifies an error response.
pub(crate) fn refusal(answer: ErrorResponse, redirected: bool, after: Option<Duration>) -> FetchErrorKind {
    match answer.status {
        // The target of a redirect rejected the registry's signature; the next one may be valid.
        401 | 403 if redirected => FetchErrorKind::Failing(answer),
        401 | 403 => FetchErrorKind::Denied(answer),
        404 | 410 => FetchErrorKind::NotFound(answer),
        416 => FetchErrorKind::BadRange(format!("range of the blob not served: {answer}")),
        429 => FetchErrorKind::RateLimited { answer, after },
        408 | 425 | 500.. => FetchErrorKind::Failing(answer),
        _ => FetchErrorKind::Refused(answer),
    }
}

/// The part of a blob that a response contains.
pub(crate) fn part_of(
    response: &Response,
    asked: Option<(u64, u64)>,
    size: u64,
) -> Result<BlobRange, FetchErrorKind> {
    let (bad, bad_range) = (FetchErrorKind::BadReply, FetchErrorKind::BadRange);
    match (response.status(), asked) {
        (StatusCode::PARTIAL_CONTENT, Some((offset, end))) => {
            let range = response.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok());
            let range = range
                .and_then(ContentRange::parse)
                .ok_or_else(|| bad_range("partial response without a valid Content-Range".into()))?;
            match range.problem(offset, end, size) {
                Some(problem) => Err(bad_range(problem)),
                None => Ok(BlobRange { start: offset, end: range.end, ranged: true }),
            }
        }
        (StatusCode::PARTIAL_CONTENT, None) => {
            Err(bad("partial response to a request without a range".into()))
        }
        _ => match response.content_length() {
            Some(length) if length != size => Err(wrong_length(length, size, response)),
            _ => Ok(BlobRange { start: 0, end: size, ranged: false }),
        },
    }
}

/// Some servers declare the compression of a layer as an encoding of the response, and send the bytes as they are: only
/// bytes that do not fit are refused.
fn wrong_length(length: u64, size: u64, response: &Response) -> FetchErrorKind {
    let encoded = match response.headers().get(CONTENT_ENCODING) {
        Some(encoding) if !encoding.as_bytes().eq_ignore_ascii_case(b"identity") => {
            " and the response has a Content-Encoding that was not requested"
        }
        _ => "",
    };
    FetchErrorKind::BadReply(format!("Content-Length is {length}, the manifest says {size}{encoded}"))
}

impl ManifestOrIndex {
    /// The media type to store: the one in the document, else that of the response, else the one of its parsed kind.
    pub(crate) fn media_type(&self, raw: &[u8], media_type_header: &str) -> String {
        #[derive(serde::Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct MediaTypeField {
            #[serde(default)]
            media_type: Option<String>,
        }
        let own = serde_json::from_slice::<MediaTypeField>(raw).ok().and_then(|named| named.media_type);
        let media_type_header = media_type_header.split(';').next().unwrap_or_default().trim();
        let known = |text: &str| MediaType::of(text).is_manifest();
        let [index, manifest, ..] = ACCEPTED_MANIFESTS;
        match own {
            Some(own) if known(&own) => own,
            _ if known(media_type_header) => media_type_header.to_owned(),
            _ => match self {
                ManifestOrIndex::Index(_) => index.to_owned(),
                ManifestOrIndex::Manifest(_) | ManifestOrIndex::Artifact(_) => manifest.to_owned(),
            },
        }
    }
}
