//! A blob of a repository, and what its transfer proves. Pure.

use larder::credentials::Credential;
use larder::reference::{Digest, Reference};
use larder_registry::manifest::Descriptor;
use serde::{Deserialize, Serialize};

use crate::lazy::toc::TocFormat;

/// Most transfers that are recorded of one layer, so that many small pulls do not fill the database.
const MAX_TRANSFERS: usize = 32;

/// The credential of a transfer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransferLogin {
    /// No credential.
    Anonymous,
    /// The credential with this hash.
    Hash(String),
    /// A credential that is not recorded. It equals no other one.
    #[default]
    Unrecorded,
}

impl From<Option<&Credential>> for TransferLogin {
    fn from(credential: Option<&Credential>) -> TransferLogin {
        match credential {
            None => TransferLogin::Anonymous,
            Some(credential) if credential.hash.is_empty() => TransferLogin::Unrecorded,
            Some(credential) => TransferLogin::Hash(credential.hash.clone()),
        }
    }
}

/// Identifies an ingest: what was received of a blob of one repository, and can be resumed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct IngestId(Digest);

impl IngestId {
    /// Returns the ID with this digest.
    pub(super) fn of_digest(digest: Digest) -> IngestId {
        IngestId(digest)
    }

    /// Returns the digest that names the files of the ingest.
    pub fn digest(&self) -> &Digest {
        &self.0
    }
}

/// A blob as one repository has it: the unit in which layers are claimed, ingested, and reused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobSource {
    /// Registry and repository; empty for archives, which an administrator loads.
    pub(super) repository: String,
    /// The credential that the repository was asked with.
    login: TransferLogin,
    /// Digest of the blob.
    pub(super) digest: Digest,
    /// Size of the blob in bytes.
    pub(super) size: u64,
}

impl BlobSource {
    /// A blob of the repository of this name.
    pub fn registry(name: &Reference, login: TransferLogin, digest: Digest, size: u64) -> BlobSource {
        BlobSource { repository: name.name().to_owned(), login, digest, size }
    }

    /// A blob of an archive or a layout.
    pub fn archive(digest: Digest, size: u64) -> BlobSource {
        BlobSource { repository: String::new(), login: TransferLogin::Anonymous, digest, size }
    }

    /// Registry and repository; empty for archives.
    pub(crate) fn repository(&self) -> &str {
        &self.repository
    }

    /// The blob beside this one that is its table of contents, if the format has it so.
    pub(crate) fn table(&self, format: &TocFormat) -> Option<BlobSource> {
        let Descriptor { digest, size, .. } = format.blob()?;
        Some(BlobSource { digest: digest.clone(), size: *size, ..self.clone() })
    }

    /// Identifies the ingest of the blob. The ID depends on repository, digest and size: bytes of one repository are
    /// never completed by another one, nor replaced by a blob of another size.
    pub fn ingest_id(&self) -> IngestId {
        IngestId(Digest::sha256(format!("{} {} {}", self.repository, self.digest, self.size)))
    }

    /// Identifies the fetch of the blob: those who would be given its layer afterwards may wait for it, which are those
    /// that ask the same registry with the same credential.
    pub(super) fn fetch(&self) -> Digest {
        let registry = self.registry_name();
        match &self.login {
            TransferLogin::Anonymous => Digest::sha256(format!("{registry}  {} {}", self.digest, self.size)),
            TransferLogin::Hash(hash) => {
                Digest::sha256(format!("{registry} {hash} {} {}", self.digest, self.size))
            }
            TransferLogin::Unrecorded => self.ingest_id().0,
        }
    }

    /// Registry of the repository; empty for archives.
    pub(super) fn registry_name(&self) -> &str {
        self.repository.split_once('/').map_or("", |(registry, _)| registry)
    }

    pub(super) fn is_archive(&self) -> bool {
        self.repository.is_empty()
    }

    /// Without the hash of the credential, for a copy outside of the database.
    pub(super) fn without_login(&self) -> BlobSource {
        BlobSource { login: TransferLogin::Unrecorded, ..self.clone() }
    }

    /// Returns true if this transfer proves that `other` may use the layer: the same blob was sent by the same
    /// repository, or by its registry to the same credential, which the blob is thus readable with.
    fn proves(&self, other: &BlobSource) -> bool {
        let same_blob = self.digest == other.digest && self.size == other.size;
        same_blob && (self.repository == other.repository || self.is_same_login(other))
    }

    fn is_same_login(&self, other: &BlobSource) -> bool {
        let is_recorded = self.login != TransferLogin::Unrecorded && self.login == other.login;
        is_recorded && !self.is_archive() && self.registry_name() == other.registry_name()
    }
}

/// Returns true if one of these transfers proves that `source` may use the layer.
pub(super) fn is_proved(transfers: &[BlobSource], source: &BlobSource) -> bool {
    transfers.iter().any(|transfer| transfer.proves(source))
}

/// Adds transfers to those of a layer; beyond [`MAX_TRANSFERS`], the oldest are forgotten.
pub(super) fn merge_transfers(known: &mut Vec<BlobSource>, new: &[BlobSource]) {
    known.retain(|transfer| !new.contains(transfer));
    known.extend_from_slice(new);
    known.drain(..known.len().saturating_sub(MAX_TRANSFERS));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(name: &str, login: TransferLogin, size: u64) -> BlobSource {
        BlobSource::registry(&Reference::parse(name).expect("a name"), login, Digest::sha256("blob"), size)
    }

    #[test]
    fn a_transfer_proves_the_blob_for_its_repository_and_for_its_credential_at_that_registry() {
        let (anonymous, login) = (TransferLogin::Anonymous, |hash: &str| TransferLogin::Hash(hash.into()));
        let sent = source("r.example/app", login("a"), 10);
        for (name, by, size, proved) in [
            ("r.example/app", login("b"), 10, true),
            ("r.example/app", anonymous.clone(), 10, true),
            ("r.example/app", login("a"), 11, false),
            ("r.example/other", login("a"), 10, true),
            ("r.example/other", login("b"), 10, false),
            ("r.example/other", anonymous.clone(), 10, false),
            ("r.example/other", TransferLogin::Unrecorded, 10, false),
            ("r.example:444/app", login("a"), 10, false),
            ("evil.example/app", login("a"), 10, false),
        ] {
            assert_eq!(sent.proves(&source(name, by.clone(), size)), proved, "{name} {by:?} {size}");
        }
        let unrecorded = source("r.example/app", TransferLogin::Unrecorded, 10);
        assert!(!unrecorded.proves(&source("r.example/other", TransferLogin::Unrecorded, 10)));
        let public = source("r.example/app", anonymous.clone(), 10);
        assert!(public.proves(&source("r.example/other", anonymous.clone(), 10)));
        assert!(!public.proves(&source("evil.example/app", anonymous.clone(), 10)));
        let archive = BlobSource::archive(Digest::sha256("blob"), 10);
        assert!(archive.proves(&archive) && !archive.proves(&public) && !public.proves(&archive));
    }

    #[test]
    fn the_oldest_transfers_of_a_layer_are_forgotten() {
        let mut known = Vec::new();
        for size in 0..100 {
            merge_transfers(&mut known, &[source("r.example/app", TransferLogin::Anonymous, size)]);
        }
        assert_eq!(known.iter().map(|known| known.size).collect::<Vec<_>>(), (68..100).collect::<Vec<_>>());
    }

    #[test]
    fn who_waits_for_a_fetch_is_given_its_layer() {
        let login = |hash: &str| TransferLogin::Hash(hash.into());
        let mut sources = vec![BlobSource::archive(Digest::sha256("blob"), 10)];
        for name in ["r.example/app", "r.example/other", "r.example:444/app"] {
            for by in [TransferLogin::Anonymous, login("a"), login("b"), TransferLogin::Unrecorded] {
                sources.push(source(name, by, 10));
            }
        }
        for (one, other) in sources.iter().flat_map(|one| sources.iter().map(move |other| (one, other))) {
            assert!(one.fetch() != other.fetch() || one.proves(other), "{one:?} {other:?}");
        }
        let shared = |by: TransferLogin| {
            source("r.example/app", by.clone(), 10).fetch() == source("r.example/other", by, 10).fetch()
        };
        assert!(shared(TransferLogin::Anonymous) && shared(login("a")));
    }

    #[test]
    fn each_source_has_an_ingest_of_its_own() {
        let one = source("r.example/app", TransferLogin::Anonymous, 10);
        assert_eq!(one.ingest_id(), one.without_login().ingest_id());
        for other in ["r.example/app2", "r.example:444/app"] {
            assert_ne!(one.ingest_id(), source(other, TransferLogin::Anonymous, 10).ingest_id());
        }
        assert_ne!(one.ingest_id(), source("r.example/app", TransferLogin::Anonymous, 1).ingest_id());
        assert_ne!(one.ingest_id(), BlobSource::archive(Digest::sha256("blob"), 10).ingest_id());
    }
}
