//! Behaviour when no backend is named.

use std::fs::Permissions;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

use crate::world::{CliFixture, CliOutput, larder, unprivileged};

#[test]
fn without_a_backend_images_are_in_the_users_own_store_whatever_crictl_talks_to() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    let data = world.home.path().join("data");
    let run = |arguments: &[&str]| {
        let mut command = unprivileged(world.home.path());
        command.env("XDG_DATA_HOME", &data).env("LARDER_BACKEND", "");
        command.env("CONTAINER_RUNTIME_ENDPOINT", world.cri.endpoint().to_string());
        CliOutput::of(command.args(arguments).stdin(Stdio::null()).output().unwrap())
    };
    // The registry's name does not resolve; a store is created before the first request.
    run(&["pull", "127.0.0.1:1/no/such:1"]).expect(1);
    let info = run(&["runtime", "-o", "json"]).expect(0).json();
    assert_eq!(info["name"], "larder");
    assert_eq!(info["endpoint"], data.join("larder").to_string_lossy().into_owned());
    assert_eq!(run(&["images", "-q"]).expect(0).stdout, "");
}

#[test]
fn a_database_of_another_user_is_no_damage() {
    let world = CliFixture::new();
    let run = |arguments: &[&str]| {
        let mut command = unprivileged(world.home.path());
        command.args(["--root", "store"]).args(arguments);
        CliOutput::of(command.stdin(Stdio::null()).output().unwrap())
    };
    run(&["pull", "127.0.0.1:1/no/such:1"]).expect(1);
    for file in ["larder.db", "larder.db-wal"] {
        let path = world.home.path().join("store").join(file);
        fs_err::set_permissions(&path, Permissions::from_mode(0o000)).unwrap();
        for (arguments, code) in [(&["images"][..], 3), (&["gc", "--dry-run"], 3), (&["fsck"], 1)] {
            let failed = run(arguments).expect(code);
            assert!(failed.stderr.contains("Permission denied"), "{file}: {failed:?}");
            assert!(failed.stderr.contains("hint: run as the user who owns the store"), "{file}: {failed:?}");
            assert!(!failed.stderr.contains("rebuild"), "{file}: {failed:?}");
        }
        fs_err::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    }
    run(&["images"]).expect(0);
}

#[test]
fn a_daemon_that_does_not_serve_yet_is_waited_for() {
    let world = CliFixture::offering(&[]);
    let run = |arguments: &[&str]| {
        let mut command = larder(world.home.path());
        CliOutput::of(command.args(["--root", "store"]).args(arguments).output().unwrap())
    };
    run(&["pull", "127.0.0.1:1/no/such:1"]).expect(1);
    // A process with the arguments of a daemon, and the store's lock open.
    let script = "exec 9<store/lock; echo ready; read line";
    let mut daemon = Command::new("sh");
    daemon.args(["-c", script, "larder", "serve"]).current_dir(world.home.path());
    let mut daemon = daemon.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut ready = [0; 6];
    daemon.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    let lock = world.home.path().join("store/lock");
    fs_err::write(&lock, format!("{}\n", daemon.id())).unwrap();
    let waited = run(&["--timeout", "300ms", "status"]).expect(3);
    let expected = format!("error: the daemon (process {}) starts or stops\n", daemon.id());
    assert!(waited.stderr.contains(&expected) && waited.stderr.contains("waited 300ms"), "{waited:?}");
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(run(&["status"]).expect(3).stderr.contains("no daemon is running"));

    // Another process that has got the number since.
    let mut other = Command::new("sh");
    let mut other = other.args(["-c", "read line", "other", "serve"]).stdin(Stdio::piped()).spawn().unwrap();
    fs_err::write(&lock, format!("{}\n", other.id())).unwrap();
    assert!(run(&["--timeout", "300ms", "status"]).expect(3).stderr.contains("no daemon is running"));
    other.kill().unwrap();
    other.wait().unwrap();
}

/// Commands that bring no images; each is given what it needs to get as far as the store.
const LOOKING: [&[&str]; 14] = [
    &["images"],
    &["df"],
    &["mounts"],
    &["runtime"],
    &["inspect", "busybox"],
    &["rm", "busybox"],
    &["gc", "--dry-run"],
    &["explain", "busybox"],
    &["gc", "log"],
    &["keep"],
    &["keep", "busybox"],
    &["umount", "."],
    &["fsck"],
    &["fsck", "--rebuild"],
];

#[test]
fn a_mistyped_root_does_not_become_a_store() {
    let home = tempfile::tempdir().unwrap();
    fs_err::create_dir(home.path().join("empty")).unwrap();
    fs_err::write(home.path().join("file"), "").unwrap();
    for (root, said) in [
        ("nowhere", "no image store in nowhere"),
        ("empty", "no image store in empty"),
        ("file", "file is not a directory"),
    ] {
        for arguments in LOOKING {
            let run = larder(home.path()).args(["--root", root]).args(arguments).output().unwrap();
            let run = CliOutput::of(run).expect(3);
            assert!(run.stderr.contains(said) && run.stderr.contains("hint: "), "{arguments:?}: {run:?}");
            assert_eq!(run.stdout, "", "{arguments:?}");
        }
    }
    assert!(!home.path().join("nowhere").exists());
    assert_eq!(fs_err::read_dir(home.path().join("empty")).unwrap().count(), 0);
    let run = larder(home.path()).args(["--root", "file", "pull", "127.0.0.1:1/no:1"]).output().unwrap();
    assert!(CliOutput::of(run).expect(3).stderr.contains("file is not a directory"));
}

#[test]
fn commands_of_the_store_report_that_the_variable_has_no_effect() {
    let home = tempfile::tempdir().unwrap();
    let mut command = unprivileged(home.path());
    command.env("LARDER_BACKEND", "cri").args(["mount", "busybox", "/mnt"]);
    let run = CliOutput::of(command.output().unwrap()).expect(3);
    assert!(run.stderr.contains("LARDER_BACKEND=cri has no effect"), "{run:?}");
}

#[test]
fn pulls_without_a_pod_are_reported_without_one() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    let run = world.larder(&["-v", "pull", "busybox:1.36"]).expect(0);
    assert!(run.stderr.contains("info: Pulling image") && !run.stderr.contains("//"), "{run:?}");
}

#[test]
fn the_usual_daemon_is_not_asked_about_images_that_a_settings_file_names() {
    let home = tempfile::tempdir().unwrap();
    let at = |name: &str| home.path().join(name);
    fs_err::create_dir_all(at("run/larder")).unwrap();
    let daemon = UnixListener::bind(at("run/larder/larder.sock")).unwrap();
    fs_err::set_permissions(at("run/larder/larder.sock"), Permissions::from_mode(0o777)).unwrap();
    // It closes each connection; which way a command takes is seen before that.
    std::thread::spawn(move || daemon.incoming().for_each(drop));
    let mut command = unprivileged(home.path());
    command.env("XDG_RUNTIME_DIR", at("run")).env("LARDER_CONFIG", at("c.yaml")).stdin(Stdio::null());
    command.args(["-v", "images"]);
    let nowhere = at("nowhere").display().to_string();
    for (settings, asks, code) in [
        ("registryPullQPS: 7".to_owned(), true, 3),
        (format!("root: {nowhere}"), false, 3),
        (format!("state: {nowhere}"), false, 0),
        (format!("backend: unix://{nowhere}"), false, 3),
        (format!("containerRuntimeEndpoint: unix://{nowhere}"), false, 3),
    ] {
        let text = format!("apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n{settings}\n");
        fs_err::write(at("c.yaml"), text).unwrap();
        let run = CliOutput::of(command.output().unwrap()).expect(code);
        assert_eq!(run.stderr.contains("using the daemon at"), asks, "{settings}: {run:?}");
        assert_eq!(run.stderr.contains("larder.sock"), asks, "{settings}: {run:?}");
    }
}

#[test]
fn before_the_first_pull_there_is_nothing_to_collect_and_rules_can_be_set() {
    let home = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let mut command = unprivileged(home.path());
        CliOutput::of(command.args(arguments).stdin(Stdio::null()).output().unwrap())
    };
    for arguments in [&["gc"][..], &["gc", "--all-unused"], &["gc", "--free", "1GB"]] {
        assert_eq!(run(arguments).expect(0).stdout, "removed nothing\n", "{arguments:?}");
    }
    let plan = run(&["gc", "--dry-run", "-o", "json"]).expect(0).json();
    assert_eq!((&plan["dryRun"], &plan["reached"]), (&true.into(), &true.into()), "{plan}");
    assert_eq!(run(&["runtime", "-o", "json"]).expect(0).json()["name"], "larder");
    assert_eq!(run(&["keep", "-o", "json"]).expect(0).json(), serde_json::json!([]));
    assert!(!home.path().join(".local/share/larder").exists(), "reading creates nothing");
    run(&["keep", "busybox:1.36"]).expect(0);
    assert_eq!(run(&["keep", "-o", "json"]).expect(0).json().as_array().unwrap().len(), 1);
    assert_eq!(run(&["images", "-q"]).expect(0).stdout, "");
}

#[test]
fn before_the_first_pull_lists_are_empty_with_a_note() {
    let home = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let mut command = unprivileged(home.path());
        CliOutput::of(command.args(arguments).stdin(Stdio::null()).output().unwrap())
    };
    for list in ["images", "df", "mounts"] {
        let printed = run(&[list]).expect(0).stderr;
        assert!(printed.contains("no images pulled yet"), "{list}: {printed}");
        let data = run(&[list, "-o", "json"]).expect(0).json();
        assert!(data.as_array().is_none_or(Vec::is_empty), "{data}");
    }
    let printed = run(&["rm", "busybox"]).expect(3).stderr;
    assert!(
        printed.contains("nothing has been pulled yet") && printed.contains("hint: larder pull"),
        "{printed}"
    );
    assert!(!home.path().join(".local/share/larder").exists());
}
