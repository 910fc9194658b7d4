//! Checks manifests and configs: every byte, against their digests.

use larder::reference::Digest;

use super::report::{FsckReport, RepairState, StoreDamage};
use crate::store::blobs::read_blob;
use crate::store::db::{DbRead as _, IMAGES};
use crate::store::error::StoreErrorContext as _;
use crate::store::listing::put_image;
use crate::store::{ImageRecord, OpenStore, StoreError};

impl OpenStore {
    pub(super) fn check_blobs(&self, repair: bool, report: &mut FsckReport) -> Result<(), StoreError> {
        let images: Vec<ImageRecord> = self.db.read("find damaged manifests", |reader| reader.all(IMAGES))?;
        report.images = images.len() as u64;
        for image in &images {
            let mut broken = false;
            for digest in image.blobs() {
                if let Some(damage) = self.check_blob(digest, image, repair)? {
                    // What is missing from an image that is noted as incomplete is in the list of what to fetch.
                    if image.complete || matches!(damage, StoreDamage::BlobDamaged { .. }) {
                        report.add(damage, RepairState::when(repair, RepairState::AwaitsPull));
                    }
                    broken = true;
                }
            }
            if broken && image.complete && repair {
                self.hide_image(&image.id)?;
            }
        }
        Ok(())
    }

    fn check_blob(
        &self,
        digest: &Digest,
        image: &ImageRecord,
        repair: bool,
    ) -> Result<Option<StoreDamage>, StoreError> {
        let doing = "check a manifest or config";
        let _guard = self.lock_content();
        let present = self.db.read(doing, |reader| reader.get::<ImageRecord>(IMAGES, image.id.as_str()))?;
        if !present.is_some_and(|present| present.blobs().any(|blob| blob == digest)) {
            return Ok(None); // removed since
        }
        let path = self.layout.blob(digest);
        let (digest, image) = (digest.clone(), image.id.clone());
        let Some(bytes) = read_blob(&path).context(doing)? else {
            return Ok(Some(StoreDamage::BlobMissing { digest, image }));
        };
        if digest.check(&bytes).is_ok() {
            return Ok(None);
        }
        if repair {
            self.discard(&path).context("remove a damaged manifest or config")?;
        }
        Ok(Some(StoreDamage::BlobDamaged { digest, image }))
    }

    /// Marks an image as incomplete.
    fn hide_image(&self, id: &Digest) -> Result<(), StoreError> {
        let hidden = self.db.write("record an incomplete image", |writer| {
            let Some(mut image) = writer.get::<ImageRecord>(IMAGES, id.as_str())? else { return Ok(None) };
            image.complete = false;
            put_image(writer, &mut image)?;
            Ok(Some(image))
        })?;
        self.note_images(hidden.iter());
        Ok(())
    }
}
