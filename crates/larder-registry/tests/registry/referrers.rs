//! Signatures and other content that refers to an image: by the API, by tags, and in lists that are hostile.

use larder::reference::Digest;
use larder_registry::manifest::{MAX_REFERRERS, PlatformMatcher};
use larder_registry::{FetchError, Referrer, Referrers, RegistryClient};
use larder_testkit::fault_registry::{FaultRegistry, FaultRegistryAuth, FaultTrigger, ResponseFault};
use serde_json::{Value, json};

use crate::support::*;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const SBOM: &str = "application/spdx+json";
const SIGNATURE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
const COSIGN: &str = "application/vnd.dev.cosign.simplesigning.v1+json";

/// A registry with an index `app:1` of one manifest for this machine, and the digests of both.
struct SignedWorld {
    registry: FaultRegistry,
    index: String,
    manifest: String,
}

impl SignedWorld {
    fn new() -> SignedWorld {
        let registry = FaultRegistry::start();
        let manifest = registry.put_image("app", "only", LAYER, &[content(100)], &[]).manifest;
        let host = larder::reference::Platform::host();
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [
            {"mediaType": MANIFEST, "digest": manifest, "size": 7,
                "platform": {"os": host.os, "architecture": host.architecture}}]});
        let index = registry.put_manifest("app", "1", INDEX, index.to_string());
        SignedWorld { registry, index, manifest }
    }

    /// Puts a manifest of this type under a tag, which refers to a subject. Returns its digest.
    fn refer(&self, tag: &str, artifact_type: &str, subject: &str) -> String {
        self.put(tag, &json!({"artifactType": artifact_type, "subject": {"digest": subject}}))
    }

    fn put(&self, tag: &str, fields: &Value) -> String {
        let mut document = json!({"schemaVersion": 2, "mediaType": MANIFEST, "layers": [],
            "config": {"mediaType": "application/vnd.oci.empty.v1+json",
                "digest": self.registry.put_blob("{}"), "size": 2},
            "annotations": {"tag": tag}});
        for (key, value) in fields.as_object().unwrap() {
            document[key] = value.clone();
        }
        self.registry.put_manifest("app", tag, MANIFEST, document.to_string())
    }

    async fn referrers(&self, subject: &str, artifact_type: Option<&str>) -> Result<Referrers, FetchError> {
        let session = session(quick(), &self.registry.image("app:1"));
        session.referrers(&Digest::parse(subject).unwrap(), artifact_type).await
    }
}

/// The tag annotation and the artifact type of each, in order of the tags.
fn shown(referrers: &Referrers) -> Vec<(&str, &str)> {
    let mut shown: Vec<_> = referrers
        .found
        .iter()
        .map(|Referrer { descriptor, .. }| (&*descriptor.annotations["tag"], &*descriptor.artifact_type))
        .collect();
    shown.sort_unstable();
    shown
}

fn tag_of(subject: &str) -> String {
    subject.replace(':', "-")
}

#[tokio::test]
async fn subjects_are_the_index_and_the_manifest_for_the_platform() {
    let world = SignedWorld::new();
    let subjects = async |name: &str| {
        let session = session(quick(), &world.registry.image(name));
        let found = session.subjects(&PlatformMatcher::host()).await.unwrap();
        found.into_iter().map(|digest| digest.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(subjects("app:1").await, [&*world.index, &*world.manifest]);
    assert_eq!(subjects("app:only").await, [&*world.manifest]);
}

#[tokio::test]
async fn the_api_lists_pages_and_filters() {
    let world = SignedWorld::new();
    world.registry.serve_referrers(2);
    for number in 0..5 {
        world.refer(&format!("sbom-{number}"), SBOM, &world.index);
    }
    world.refer("bundle", SIGNATURE, &world.index);
    world.refer("other", SIGNATURE, &world.manifest);
    let all = world.referrers(&world.index, None).await.unwrap();
    let expected = [
        ("bundle", SIGNATURE),
        ("sbom-0", SBOM),
        ("sbom-1", SBOM),
        ("sbom-2", SBOM),
        ("sbom-3", SBOM),
        ("sbom-4", SBOM),
    ];
    assert_eq!((shown(&all), all.is_complete), (expected.to_vec(), true));
    assert_eq!(world.registry.requests_for("/referrers/").len(), 3, "three pages");
    let signatures = world.referrers(&world.index, Some(SIGNATURE)).await.unwrap();
    assert_eq!(shown(&signatures), [("bundle", SIGNATURE)]);
    assert!(signatures.found.iter().all(|referrer| referrer.tag.is_none()));
}

#[tokio::test]
async fn tags_are_read_where_the_registry_has_no_api_and_those_of_cosign_always() {
    for has_api in [false, true] {
        let world = SignedWorld::new();
        if has_api {
            world.registry.serve_referrers(10);
        }
        let sbom = world.refer("sbom", SBOM, &world.index);
        let list = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [
            {"mediaType": MANIFEST, "digest": sbom, "size": 7, "artifactType": SBOM,
                "annotations": {"tag": "sbom"}}]});
        let tag = tag_of(&world.index);
        world.registry.put_manifest("app", &tag, INDEX, list.to_string());
        let layer = json!({"mediaType": COSIGN, "digest": world.index, "size": 3});
        let cosign = world.put(
            &format!("{tag}.sig"),
            &json!({"config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": sbom, "size": 2},
                "layers": [layer]}),
        );
        let found = world.referrers(&world.index, None).await.unwrap();
        let tags: Vec<_> = found.found.iter().map(|referrer| referrer.tag.clone()).collect();
        let signature = Some(format!("{tag}.sig"));
        assert_eq!(tags, [Some(tag.clone()).filter(|_| !has_api), signature], "API: {has_api}");
        assert_eq!(found.found[1].descriptor.digest.as_str(), cosign);
        assert_eq!(found.found[1].descriptor.artifact_type, COSIGN);
        assert_eq!(found.found[0].descriptor.artifact_type, SBOM);

        let none = world.referrers(&world.manifest, None).await.unwrap();
        assert_eq!(none, Referrers { found: Vec::new(), is_complete: true });
    }
}

#[tokio::test]
async fn a_list_of_many_is_cut_and_says_so() {
    let world = SignedWorld::new();
    let entry =
        |number: usize| json!({"mediaType": MANIFEST, "digest": format!("sha256:{number:064x}"), "size": 1});
    let entries: Vec<Value> = (0..10_000).map(entry).collect();
    let list = json!({"schemaVersion": 2, "manifests": entries}).to_string();
    let answer =
        |fields: Vec<(String, String)>, list: &str| ResponseFault::Status(200, fields, list.to_owned());
    world.registry.fault(FaultTrigger::path("/referrers/"), answer(Vec::new(), &list));
    let found = world.referrers(&world.index, None).await.unwrap();
    assert_eq!((found.found.len(), found.is_complete), (MAX_REFERRERS, false));

    // Pages without end, of no entry or of one.
    for list in [json!({"manifests": []}), json!({"manifests": [entry(1)]})] {
        world.registry.clear_faults();
        world.registry.forget_requests();
        let next = ("Link".to_owned(), "<?last=x>; rel=\"next\"".to_owned());
        world.registry.fault(FaultTrigger::path("/referrers/"), answer(vec![next], &list.to_string()));
        let found = world.referrers(&world.index, None).await.unwrap();
        assert!(!found.is_complete && found.found.len() < 2, "{found:?}");
        assert!(world.registry.requests_for("/referrers/").len() <= 100);
    }
}

#[tokio::test]
async fn other_content_is_an_error_that_names_the_subject() {
    let world = SignedWorld::new();
    let huge = format!("{{\"manifests\": [], \"x\": \"{}\"}}", "x".repeat(5 << 20));
    for body in ["<html>not found</html>", "{}", "", r#"{"manifests": [{"digest": "sha256:x"}]}"#, &huge] {
        world.registry.clear_faults();
        let answer = ResponseFault::Status(200, Vec::new(), body.to_owned());
        world.registry.fault(FaultTrigger::path("/referrers/"), answer);
        let error = world.referrers(&world.index, None).await.unwrap_err().to_string();
        assert!(error.contains(&format!("referrers of {}", world.index)), "{error}");
    }
}

#[tokio::test]
async fn lists_need_the_credential_of_a_pull_and_no_other_host_gets_it() {
    let world = SignedWorld::new();
    let other = FaultRegistry::start();
    world.registry.serve_referrers(1);
    world.refer("a", SBOM, &world.index);
    world.refer("b", SBOM, &world.index);
    world.registry.require(FaultRegistryAuth::Basic { user: "u".into(), password: "s3cret".into() });
    let image = reference(&world.registry.image("app:1"));
    let client = RegistryClient::new(quick());
    let subject = Digest::parse(&world.index).unwrap();
    let anonymous = client.session(&image, None).unwrap().referrers(&subject, None).await.unwrap_err();
    assert!(anonymous.to_string().contains("denied"), "{anonymous}");
    let credential = login("u", "s3cret");
    let session = client.session(&image, Some(&credential)).unwrap();
    assert_eq!(session.referrers(&subject, None).await.unwrap().found.len(), 2);

    let next = ("Link".to_owned(), format!("<{}/v2/app/x>; rel=\"next\"", other.url()));
    let list = json!({"manifests": []}).to_string();
    world.registry.fault(FaultTrigger::path("/referrers/"), ResponseFault::Status(200, vec![next], list));
    let _ = session.referrers(&subject, None).await;
    assert!(other.requests().is_empty());
}

#[tokio::test]
async fn a_mirror_without_the_capability_is_not_asked() {
    let (world, mirror) = (SignedWorld::new(), FaultRegistry::start());
    world.registry.serve_referrers(5);
    mirror.serve_referrers(5);
    world.refer("a", SBOM, &world.index);
    for (capabilities, is_asked) in [("[\"pull\", \"resolve\"]", false), ("[\"referrers\"]", true)] {
        mirror.forget_requests();
        let hosts = format!(
            "server = \"{}\"\n[host.\"{}\"]\ncapabilities = {capabilities}\n",
            world.registry.url(),
            mirror.url()
        );
        let (_dir, config) = with_hosts("r.example", &hosts);
        let session = session(config, "r.example/app:1");
        session.referrers(&Digest::parse(&world.index).unwrap(), None).await.unwrap();
        assert_eq!(!mirror.requests_for("/referrers/").is_empty(), is_asked, "{capabilities}");
    }
}
