//! The settings files that a daemon last ran with, for a start with files that cannot be used.
//!
//! Promises of such a start: no image is removed by GC, and a verification policy that cannot be read denies.

use std::path::{Path, PathBuf};

use larder::config::Verification;
use larder::files;
use larder::reference::Digest;
use serde::{Deserialize, Serialize};

use super::read::{ConfigReader, SettingsFiles, load_from};
use super::{Config, ConfigErrors, SettingsSource, SettingsSources};

/// The version of the saved format.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct SavedSettings {
    version: u32,
    files: SettingsFiles,
}

/// Where the settings files are saved: a file for each set of sources, below the root that needs no settings file.
fn saved_path(sources: &SettingsSources) -> Option<PathBuf> {
    let given = |wanted: &str| {
        sources.layers.iter().rev().find_map(|source| match source {
            SettingsSource::Given { key, value, .. } if *key == wanted => Some(PathBuf::from(value)),
            _ => None,
        })
    };
    let paths = sources.layers.iter().filter_map(|source| match source {
        SettingsSource::File { path, .. } | SettingsSource::KubeletFile(path) => Some(path),
        _ => None,
    });
    // The same relative path in another directory is another file.
    let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
    let paths: Vec<String> = paths.map(|path| absolute(path).display().to_string()).collect();
    let key = Digest::sha256(paths.join("\n"));
    let root = given("state").or_else(|| given("root")).or_else(|| sources.places.root.clone())?;
    Some(root.join("settings").join(format!("{}.json", key.hex().get(..16)?)))
}

/// Saves the files of settings that are in force. A failure is logged: it costs only a later start.
pub(crate) fn save(sources: &SettingsSources, files: &SettingsFiles) {
    let Some(path) = saved_path(sources).filter(|_| !files.is_empty()) else { return };
    if let Err(error) = write(&path, files) {
        tracing::warn!("cannot save the settings for a start with invalid ones: {error}");
    }
}

fn write(path: &Path, files: &SettingsFiles) -> std::io::Result<()> {
    let text = serde_json::to_vec(&SavedSettings { version: VERSION, files: files.clone() })?;
    if fs_err::read(path).is_ok_and(|saved| saved == text) {
        return Ok(());
    }
    larder::trusted_path::create_dir(path.parent().unwrap_or(Path::new("/")))?;
    files::replace_with_mode(path, &text, 0o600)
}

/// The configuration of the saved files, if these `errors` are of files and the saved ones have none.
pub(crate) fn load(sources: &SettingsSources, errors: &ConfigErrors) -> Option<Config> {
    let path = saved_path(sources)?;
    let saved = fs_err::read(&path).ok()?;
    let saved: SavedSettings = files::decode_document(&saved, VERSION)
        .inspect_err(|problem| tracing::warn!("{}: {problem}", path.display()))
        .ok()?;
    let mut config = load_from(sources, &|path, _| Ok(saved.files.get(path).cloned().flatten())).ok()?.0;
    config.verification =
        ConfigReader::verification_in(sources).unwrap_or_else(|_| Some(Verification::always_verify()));
    config.gc = config.gc.disabled();
    config.degraded = Some(errors.line());
    Some(config)
}

#[cfg(test)]
mod tests {
    use larder::reference::ImageName;

    use super::super::SettingOrigin;
    use super::super::read::load_with_files;
    use super::*;
    use crate::environment::DefaultPaths;

    #[test]
    fn a_hidden_policy_verifies_each_image_and_a_readable_one_stays() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("config.yaml");
        let root = dir.path().display().to_string();
        let layers = vec![
            SettingsSource::File { path: file.clone(), required: true },
            SettingsSource::Given { by: SettingOrigin::Flag("--root"), key: "root", value: root },
        ];
        let sources = SettingsSources { places: DefaultPaths::of(true, |_| None), layers };
        let write = |settings: &str| {
            let head = "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n";
            fs_err::write(&file, format!("{head}{settings}\n")).expect("a file");
            load_with_files(&sources)
        };
        let never = "imagePullCredentialsVerificationPolicy: NeverVerify";
        let (_, files) = write(never).expect("valid settings");
        save(&sources, &files);
        let broken = [
            ("imagePullCredentialsVerificationPolicy: NeverVerfy".to_owned(), true),
            ("imagePullCredentialsVerificationPolice: NeverVerify".to_owned(), true),
            (format!("{never}\nserializeImagePulls: maybe"), false),
        ];
        for (settings, verifies) in broken {
            let errors = write(&settings).expect_err("invalid settings");
            let config = load(&sources, &errors).expect("the last good settings");
            let verification = config.verification.expect("records are kept");
            let required = verification.required(&ImageName::from("private.example/app:1"), false);
            assert_eq!((required, config.gc.is_enabled()), (verifies, false), "{settings}");
        }
    }

    #[test]
    fn a_relative_path_in_another_directory_is_another_file() {
        let saved_below = |path: PathBuf| {
            let layers = vec![SettingsSource::File { path, required: true }];
            saved_path(&SettingsSources { places: DefaultPaths::of(true, |_| None), layers }).expect("a root")
        };
        let here = std::env::current_dir().expect("a directory");
        assert_eq!(saved_below("config.yaml".into()), saved_below(here.join("config.yaml")));
    }
}
