//! From names to manifests and configs.

use larder::reference::{Digest, Platform};
use larder_registry::FetchErrorKind;
use larder_registry::manifest::{ManifestError, ManifestOrIndex, PlatformMatcher};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault, digest};
use serde_json::json;

use crate::support::*;

const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";

fn platform(text: &str) -> PlatformMatcher {
    PlatformMatcher::for_platform(&text.parse::<Platform>().unwrap())
}

#[tokio::test]
async fn a_tag_and_a_digest_lead_to_the_same_manifest() {
    let registry = FaultRegistry::start();
    let image = registry.put_image("shop/web", "1", LAYER, &[content(100)], &[]);
    for name in [
        "shop/web:1".to_owned(),
        format!("shop/web@{}", image.manifest),
        format!("shop/web:gone@{}", image.manifest),
    ] {
        let resolved = session(quick(), &registry.image(&name)).resolve().await.unwrap();
        assert_eq!(resolved.descriptor.digest.as_str(), image.manifest);
        assert_eq!(resolved.descriptor.media_type, OCI_MANIFEST);
        assert_eq!(digest(&resolved.raw), image.manifest);
        assert_eq!(resolved.host, registry.address());
    }
}

#[tokio::test]
async fn the_documents_of_an_image_fit_together() {
    let registry = FaultRegistry::start();
    let image = registry.put_image("shop/web", "1", LAYER, &[content(100), content(50)], &[]);
    let documents =
        session(quick(), &registry.image("shop/web:1")).documents(&PlatformMatcher::host()).await.unwrap();
    assert_eq!(digest(&documents.config_raw), image.config);
    assert_eq!(documents.layers.layers.len(), 2);
    assert_eq!(documents.config.diff_ids[1].as_str(), image.layers[1]);
}

#[tokio::test]
async fn nested_indexes_are_searched_for_the_platform_and_a_loop_of_them_ends() {
    let registry = FaultRegistry::start();
    let image = registry.put_image("shop/web", "amd", LAYER, &[content(10)], &[]);
    let size = registry_size(&registry, "shop/web:amd").await;
    let entry = |media_type: &str, digest: &str, size: usize, platform: serde_json::Value| json!({"mediaType": media_type, "digest": digest, "size": size, "platform": platform});
    let wanted = json!({"os": "linux", "architecture": "s390x"});
    let inner = json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry(OCI_MANIFEST, &image.manifest, size, wanted)]}).to_string();
    let inner_digest = registry.put_manifest("shop/web", "inner", OCI_INDEX, inner.clone());
    let outer = json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry(OCI_INDEX, &inner_digest, inner.len(), json!(null))]});
    registry.put_manifest("shop/web", "outer", OCI_INDEX, outer.to_string());

    let session = session(quick(), &registry.image("shop/web:outer"));
    let documents = session.documents(&platform("linux/s390x")).await.unwrap();
    assert_eq!(documents.manifest.descriptor.digest.as_str(), image.manifest);
    assert!(matches!(documents.target.document, ManifestOrIndex::Index(_)));

    let error = session.documents(&platform("linux/riscv64")).await.unwrap_err();
    assert!(matches!(*error.kind, FetchErrorKind::Manifest(ManifestError::NoPlatform { .. })));
    assert!(error.to_string().contains("wanted linux/riscv64, offered linux/s390x"), "{error}");
    let hint = error.hint().unwrap().to_string();
    let expected =
        "build the image for this platform, or pull it for another one: larder pull --platform linux/s390x ";
    assert!(
        hint.starts_with(expected) && hint.contains("shop/web@sha256:"),
        "every caller can give it: {hint}"
    );

    // Beyond any real nesting: each index names the one before it.
    let (mut below, mut below_size) = (inner_digest, inner.len());
    for depth in 0..6 {
        let index =
            json!({"schemaVersion": 2, "manifests": [entry(OCI_INDEX, &below, below_size, json!(null))]})
                .to_string();
        below = registry.put_manifest("shop/web", &format!("deep{depth}"), OCI_INDEX, index.clone());
        below_size = index.len();
    }
    let session = crate::support::session(quick(), &registry.image("shop/web:deep5"));
    let error = session.documents(&platform("linux/s390x")).await.unwrap_err();
    assert!(matches!(*error.kind, FetchErrorKind::Manifest(ManifestError::TooDeep)), "{error}");
}

async fn registry_size(registry: &FaultRegistry, name: &str) -> usize {
    session(quick(), &registry.image(name)).resolve().await.unwrap().raw.len()
}

#[tokio::test]
async fn an_entry_without_platform_has_that_of_its_config() {
    let registry = FaultRegistry::start();
    let image = registry.put_image("shop/web", "1", LAYER, &[content(10)], &[]);
    let size = registry_size(&registry, "shop/web:1").await;
    let index = json!({"schemaVersion": 2, "manifests": [{"mediaType": OCI_MANIFEST, "digest": image.manifest, "size": size}]});
    registry.put_manifest("shop/web", "index", OCI_INDEX, index.to_string());
    let session = session(quick(), &registry.image("shop/web:index"));
    assert!(session.documents(&PlatformMatcher::host()).await.is_ok());
    let error = session.documents(&platform("linux/mips")).await.unwrap_err();
    assert!(error.to_string().contains("no match for platform in manifest: wanted linux/mips"), "{error}");
    assert!(error.hint().is_some());
}

#[tokio::test]
async fn an_index_may_list_other_content_before_the_image() {
    let registry = FaultRegistry::start();
    let image = registry.put_image("shop/web", "1", LAYER, &[content(10)], &[]);
    let size = registry_size(&registry, "shop/web:1").await;
    let config =
        json!({"mediaType": "application/vnd.oci.image.config.v1+json", "digest": image.config, "size": 2});
    let empty = json!({"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest(b"{}"), "size": 2});
    let other = |config: &serde_json::Value, layer: &str| {
        json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": [
            {"mediaType": layer, "digest": digest(b"x"), "size": 1}]})
        .to_string()
    };
    let others =
        [other(&config, "application/vnd.dev.cosign.simplesigning.v1+json"), other(&empty, "text/spdx+json")];
    let mut entries: Vec<_> = others
        .iter()
        .map(|other| {
            let digest = registry.put_manifest("shop/web", &digest(other.as_bytes())[7..20], OCI_MANIFEST, other.clone());
            json!({"mediaType": OCI_MANIFEST, "digest": digest, "size": other.len(), "platform": {"os": "", "architecture": ""}})
        })
        .collect();
    let put = |tag: &str, entries: &[serde_json::Value]| {
        let index = json!({"schemaVersion": 2, "manifests": entries});
        registry.put_manifest("shop/web", tag, OCI_INDEX, index.to_string());
        session(quick(), &registry.image(&format!("shop/web:{tag}")))
    };
    let error = put("others", &entries).documents(&PlatformMatcher::host()).await.unwrap_err().to_string();
    for text in ["several artifacts", "text/spdx+json", "simplesigning", &digest(others[0].as_bytes())] {
        assert!(error.contains(text), "{error}");
    }
    entries.push(json!({"mediaType": OCI_MANIFEST, "digest": image.manifest, "size": size}));
    // An artifact that says to be for this platform belongs to the image as well, as indexes of SOCI do.
    entries[1]["platform"] = json!({"os": "linux", "architecture": Platform::host().architecture});
    let documents = put("all", &entries).documents(&PlatformMatcher::host()).await.unwrap();
    assert_eq!(documents.manifest.descriptor.digest.as_str(), image.manifest);
}

#[tokio::test]
async fn an_index_of_artifacts_leads_to_the_one_for_the_platform_or_to_the_only_one() {
    let registry = FaultRegistry::start();
    let config = registry.put_blob("{}");
    let mut entries = Vec::new();
    for (file, architecture) in [("a", "amd64"), ("b", "arm64"), ("c", "")] {
        let manifest = json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "artifactType": "text/plain",
            "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": config, "size": 2},
            "layers": [{"mediaType": "text/plain", "digest": registry.put_blob(file), "size": 1}]})
        .to_string();
        let digest = registry.put_manifest("files", file, OCI_MANIFEST, manifest.clone());
        entries.push(json!({"mediaType": OCI_MANIFEST, "digest": digest, "size": manifest.len(),
            "platform": {"os": "linux", "architecture": architecture}}));
    }
    entries[2]["platform"] = json!(null);
    let put = |tag: &str, entries: &[serde_json::Value]| {
        let index = json!({"schemaVersion": 2, "manifests": entries});
        registry.put_manifest("files", tag, OCI_INDEX, index.to_string());
        session(quick(), &registry.image(&format!("files:{tag}")))
    };
    let found = async |tag: &str, entries: &[serde_json::Value], wanted: &str| {
        let documents = put(tag, entries).documents(&platform(wanted)).await;
        let digest = |digest: &Digest| entries.iter().position(|entry| entry["digest"] == digest.as_str());
        let position = documents.map(|documents| digest(&documents.artifact.expect("an artifact").digest));
        position.map(Option::unwrap).map_err(|error| error.to_string())
    };
    assert_eq!(found("all", &entries, "linux/amd64").await, Ok(0));
    assert_eq!(found("all", &entries, "linux/arm64").await, Ok(1));
    let error = found("all", &entries, "linux/s390x").await.unwrap_err();
    assert!(error.contains("wanted linux/s390x, offered linux/amd64, linux/arm64"), "{error}");
    assert_eq!(found("only", &entries[2..], "linux/s390x").await, Ok(0));
}

#[tokio::test]
async fn manifests_that_cannot_be_used_are_refused_by_name() {
    let registry = FaultRegistry::start();
    let put = |tag: &str, media_type: &str, content: String| {
        registry.put_manifest("shop/web", tag, media_type, content);
    };
    put(
        "one",
        "application/vnd.docker.distribution.manifest.v1+prettyjws",
        r#"{"schemaVersion":1,"fsLayers":[]}"#.into(),
    );
    put("html", "text/html", "<html>log in</html>".into());
    put("odd", "application/vnd.example+json", "{}".into());
    put("huge", OCI_MANIFEST, format!("{{\"x\":\"{}\"}}", "x".repeat(5 << 20)));
    for (tag, text) in [
        ("one", "schema 1"),
        ("html", "malformed document"),
        ("odd", "neither a manifest nor an index"),
        ("huge", "too large: the limit is 4194304 bytes"),
    ] {
        let name = registry.image(&format!("shop/web:{tag}"));
        let error = session(quick(), &name).resolve().await.unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert!(
            error.to_string().contains(&format!("shop/web: manifest {tag} at {}", registry.address())),
            "{error}"
        );
    }
    assert_eq!(registry.requests().len(), 4, "none of these is worth a second try");
    let huge = registry.requests_for("/huge")[0].sent;
    assert!(huge < 4 << 20, "{huge} bytes were read of a manifest whose length was known");
}

#[tokio::test]
async fn a_manifest_that_is_endless_is_cut_off() {
    let registry = FaultRegistry::start();
    registry.put_manifest("shop/web", "1", OCI_MANIFEST, "{}");
    registry.fault(FaultTrigger::path("/manifests/"), ResponseFault::Overlong(20 << 20));
    let error = session(quick(), &registry.image("shop/web:1")).resolve().await.unwrap_err();
    assert_eq!(kind(&error), "too large");
    assert!(registry.requests()[0].sent < 8 << 20, "{}", registry.requests()[0].sent);
}

#[tokio::test]
async fn bytes_that_do_not_fit_their_digest_are_refused() {
    let registry = FaultRegistry::start();
    let image = registry.put_image("shop/web", "1", LAYER, &[content(10)], &[]);
    registry.fault(FaultTrigger::path("/manifests/"), ResponseFault::Corrupt);
    for name in ["shop/web:1".to_owned(), format!("shop/web@{}", image.manifest)] {
        let error = session(quick(), &registry.image(&name)).resolve().await.unwrap_err();
        assert_eq!(kind(&error), "digest mismatch", "{error}");
    }
    registry.clear_faults();
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::Corrupt);
    let error = session(quick(), &registry.image("shop/web:1"))
        .documents(&PlatformMatcher::host())
        .await
        .unwrap_err();
    assert_eq!(kind(&error), "digest mismatch", "{error}");
    assert!(error.to_string().contains("config sha256:"), "{error}");
}

#[tokio::test]
async fn a_config_with_another_number_of_layers_is_refused() {
    let registry = FaultRegistry::start();
    let one = digest(b"one");
    registry.put_image("shop/web", "1", LAYER, &[content(10), content(20)], &[one]);
    let error = session(quick(), &registry.image("shop/web:1"))
        .documents(&PlatformMatcher::host())
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("layer count mismatch: 2 in the manifest, 1 diff IDs in the config"),
        "{error}"
    );
    let hint = error.hint().map(|hint| hint.to_string()).unwrap_or_default();
    assert!(hint.starts_with("build the image again"), "{hint}");
}

#[tokio::test]
async fn a_missing_manifest_is_reported_with_the_registry_s_message() {
    let registry = FaultRegistry::start();
    let error = session(quick(), &registry.image("shop/none:1")).resolve().await.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "{0}/shop/none: manifest 1 at {0}: not found: 404 Not Found (MANIFEST_UNKNOWN: manifest unknown)",
            registry.address()
        )
    );
    assert_eq!(registry.requests_for("/manifests/").len(), 1);
    assert_eq!(registry.requests_for("/tags/list").len(), 1, "for the hint");
    registry.fault(FaultTrigger::path("/"), ResponseFault::Status(418, Vec::new(), String::new()));
    let error = session(quick(), &registry.image("shop/none:1")).resolve().await.unwrap_err();
    assert_eq!(kind(&error), "refused");
    assert_eq!(registry.requests_for("/manifests/").len(), 2, "4xx is not tried again");
}
