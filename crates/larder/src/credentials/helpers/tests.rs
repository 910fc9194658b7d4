use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use super::*;
use crate::credentials::docker_config::DockerConfig;

/// A directory with one helper, a shell script.
fn helper(name: &str, script: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), name, script, 0o755);
    dir
}

fn put(dir: &Path, name: &str, script: &str, mode: u32) {
    let path = dir.join(format!("docker-credential-{name}"));
    fs_err::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs_err::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn store(name: &str) -> HelperNames {
    HelperNames::from_config(&DockerConfig { creds_store: Some(name.into()), ..DockerConfig::default() })
}

async fn got(script: &str) -> Result<Option<Credential>, HelperError> {
    let dir = helper("test", script);
    CredentialHelpers::on_path(dir.path().as_os_str()).get(&store("test"), "r.example:5000/team/app").await
}

#[tokio::test]
async fn a_helper_is_asked_for_the_registry_and_answers_with_a_login() {
    let script = r#"read server; echo "{\"Username\": \"$1 $server\", \"Secret\": \"hunter2\"}""#;
    let credential = got(script).await.unwrap().unwrap();
    assert_eq!(credential.username, "get r.example:5000");
    assert_eq!(credential.password.reveal(), "hunter2");
    assert_eq!(credential.source, None, "it is the node's");
}

#[tokio::test]
async fn a_helper_without_credentials_is_no_error() {
    let script = "echo 'credentials not found in native keychain'; exit 1";
    assert_eq!(got(script).await.unwrap(), None);
}

#[tokio::test]
async fn the_output_of_a_helper_is_in_no_error() {
    for script in [
        "echo hunter2; echo hunter2 >&2; exit 1",
        "echo hunter2; exit 0",
        "echo '{\"Secret\": \"hunter2\"'",
        "yes hunter2",
        "kill -9 $$",
    ] {
        let error = got(script).await.expect_err(script);
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        assert!(error.to_string().contains("docker-credential-test"), "{error}");
    }
}

#[tokio::test]
async fn missing_untrusted_and_misnamed_helpers_have_different_errors() {
    let dir = helper("mine", "true");
    put(dir.path(), "open", "true", 0o777);
    let helpers = CredentialHelpers::on_path(dir.path().as_os_str());
    let error = async |name: &str| helpers.get(&store(name), "r.example/app").await.unwrap_err();
    assert!(matches!(error("absent").await, HelperError::Find(HelperNotRunnable::Absent(_))));
    assert!(matches!(error("open").await, HelperError::Find(HelperNotRunnable::NotTrusted { .. })));
    assert!(matches!(error("../mine").await, HelperError::Find(HelperNotRunnable::Name(_))));
}

#[tokio::test]
async fn a_path_that_is_not_absolute_is_not_searched() {
    let helpers = CredentialHelpers::on_path(OsStr::new("::.:bin"));
    assert!(helpers.dirs.is_empty());
}

#[tokio::test]
async fn lookups_of_one_moment_share_a_run_and_later_ones_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let runs = dir.path().join("runs");
    let script = format!("echo x >> {}; echo '{{\"Username\": \"u\", \"Secret\": \"s\"}}'", runs.display());
    put(dir.path(), "test", &script, 0o755);
    let helpers = CredentialHelpers::on_path(dir.path().as_os_str());
    let names = store("test");
    let get = || helpers.get(&names, "r.example/app");
    let (a, b) = tokio::join!(get(), get());
    assert!(a.unwrap().is_some() && b.unwrap().is_some());
    assert_eq!(fs_err::read_to_string(&runs).unwrap(), "x\n");
    assert!(get().await.unwrap().is_some());
    assert_eq!(fs_err::read_to_string(&runs).unwrap(), "x\nx\n", "nothing is kept");
}

#[tokio::test(start_paused = true)]
async fn a_helper_that_hangs_is_given_up() {
    let error = got("sleep 1000").await.expect_err("it hangs");
    assert!(error.to_string().contains("did not end within 1m0s"), "{error}");
}
