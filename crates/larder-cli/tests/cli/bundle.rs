//! The archive for a bug report: its contents, and that no secret is in it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use larder_testkit_peers::fake_cri::Rpc;
use larder_testkit_peers::process::{WAIT_LIMIT, poll};
use rustix::process::{Pid, Signal, kill_process};

use crate::world::CliFixture;

/// Unpacks a bundle, and returns the text of all its files with their names.
fn unpacked(world: &CliFixture, archive: &Path) -> Vec<(String, String)> {
    let dir = tempfile::tempdir_in(world.state().parent().unwrap()).unwrap();
    let packed = archive.extension().is_some_and(|suffix| suffix != "tar");
    let magic = fs_err::read(archive).unwrap().starts_with(&[0x1f, 0x8b]);
    assert_eq!(magic, packed, "{}", archive.display());
    let tar = Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(dir.path()).status().unwrap();
    assert!(tar.success());
    let inside = fs_err::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
    let files = fs_err::read_dir(inside).unwrap().map(|file| file.unwrap().path());
    files
        .map(|file| {
            let text = fs_err::read_to_string(&file).unwrap();
            (file.file_name().unwrap().to_string_lossy().into_owned(), text)
        })
        .collect()
}

fn text<'a>(files: &'a [(String, String)], name: &str) -> &'a str {
    files.iter().find(|(found, _)| found == name).map_or_else(|| panic!("no {name}"), |(_, text)| text)
}

#[test]
fn a_bundle_has_what_the_commands_print_and_is_for_its_owner_alone() {
    let world = CliFixture::offering(&["busybox:1"]);
    world.larder(&["pull", "busybox:1"]).expect(0);
    let file = world.file("here", "").with_file_name("report.tar.gz");
    let name = file.to_string_lossy().into_owned();
    let run = world.larder(&["bundle", "-o", &name]).expect(0);
    assert!(run.stdout.contains("gc-plan.json") && run.stdout.contains(&format!("wrote {name}")), "{run:?}");
    assert_eq!(fs_err::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);

    let files = unpacked(&world, &file);
    assert!(text(&files, "images.json").contains("busybox"), "{files:?}");
    assert!(text(&files, "settings.yaml").contains("imageGCHighThresholdPercent"), "{files:?}");
    assert!(text(&files, "version.txt").starts_with("larder "), "{files:?}");
    assert!(text(&files, "version.txt").contains("\nfeatures: "), "{files:?}");
    assert!(text(&files, "runtime.json").starts_with('{'), "{files:?}");
    assert!(text(&files, "status.json.error").contains("no daemon is running"), "{files:?}");
    for (name, _) in &files {
        let listed = name.trim_end_matches(".error");
        assert!(
            listed == "README.md" || text(&files, "README.md").contains(&format!("- {listed}: ")),
            "{name}"
        );
    }

    let plain = file.with_file_name("report.tar");
    world.larder(&["bundle", "-o", &plain.to_string_lossy()]).expect(0);
    assert!(text(&unpacked(&world, &plain), "images.json").contains("busybox"));

    let again = world.larder(&["bundle", "-o", &name]).expect(1);
    assert!(again.stderr.contains("report.tar.gz: already exists"), "{again:?}");
    let nowhere = world.larder(&["bundle", "-o", "/nonexistent/a.tar.gz"]).expect(2);
    let expected =
        "error: /nonexistent/a.tar.gz: no such directory: /nonexistent\nhint: create the directory";
    assert!(nowhere.stderr.contains(expected), "{nowhere:?}");
}

#[test]
fn an_interrupted_bundle_leaves_no_file() {
    let world = CliFixture::new();
    world.cri.hang_next(Rpc::Version);
    let dir = world.home.path().join("report");
    fs_err::create_dir(&dir).unwrap();
    let file = dir.join("report.tar.gz");
    let mut bundle = world.command(&["bundle", "-o", &file.to_string_lossy()]).spawn().unwrap();
    let begun = || fs_err::read_dir(&dir).unwrap().next().map(|_| ());
    poll(WAIT_LIMIT, begun).expect("a file for the archive");
    kill_process(Pid::from_child(&bundle), Signal::INT).unwrap();
    assert_eq!(bundle.wait().unwrap().code(), Some(130));
    assert!(begun().is_none(), "nothing is left");
}

#[test]
fn a_bundle_about_invalid_settings_has_the_file_without_its_secrets() {
    let world = CliFixture::offering(&["busybox:1"]);
    let head = "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n";
    let endpoints =
        ["ftp://h:1/hunter2a", "collector/hunter2b", "h:4317/hunter2c", "http://h:99999/hunter2d"];
    for (number, endpoint) in endpoints.into_iter().enumerate() {
        let settings = world.file(
            "config.yaml",
            &format!(
                "{head}gc: {{perod: 1m}}\ntracing: {{endpoint: '{endpoint}'}}\n\
                 prefetch:\n- image: https://bob:hunter2e@r.example/app\n"
            ),
        );
        let file = settings.with_file_name(format!("report-{number}.tar.gz"));
        let mut command = world.command(&["bundle", "-o", &file.to_string_lossy()]);
        let run = command.env("LARDER_CONFIG", &settings).output().unwrap();
        assert!(run.status.success(), "{run:?}");
        let files = unpacked(&world, &file);
        assert!(text(&files, "settings-file.yaml").contains("perod: 1m"), "{files:?}");
        assert!(text(&files, "status.json.error").contains("perod"), "{files:?}");
        assert!(text(&files, "status.json.error").contains("is selected with --daemon SOCKET"), "{files:?}");
        for (name, text) in &files {
            assert!(!text.contains("hunter2"), "{endpoint}: {name}: {text}");
        }
    }
}

#[test]
fn no_secret_is_in_a_bundle() {
    let world = CliFixture::offering(&["busybox:1"]);
    let secret = |number: usize| format!("hunter2secret{number}");
    world.file(".docker/config.json", &format!(
        r#"{{"auths": {{"r.example": {{"username": "bob", "password": "{}"}}, "q.example": {{"identitytoken": "{}"}}}}, "HttpHeaders": {{"X-Meta": "{}"}}}}"#,
        secret(1), secret(2), secret(3),
    ));
    world.file("certs.d/r.example/hosts.toml", &format!(
        "server = \"https://bob:{}@r.example\"\n[host.\"https://mirror.example\".header]\n  Authorization = \"Basic {}\"\n",
        secret(4), secret(5),
    ));
    let provider = world.file("provider.yaml", &format!(
        "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n- name: cloud\n  apiVersion: credentialprovider.kubelet.k8s.io/v1\n  matchImages: [r.example]\n  defaultCacheDuration: 1m\n  args: [--token={}]\n  env: [{{name: CLOUD_TOKEN, value: {}}}]\n",
        secret(6), secret(7),
    ));
    let bin = world.file("bin/cloud", &format!("#!/bin/sh\necho {} >&2\nexit 1\n", secret(8)));
    world.file("pods/pod.yaml", &format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: s}}\ntype: kubernetes.io/dockerconfigjson\nstringData: {{.dockerconfigjson: '{{\"auths\": {{\"r.example\": {{\"password\": \"{}\"}}}}}}'}}\n---\napiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec:\n  containers: [{{name: c, image: 'busybox:1', env: [{{name: PASSWORD, value: {}}}]}}]\n",
        secret(9), secret(10),
    ));
    let settings = world.file(
        "config.yaml",
        &format!(
            "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\nstaticPodPath: {}\nimageCredentialProviderConfig: {}\nimageCredentialProviderBinDir: {}\ntracing: {{endpoint: 'http://127.0.0.1:9/{}/v1/traces', protocol: http/protobuf}}\n",
            world.state().parent().unwrap().join("pods").display(),
            provider.display(),
            bin.parent().unwrap().display(),
            secret(17),
        ),
    );
    let file = settings.with_file_name("report.tar.gz");
    let certs = settings.with_file_name("certs.d");
    let mut command = world.command(&[
        "-vv",
        "--certs-d",
        &certs.to_string_lossy(),
        "bundle",
        "-o",
        &file.to_string_lossy(),
    ]);
    command.env("LARDER_CONFIG", &settings);
    command.env("HTTP_PROXY", format!("http://bob:{}@proxy.example:3128", secret(11)));
    command.env("https_proxy", format!("http://{}@proxy.example:3128", secret(12)));
    command.env("ALL_PROXY", format!("bob:{}@proxy.example:3128", secret(16)));
    command.env("REGISTRY_PASSWORD", secret(13));
    command.env("OTEL_EXPORTER_OTLP_HEADERS", format!("authorization=Bearer {}", secret(14)));
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://127.0.0.1:9/{}", secret(18)));
    command.env("LARDER_TOKEN", secret(15));
    let run = command.output().unwrap();
    assert!(run.status.success(), "{run:?}");

    let files = unpacked(&world, &file);
    for (name, text) in &files {
        assert!(!text.contains("hunter2secret"), "{name} has a secret:\n{text}");
    }
    let printed = format!("{run:?}");
    assert!(!printed.contains("hunter2secret"), "{printed}");
    // The settings that were planted are those that were read, and the hosts of proxies remain.
    assert!(text(&files, "settings.yaml").contains("pods"), "{files:?}");
    assert!(text(&files, "settings.yaml").contains("http://127.0.0.1:9/****"), "{files:?}");
    assert!(
        text(&files, "environment.txt").contains("HTTP_PROXY=http://****@proxy.example:3128"),
        "{files:?}"
    );
    assert!(text(&files, "environment.txt").contains("OTEL_EXPORTER_OTLP_HEADERS=(set)"), "{files:?}");
}
