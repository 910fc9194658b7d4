//! Real configurations, edited and taken back. `LARDER_BLESS=1` writes the edited ones.

use std::path::{Path, PathBuf};

use toml_edit::DocumentMut;

use super::edit::{self, EditProblem, ProxyPlugin};
use super::version::ContainerdVersion;
use super::{difference, files};

fn version(text: &str) -> ContainerdVersion {
    ContainerdVersion::find(text).expect("a version")
}

fn larder() -> ProxyPlugin {
    ProxyPlugin { address: "/run/larder/larder.sock".into(), root: "/var/lib/larder".into() }
}

fn documents(texts: &[&str]) -> Vec<DocumentMut> {
    texts.iter().map(|text| text.parse().expect("TOML")).collect()
}

fn configured(texts: &[&str], of: &str) -> Result<Vec<String>, EditProblem> {
    let mut documents = documents(texts);
    edit::configure(&mut documents, version(of), &larder())?;
    Ok(documents.iter().map(ToString::to_string).collect())
}

fn restored(text: &str) -> String {
    let mut document = documents(&[text]).remove(0);
    edit::restore(&mut document);
    document.to_string()
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/configuration/golden").join(name)
}

#[test]
fn default_configurations_are_edited_as_recorded_and_taken_back_unchanged() {
    for (name, of) in [
        ("debian-1.6", "1.6.20"),
        ("default-1.6", "1.6.32"),
        ("default-1.6", "1.6.20"),
        ("default-2.4", "2.4.0"),
        ("debian-1.6", "2.0.0"),
        ("default-1.6", "2.2.1"),
    ] {
        let text = fs_err::read_to_string(golden(&format!("{name}.toml"))).expect("a configuration");
        let edited = configured(&[&text], of).expect(name).remove(0);
        let change = difference::lines(&text, &edited).join("\n") + "\n";
        let expected = golden(&format!("{name}-under-{of}.diff"));
        if std::env::var_os("LARDER_BLESS").is_some() {
            fs_err::write(&expected, &change).expect("written");
        }
        assert_eq!(change, fs_err::read_to_string(&expected).expect("a golden file"), "{name} under {of}");
        let again = configured(&[&edited], of).expect(name).remove(0);
        assert_eq!(again, edited, "{name} under {of}: the second edit changes nothing");
        assert_eq!(restored(&edited), text, "{name} under {of}");
    }
}

#[test]
fn a_missing_file_is_made_with_the_version_of_its_containerd() {
    let made = configured(&[""], "1.7.20").expect("an edit").remove(0);
    assert!(made.starts_with("version = 2 # added by larder\n"), "{made}");
    assert_eq!(restored(&made), "");
    assert!(made.contains("snapshotter = \"larder\""), "{made}");
    let made = configured(&["# nothing yet\n"], "2.1.0").expect("an edit").remove(0);
    assert!(made.contains("version = 3 # added by larder\n") && made.contains("# nothing yet"), "{made}");
    assert_eq!(restored(&made), "# nothing yet\n");
    let more = restored(&format!("{made}[debug]\nlevel = \"debug\"\n"));
    assert!(more.contains("version = 3") && more.contains("[debug]"), "the rest is of this version: {more}");
    assert_eq!(configured(&["disabled_plugins = [\"cri\"]\n"], "1.6.32"), Err(EditProblem::Version1));
    assert_eq!(configured(&["version = 3\n"], "1.7.20"), Err(EditProblem::TooNew(3)));
    let inline = "version = 2\nproxy_plugins = { }\n";
    assert_eq!(configured(&[inline], "1.7.20"), Err(EditProblem::NoTable("proxy_plugins".into())));
}

#[test]
fn the_last_file_with_a_table_is_edited() {
    let main = "version = 2\nimports = [\"conf.d/*.toml\"]\n";
    let cri = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"pause:1\"\n";
    let edited = configured(&[main, cri, "version = 2\n"], "1.6.32").expect("an edit");
    assert!(edited[0].contains("[proxy_plugins.larder]") && !edited[0].contains("snapshotter"), "{edited:?}");
    assert!(edited[1].contains("snapshotter = \"larder\""), "its table replaces that of the main file");
    assert_eq!(edited[2], "version = 2\n");
}

#[test]
fn comments_stay_and_later_changes_are_not_taken_back() {
    let text =
        "version = 3 # ours\n[plugins.\"io.containerd.cri.v1.images\"]\n\tsnapshotter = 'native' # fast\n";
    let edited = configured(&[text], "2.1.0").expect("an edit").remove(0);
    assert!(edited.contains("\tsnapshotter = \"larder\" # set by larder, was 'native' # fast\n"), "{edited}");
    assert_eq!(restored(&edited), text);
    let since = edited.replace("snapshotter = \"larder\" # set", "snapshotter = \"zfs\" # set");
    assert!(restored(&since).contains("snapshotter = \"zfs\""), "{}", restored(&since));
    let by_hand =
        "version = 2\n[proxy_plugins.larder]\ntype = \"snapshot\"\naddress = \"/run/larder/larder.sock\"\n";
    assert_eq!(restored(by_hand), by_hand);
    assert!(edit::uses_larder(&documents(&[by_hand])[0]));
}

#[test]
fn a_table_that_only_has_tables_below_it_gets_its_header_and_loses_it_again() {
    let text =
        "version = 3\n[plugins.\"io.containerd.cri.v1.images\".pinned_images]\n  sandbox = \"pause:1\"\n";
    let edited = configured(&[text], "2.1.0").expect("an edit").remove(0);
    assert!(edited.contains("[plugins.\"io.containerd.cri.v1.images\"] # added by larder\n"), "{edited}");
    assert_eq!(restored(&edited), text);
}

#[test]
fn entries_of_the_transfer_service_are_kept() {
    let head = "version = 3\n[[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\n";
    let text = format!("{head}platform = \"linux/amd64\"\nsnapshotter = \"zfs\"\ndiffer = \"walking\"\n");
    let edited = configured(&[&text], "2.1.0").expect("an edit").remove(0);
    assert!(edited.starts_with(&text), "{edited}");
    assert_eq!(edited.matches("unpack_config]]").count(), 2, "zfs and larder: {edited}");
    assert_eq!(restored(&edited), text);
}

#[test]
fn runtimes_with_a_snapshotter_of_their_own_are_reported() {
    let text = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.kata]\nsnapshotter = \"devmapper\"\n";
    assert_eq!(
        edit::other_snapshotters(&documents(&[text])[0]),
        [("kata".to_owned(), "devmapper".to_owned())]
    );
}

#[test]
fn files_are_replaced_with_their_mode_after_a_copy_and_read_with_their_imports() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().expect("a directory");
    let main = dir.path().join("config.toml");
    fs_err::create_dir(dir.path().join("conf.d")).expect("a directory");
    for (name, text) in
        [("config.toml", "imports = [\"conf.d/*.toml\"]\n"), ("conf.d/a.toml", ""), ("conf.d/b", "")]
    {
        fs_err::write(dir.path().join(name), text).expect("a file");
    }
    let paths = |found: &[files::ConfigFile]| found.iter().map(|file| file.path.clone()).collect::<Vec<_>>();
    let read = files::read(&main).expect("files");
    assert_eq!(paths(&read), [main.clone(), dir.path().join("conf.d/a.toml")]);

    fs_err::set_permissions(&main, std::fs::Permissions::from_mode(0o640)).expect("a mode");
    let new = |old, new| files::Replacement { path: &main, old: Some(old), new };
    let text = fs_err::read_to_string(&main).expect("text");
    let backups = files::replace_all(&[new(&text, "version = 2\n")]).expect("replaced");
    assert_eq!(backups, [dir.path().join("config.toml.before-larder")]);
    let more = files::replace_all(&[new("version = 2\n", "version = 3\n")]).expect("replaced");
    assert_eq!(more, [dir.path().join("config.toml.before-larder.2")]);
    assert_eq!(fs_err::read_to_string(&main).expect("text"), "version = 3\n");
    assert_eq!(fs_err::read_to_string(&backups[0]).expect("text"), text);
    for path in [&main, &backups[0]] {
        let bits = fs_err::metadata(path).expect("a file").permissions().mode();
        assert_eq!(bits & 0o777, 0o640, "{}", path.display());
    }
    assert_eq!(paths(&files::read(&main).expect("files")), vec![main], "a copy is no import");
    let missing = files::read(&dir.path().join("none.toml")).expect("an empty file");
    assert_eq!((missing.len(), missing[0].text.as_deref()), (1, None));
}

#[test]
fn dotted_keys_are_edited_and_taken_back() {
    let head = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n";
    for (line, edit) in [
        (
            "containerd.snapshotter = \"native\"",
            "containerd.snapshotter = \"larder\" # set by larder, was \"native\"\n",
        ),
        (
            "containerd.default_runtime_name = \"runc\"",
            "containerd.snapshotter = \"larder\" # added by larder\n",
        ),
    ] {
        let text = format!("{head}{line}\n");
        let edited = configured(&[&text], "1.7.20").expect("an edit").remove(0);
        assert!(edited.contains(edit), "{edited}");
        assert_eq!(configured(&[&edited], "1.7.20"), Ok(vec![edited.clone()]));
        assert_eq!(restored(&edited), text);
    }
}

#[test]
fn keys_of_added_tables_that_were_changed_since_are_kept() {
    let edited = configured(&["version = 3\n"], "2.1.0").expect("an edit").remove(0);
    assert_eq!(restored(&edited), "version = 3\n");
    let images = "[plugins.\"io.containerd.cri.v1.images\"] # added by larder\n  snapshotter = ";
    let changed = edited.replace(&format!("{images}\"larder\""), &format!("{images}\"zfs\""));
    let kept = restored(&changed);
    assert!(kept.contains("[plugins.\"io.containerd.cri.v1.images\"]\n  snapshotter = \"zfs\"\n"), "{kept}");
    assert!(!kept.contains("larder"), "{kept}");
    let changed = edited.replace("type = \"snapshot\"", "type = \"content\"");
    let kept = restored(&changed);
    assert!(kept.contains("type = \"content\"\n  address = \"/run/larder/larder.sock\"\n"), "{kept}");
    let changed = edited.replace("\"overlayfs\"\n", "\"overlayfs\"\n  differ = \"walking\"\n");
    let kept = restored(&changed);
    assert!(kept.contains("snapshotter = \"overlayfs\"\n  differ = \"walking\"\n"), "{kept}");
    assert_eq!(kept.matches("unpack_config]]").count(), 1, "{kept}");
}

#[test]
fn the_plugin_is_not_taken_out_while_settings_name_it() {
    let file = |text: &str| files::ConfigFile {
        path: "/etc/containerd/config.toml".into(),
        text: Some(text.to_owned()),
        document: documents(&[text]).remove(0),
    };
    let edited = configured(&["version = 3\n"], "2.1.0").expect("an edit").remove(0);
    assert_eq!(super::restored(&[file(&edited)]).expect("nothing names it")[0].to_string(), "version = 3\n");
    let by_hand = "[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.kata]\nsnapshotter = \"larder\"\n\
        [[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\nsnapshotter = \"larder\"\n";
    let error = super::restored(&[file(&edited), file(by_hand)]).expect_err("refused");
    for place in [
        "plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.kata.snapshotter",
        "plugins.\"io.containerd.transfer.v1.local\".unpack_config.snapshotter",
    ] {
        let line = format!("\n  /etc/containerd/config.toml: {place}");
        assert!(error.message.contains(&line), "{}", error.message);
    }
    let plugin = "[proxy_plugins.larder]\ntype = \"snapshot\"\naddress = \"/run/larder/larder.sock\"\n";
    assert!(super::restored(&[file(&format!("{plugin}{by_hand}"))]).is_ok(), "it stays");
}

#[test]
fn templates_and_unchanged_files_may_say_that_they_are_generated() {
    let text = "# File generated by k3s. DO NOT EDIT. Use config.toml.tmpl instead.\n";
    let refuse = |path: &str| {
        let change = files::Replacement { path: Path::new(path), old: Some(text), new: "version = 2\n" };
        super::refuse_generated(&[change], version("1.7.20"))
    };
    let error = refuse("/k3s/config.toml").expect_err("refused");
    assert!(error.message.contains("/k3s/config.toml is generated"), "{}", error.message);
    assert!(refuse("/k3s/config.toml.tmpl").is_ok());
    assert!(super::refuse_generated(&[], version("1.7.20")).is_ok());
}

#[test]
fn a_change_that_no_containerd_can_read_first_is_not_verified() {
    let note = super::unverified_note(version("2.4.0"), None).expect("a note");
    assert!(note.contains("not verified: PATH has no program of containerd 2.4.0"), "{note}");
    assert_eq!(super::unverified_note(version("2.4.0"), Some(Path::new("containerd"))), None);
}

#[test]
fn ends_of_lines_are_kept() {
    for text in
        ["version = 3\r\n# mine\r\nroot = \"/srv\"\r\n", "version = 3\nroot = \"/srv\"", "version = 3 "]
    {
        let file = |text: &str| files::ConfigFile {
            path: "config.toml".into(),
            text: Some(text.to_owned()),
            document: documents(&[text]).remove(0),
        };
        let original = file(text);
        assert_eq!(original.edited(&original.document), text, "nothing is edited");
        let mut edited = vec![original.document.clone()];
        edit::configure(&mut edited, version("2.1.0"), &larder()).expect("an edit");
        let edited = original.edited(&edited[0]);
        assert!(edited.starts_with(text.trim_end()) && edited.contains("larder"), "{edited:?}");
        let (all, windows) = (edited.matches('\n').count(), edited.matches("\r\n").count());
        assert_eq!(windows, if text.contains('\r') { all } else { 0 }, "{edited:?}");
        assert_eq!(edited.ends_with('\n'), text.ends_with('\n'), "{edited:?}");
        let edited = file(&edited);
        let mut restored = edited.document.clone();
        edit::restore(&mut restored);
        assert_eq!(edited.edited(&restored).trim_end(), text.trim_end());
    }
}

#[test]
fn a_file_that_was_changed_since_is_not_replaced() {
    let dir = tempfile::tempdir().expect("a directory");
    let paths = ["a.toml", "b.toml"].map(|name| dir.path().join(name));
    for path in &paths {
        fs_err::write(path, "version = 2\n").expect("a file");
    }
    let change = |path| files::Replacement { path, old: Some("version = 2\n"), new: "version = 3\n" };
    fs_err::write(&paths[1], "# mine\n").expect("a file");
    let error = files::replace_all(&[change(&paths[0]), change(&paths[1])]).expect_err("changed since");
    assert!(error.message.contains("another program has changed it"), "{}", error.message);
    assert!(error.message.ends_with("; all files have their old text"), "{}", error.message);
    let texts = paths.each_ref().map(|path| fs_err::read_to_string(path).expect("text"));
    assert_eq!(texts, ["version = 2\n", "# mine\n"]);
}

#[test]
fn files_that_cannot_get_their_old_text_are_named_with_their_copies() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("config.toml");
    fs_err::create_dir(&path).expect("a directory in its place");
    let rest = files::put_back(&[files::Replacement { path: &path, old: Some("version = 2\n"), new: "" }]);
    let copy = dir.path().join("config.toml.before-larder");
    assert!(rest.starts_with(&format!("files without their old text:\n  {}: ", path.display())), "{rest}");
    assert!(rest.ends_with(&format!("; its old text is in {}", copy.display())), "{rest}");
    assert_eq!(fs_err::read_to_string(copy).expect("a copy"), "version = 2\n");
}
