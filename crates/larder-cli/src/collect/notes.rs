//! What an ensure or a pull leaves for collection: that images were wanted just now.

use larder::gc::{Clock as _, FileStore, GcPolicy, RecordStore as _, SystemClock};
use larder::reference::Digest;
use larder_store::backend::StoreBackend;

use super::{EnsuredFile, Place};
use crate::args::Connection;
use crate::connect::Chosen;
use crate::failure::{Failure, chain};
use crate::out::Out;

/// Where it is written down for one backend.
pub(crate) struct Notes {
    place: Place,
    /// Larder's own store, which spares such images for a while by itself.
    store: Option<StoreBackend>,
}

impl Notes {
    /// Those of this backend.
    pub(crate) fn of(connection: &Connection, chosen: &Chosen) -> Result<Notes, Failure> {
        Ok(Notes { place: Place::of(connection, chosen)?, store: chosen.store().cloned() })
    }

    /// Where they are.
    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    /// Takes note that these images, by id, were just made present: that is a use. Trouble is told, and no more.
    pub(crate) fn ensured(self, ids: &[&str], out: &Out) {
        if ids.is_empty() {
            return;
        }
        if let Some(store) = &self.store {
            for id in ids.iter().filter_map(|id| Digest::parse(id).ok()) {
                if let Err(error) = store.puller().spare(&id) {
                    out.warning(format_args!("collection may remove {id}: {}", chain(&error)));
                }
            }
        } else {
            if let Some(roots) = self.place.of_root() {
                let folder = roots.folder().display();
                out.warning(format_args!(
                    "root collects here as well, and does not know that the images are wanted: {folder}"
                ));
            }
            if let Err(failure) = EnsuredFile::at(&self.place).add(ids) {
                out.warning(format_args!(
                    "collection may remove the images before they are used: {}",
                    failure.message()
                ));
            }
            // Ages are written down only where somebody collects.
            if !self.place.exists() {
                return;
            }
        }
        if let Err(failure) = self.place.locked().and_then(|place| write_down(&place, ids, out)) {
            out.warning(format_args!("not noted that the images were wanted: {}", failure.message()));
        }
    }
}

fn write_down(place: &Place, ids: &[&str], out: &Out) -> Result<(), Failure> {
    let store = FileStore::new(place.records());
    let mut loaded = store.load();
    if let Some(notice) = &loaded.notice {
        out.warning(notice);
    }
    loaded.records.ensured(ids.iter().copied(), &SystemClock::new().read(), GcPolicy::default().clock);
    store.save(&loaded.records).map_err(|error| Failure::failed(chain(&error)))
}
