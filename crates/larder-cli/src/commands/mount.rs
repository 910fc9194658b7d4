//! `larder mount`, `larder mounts`, `larder umount`: root file systems out of larder's own store.

use std::time::SystemTime;

use larder_store::mounts::{MountError, MountOptions};
use larder_store::store::{MountRecord, Store};
use serde::Serialize;

use crate::args::{Connection, MountArgs, MountsArgs, UmountArgs};
use crate::connect;
use crate::exit::Outcome;
use crate::failure::{Failure, chain};
use crate::out::Out;
use crate::output;
use crate::output::table::Table;

pub(super) fn mount(args: &MountArgs, store: &Store, out: &Out) -> Result<Outcome, Failure> {
    let options = MountOptions { writable: args.writable };
    let mount = store.mount(&args.image, &args.dir, options, SystemTime::now()).map_err(|error| {
        let failure = failed(&error);
        match error {
            MountError::Store(_) => failure.hint(format!("larder pull {}", args.image)),
            _ => failure,
        }
    })?;
    out.line(mount.target.display());
    Ok(Outcome::Done)
}

pub(super) fn umount(args: &UmountArgs, store: &Store, out: &Out) -> Outcome {
    // What was written there goes, and layers of images that were removed meanwhile.
    store.finish_deletion();
    let mut outcome = Outcome::Done;
    for dir in &args.dirs {
        match store.umount_with(dir, args.force) {
            Ok(mount) => out.line(mount.target.display()),
            Err(error) => outcome = outcome.max(failed(&error).print(out)),
        }
    }
    outcome
}

pub(super) fn list(args: &MountsArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let mounts = match connect::store_to_list(connection, out)? {
        Some(backend) => backend.store().mounts().map_err(|error| Failure::failed(chain(&error)))?,
        None => Vec::new(),
    };
    let mounts: Vec<MountReport> = mounts.iter().map(MountReport::new).collect();
    output::show(out, args.output, &mounts, || table(&mounts));
    Ok(Outcome::Done)
}

fn failed(error: &MountError) -> Failure {
    let failure = Failure::failed(chain(error));
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// One mount. The shape of `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct MountReport {
    target: String,
    image: String,
    image_id: String,
    writable: bool,
    /// False for a writable mount that a reboot ended: its files are kept until `larder umount`.
    mounted: bool,
}

impl MountReport {
    fn new(mount: &MountRecord) -> Self {
        MountReport {
            target: mount.target.display().to_string(),
            image: mount.name.clone(),
            image_id: mount.image.to_string(),
            writable: mount.writable,
            mounted: mount.mounted,
        }
    }
}

fn table(mounts: &[MountReport]) -> Table {
    let mut table = Table::new(["TARGET", "IMAGE", "IMAGE ID", "MODE", "STATE"]);
    for mount in mounts {
        let id = mount.image_id.split_once(':').map_or(mount.image_id.as_str(), |(_, digits)| digits);
        table.row([
            mount.target.clone(),
            mount.image.clone(),
            id.chars().take(13).collect(),
            if mount.writable { "read-write" } else { "read-only" }.into(),
            if mount.mounted { "mounted" } else { "gone" }.into(),
        ]);
    }
    table
}
