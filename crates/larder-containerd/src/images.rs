//! The images of containerd that other programs put there, with their content; and that they have changed.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::time::Duration;

use futures_util::stream::{self, BoxStream, StreamExt as _, TryStreamExt as _};
use larder::backend::BackendError;
use larder::reference::{Digest, Reference};
use larder_cri::channel::CriChannel;
use tokio::sync::mpsc;
use tonic::Status;

use crate::NAMESPACE;
use crate::client::ContainerdClient;
use crate::proto::events::Envelope;
use crate::proto::images::Image as ImageRecord;
use crate::publish::is_pulled;

/// Parts of a blob that wait for their reader. containerd sends parts of a megabyte.
const PARTS_AHEAD: usize = 2;

/// An image of containerd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerdImage {
    /// Digest of its index or manifest.
    pub target: Digest,
    /// Media type of that document.
    pub media_type: String,
    /// Size of that document in bytes.
    pub size: u64,
    /// Its names in full. Others, such as the ID under which CRI has it, are left out.
    pub names: Vec<Reference>,
}

/// Reads the images in the namespace of CRI.
#[derive(Clone)]
pub struct ContainerdImages {
    client: ContainerdClient,
}

impl ContainerdImages {
    /// Over this connection, which no other calls share: blobs are read as slowly as they are unpacked. `timeout`
    /// limits each call, and each part of a blob.
    pub fn new(channel: CriChannel, timeout: Duration) -> ContainerdImages {
        ContainerdImages { client: ContainerdClient::new(channel, timeout) }
    }

    /// The images that have a name in full, but for those that larder pulled.
    pub async fn list(&self) -> Result<Vec<ContainerdImage>, BackendError> {
        let listed = self.client.within_limit(self.client.images(NAMESPACE)).await;
        Ok(grouped(listed.map_err(|status| self.client.error(&status))?))
    }

    /// The image with this name, and no other of its names.
    pub async fn named(&self, name: &Reference) -> Result<Option<ContainerdImage>, BackendError> {
        let name = name.to_string();
        let found = self.client.within_limit(self.client.image(NAMESPACE, &name)).await;
        Ok(grouped(found.map_err(|status| self.client.error(&status))?).pop())
    }

    /// Sizes of all blobs, in bytes.
    pub async fn blobs(&self) -> Result<HashMap<Digest, u64>, BackendError> {
        let listed = self.client.within_limit(self.client.content(NAMESPACE, None)).await;
        let blobs = listed.map_err(|status| self.client.error(&status))?.into_iter();
        let sized = |digest: &str, size| Some((Digest::parse(digest).ok()?, u64::try_from(size).ok()?));
        Ok(blobs.filter_map(|blob| sized(&blob.digest, blob.size)).collect())
    }

    /// Reads a blob, which ends early with an error. Ends with the receiver, too.
    pub fn read(&self, digest: &Digest) -> mpsc::Receiver<io::Result<Vec<u8>>> {
        let (parts, received) = mpsc::channel(PARTS_AHEAD);
        let (own, digest) = (self.clone(), digest.to_string());
        tokio::spawn(async move {
            if let Err(status) = own.send_parts(&digest, &parts).await {
                let _ = parts.send(Err(io::Error::other(own.client.error(&status)))).await;
            }
        });
        received
    }

    async fn send_parts(
        &self,
        digest: &str,
        parts: &mpsc::Sender<io::Result<Vec<u8>>>,
    ) -> Result<(), Status> {
        let mut content = self.client.within_limit(self.client.read_blob(NAMESPACE, digest)).await?;
        while let Some(part) = self.client.within_limit(content.message()).await? {
            if parts.send(Ok(part.data)).await.is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Changes of the images, from the first call of [`ImageChanges::next`] on. containerd answers a subscription with
    /// the first change, so that wait has no limit.
    pub fn changes(&self) -> ImageChanges {
        let filter = format!("namespace==\"{NAMESPACE}\",topic~=\"^/images/\"");
        let client = self.client.clone();
        ImageChanges(stream::once(async move { client.subscribe(filter).await }).try_flatten().boxed())
    }
}

/// Changes of the images of containerd, as they happen.
pub struct ImageChanges(BoxStream<'static, Result<Envelope, Status>>);

impl ImageChanges {
    /// Waits for a change: an image was created, updated or deleted. Returns false if there is no connection, or it has
    /// ended. The future can be dropped at any time.
    pub async fn next(&mut self) -> bool {
        matches!(self.0.next().await, Some(Ok(_)))
    }
}

/// The images that records stand for, in the order of their digests. An image that larder pulled, maybe for some pods,
/// is not to become one for all.
fn grouped(records: impl IntoIterator<Item = ImageRecord>) -> Vec<ContainerdImage> {
    let mut images: BTreeMap<String, ContainerdImage> = BTreeMap::new();
    for ImageRecord { name, target, .. } in records.into_iter().filter(|record| !is_pulled(record)) {
        let Some(target) = target else { continue };
        let (Ok(digest), Ok(size)) = (Digest::parse(&target.digest), u64::try_from(target.size)) else {
            continue;
        };
        // A name with a digest stands for that alone, wherever a tool has put it.
        let fits = |name: &Reference| name.digest().is_none_or(|named| *named == digest);
        let Some(name) = full_name(&name).filter(fits) else { continue };
        let image = images.entry(target.digest).or_insert_with(|| ContainerdImage {
            target: digest,
            media_type: target.media_type,
            size,
            names: Vec::new(),
        });
        image.names.push(name);
    }
    images.into_values().collect()
}

/// Returns true if the name stands for the same image everywhere.
pub(crate) fn is_full_name(text: &str) -> bool {
    full_name(text).is_some()
}

/// A name that stands for the same image everywhere: in full, with a tag or a digest.
fn full_name(text: &str) -> Option<Reference> {
    let name = Reference::parse(text).ok()?;
    let is_full = name.to_string() == text && name.tag().is_some() != name.digest().is_some();
    let is_full = is_full && name.platform().is_none(); // larder alone knows such names
    is_full.then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::images::Descriptor;

    #[test]
    fn names_of_one_document_are_one_image_and_ids_are_no_names() {
        let digest = |digit: &str| format!("sha256:{}", digit.repeat(64));
        let record = |name: &str, digit: &str| ImageRecord {
            name: name.to_owned(),
            target: Some(Descriptor { media_type: "m".into(), digest: digest(digit), size: 3 }),
            ..ImageRecord::default()
        };
        let by_digest = format!("r.example/app@{}", digest("1"));
        let images = grouped([
            record("r.example/app:1", "1"),
            record("r.example/other:1", "2"),
            record(&by_digest, "1"),
            record(&digest("3"), "1"),
            record("app:1", "1"),
            record("r.example/app", "1"),
            record(&format!("r.example/wrong@{}", digest("4")), "1"),
            ImageRecord {
                labels: [("larder.dev/published".to_owned(), digest("5"))].into(),
                ..record("r.example/published:1", "5")
            },
        ]);
        let names = |at: usize| images[at].names.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(names(0), ["r.example/app:1", &by_digest]);
        assert_eq!(names(1), ["r.example/other:1"]);
        assert_eq!(images.len(), 2);
    }
}
