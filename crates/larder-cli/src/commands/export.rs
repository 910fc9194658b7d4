//! `larder export` and `larder save`: images out of larder's own store. The node sends an archive; a directory or an
//! EROFS image is made of it here, with the rights of the user.

mod empty_directory;

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal as _, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use larder::error_chain;
use larder::hint::Hint;
use larder::reference::{Digest, ImageName};
use larder_agent::client::ArchiveDownload;
use larder_api::v1::{ExportFormat as ArchiveFormat, ExportRequest};
use larder_store::unpack::{ExtractOptions, SkippedFiles, UnpackError, extract_files, write_erofs_disk};

use crate::args::{ExportArgs, ExportFormat, SaveArgs};
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::interrupt::{InterruptHandle, InterruptSignals};
use crate::session::{CommandSession, ImageAccess};
use empty_directory::EmptyDirectory;

pub(super) async fn run(
    args: &ExportArgs,
    session: &CommandSession,
    interrupt: InterruptSignals,
) -> Result<CommandOutcome, Failure> {
    check_order("export", &args.image, args.dir.as_deref())?;
    check_suffix(args)?;
    let images = vec![args.image.clone().into()];
    let format = if args.format == ExportFormat::Oci { ArchiveFormat::Oci } else { ArchiveFormat::Files };
    // What reads the archive here knows sparse files.
    let sparse = args.to.is_some() || args.dir.is_some() || args.format == ExportFormat::Erofs;
    let request = ExportRequest { images, format: format.into(), sparse };
    let interrupt = interrupt.handle();
    if let Some(dir) = args.to.as_ref().or(args.dir.as_ref()) {
        let wanted = ExtractOptions { suid: args.honored.suid, dev: args.honored.dev };
        return to_directory(dir, wanted, request, session, &interrupt).await;
    }
    if args.honored.suid || args.honored.dev {
        return Err(Failure::bad_input("--suid and --dev are for --to: archives have all files as they are"));
    }
    let output = Output::of(args.output.as_deref())?;
    if args.format == ExportFormat::Erofs {
        return to_disk_image(output, request, session, &interrupt).await;
    }
    to_archive(output, request, session, &interrupt).await
}

pub(super) async fn save(
    args: &SaveArgs,
    session: &CommandSession,
    interrupt: InterruptSignals,
) -> Result<CommandOutcome, Failure> {
    let images = args.images.iter().cloned().map(Into::into).collect();
    let request = ExportRequest { images, format: ArchiveFormat::Oci.into(), sparse: false };
    let saved =
        to_archive(Output::of(args.output.as_deref())?, request, session, &interrupt.handle()).await?;
    if saved == CommandOutcome::Done {
        session.out.info("note: larder load restores the digests of the repositories; to other programs, which read the uncompressed layers, the images have other digests");
    }
    Ok(saved)
}

/// Fails where a file is named, as for `docker save`, and a directory would be written, or an archive where the name
/// says EROFS.
fn check_suffix(args: &ExportArgs) -> Result<(), Failure> {
    let image = args.image.to_string();
    let export = |more: &[&str]| {
        let words = ["export", &image].into_iter().chain(more.iter().copied());
        Hint::new().command(words.map(str::to_owned).collect::<Vec<_>>())
    };
    let suffix = |file: &Path| file.extension().and_then(|suffix| suffix.to_str()).map(str::to_lowercase);
    if let Some(dir) = args.dir.as_deref().filter(|dir| !dir.exists()) {
        let shown = dir.display().to_string();
        let hint = match suffix(dir).as_deref() {
            Some("tar") => export(&["-o", &shown]).text(" writes an archive"),
            Some("erofs") => export(&["-o", &shown, "--format", "erofs"]).text(" writes an EROFS filesystem"),
            Some("tgz" | "gz" | "zst" | "xz" | "bz2") => {
                export(&["-o", "-"]).text(format!(" writes an archive; compress it with | gzip > {shown}"))
            }
            _ => return Ok(()),
        };
        return Err(Failure::bad_input(format!(
            "{shown}: is the name of a file; export writes a directory here"
        ))
        .hint(hint)
        .hint(export(&["--to", &shown]).text(" writes a directory of this name")));
    }
    match args.output.as_deref() {
        Some(file)
            if args.format != ExportFormat::Erofs && suffix(file).is_some_and(|suffix| suffix == "erofs") =>
        {
            let shown = file.display().to_string();
            Err(Failure::bad_input(format!("{shown}: the name says EROFS, and the format is an archive"))
                .hint(export(&["-o", &shown, "--format", "erofs"])))
        }
        _ => Ok(()),
    }
}

/// Fails where a path stands for the image, as when image and directory were swapped. A path is no image's name.
pub(super) fn check_order(command: &str, image: &ImageName, dir: Option<&Path>) -> Result<(), Failure> {
    let text = image.as_str();
    let is_path = ["/", "./", "../", "~"].iter().any(|start| text.starts_with(start)) || text == ".";
    let is_swapped = || dir.is_some_and(|dir| !dir.exists() && dir.is_relative() && Path::new(text).is_dir());
    if !is_path && !is_swapped() {
        return Ok(());
    }
    let other = dir.map_or_else(|| "IMAGE".to_owned(), |dir| dir.display().to_string());
    Err(Failure::bad_input(format!("{text}: is a path, and an image is expected"))
        .hint(Hint::from("the image stands first: ").command([command.to_owned(), other, text.to_owned()])))
}

async fn begin(session: &CommandSession, request: ExportRequest) -> Result<ArchiveDownload, Failure> {
    let client = session.open(&ImageAccess::read().of_store()).await?;
    ArchiveDownload::begin(&client, request).await
}

async fn to_archive(
    output: Output,
    request: ExportRequest,
    session: &CommandSession,
    interrupt: &InterruptHandle,
) -> Result<CommandOutcome, Failure> {
    let Some(download) = interrupt.or(begin(session, request)).await else {
        return Ok(CommandOutcome::Interrupted);
    };
    let mut download = download?;
    let mut file = output.open()?;
    loop {
        let Some(piece) = interrupt.or(download.next()).await else { return Ok(CommandOutcome::Interrupted) };
        match piece? {
            Some(piece) => match file.write_all(&piece) {
                // The reader of the pipe has what it wanted.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(CommandOutcome::Done),
                written => written.map_err(|error| output.failed("write", &error))?,
            },
            None => break,
        }
    }
    output.complete(file)
}

/// Writes the image beside the file, which it replaces when it is complete.
async fn to_disk_image(
    output: Output,
    request: ExportRequest,
    session: &CommandSession,
    interrupt: &InterruptHandle,
) -> Result<CommandOutcome, Failure> {
    let Output::New { part, .. } = &output else {
        return Err(Failure::bad_input(format!("{output}: EROFS needs a file, not a stream or a device"))
            .hint("write a file with -o FILE"));
    };
    let download = begin(session, request).await?;
    let id = download.image_ids().first().and_then(|id| Digest::parse(id).ok());
    let id = id.ok_or_else(|| Failure::failed("the image has no digest"))?;
    let path = part.clone();
    let written =
        download.read_with(interrupt.interrupted(), move |files| write_erofs_disk(files, &id, &path)).await?;
    match written {
        None => Ok(CommandOutcome::Interrupted),
        Some(Err(error)) => Err(unpack_failure(&error)),
        Some(Ok(())) => {
            let opened = OpenOptions::new().read(true).open(part);
            let file = opened.map_err(|error| output.failed("open", &error))?;
            output.complete(Box::new(file))
        }
    }
}

async fn to_directory(
    dir: &Path,
    wanted: ExtractOptions,
    request: ExportRequest,
    session: &CommandSession,
    interrupt: &InterruptHandle,
) -> Result<CommandOutcome, Failure> {
    let target = EmptyDirectory::open(dir)?;
    let download = begin(session, request).await?;
    let path = target.path().to_owned();
    let written =
        download.read_with(interrupt.interrupted(), move |files| extract_files(files, &path, wanted)).await?;
    let skipped = match written {
        None => return Ok(CommandOutcome::Interrupted),
        Some(written) => written.map_err(|error| unpack_failure(&error))?,
    };
    target.keep();
    if skipped != SkippedFiles::default() {
        let SkippedFiles { devices, suid, xattrs } = skipped;
        session.out.info(format_args!(
            "note: {}: left out devices (--dev): {devices}, set-ID bits and capabilities of files (--suid): {suid}, extended attributes: {xattrs}",
            dir.display()
        ));
    }
    Ok(CommandOutcome::Done)
}

fn unpack_failure(error: &UnpackError) -> Failure {
    Failure::failed(error_chain(error))
}

/// The destination of an archive.
enum Output {
    Stdout,
    /// A pipe or device, written in place.
    Existing(PathBuf),
    /// A file, written as `part` beside it and renamed when it is complete. Until then, an old file stays.
    New {
        path: PathBuf,
        part: PathBuf,
    },
}

impl Output {
    fn of(file: Option<&Path>) -> Result<Output, Failure> {
        let Some(file) = file.filter(|file| *file != Path::new("-")) else {
            if io::stdout().is_terminal() {
                return Err(Failure::bad_input("no file given, and standard output is a terminal")
                    .hint("write a file with -o FILE, or pipe the output to another command"));
            }
            return Ok(Output::Stdout);
        };
        let shown = file.display();
        if file.as_os_str().as_encoded_bytes().ends_with(b"/") || file.is_dir() {
            let export =
                ["export", "IMAGE", "--to"].map(str::to_owned).into_iter().chain([shown.to_string()]);
            return Err(Failure::bad_input(format!("{shown}: is a directory"))
                .hint(Hint::from("name a file, or write the files of an image: ").command(export)));
        }
        match fs_err::metadata(file) {
            Ok(found) if !found.is_file() => return Ok(Output::Existing(file.to_owned())),
            _ => {}
        }
        // A link stays, and what it leads to is replaced.
        let path = fs_err::canonicalize(file).unwrap_or_else(|_| file.to_owned());
        let Some(name) = path.file_name() else {
            return Err(Failure::bad_input(format!("{shown}: names no file")));
        };
        let mut part = std::ffi::OsString::from(".");
        part.push(name);
        part.push(format!(".{}.part", std::process::id()));
        Ok(Output::New { part: path.with_file_name(part), path })
    }

    fn open(&self) -> Result<Box<dyn ArchiveFile>, Failure> {
        // Its errors are reported with the name of the file, not with that of the partial one.
        let mut options = OpenOptions::new();
        let opened = match self {
            Output::Stdout => return Ok(Box::new(io::stdout().lock())),
            Output::Existing(path) => options.write(true).open(path),
            // Images may contain secrets: other users cannot read the archive.
            Output::New { part, .. } => options.write(true).create_new(true).mode(0o600).open(part),
        };
        Ok(Box::new(opened.map_err(|error| self.failed("create", &error))?))
    }

    /// Everything is written.
    fn complete(&self, mut file: Box<dyn ArchiveFile>) -> Result<CommandOutcome, Failure> {
        file.finish().map_err(|error| self.failed("write", &error))?;
        if let Output::New { path, part } = self {
            std::fs::rename(part, path).map_err(|error| self.failed("replace", &error))?;
        }
        Ok(CommandOutcome::Done)
    }

    fn failed(&self, doing: &str, error: &io::Error) -> Failure {
        let failure = Failure::failed(format!("{self}: cannot {doing}: {error}"));
        match error.kind() {
            io::ErrorKind::NotFound => failure.hint("create its directory first"),
            io::ErrorKind::StorageFull => failure.hint("free space, or write to another filesystem"),
            _ => failure,
        }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Output::New { part, .. } = self {
            let _ = std::fs::remove_file(part); // it was renamed, or is incomplete
        }
    }
}

impl std::fmt::Display for Output {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Output::Stdout => f.write_str("standard output"),
            Output::Existing(path) | Output::New { path, .. } => path.display().fmt(f),
        }
    }
}

/// A file or a stream.
trait ArchiveFile: Write {
    /// Errors of writes that were delayed.
    fn finish(&mut self) -> io::Result<()>;
}

impl ArchiveFile for File {
    fn finish(&mut self) -> io::Result<()> {
        match self.sync_all() {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()), // a pipe
            synced => synced,
        }
    }
}

impl ArchiveFile for io::StdoutLock<'_> {
    fn finish(&mut self) -> io::Result<()> {
        self.flush()
    }
}
