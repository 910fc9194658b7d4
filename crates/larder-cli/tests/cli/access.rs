//! Credential helpers and providers, what is remembered of them, and that nothing that they say gets out.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use larder_testkit_peers::fake_cri::Rpc;
use serde_json::json;

use crate::world::{CliFixture, CliOutput, unprivileged};

const HOST: &str = "127.0.0.1:5000";
const IMAGE: &str = "127.0.0.1:5000/private/ledger:3.1";

fn program(world: &CliFixture, path: &str, script: &str) {
    let path = world.file(path, &format!("#!/bin/sh\n{script}\n"));
    fs_err::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
}

/// A docker config with a login and a helper; the helper itself is another matter.
fn docker_config(world: &CliFixture) {
    let config = json!({
        "auths": {HOST: {"username": "file", "password": "file-pass"}},
        "credHelpers": {HOST: "test"},
    });
    world.file(".docker/config.json", &config.to_string());
}

fn helper(world: &CliFixture, script: &str) {
    program(world, "helpers/docker-credential-test", script);
}

/// A provider `test`, and the flags that name it.
fn provider(world: &CliFixture, script: &str) -> Vec<String> {
    program(world, "providers/test", script);
    let config = format!(
        "kind: CredentialProviderConfig
apiVersion: kubelet.config.k8s.io/v1
providers:
- name: test
  matchImages: ['{HOST}']
  defaultCacheDuration: 1m
  apiVersion: credentialprovider.kubelet.k8s.io/v1
  args: [get]
  env: [{{name: PLANTED, value: env-planted}}]
"
    );
    let config = world.file("providers.yaml", &config);
    let programs = config.with_file_name("providers");
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    vec![
        "--image-credential-provider-config".into(),
        text(&config),
        "--image-credential-provider-bin-dir".into(),
        text(&programs),
    ]
}

fn answer(user: &str, password: &str) -> String {
    let answer = json!({
        "kind": "CredentialProviderResponse",
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "cacheKeyType": "Image",
        "auth": {HOST: {"username": user, "password": password}},
    });
    format!("cat > /dev/null; echo '{answer}'")
}

fn command(world: &CliFixture, arguments: &[&str], more: &[String]) -> Command {
    let mut command = world.command(arguments);
    let helpers = world.home.path().join("helpers");
    command.args(more).env("PATH", format!("{}:/usr/bin:/bin", helpers.display())).stdin(Stdio::null());
    command
}

fn run(world: &CliFixture, arguments: &[&str], more: &[String]) -> CliOutput {
    CliOutput::of(command(world, arguments, more).output().unwrap())
}

/// The users that were sent, in order; empty without one.
fn shown(world: &CliFixture) -> Vec<String> {
    let pulls = world.cri.received().into_iter().filter(|received| received.rpc == Rpc::PullImage);
    pulls
        .map(|pull| pull.auth.map(|auth| format!("{}:{}", auth.username, auth.password)).unwrap_or_default())
        .collect()
}

#[test]
fn secrets_files_helpers_and_providers_are_tried_in_this_order() {
    let world = CliFixture::new(); // nothing is offered, so that every pull fails
    docker_config(&world);
    helper(&world, r#"echo '{"Username": "helper", "Secret": "helper-pass"}'"#);
    let flags = provider(&world, &answer("provider", "provider-pass"));
    let config = json!({"auths": {HOST: {"username": "secret", "password": "secret-pass"}}}).to_string();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"},
        "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": config},
    });
    let secret = world.file("secret.json", &secret.to_string());
    run(&world, &["ensure", IMAGE, "--secret", secret.to_str().unwrap()], &flags).expect(1);
    let order = ["secret", "file", "helper", "provider"].map(|of| format!("{of}:{of}-pass"));
    assert_eq!(shown(&world), order);
}

#[test]
fn a_helper_alone_and_a_provider_alone_get_an_image() {
    let world = CliFixture::offering(&[IMAGE]);
    world.file(".docker/config.json", &json!({"auths": {HOST: {}}, "credsStore": "test"}).to_string());
    helper(&world, r#"[ "$1" = get ] || exit 1; read s; echo "{\"Username\": \"$s\", \"Secret\": \"p\"}""#);
    run(&world, &["pull", IMAGE], &[]).expect(0);
    let flags = provider(&world, &answer("provider", "p"));
    world.file(".docker/config.json", "{}");
    run(&world, &["pull", IMAGE], &flags).expect(0);
    assert_eq!(shown(&world), [format!("{HOST}:p"), "provider:p".into()]);
}

#[test]
fn kubelets_way_asks_no_helpers() {
    let world = CliFixture::offering(&[IMAGE]);
    docker_config(&world);
    helper(&world, "echo ran > ran");
    run(&world, &["pull", "--kubelet", IMAGE], &[]).expect(0);
    assert!(!world.home.path().join("ran").exists());
}

#[test]
fn errors_of_providers_are_reported_before_any_pull() {
    let world = CliFixture::offering(&[IMAGE]);
    let flags = provider(&world, "true");
    let printed = |said: &str| {
        let run = run(&world, &["pull", IMAGE], &flags).expect(2);
        assert!(run.stderr.contains(said), "{said}: {run:?}");
        assert!(!run.stderr.contains("env-planted"), "{run:?}");
    };
    let program = world.home.path().join("providers/test");
    fs_err::set_permissions(&program, Permissions::from_mode(0o777)).unwrap();
    printed("is writable by users other than root");
    fs_err::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    fs_err::set_permissions(program.parent().unwrap(), Permissions::from_mode(0o777)).unwrap();
    printed("is writable by users other than root");
    fs_err::remove_file(&program).unwrap();
    printed("credential provider \"test\": ");
    let config = world.home.path().join("providers.yaml");
    let text = fs_err::read_to_string(&config).unwrap();
    for (from, to, said) in [
        ("  args", "  arguments", "line 8"),
        ("config.k8s.io/v1", "config.k8s.io/v9", "expected CredentialProviderConfig"),
        ("kubelet.k8s.io/v1", "kubelet.k8s.io/v9", "providers.apiVersion: Unsupported value"),
        ("name: test", "name: a/b", "provider name cannot contain '/'"),
    ] {
        fs_err::write(&config, text.replace(from, to)).unwrap();
        printed(said);
    }
    fs_err::write(&config, format!("{text}{}", text.split_once("providers:\n").unwrap().1)).unwrap();
    printed("duplicate provider name");
    assert_eq!(shown(&world), [""; 0]);
}

/// Everything below a directory, but for what a test planted there.
fn written(dir: &Path, planted: &[&Path], found: &mut Vec<(String, Vec<u8>)>) {
    for entry in fs_err::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if planted.iter().any(|own| path.starts_with(own)) {
            continue;
        }
        if path.is_dir() {
            written(&path, planted, found);
        } else if path.is_file() {
            found.push((path.display().to_string(), fs_err::read(&path).unwrap()));
        }
    }
}

#[test]
fn no_planted_secret_gets_out_at_any_level_of_logging() {
    let planted = ["file-pass", "helper-planted", "provider-planted", "env-planted", "stderr-planted"];
    for works in [true, false] {
        let world = if works { CliFixture::offering(&[IMAGE]) } else { CliFixture::new() };
        docker_config(&world);
        let mut scripts = vec![
            r#"echo '{"Username": "u", "Secret": "helper-planted"}'; echo stderr-planted >&2"#.to_owned(),
            "echo helper-planted; echo stderr-planted >&2; exit 1".to_owned(),
            "echo '{\"Secret\": \"helper-planted\"'".to_owned(),
            "yes helper-planted".to_owned(),
        ];
        for helper_script in scripts.drain(..) {
            helper(&world, &helper_script);
            for provider_script in [
                format!("echo $PLANTED stderr-planted >&2; {}", answer("u", "provider-planted")),
                "echo provider-planted $PLANTED; echo stderr-planted >&2; exit 3".to_owned(),
                "echo '{\"apiVersion\": \"provider-planted\"}'".to_owned(),
                answer("u", "provider-planted").replace("Image", "provider-planted"),
                "yes provider-planted".to_owned(),
            ] {
                let flags = provider(&world, &provider_script);
                let run = CliOutput::of(
                    command(
                        &world,
                        &["-v", "-v", "-v", "ensure", "--policy", "Always", IMAGE, "-o", "json"],
                        &flags,
                    )
                    .env("RUST_BACKTRACE", "1")
                    .output()
                    .unwrap(),
                );
                assert_eq!(run.code, Some(i32::from(!works)), "{run:?}");
                let mut found = vec![
                    ("standard output".to_owned(), run.stdout.into_bytes()),
                    ("standard error".to_owned(), run.stderr.into_bytes()),
                ];
                let own = [".docker", "helpers", "providers", "providers.yaml"]
                    .map(|own| world.home.path().join(own));
                written(world.home.path(), &own.each_ref().map(std::path::PathBuf::as_path), &mut found);
                for (place, bytes) in &found {
                    let text = String::from_utf8_lossy(bytes);
                    for secret in planted {
                        assert!(!text.contains(secret), "{secret} in {place}:\n{text}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_pod_without_the_secret_that_brought_an_image_has_to_show_one() {
    let world = CliFixture::offering(&[IMAGE]);
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"},
        "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": json!({"auths": {HOST: {"username": "u", "password": "p"}}}).to_string()},
    });
    let secret = world.file("secret.json", &secret.to_string());
    let with = ["ensure", IMAGE, "--secret", secret.to_str().unwrap()];
    run(&world, &with, &[]).expect(0);
    run(&world, &with, &[]).expect(0);
    assert_eq!(shown(&world), ["u:p"], "known the second time");
    run(&world, &["ensure", IMAGE, "--verify", "NeverVerify"], &[]).expect(0);
    let allowed = ["--verify", "NeverVerifyAllowlistedImages", "--verify-allow", "127.0.0.1:5000/private/*"];
    run(&world, &[&["ensure", IMAGE][..], &allowed].concat(), &[]).expect(0);
    assert_eq!(shown(&world), ["u:p"]);
    run(&world, &["ensure", IMAGE], &[]).expect(0);
    assert_eq!(shown(&world), ["u:p", ""], "it is asked for anonymously, which this registry allows");
    run(&world, &["ensure", IMAGE, "--policy", "Never"], &[]).expect(0);
    run(&world, &["ensure", IMAGE, "--verify", "Sometimes"], &[]).expect(2);
    let bad = ["ensure", IMAGE, "--verify", "NeverVerifyAllowlistedImages", "--verify-allow", "a:1"];
    assert!(run(&world, &bad, &[]).expect(2).stderr.contains("neither tag nor digest is accepted"));
}

/// A manifest of a pull secret with this uid and password.
fn secret_with_uid(world: &CliFixture, uid: &str, password: &str) -> String {
    let config = json!({"auths": {HOST: {"username": "u", "password": password}}}).to_string();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "uid": uid},
        "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": config},
    });
    world.file(&format!("{password}.json"), &secret.to_string()).to_str().unwrap().to_owned()
}

#[test]
fn a_uid_in_a_manifest_proves_nothing() {
    let world = CliFixture::offering(&[IMAGE]);
    let [right, wrong] = ["right", "wrong"].map(|password| secret_with_uid(&world, "u-1", password));
    run(&world, &["ensure", IMAGE, "--secret", &right], &[]).expect(0);
    let present = |secret: &str| {
        run(
            &world,
            &["ensure", IMAGE, "--policy", "Never", "--verify", "AlwaysVerify", "--secret", secret],
            &[],
        )
    };
    for _ in 0..2 {
        present(&wrong).expect(1);
    }
    present(&right).expect(0);
    assert_eq!(shown(&world), ["u:right"]);
}

#[test]
fn an_image_pulled_with_a_users_credential_is_not_for_every_pod() {
    let login =
        |password: &str| json!({"auths": {HOST: {"username": "u", "password": password}}}).to_string();
    for given in [&["--username", "u", "--password-stdin"][..], &["--authfile", "auth.json"], &[]] {
        let world = CliFixture::offering(&[IMAGE]);
        let as_user = |arguments: &[&str], password: &str| {
            match given {
                ["--authfile", name] => _ = world.file(name, &login(password)),
                [] => _ = world.file(".docker/config.json", &login(password)),
                _ => {}
            }
            let done = world.larder_reading(password, &[arguments, given].concat());
            let _ = fs_err::remove_file(world.home.path().join(".docker/config.json"));
            done
        };
        as_user(&["pull", IMAGE], "right").expect(0);
        assert_eq!(shown(&world), ["u:right"], "{given:?}");
        let present = ["ensure", IMAGE, "--policy", "Never"];
        run(&world, &present, &[]).expect(1);
        as_user(&present, "wrong").expect(1);
        as_user(&present, "right").expect(0);
    }
}

#[test]
fn a_program_that_the_groups_of_the_user_can_write_is_not_run() {
    let world = CliFixture::offering(&[IMAGE]);
    let flags = provider(&world, "true");
    let group =
        if rustix::process::geteuid().is_root() { 65534 } else { rustix::process::getegid().as_raw() };
    unprivileged(world.home.path());
    for name in ["providers", "providers/test"] {
        let path = world.home.path().join(name);
        std::os::unix::fs::chown(&path, rustix::process::geteuid().is_root().then_some(group), Some(group))
            .unwrap();
        fs_err::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    }
    let refused = || {
        let mut larder = unprivileged(world.home.path());
        let run =
            CliOutput::of(larder.args(["pull", IMAGE]).args(&flags).stdin(Stdio::null()).output().unwrap());
        run.stderr.contains("is writable by users other than root")
    };
    assert!(!refused());
    fs_err::set_permissions(world.home.path().join("providers/test"), Permissions::from_mode(0o775)).unwrap();
    assert!(refused());
}
