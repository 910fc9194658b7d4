//! Who may pull and use what, as the user or the settings want it: records, credential helpers and providers.

mod login_file;
mod login_registry;
mod plugins;
pub(crate) mod terminal;
mod verify;

use std::env;
use std::sync::Arc;

use larder::credentials::Tokens;
use larder::credentials::helpers::Helpers;
use larder::records::{ImageRecords, Verification};

use crate::collect::Place;
use crate::failure::{Failure, chain};

pub(crate) use login_file::LoginFile;
pub(crate) use login_registry::LoginRegistry;
pub(crate) use plugins::plugins;
pub(crate) use verify::VerifyArgs;

/// The credential helpers on the `PATH`; none where kubelet's way is wanted, which asks none.
pub(crate) fn helpers(tokens: Tokens) -> Option<Helpers> {
    let path = env::var_os("PATH").unwrap_or_default();
    (tokens == Tokens::Keep).then(|| Helpers::on_path(&path))
}

/// The records of a backend, whose state is in this place.
pub(crate) fn records(place: &Place, verification: Verification) -> Result<Arc<ImageRecords>, Failure> {
    let opened = ImageRecords::open(&place.pull_records(), verification);
    opened.map(Arc::new).map_err(|error| Failure::failed(chain(&error)).hint(error.hint()))
}
