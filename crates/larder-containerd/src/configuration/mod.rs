//! Sets up a containerd to keep its snapshots in larder's store: edits its configuration, and checks the result.
//!
//! ```text
//! find containerd -> read its files -> edit -> difference            (nothing is written)
//!                                          \-> copy, replace, containerd reads them -> put back if it does not take them
//! ```
//!
//! Read `edit` first. Promises: containerd is never restarted; a change is written as a whole or not at all; only lines
//! of larder's own edit are taken back.

mod check;
mod difference;
mod edit;
mod error;
mod files;
mod installed;
#[cfg(test)]
mod tests;
mod version;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::ContainerdInspector;
use larder::backend::BackendError;
use larder::error_chain;
use larder::hint::Hint;
use larder_cri::CriConfig;
use tokio::task::spawn_blocking;
use toml_edit::{DocumentMut, Item};

use edit::{EditProblem, ProxyPlugin, SNAPSHOTTER};
use files::{ConfigFile, Replacement};
use installed::InstalledContainerd;

pub use check::{SetupCheck, check};
pub use error::{ConfigurationError, ConfigurationErrorKind};
pub use version::ContainerdVersion;

/// The flag for a program of containerd.
const PROGRAM_FLAG: &str = "--containerd";

/// Where containerd's main configuration file is by default.
pub const DEFAULT_CONFIG: &str = "/etc/containerd/config.toml";

/// Where the files are, and which containerd reads them.
#[derive(Debug, Clone)]
pub struct ContainerdFiles {
    /// containerd's main configuration file.
    pub config: PathBuf,
    /// Program or socket of containerd; `None`: whatever runs or is installed.
    pub containerd: Option<String>,
    /// kubelet's configuration file.
    pub kubelet: PathBuf,
}

/// The settings of larder that containerd's configuration has to agree with.
#[derive(Debug, Clone)]
pub struct LarderSettings {
    /// The socket of the daemon.
    pub socket: PathBuf,
    /// The directory of the store.
    pub root: PathBuf,
    /// How a CRI runtime is called.
    pub runtime: CriConfig,
    /// Whether the backend is larder's own store.
    pub uses_store: bool,
    /// Whether containerd keeps snapshots in the store.
    pub serves_snapshots: bool,
    /// The containerd that images are published to.
    pub containerd_socket: Option<String>,
}

impl ContainerdFiles {
    /// The command that does `what` with the same files and the same containerd.
    fn command(&self, what: &'static str) -> Vec<String> {
        let mut command = vec!["containerd".to_owned(), "configure".to_owned(), what.to_owned()];
        if self.config != Path::new(DEFAULT_CONFIG) {
            command.extend(["--config".to_owned(), self.config.display().to_string()]);
        }
        if let Some(containerd) = &self.containerd {
            command.extend(["--containerd".to_owned(), containerd.clone()]);
        }
        command
    }
}

/// A change of the configuration files.
pub struct ConfigChange {
    containerd: InstalledContainerd,
    files: Vec<ConfigFile>,
    /// The new text of each file.
    texts: Vec<String>,
    /// Notes about settings that the change does not cover.
    pub notes: Vec<String>,
    main: PathBuf,
}

/// The change that makes larder's store containerd's.
pub async fn plan(
    files: &ContainerdFiles,
    settings: &LarderSettings,
) -> Result<ConfigChange, ConfigurationError> {
    let plugin = ProxyPlugin {
        address: settings.socket.display().to_string(),
        root: settings.root.display().to_string(),
    };
    let (containerd, read) = open(files, settings).await?;
    let version = containerd.version;
    let mut documents: Vec<DocumentMut> = read.iter().map(|file| file.document.clone()).collect();
    let edited = edit::configure(&mut documents, version, &plugin);
    edited.map_err(|problem| refused(&problem, &files.config, version))?;
    let mut notes: Vec<String> = read.iter().flat_map(|file| notes_on(&file.document)).collect();
    notes.extend(image_directory_note(version, &read, &plugin));
    ConfigChange::of(containerd, read, &documents, notes, files)
}

/// The change that takes larder's edit back.
pub async fn plan_undo(
    files: &ContainerdFiles,
    settings: &LarderSettings,
) -> Result<ConfigChange, ConfigurationError> {
    let (containerd, read) = open(files, settings).await?;
    let documents = restored(&read)?;
    let mut notes = Vec::new();
    if documents.iter().any(edit::uses_larder) {
        let what =
            "lines that name larder remain: they have no comment of larder's, so take them out by hand";
        notes.push(what.to_owned());
    }
    ConfigChange::of(containerd, read, &documents, notes, files)
}

/// The documents without larder's edit. Fails if larder's snapshotter is gone with it and a setting still names it:
/// containerd's CRI does not start then.
fn restored(files: &[ConfigFile]) -> Result<Vec<DocumentMut>, ConfigurationError> {
    let mut documents: Vec<DocumentMut> = files.iter().map(|file| file.document.clone()).collect();
    documents.iter_mut().for_each(edit::restore);
    if documents.iter().any(edit::has_plugin) {
        return Ok(documents);
    }
    let mut places = String::new();
    for (file, document) in files.iter().zip(&documents) {
        for key in edit::references(document) {
            let _ = write!(places, "\n  {}: {key}", file.path.display());
        }
    }
    if places.is_empty() {
        return Ok(documents);
    }
    let what =
        format!("settings without larder's comment name its snapshotter, and CRI would not start:{places}");
    Err(ConfigurationError::failed(what)
        .hint("give them another snapshotter, such as overlayfs, or remove them"))
}

async fn open(
    files: &ContainerdFiles,
    settings: &LarderSettings,
) -> Result<(InstalledContainerd, Vec<ConfigFile>), ConfigurationError> {
    let containerd = InstalledContainerd::find(files.containerd.as_deref(), settings).await?;
    let main = files.config.clone();
    let read = spawn_blocking(move || files::read(&main)).await;
    let read = read.map_err(|error| ConfigurationError::failed(error.to_string()))??;
    let version = containerd.version;
    if !version.is_supported() {
        return Err(ConfigurationError::failed(format!(
            "containerd {version} is too old: larder works with 1.6 and later"
        )));
    }
    Ok((containerd, read))
}

impl ConfigChange {
    fn of(
        containerd: InstalledContainerd,
        files: Vec<ConfigFile>,
        documents: &[DocumentMut],
        mut notes: Vec<String>,
        of: &ContainerdFiles,
    ) -> Result<ConfigChange, ConfigurationError> {
        let texts = files.iter().zip(documents).map(|(file, document)| file.edited(document)).collect();
        notes.extend(unverified_note(containerd.version, containerd.program.as_deref()));
        let change = ConfigChange { containerd, files, texts, notes, main: of.config.clone() };
        refuse_generated(&change.replacements(), change.containerd.version)?;
        Ok(change)
    }

    fn replacements(&self) -> Vec<Replacement<'_>> {
        let pairs = self.files.iter().zip(&self.texts);
        let all = pairs.map(|(file, new)| Replacement { path: &file.path, old: file.text.as_deref(), new });
        all.filter(|one| one.old.unwrap_or_default() != one.new).collect()
    }

    /// Whether the files are as they should be.
    pub fn is_empty(&self) -> bool {
        self.replacements().is_empty()
    }

    /// The containerd that it is for, such as `containerd 1.6.20 (unix:///run/containerd/containerd.sock)`.
    pub fn target(&self) -> String {
        format!("containerd {} ({})", self.containerd.version, self.containerd.source)
    }

    /// The changed lines of each file.
    pub fn differences(&self) -> Vec<(PathBuf, Vec<String>)> {
        let all = self.replacements().into_iter();
        all.map(|one| (one.path.to_owned(), difference::lines(one.old.unwrap_or_default(), one.new)))
            .collect()
    }

    /// Writes the files. Returns the copies of the old ones. Puts these back if containerd cannot read the new ones, or
    /// with `is_setup` does not take larder from them.
    pub async fn apply(&self, is_setup: bool) -> Result<Vec<PathBuf>, ConfigurationError> {
        let replacements = self.replacements();
        let backups = files::replace_all(&replacements)?;
        let problem = match self.containerd.dump_snapshotter(&self.main).await {
            Err(error) => error.message,
            Ok(Some(found)) if is_setup && found != SNAPSHOTTER => {
                format!("containerd would use the snapshotter {found:?} with it")
            }
            Ok(_) => return Ok(backups),
        };
        let rest = files::put_back(&replacements);
        let what = format!("cannot change {}: {problem}; {rest}", self.main.display());
        Err(ConfigurationError::failed(what))
    }

    /// Fails if containerd has images that cannot be run after the change is taken back, or containers that cannot be
    /// removed.
    pub async fn refuse_dependents(&self) -> Result<(), ConfigurationError> {
        let inspector = ContainerdInspector::new(&self.containerd.cri);
        let force = |hint: Hint| hint.setting("force", "").text(" takes the change back all the same");
        let failed = |error: BackendError| {
            let what = format!("cannot determine which images need larder: {}", error_chain(&error));
            ConfigurationError::unreachable(what).hint(force(Hint::new()))
        };
        let containers = inspector.containers_on(SNAPSHOTTER).await.map_err(failed)?;
        let images = inspector.images_without_layers(SNAPSHOTTER).await.map_err(failed)?;
        if containers.is_empty() && images.is_empty() {
            return Ok(());
        }
        let mut what = format!(
            "{} containers and {} images of containerd need larder's store:",
            containers.len(),
            images.len()
        );
        for line in containers.iter().map(|id| format!("container {id}")).chain(images) {
            what.push_str("\n  ");
            what.push_str(&line);
        }
        let hint = Hint::from("drain the node, then ").command(["rm", "--force"]);
        let hint = hint.text(" removes images from both; containerd pulls them again; or ");
        Err(ConfigurationError::failed(what).hint(force(hint)))
    }
}

/// Fails if another program would write a changed file again. A template that is a copy of such a file has its first
/// lines.
fn refuse_generated(
    changes: &[Replacement<'_>],
    version: ContainerdVersion,
) -> Result<(), ConfigurationError> {
    let is_generated = |change: &&Replacement<'_>| {
        let is_template = change.path.extension().is_some_and(|extension| extension == "tmpl");
        let mut first = change.old.unwrap_or_default().lines().take(5);
        !is_template && first.any(|line| line.contains("DO NOT EDIT"))
    };
    changes.iter().find(is_generated).map_or(Ok(()), |change| Err(generated(change.path, version)))
}

/// Without a program of this version, containerd does not read the result before it is started with it.
fn unverified_note(version: ContainerdVersion, program: Option<&Path>) -> Option<String> {
    program.is_none().then(|| {
        format!(
            "not verified: PATH has no program of containerd {version}; name the program with {PROGRAM_FLAG}"
        )
    })
}

fn generated(path: &Path, version: ContainerdVersion) -> ConfigurationError {
    let template = if version.has_split_cri() { "config-v3.toml.tmpl" } else { "config.toml.tmpl" };
    let template = path.with_file_name(template);
    let what = format!("{} is generated: a change would be lost with the next start", path.display());
    ConfigurationError::failed(what).hint(format!(
        "k3s and RKE2 make it from {}: copy the generated file there and configure that one",
        template.display()
    ))
}

fn refused(problem: &EditProblem, main: &Path, version: ContainerdVersion) -> ConfigurationError {
    let place = main.display();
    match problem {
        EditProblem::Version1 => {
            let what = format!("{place}: the configuration has version 1, whose plugins have other names");
            let command = if version.has_split_cri() { "migrate" } else { "dump" };
            ConfigurationError::failed(what)
                .hint(format!("`containerd config {command}` prints it in a later version"))
        }
        EditProblem::TooNew(found) => ConfigurationError::failed(format!(
            "{place}: containerd {version} does not read version {found} of its configuration"
        )),
        EditProblem::NoTable(what) => {
            let hint = format!("write it as a table with a header of its own: [{what}]");
            ConfigurationError::failed(format!("{place}: {what} is not a table with a header")).hint(hint)
        }
    }
}

/// Returns notes about a configuration before larder is in it.
fn notes_on(document: &DocumentMut) -> Vec<String> {
    let mut notes = Vec::new();
    let disabled = document.get("disabled_plugins").and_then(Item::as_array);
    if disabled
        .into_iter()
        .flatten()
        .filter_map(toml_edit::Value::as_str)
        .any(|name| ["cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images"].contains(&name))
    {
        notes.push("CRI is in disabled_plugins: kubelet cannot use this containerd".to_owned());
    }
    for (runtime, snapshotter) in edit::other_snapshotters(document) {
        notes.push(format!(
            "runtime {runtime} keeps its own snapshotter {snapshotter}: larder's images do not run with it"
        ));
    }
    notes
}

/// Without `exports`, CRI measures the filesystem of images at a directory that no plugin makes.
fn image_directory_note(
    version: ContainerdVersion,
    files: &[ConfigFile],
    plugin: &ProxyPlugin,
) -> Option<String> {
    if version.has_exports() {
        return None;
    }
    let mut roots = files.iter().rev().filter_map(|file| file.document.get("root")?.as_str());
    let root = roots.next().unwrap_or("/var/lib/containerd");
    let dir = Path::new(root).join("io.containerd.snapshotter.v1.larder");
    (!dir.exists()).then(|| {
        let dir = dir.display();
        format!(
            "containerd {version} measures the filesystem of images at {dir}: ln -s {} {dir}",
            plugin.root
        )
    })
}

/// The next step after a change was printed.
pub fn before_change(files: &ContainerdFiles, is_undo: bool) -> Hint {
    let write = if is_undo { "--undo" } else { "--apply" };
    Hint::new().command(files.command(write)).text(" writes it")
}

/// The next steps after a change was written.
pub fn after_change(files: &ContainerdFiles, is_setup: bool) -> Vec<Hint> {
    let restart = Hint::from("systemctl restart containerd puts it into effect; containers keep running");
    let check = Hint::new().command(files.command("--check")).text(" says whether it took effect");
    if is_setup { vec![restart, check] } else { vec![restart] }
}
