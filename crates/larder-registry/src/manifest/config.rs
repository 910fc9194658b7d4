//! The config of an image: its platform, and the diff IDs of its layers.

use larder::reference::{Digest, Platform};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use super::limits::{MAX_BYTES, MAX_LAYERS, MAX_LISTED_TEXT};
use super::{ManifestError, bounded};

/// The fields of an image config that image management needs. A runtime reads the others from the bytes, and labels are
/// read where something asks for them: a config may have megabytes of those.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageConfig {
    /// The platform of the image; fields that the config lacks are empty.
    pub platform: Platform,
    /// Digests of the uncompressed layers, from the bottom up.
    pub diff_ids: Vec<Digest>,
    /// `USER[:GROUP]` of its processes; empty is root.
    pub user: String,
    /// Creation time, as written.
    pub created: String,
}

#[derive(Deserialize)]
struct ImageConfigDocument {
    #[serde(default, deserialize_with = "bounded::or_default")]
    architecture: String,
    #[serde(default, deserialize_with = "bounded::or_default")]
    os: String,
    #[serde(default, deserialize_with = "bounded::or_default")]
    variant: String,
    #[serde(default, deserialize_with = "bounded::or_default")]
    rootfs: RootFsDocument,
    #[serde(default, deserialize_with = "bounded::or_default")]
    config: RuntimeConfig,
    #[serde(default, deserialize_with = "bounded::or_default")]
    created: String,
}

#[derive(Deserialize, Default)]
struct RootFsDocument {
    #[serde(default, deserialize_with = "bounded::list::<MAX_LAYERS, _, _>")]
    diff_ids: Vec<DiffId>,
}

#[derive(Deserialize, Default)]
struct RuntimeConfig {
    #[serde(default, rename = "User", deserialize_with = "bounded::or_default")]
    user: String,
}

struct DiffId(Digest);

impl<'de> Deserialize<'de> for DiffId {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        Digest::parse(&text).map(DiffId).map_err(|error| D::Error::custom(format_args!("diff id: {error}")))
    }
}

impl ImageConfig {
    /// Reads the config of a container image.
    pub fn parse(raw: &[u8]) -> Result<ImageConfig, ManifestError> {
        if raw.len() > MAX_BYTES {
            return Err(ManifestError::TooLarge { size: raw.len() as u64 });
        }
        let written: ImageConfigDocument = bounded::object(raw)?;
        for (field, text) in [("config.User", &written.config.user), ("created", &written.created)] {
            if text.len() > MAX_LISTED_TEXT {
                return Err(ManifestError::FieldTooLong { field, length: text.len() });
            }
        }
        Ok(ImageConfig {
            platform: Platform {
                os: written.os,
                architecture: written.architecture,
                variant: written.variant,
            },
            diff_ids: written.rootfs.diff_ids.into_iter().map(|diff_id| diff_id.0).collect(),
            user: written.config.user,
            created: written.created,
        })
    }

    /// Checks that the number of diff IDs is `layers`.
    pub fn check_layers(&self, layers: usize) -> Result<(), ManifestError> {
        match self.diff_ids.len() {
            diff_ids if diff_ids == layers => Ok(()),
            diff_ids => Err(ManifestError::LayerCount { layers, diff_ids }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diff_id(byte: &str) -> String {
        format!("sha256:{}", byte.repeat(32))
    }

    #[test]
    fn a_config_gives_user_platform_and_diff_ids() {
        let raw = format!(
            r#"{{"architecture":"arm64","variant":"v8","os":"linux","created":"2026-01-01T00:00:00Z",
                "config":{{"User":"1000:1000","Env":["A=b"],"Labels":{{"keep":"yes"}},"Cmd":null}},
                "rootfs":{{"type":"layers","diff_ids":["{}","{}"]}},
                "history":[{{"empty_layer":true}}]}}"#,
            diff_id("aa"),
            diff_id("bb")
        );
        let config = ImageConfig::parse(raw.as_bytes()).unwrap();
        assert_eq!(config.user, "1000:1000");
        assert_eq!(config.platform.to_string(), "linux/arm64/v8");
        assert_eq!(config.diff_ids[1].as_str(), diff_id("bb"));
        config.check_layers(2).unwrap();
        let error = config.check_layers(3).unwrap_err();
        assert_eq!(error.to_string(), "layer count mismatch: 3 in the manifest, 2 diff IDs in the config");
    }

    #[test]
    fn null_as_go_writes_it_is_empty() {
        let raw = br#"{"architecture":"amd64","os":"linux","config":{"User":null,"Labels":null},"rootfs":{"diff_ids":null}}"#;
        let config = ImageConfig::parse(raw).unwrap();
        assert_eq!((config.user.as_str(), config.diff_ids.len()), ("", 0));
        assert_eq!(ImageConfig::parse(b"{\"config\":null}").unwrap().diff_ids.len(), 0);
    }

    #[test]
    fn texts_that_lists_show_are_bounded() {
        let read = |user: usize, created: usize| {
            let raw = format!(
                r#"{{"config":{{"User":"{}"}},"created":"{}"}}"#,
                "u".repeat(user),
                "c".repeat(created)
            );
            ImageConfig::parse(raw.as_bytes()).map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(read(MAX_LISTED_TEXT, MAX_LISTED_TEXT), Ok(()));
        let error = |field| format!("{field} is too long: 1025 bytes, the limit is 1024 bytes");
        assert_eq!(read(MAX_LISTED_TEXT + 1, 0), Err(error("config.User")));
        assert_eq!(read(0, MAX_LISTED_TEXT + 1), Err(error("created")));
    }

    #[test]
    fn a_diff_id_that_is_no_digest_is_named() {
        let raw = br#"{"rootfs":{"diff_ids":["sha256:abc"]}}"#;
        let error = ImageConfig::parse(raw).unwrap_err();
        let cause = std::error::Error::source(&error).expect("a cause").to_string();
        assert!(cause.contains("diff id"), "{cause}");
    }

    #[test]
    fn diff_ids_without_end_are_refused() {
        let one = format!("\"{}\",", diff_id("aa"));
        let raw =
            format!(r#"{{"rootfs":{{"diff_ids":[{}]}}}}"#, one.repeat(MAX_LAYERS + 1).trim_end_matches(','));
        assert!(matches!(ImageConfig::parse(raw.as_bytes()), Err(ManifestError::Malformed(_))));
    }
}
