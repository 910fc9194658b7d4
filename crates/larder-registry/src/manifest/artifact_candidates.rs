//! The choice among the artifacts that an index lists. Pure.
//!
//! Most of them belong to the images beside them, as signatures and SBOMs do: they count only where no image fits.

use larder::reference::Digest;

use super::ManifestError;

/// Artifacts that were met in the search for an image, best first.
#[derive(Debug)]
pub struct ArtifactCandidates<T>(Vec<ArtifactCandidate<T>>);

#[derive(Debug)]
struct ArtifactCandidate<T> {
    artifact: T,
    /// Whether an index declares its platform, which fits.
    matches: bool,
    /// Its type and digest.
    description: String,
}

impl<T> Default for ArtifactCandidates<T> {
    fn default() -> Self {
        ArtifactCandidates(Vec::new())
    }
}

impl<T> ArtifactCandidates<T> {
    /// Adds an artifact; `matches` if an index declares its platform, which fits.
    pub fn add(&mut self, artifact: T, matches: bool, artifact_type: &str, digest: &Digest) {
        let description = format!("{artifact_type} {digest}");
        self.0.push(ArtifactCandidate { artifact, matches, description });
    }

    /// The artifact that the index stands for: the one for the platform, or the only one of an index without
    /// platforms. `None` if there is no such artifact.
    pub fn choose(self, has_platforms: bool) -> Result<Option<T>, ManifestError> {
        let mut found = self.0;
        if let Some(at) = found.iter().position(|candidate| candidate.matches) {
            return Ok(Some(found.swap_remove(at).artifact));
        }
        if has_platforms {
            return Ok(None);
        }
        if found.len() > 1 {
            let artifacts = found.into_iter().map(|candidate| candidate.description).collect();
            return Err(ManifestError::SeveralArtifacts { artifacts });
        }
        Ok(found.pop().map(|candidate| candidate.artifact))
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
