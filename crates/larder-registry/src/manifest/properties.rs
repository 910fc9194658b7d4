//! Invariants of all documents, checked on generated ones.

use larder::reference::Platform;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// Values that hostile or broken documents have where another type belongs.
fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
        "(sha256|sha512|md5):[0-9a-f]{0,64}".prop_map(Value::from),
        Just(json!("application/vnd.oci.image.index.v1+json")),
        Just(json!("application/vnd.oci.image.layer.v1.tar+gzip")),
        Just(json!("application/vnd.docker.distribution.manifest.v2+json")),
        Just(json!("application/vnd.docker.container.image.v1+json")),
    ]
}

fn key() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("schemaVersion"),
        Just("mediaType"),
        Just("config"),
        Just("layers"),
        Just("manifests"),
        Just("fsLayers"),
        Just("digest"),
        Just("size"),
        Just("platform"),
        Just("os"),
        Just("architecture"),
        Just("variant"),
        Just("urls"),
        Just("annotations"),
        Just("rootfs"),
        Just("diff_ids"),
        Just("os.features"),
        Just("Labels"),
        Just("User"),
    ]
    .prop_map(str::to_owned)
}

fn document() -> impl Strategy<Value = Value> {
    scalar().prop_recursive(4, 48, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((key(), inner), 0..8)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn no_document_panics(value in document(), media_type in "\\PC{0,40}") {
        let raw = value.to_string();
        let _ = ManifestOrIndex::parse(raw.as_bytes(), &media_type);
        let _ = ImageConfig::parse(raw.as_bytes());
        let _ = ReferrerList::parse(raw.as_bytes());
    }

    #[test]
    fn no_bytes_panic(raw in prop::collection::vec(any::<u8>(), 0..200), media_type in "\\PC{0,40}") {
        let _ = ManifestOrIndex::parse(&raw, &media_type);
        let _ = ImageConfig::parse(&raw);
        let _ = ReferrerList::parse(&raw);
        let _ = MediaType::of(&media_type);
    }

    #[test]
    fn a_document_cut_anywhere_is_an_error(cut in 0usize..400) {
        let descriptor = json!({"mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": format!("sha256:{}", "ab".repeat(32)), "size": 1});
        let raw = json!({"schemaVersion": 2, "config": descriptor, "layers": []}).to_string();
        prop_assume!(cut < raw.len());
        prop_assert!(ManifestOrIndex::parse(&raw.as_bytes()[..cut], "").is_err());
        prop_assert!(ManifestOrIndex::parse(raw.as_bytes(), "").is_ok());
    }

    #[test]
    fn every_platform_that_parses_matches_itself(text in "[a-z0-9]{1,8}/[a-z0-9]{1,8}(/v[0-9]{1,2})?") {
        let platform: Platform = text.parse().expect("the pattern is the grammar");
        prop_assert_eq!(PlatformMatcher::for_platform(&platform).rank(&platform), Some(0));
    }
}
