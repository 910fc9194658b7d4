//! `larder mount`, `larder mounts`, `larder umount`: root filesystems out of larder's own store.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use larder::hint::Hint;
use larder_agent::client::Client;
use larder_agent::image_name::digits_of_id;
use larder_api::v1::{Mount, MountRequest, MountsRequest, StatusRequest, UnmountRequest};
use larder_store::mounts::is_seen_at;

use super::export;
use crate::args::{MountArgs, MountsArgs, UmountArgs};
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure};
use crate::output::table::TextTable;
use crate::output::{self, PrintFormat, size};
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn mount(args: &MountArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let Some(image) = &args.image else {
        return list(&MountsArgs { output: PrintFormat::default() }, session).await;
    };
    export::check_order("mount", image, args.dir.as_deref())?;
    let target = args.dir.as_deref().map(absolute).transpose()?;
    let client = session.open(&ImageAccess::write().of_store()).await?;
    let chosen = target.is_none().then(new_directory).transpose()?;
    let request = MountRequest {
        image: image.clone().into(),
        target: text(target.as_deref().or(chosen.as_deref()).unwrap_or(Path::new("")))?,
        writable: args.writable,
        suid: args.honored.suid,
        dev: args.honored.dev,
    };
    let answer = client.wait(async |mut calls| calls.mount(request).await).await;
    if let (Err(_), Some(dir)) = (&answer, &chosen) {
        let _ = fs_err::remove_dir(dir); // it is empty, or mounted after all
    }
    let mount = answer?.mount.unwrap_or_default();
    check_seen(&mount, &client).await?;
    session.out.line(&mount.target);
    Ok(CommandOutcome::Done)
}

/// Parent of the directories that larder chooses for mounts.
const MOUNTS: &str = "/run/larder/mounts";

/// A new directory to mount at.
fn new_directory() -> Result<PathBuf, Failure> {
    let failed = |error: io::Error| {
        Failure::failed(error.to_string())
            .hint(Hint::from("name a directory: ").command(["mount", "IMAGE", "DIR"]))
    };
    fs_err::create_dir_all(MOUNTS).map_err(failed)?;
    // Others may reach the files of an image, but not change which directory is mounted at.
    let mode = Permissions::from_mode(0o755);
    let dir = tempfile::Builder::new().prefix("").permissions(mode).tempdir_in(MOUNTS).map_err(failed)?;
    Ok(dir.keep())
}

/// Fails if the caller cannot see a mount of another process, which is then of no use to it. Where that cannot be
/// determined, the process is believed.
async fn check_seen(mount: &Mount, client: &Client) -> Result<(), Failure> {
    let target = &mount.target;
    if client.socket().is_none() || is_seen_at(Path::new(target)).unwrap_or(true) {
        return Ok(());
    }
    let status = client.ask(async |mut calls| calls.status(StatusRequest::default()).await).await;
    let process = status.map_or_else(|_| "PID".to_owned(), |status| status.pid.to_string());
    Err(Failure::failed(format!(
        "{target}: mounted by the daemon, but not visible here: this command and the daemon are in different mount namespaces"
    ))
    .hint(
        Hint::from(format!("nsenter --mount --target {process} COMMAND runs a command in the daemon's namespace; "))
            .command(["umount".to_owned(), target.clone()])
            .text(" unmounts it"),
    )
    .hint("remove mount settings from the daemon's unit (ProtectSystem=, PrivateTmp=, ...), or run this command outside its container"))
}

pub(super) async fn umount(args: &UmountArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let client = session.open(&ImageAccess::write().of_store()).await?;
    let mut outcome = CommandOutcome::Done;
    let mut dirs = args.dirs.clone();
    if args.all {
        let mounts = client.ask(async |mut calls| calls.mounts(MountsRequest {}).await).await?.mounts;
        dirs.extend(mounts.into_iter().map(|mount| PathBuf::from(mount.target)));
        dirs.sort_by_key(|dir| std::cmp::Reverse(dir.components().count())); // a mount inside another one first
    }
    for dir in &dirs {
        let target = match mounted_image(dir, &client).await? {
            Some(target) => target,
            None => text(&absolute(dir)?)?,
        };
        let request = UnmountRequest { target, force: args.force };
        match client.wait(async |mut calls| calls.unmount(request).await).await {
            Ok(answer) => {
                let target = answer.mount.unwrap_or_default().target;
                if Path::new(&target).parent() == Some(Path::new(MOUNTS)) {
                    let _ = fs_err::remove_dir(&target); // another mount may be there
                }
                out.line(target);
            }
            Err(failure) if failure.outcome() == CommandOutcome::Unreachable => return Err(failure),
            Err(failure) => outcome = outcome.max(failure.print(out)),
        }
    }
    Ok(outcome)
}

/// Where an image is mounted, if this is no path and names an image that is mounted once, as podman takes it.
async fn mounted_image(named: &Path, client: &Client) -> Result<Option<String>, Failure> {
    let Some(image) = named.to_str().filter(|_| named.is_relative() && !named.exists()) else {
        return Ok(None);
    };
    let mounts = client.ask(async |mut calls| calls.mounts(MountsRequest {}).await).await?.mounts;
    let target = text(&absolute(named)?)?;
    if mounts.iter().any(|mount| mount.target == target) {
        return Ok(None);
    }
    let found = mounts.iter().filter(|mount| is_image(image, mount)).map(|mount| mount.target.clone());
    match found.collect::<Vec<_>>().as_slice() {
        [] => Ok(None),
        [one] => Ok(Some(one.clone())),
        several => Err(Failure::bad_input(format!("{image}: mounted at {}", several.join(", ")))
            .hint("name the directories")),
    }
}

/// Whether the text is the mounted image's name, the end of it at a slash, with or without the tag, or the start of its
/// ID.
fn is_image(text: &str, mount: &Mount) -> bool {
    let repository = mount.image.rsplit_once(':').map_or(mount.image.as_str(), |(repository, _)| repository);
    let ends =
        |name: &str| name.strip_suffix(text).is_some_and(|before| before.is_empty() || before.ends_with('/'));
    let digits = mount.image_id.rsplit(':').next().unwrap_or_default();
    ends(&mount.image)
        || ends(repository)
        || digits_of_id(text).is_some_and(|start| digits.starts_with(start))
}

pub(super) async fn list(args: &MountsArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let mounts = match session.open_to_list(&ImageAccess::read().of_store()).await? {
        Some(client) => client.ask(async |mut calls| calls.mounts(MountsRequest {}).await).await?.mounts,
        None => Vec::new(),
    };
    output::show(&session.out, args.output, &mounts, || table(&mounts));
    Ok(CommandOutcome::Done)
}

/// An absolute path, since the daemon has another working directory.
fn absolute(dir: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(dir).map_err(|error| Failure::bad_input(format!("{}: {error}", dir.display())))
}

fn text(path: &Path) -> Result<String, Failure> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        Failure::bad_input(format!("{}: the daemon requires a path in UTF-8", path.display()))
            .hint("stop the daemon and mount without it, or use another path")
    })
}

fn table(mounts: &[Mount]) -> TextTable {
    let mut table = TextTable::new(["TARGET", "IMAGE", "IMAGE ID", "MODE", "STATE", "WRITTEN"]);
    for mount in mounts {
        let id = mount.image_id.split_once(':').map_or(mount.image_id.as_str(), |(_, digits)| digits);
        table.row([
            mount.target.clone(),
            mount.image.clone(),
            id.chars().take(13).collect(),
            if mount.writable { "read-write" } else { "read-only" }.into(),
            if mount.mounted { "mounted" } else { "unmounted" }.into(),
            if mount.writable { size::bytes(mount.written_bytes) } else { String::new() },
        ]);
    }
    table
}
