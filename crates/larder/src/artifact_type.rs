//! Types of images and artifacts in words that users know. Pure.

use crate::glob;

/// The word for images, which have no artifact type.
pub const IMAGE: &str = "image";

/// All words of types.
pub const TYPE_WORDS: [&str; 7] = [IMAGE, "model", "chart", "wasm", "signature", "sbom", "attestation"];

/// Words for the types that begin so.
const WORDS: [(&str, &str); 19] = [
    ("application/vnd.cncf.model.", "model"),
    ("application/vnd.docker.ai.", "model"),
    ("application/vnd.cncf.helm.", "chart"),
    ("application/vnd.wasm.", "wasm"),
    ("application/vnd.module.wasm.", "wasm"),
    ("application/wasm", "wasm"),
    ("application/vnd.dev.cosign.simplesigning.", "signature"),
    ("application/vnd.dev.cosign.artifact.sig.", "signature"),
    ("application/vnd.dev.sigstore.bundle", "signature"),
    ("application/vnd.cncf.notary.", "signature"),
    ("application/spdx", "sbom"),
    ("text/spdx", "sbom"),
    ("application/vnd.cyclonedx", "sbom"),
    ("application/vnd.syft", "sbom"),
    ("application/vnd.dev.cosign.artifact.sbom.", "sbom"),
    ("application/vnd.in-toto", "attestation"),
    ("application/vnd.dsse.", "attestation"),
    ("application/vnd.docker.attestation.", "attestation"),
    ("application/vnd.dev.cosign.attestation.", "attestation"),
];

/// The type of an image or artifact in a word, where one is known: `image`, `model`, `chart`, `wasm`, `signature`,
/// `sbom` or `attestation`; else the artifact type itself.
pub fn type_word(artifact_type: &str) -> &str {
    if artifact_type.is_empty() {
        return IMAGE;
    }
    let known = WORDS.iter().find(|(start, _)| artifact_type.starts_with(start));
    known.map_or(artifact_type, |(_, word)| word)
}

/// Returns true if a pattern selects content of an artifact type: by its word, or by the artifact type itself. `*`
/// stands for any text, `?` for one character.
pub fn type_matches(pattern: &str, artifact_type: &str) -> bool {
    glob(pattern, type_word(artifact_type)) || (!artifact_type.is_empty() && glob(pattern, artifact_type))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_types_have_words_and_others_are_shown_as_they_are() {
        for (artifact_type, word) in [
            ("", "image"),
            ("application/vnd.cncf.model.manifest.v1+json", "model"),
            ("application/vnd.cncf.helm.config.v1+json", "chart"),
            ("application/vnd.wasm.config.v0+json", "wasm"),
            ("application/vnd.dev.cosign.simplesigning.v1+json", "signature"),
            ("application/vnd.dev.sigstore.bundle.v0.3+json", "signature"),
            ("application/vnd.cncf.notary.signature", "signature"),
            ("text/spdx+json", "sbom"),
            ("application/vnd.cyclonedx+json", "sbom"),
            ("application/vnd.in-toto+json", "attestation"),
            ("application/vnd.example", "application/vnd.example"),
        ] {
            assert_eq!(type_word(artifact_type), word);
            assert!(type_matches(word, artifact_type), "{word}");
        }
    }

    #[test]
    fn every_word_is_listed() {
        assert!(WORDS.iter().all(|(_, word)| TYPE_WORDS.contains(word)));
        assert!(TYPE_WORDS.iter().all(|word| *word == IMAGE || WORDS.iter().any(|(_, of)| of == word)));
    }

    #[test]
    fn a_pattern_selects_by_word_and_by_type() {
        let model = "application/vnd.cncf.model.manifest.v1+json";
        assert!(type_matches("application/vnd.cncf.*", model) && type_matches(model, model));
        assert!(!type_matches("mod", model) && !type_matches("model", "") && !type_matches("", ""));
        assert!(type_matches("*", "") && type_matches("*", model));
    }
}
