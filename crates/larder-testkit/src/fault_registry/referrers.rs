//! The API of referrers: manifests by their `subject`.

use serde_json::{Value, json};

use super::http::{PlannedResponse, RequestHead};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";

impl super::RegistryContents {
    /// A page of the manifests that refer to a digest, filtered by `artifactType`; 404 without the API.
    pub(super) fn list_referrers(
        &self,
        head: &RequestHead,
        repository: &str,
        subject: &str,
    ) -> PlannedResponse {
        let Some(page) = self.referrers_page else { return PlannedResponse::new(404, Vec::new()) };
        let prefix = format!("{repository}:sha256:");
        let of_repository = self.manifests.iter().filter(|(key, _)| key.starts_with(&prefix));
        let descriptor = |manifest: &super::StoredManifest| {
            let document: Value = serde_json::from_slice(&manifest.content).ok()?;
            (document["subject"]["digest"] == subject).then(|| {
                let of_config = &document["config"]["mediaType"];
                let artifact_type = document.get("artifactType").unwrap_or(of_config);
                json!({"mediaType": manifest.media_type, "digest": manifest.digest,
                    "size": manifest.content.len(), "artifactType": artifact_type,
                    "annotations": document["annotations"]})
            })
        };
        let mut all: Vec<Value> = of_repository.filter_map(|(_, manifest)| descriptor(manifest)).collect();
        let wanted = parameter(head, "artifactType").map(|of| of.replace("%2F", "/").replace("%2B", "+"));
        all.retain(|entry| wanted.as_ref().is_none_or(|wanted| entry["artifactType"] == **wanted));
        all.sort_by_key(|entry| entry["digest"].to_string());
        let first = parameter(head, "last").and_then(|last| last.parse().ok()).unwrap_or(0);
        let rest = all.len() > first + page;
        let entries: Vec<Value> = all.into_iter().skip(first).take(page).collect();
        let body = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).to_string();
        let answer = PlannedResponse::new(200, body.into_bytes()).with("Content-Type", INDEX);
        if !rest {
            return answer;
        }
        let filter =
            parameter(head, "artifactType").map(|of| format!("&artifactType={of}")).unwrap_or_default();
        let next =
            format!("</v2/{repository}/referrers/{subject}?last={}{filter}>; rel=\"next\"", first + page);
        answer.with("Link", next)
    }
}

/// A parameter of the request as it is written.
fn parameter<'a>(head: &'a RequestHead, name: &str) -> Option<&'a str> {
    let (_, query) = head.path.split_once('?')?;
    query
        .split('&')
        .find_map(|part| part.split_once('=').filter(|(key, _)| *key == name))
        .map(|(_, value)| value)
}
