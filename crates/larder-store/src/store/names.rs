//! Adds and removes single names of an image.

use larder::backend::RemoveOptions;
use larder::reference::{Digest, ImageName, Reference};

use super::commit::{move_name, sort};
use super::db::{DbRead as _, DbResult, DbTransaction, IMAGES, NAMES};
use super::error::StoreError;
use super::handle::{OpenStore, Store};
use super::images::find;
use super::listing::put_image;
use super::records::ImageRecord;
use super::remove::StoreRemoval;
use crate::disk::DiskSpace;

impl Store {
    /// Adds a name with a tag to an image; the image that has it loses it. `None` if the image is not found.
    pub fn add_name(&self, id: &Digest, name: &Reference) -> Result<Option<ImageRecord>, StoreError> {
        self.0.add_name(id, name)
    }
}

impl OpenStore {
    /// Removes names of an image, and the image if no other name is left.
    pub(super) fn remove_names(
        &self,
        image: &ImageName,
        names: &[String],
        options: &RemoveOptions,
    ) -> Result<Option<StoreRemoval>, StoreError> {
        let guard = self.lock_content();
        let rest = self.db.write("remove names of an image", |writer| {
            let Some(mut image) = find(writer, image)? else { return Ok(None) };
            let removed: Vec<String> = image.names().filter(|name| names.contains(name)).cloned().collect();
            image.tags.retain(|name| !names.contains(name));
            image.digests.retain(|name| !names.contains(name));
            if image.names().next().is_some() {
                delete_names(writer, &image.id, &removed)?;
                put_image(writer, &mut image)?;
            }
            Ok(Some(image))
        })?;
        let Some(image) = rest else { return Ok(None) };
        if image.names().next().is_none() {
            return self.remove_locked(guard, &ImageName::from(image.id.as_str()), options);
        }
        self.note_images(std::iter::once(&image));
        Ok(Some(StoreRemoval { image, is_present: true, layers: Vec::new(), freed: DiskSpace::ZERO }))
    }

    /// Renames images for what was another platform and is this machine's now: a store moves with its disk. A name
    /// that this machine's image has stays with it.
    pub(super) fn recover_names(&self) -> Result<(), StoreError> {
        let doing = "compare names with the platform";
        let outdated = self.db.read(doing, |reader| {
            let mut outdated = Vec::new();
            reader.visit(NAMES, "", &mut |name, id| {
                let now = Reference::parse(name).ok().map(|parsed| parsed.stored().to_string());
                if let Some(now) = now.filter(|now| now != name) {
                    outdated.push((name.to_owned(), now, String::from_utf8_lossy(id).into_owned()));
                }
                Ok(true)
            })?;
            Ok(outdated)
        })?;
        if outdated.is_empty() {
            return Ok(());
        }
        let _guard = self.lock_content();
        let renamed = self.db.write(doing, |writer| {
            let mut renamed = Vec::new();
            for (name, now, id) in &outdated {
                let Some(mut image) = writer.get::<ImageRecord>(IMAGES, id)? else { continue };
                writer.delete(NAMES, name)?;
                let names = if name.contains('@') { &mut image.digests } else { &mut image.tags };
                names.retain(|other| other != name);
                if writer.value(NAMES, now)?.is_none() {
                    names.push(now.clone());
                    sort(names);
                    writer.put_raw(NAMES, now, id.as_bytes())?;
                }
                put_image(writer, &mut image)?;
                renamed.push(image);
            }
            Ok(renamed)
        })?;
        self.note_images(renamed.iter());
        Ok(())
    }

    fn add_name(&self, id: &Digest, name: &Reference) -> Result<Option<ImageRecord>, StoreError> {
        let name = name.stored().to_string();
        let _guard = self.lock_content();
        let named = self.db.write("add a name to an image", |writer| {
            let found = writer.get::<ImageRecord>(IMAGES, id.as_str())?;
            let Some(mut image) = found.filter(|image| image.complete) else { return Ok(None) };
            image.tags.push(name.clone());
            sort(&mut image.tags);
            let other = move_name(writer, &name, id)?;
            put_image(writer, &mut image)?;
            Ok(Some((image, other)))
        })?;
        let Some((image, other)) = named else { return Ok(None) };
        self.note_images(other.iter().chain([&image]));
        Ok(Some(image))
    }
}

/// Deletes these names where they are the image's.
pub(super) fn delete_names<'a>(
    writer: &DbTransaction,
    id: &Digest,
    names: impl IntoIterator<Item = &'a String>,
) -> DbResult<()> {
    for name in names {
        // A name that moved on is another image's.
        if writer.value(NAMES, name)?.as_deref() == Some(id.as_str().as_bytes()) {
            writer.delete(NAMES, name)?;
        }
    }
    Ok(())
}
