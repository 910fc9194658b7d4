//! The choice among the artifacts that an index lists. Pure.
//!
//! Most of them belong to the images beside them, as signatures and SBOMs do: they count only where no image fits.

use larder::reference::Digest;

use super::ManifestError;

/// Longest type of an artifact that is described, in characters.
const MAX_TYPE: usize = 200;

/// Artifacts that were met in the search for an image. Only the best one is kept: each is a document of megabytes.
#[derive(Debug)]
pub struct ArtifactCandidates<T> {
    /// The best one, and if it is for the platform.
    best: Option<(T, bool)>,
    /// Types and digests of all.
    descriptions: Vec<String>,
}

impl<T> Default for ArtifactCandidates<T> {
    fn default() -> Self {
        ArtifactCandidates { best: None, descriptions: Vec::new() }
    }
}

impl<T> ArtifactCandidates<T> {
    /// Adds an artifact; `matches` if an index declares its platform, which fits.
    pub fn add(&mut self, artifact: T, matches: bool, artifact_type: &str, digest: &Digest) {
        let artifact_type: String = artifact_type.chars().take(MAX_TYPE).collect();
        self.descriptions.push(format!("{artifact_type} {digest}"));
        if self.best.as_ref().is_none_or(|(_, best_matches)| matches && !best_matches) {
            self.best = Some((artifact, matches));
        }
    }

    /// The artifact that the index stands for: the one for the platform, or the only one of an index without
    /// platforms. `None` if there is no such artifact.
    pub fn choose(self, has_platforms: bool) -> Result<Option<T>, ManifestError> {
        match self.best {
            Some((artifact, true)) => Ok(Some(artifact)),
            _ if has_platforms => Ok(None),
            _ if self.descriptions.len() > 1 => {
                Err(ManifestError::SeveralArtifacts { artifacts: self.descriptions })
            }
            best => Ok(best.map(|(artifact, _)| artifact)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(matches: &[bool]) -> ArtifactCandidates<usize> {
        let mut candidates = ArtifactCandidates::default();
        for (at, matches) in matches.iter().enumerate() {
            candidates.add(at, *matches, "text/plain", &Digest::sha256(at.to_string()));
        }
        candidates
    }

    #[test]
    fn the_first_artifact_for_the_platform_is_chosen_else_the_only_one_without() {
        assert_eq!(candidates(&[false, true, true]).choose(true).unwrap(), Some(1));
        assert_eq!(candidates(&[false]).choose(true).unwrap(), None, "beside images for other platforms");
        assert_eq!(candidates(&[false]).choose(false).unwrap(), Some(0));
        assert_eq!(candidates(&[]).choose(false).unwrap(), None);
        let error = candidates(&[false, false]).choose(false).unwrap_err().to_string();
        let listed = |at: &str| error.contains(&format!("text/plain {}", Digest::sha256(at)));
        assert!(listed("0") && listed("1"), "{error}");
    }
}
