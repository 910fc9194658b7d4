//! Content that refers to an image: signatures, SBOMs, attestations, and all else that is pushed beside it.
//!
//! ```text
//! subject -> referrers API, page by page -> descriptors
//!         -> or, where a registry has no such API: the index under the tag `sha256-HEX`
//!         -> and the tags of cosign: `sha256-HEX.sig`, `.att`, `.sbom`
//! ```
//!
//! Answers are bounded: a list of many is cut, and says so.

use std::collections::HashSet;

use larder::reference::Digest;
use reqwest::Url;
use reqwest::header::{HeaderMap, LINK};

use super::body::read_small;
use super::budget::RequestSize;
use super::error::{FetchError, FetchErrorKind, FetchTarget};
use super::session::{HostCapability, RepositorySession, RequestError, SessionHost, accepting_manifests};
use crate::manifest::{Descriptor, MAX_BYTES, MAX_REFERRERS, ManifestOrIndex, PlatformMatcher, ReferrerList};

/// Most bytes of lists that are read for one subject, and most pages.
const MAX_LISTS: usize = 2 * MAX_BYTES;
const MAX_PAGES: usize = 100;
/// The ends of the tags that cosign gives to signatures, attestations and SBOMs.
const COSIGN_TAGS: [&str; 3] = ["sig", "att", "sbom"];

/// Content that refers to a subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Referrer {
    /// Its manifest, with its artifact type and annotations.
    pub descriptor: Descriptor,
    /// The tag under which it is found; `None` if the registry listed it.
    pub tag: Option<String>,
}

/// The referrers of one subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Referrers {
    /// Each manifest once, in the order of the registry, those of cosign's tags last.
    pub found: Vec<Referrer>,
    /// False if the registry has more than are read.
    pub is_complete: bool,
}

impl RepositorySession {
    /// The digests that referrers of the image name: of its index, and of its manifest for the platform.
    pub async fn subjects(&self, platform: &PlatformMatcher) -> Result<Vec<Digest>, FetchError> {
        let target = self.resolve().await?;
        let mut subjects = vec![target.descriptor.digest];
        if let ManifestOrIndex::Index(index) = &target.document {
            let manifest = index.candidates(platform).first().map(|next| next.descriptor.digest.clone());
            subjects.extend(manifest.filter(|digest| *digest != subjects[0]));
        }
        Ok(subjects)
    }

    /// The content of the repository that refers to `subject`. The registry may leave out other types than
    /// `artifact_type`, or have them in the list as well.
    pub async fn referrers(
        &self,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Referrers, FetchError> {
        // Tags have no room for all digits of a longer digest.
        let digits = subject.hex().get(..64).unwrap_or(subject.hex());
        let tag = format!("{}-{digits}", subject.algorithm());
        let listed = match self.listed_referrers(subject, artifact_type).await? {
            Some(listed) => listed,
            None => self.tagged_referrers(subject, &tag).await?,
        };
        let mut referrers = listed;
        for end in COSIGN_TAGS {
            let tag = format!("{tag}.{end}");
            if let Some(descriptor) = self.tagged_manifest(&tag).await? {
                referrers.found.push(Referrer { descriptor, tag: Some(tag) });
            }
        }
        let mut known = HashSet::new();
        referrers.found.retain(|referrer| known.insert(referrer.descriptor.digest.clone()));
        Ok(referrers)
    }

    /// Referrers by the API; `None` if the registry does not have it.
    async fn listed_referrers(
        &self,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Option<Referrers>, FetchError> {
        let target = FetchTarget::Referrers(subject.clone());
        if !self.links().iter().any(|link| link.host.referrers) {
            return Ok(None);
        }
        let request = self.host_request(target, HostCapability::Referrers)?;
        let read = |link| async move {
            let mut url = self.url(link, "referrers", subject.as_str());
            if let Some(artifact_type) = artifact_type {
                url.query_pairs_mut().append_pair("artifactType", artifact_type);
            }
            Ok(self.read_lists(link, url).await?)
        };
        found(request.send(read).await)
    }

    /// Referrers in the index under a tag; none if there is no such tag.
    async fn tagged_referrers(&self, subject: &Digest, tag: &str) -> Result<Referrers, FetchError> {
        let request = self.host_request(FetchTarget::Referrers(subject.clone()), HostCapability::Resolve)?;
        let read = |link| async move { Ok(self.read_lists(link, self.url(link, "manifests", tag)).await?) };
        let mut referrers = found(request.send(read).await)?
            .unwrap_or_else(|| Referrers { found: Vec::new(), is_complete: true });
        for referrer in &mut referrers.found {
            referrer.tag = Some(tag.to_owned());
        }
        Ok(referrers)
    }

    /// The manifest under a tag, with its artifact type and annotations; `None` if there is no such tag.
    async fn tagged_manifest(&self, tag: &str) -> Result<Option<Descriptor>, FetchError> {
        let Some(resolved) = found(self.fetch_manifest(tag, None, HostCapability::Resolve).await)? else {
            return Ok(None);
        };
        let (artifact_type, annotations) = match resolved.document {
            ManifestOrIndex::Artifact(artifact) => (artifact.artifact_type, artifact.annotations),
            ManifestOrIndex::Manifest(manifest) => (String::new(), manifest.annotations),
            ManifestOrIndex::Index(index) => (String::new(), index.annotations),
        };
        Ok(Some(Descriptor { artifact_type, annotations, ..resolved.descriptor }))
    }

    /// Reads a list and the pages that follow it, up to the limits.
    async fn read_lists(&self, link: &SessionHost, first: Url) -> Result<Referrers, RequestError> {
        let failed = |kind| RequestError { host: link.host.name(), kind, token: false };
        let headers = accepting_manifests().map_err(failed)?;
        let (mut found, mut left, mut next) = (Vec::new(), MAX_LISTS, Some(first));
        for _ in 0..MAX_PAGES {
            let Some(url) = next.take() else { return Ok(Referrers { found, is_complete: true }) };
            let (reply, _permit) = self.get(link, url.clone(), headers.clone(), RequestSize::Small).await?;
            next = next_page(&url, reply.response.headers());
            let raw = read_small(reply.response, MAX_BYTES, &self.shared.config).await.map_err(failed)?;
            let page = ReferrerList::parse(&raw).map_err(|error| failed(error.into()))?.manifests;
            let room = MAX_REFERRERS - found.len();
            let has_more = page.has_more || page.elements.len() > room;
            let entries = page.elements.into_iter().take(room);
            found.extend(entries.map(|descriptor| Referrer { descriptor, tag: None }));
            left = left.saturating_sub(raw.len());
            if has_more || (next.is_some() && (left == 0 || found.len() == MAX_REFERRERS)) {
                return Ok(Referrers { found, is_complete: false });
            }
        }
        Ok(Referrers { found, is_complete: next.is_none() })
    }
}

/// `None` for a target that no host has.
fn found<T>(result: Result<T, FetchError>) -> Result<Option<T>, FetchError> {
    match result {
        Err(error) if matches!(*error.kind, FetchErrorKind::NotFound(_)) => Ok(None),
        result => result.map(Some),
    }
}

/// The next page of a list, always at the host of this one: a link cannot send a credential to another host.
fn next_page(url: &Url, headers: &HeaderMap) -> Option<Url> {
    let links = headers.get_all(LINK).iter().filter_map(|value| value.to_str().ok());
    let target = links.flat_map(|value| value.split('<').skip(1)).find_map(|link| {
        let (target, parameters) = link.split_once('>')?;
        let is_next = parameters.split(';').any(|parameter| {
            let parameter = parameter.trim().trim_end_matches(',').trim_end();
            parameter.strip_prefix("rel=").is_some_and(|relation| relation.trim_matches('"') == "next")
        });
        is_next.then_some(target)
    })?;
    let target = url.join(target).ok()?;
    let mut next = url.clone();
    next.set_path(target.path());
    next.set_query(target.query());
    // A mirror needs to be told the registry on each page.
    let namespace = url.query_pairs().find(|(key, _)| key == "ns");
    if let Some((key, namespace)) = namespace.filter(|_| !target.query_pairs().any(|(key, _)| key == "ns")) {
        next.query_pairs_mut().append_pair(&key, &namespace);
    }
    Some(next)
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderValue;

    use super::*;

    fn next(links: &[&str]) -> Option<String> {
        let url = Url::parse("https://mirror.example:5000/v2/app/referrers/sha256:aa?ns=r.example").unwrap();
        let headers: HeaderMap =
            links.iter().map(|link| (LINK, HeaderValue::from_str(link).unwrap())).collect();
        next_page(&url, &headers).map(String::from)
    }

    #[test]
    fn the_next_page_is_at_the_same_host_and_for_the_same_registry() {
        let page = "https://mirror.example:5000/v2/app/referrers/sha256:aa";
        let with = |query: &str| Some(format!("{page}?{query}"));
        let path = "/v2/app/referrers/sha256:aa";
        for link in [
            format!("<{path}?last=b&n=2>; rel=\"next\""),
            format!("<http://other.example{path}?last=b&n=2>; rel=next"),
            "<?last=b&n=2>;rel=\"next\"".to_owned(),
            format!(
                "</a,b>; rel=\"prev\", <{path}?last=b&n=2>; title=\"x\"; rel=\"next\", </c>; rel=\"last\""
            ),
        ] {
            assert_eq!(next(&[&link]), with("last=b&n=2&ns=r.example"), "{link}");
        }
        assert_eq!(next(&["<?ns=r.example&last=b>; rel=\"next\""]), with("ns=r.example&last=b"));
        for other in ["</x>; rel=\"prev\"", "rel=\"next\"", "<", "<https://[>; rel=\"next\"", ""] {
            assert_eq!(next(&[other]), None, "{other}");
        }
    }
}
