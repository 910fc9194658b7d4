//! `larder mount`, `larder mounts`, `larder umount`: root file systems out of larder's own store.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use larder_control::v1alpha1::{Mount, MountRequest, MountsRequest, StatusRequest, UnmountRequest};
use larder_store::mounts::{self, MountError, MountOptions};
use larder_store::store::{MountRecord, Store};

use crate::args::{Connection, MountArgs, MountsArgs, UmountArgs};
use crate::connect;
use crate::daemon::Daemon;
use crate::exit::Outcome;
use crate::failure::{Failure, chain};
use crate::out::Out;
use crate::output;
use crate::output::table::Table;

pub(super) async fn mount(args: &MountArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let target = absolute(&args.dir)?;
    let mount = match Daemon::find_of_store(connection)? {
        Some(daemon) => {
            let request =
                MountRequest { image: args.image.clone(), target: text(&target)?, writable: args.writable };
            let answer = daemon.wait(async |mut client| client.mount(request).await).await?;
            let mount = answer.mount.unwrap_or_default();
            check_seen(&mount, &daemon).await?;
            mount
        }
        None => mount_of(connect::store(connection)?.store(), &args.image, &target, args.writable)?,
    };
    out.line(&mount.target);
    Ok(Outcome::Done)
}

/// What the daemon mounted is of no use to a caller who cannot see it. Where that cannot be told, the daemon is believed.
async fn check_seen(mount: &Mount, daemon: &Daemon) -> Result<(), Failure> {
    let target = &mount.target;
    if mounts::is_seen_at(Path::new(target)).unwrap_or(true) {
        return Ok(());
    }
    let status = daemon.ask(async |mut client| client.status(StatusRequest::default()).await).await;
    let process = status.map_or_else(|_| "PID".to_owned(), |status| status.process.to_string());
    Err(Failure::failed(format!(
        "{target}: the daemon mounted the image, and it is not to be seen from here: the two are in different mount namespaces"
    ))
    .hint(format!("nsenter --mount --target {process} COMMAND runs a command where it is seen; larder umount {target} ends it"))
    .hint("give the unit of the daemon no mounts of its own (ProtectSystem=, PrivateTmp=, ...), or run this command outside its container"))
}

pub(super) async fn umount(
    args: &UmountArgs,
    connection: &Connection,
    out: &Out,
) -> Result<Outcome, Failure> {
    let mut outcome = Outcome::Done;
    if let Some(daemon) = Daemon::find_of_store(connection)? {
        for dir in &args.dirs {
            let request = UnmountRequest { target: text(&absolute(dir)?)?, force: args.force };
            match daemon.wait(async |mut client| client.unmount(request).await).await {
                Ok(answer) => out.line(answer.mount.unwrap_or_default().target),
                Err(failure) if failure.outcome() == Outcome::Unreachable => return Err(failure),
                Err(failure) => outcome = outcome.max(failure.print(out)),
            }
        }
    } else {
        let store = connect::store(connection)?;
        // What was written there goes, and layers of images that were removed meanwhile.
        store.store().finish_deletion();
        for dir in &args.dirs {
            match umount_of(store.store(), &absolute(dir)?, args.force) {
                Ok(mount) => out.line(mount.target),
                Err(failure) => outcome = outcome.max(failure.print(out)),
            }
        }
    }
    Ok(outcome)
}

pub(super) async fn list(args: &MountsArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let mounts = match Daemon::find_of_store(connection)? {
        Some(daemon) => daemon.ask(async |mut client| client.mounts(MountsRequest {}).await).await?.mounts,
        None => match connect::store_to_list(connection, out)? {
            Some(store) => mounts_of(store.store())?,
            None => Vec::new(),
        },
    };
    output::show(out, args.output, &mounts, || table(&mounts));
    Ok(Outcome::Done)
}

/// Mounts an image of this store. May block.
pub(crate) fn mount_of(store: &Store, image: &str, target: &Path, writable: bool) -> Result<Mount, Failure> {
    let options = MountOptions { writable };
    let mount = store.mount(image, target, options, SystemTime::now()).map_err(|error| {
        let failure = failed(&error);
        match error {
            MountError::Store(_) => failure.hint(format!("larder pull {image}")),
            _ => failure,
        }
    })?;
    Ok(shown(&mount))
}

/// Ends a mount of this store. May block.
pub(crate) fn umount_of(store: &Store, target: &Path, force: bool) -> Result<Mount, Failure> {
    store.umount_with(target, force).map(|mount| shown(&mount)).map_err(|error| failed(&error))
}

/// The mounts of this store.
pub(crate) fn mounts_of(store: &Store) -> Result<Vec<Mount>, Failure> {
    let mounts = store.mounts().map_err(|error| Failure::failed(chain(&error)))?;
    Ok(mounts.iter().map(shown).collect())
}

fn shown(mount: &MountRecord) -> Mount {
    Mount {
        target: mount.target.display().to_string(),
        image: mount.name.clone(),
        image_id: mount.image.to_string(),
        writable: mount.writable,
        mounted: mount.mounted,
    }
}

/// The path as the daemon, which is in another folder, understands it.
fn absolute(dir: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(dir).map_err(|error| Failure::bad_input(format!("{}: {error}", dir.display())))
}

fn text(path: &Path) -> Result<String, Failure> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        Failure::bad_input(format!("{}: a path for the daemon must be text in UTF-8", path.display()))
            .hint("stop the daemon and mount without it, or use another path")
    })
}

fn failed(error: &MountError) -> Failure {
    let failure = Failure::failed(chain(error));
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

fn table(mounts: &[Mount]) -> Table {
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
