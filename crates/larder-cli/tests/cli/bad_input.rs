//! Input that cannot be used, and backends that cannot be reached: named, with the exit code that the help promises.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;

use larder_testkit_peers::fake_cri::Rpc;
use tonic::Code;

use crate::world::{CliFixture, CliOutput, larder};

const GOOD: &str = "apiVersion: v1
kind: Pod
metadata: {name: good}
spec: {containers: [{name: main, image: 'busybox:1.36'}]}
---
";

#[test]
fn each_bad_document_is_named_and_the_good_ones_proceed() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    let text = format!(
        "{GOOD}kind: Pod
  wrong: [indentation
---
services:
  web: {{image: busybox}}
---
apiVersion: v1
kind: Pod
metadata: {{name: empty, namespace: shop}}
spec: {{containers: []}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: api}}
spec:
  template:
    spec:
      containers:
        - name: upper
          image: Busybox
        - name: space
          image: 'busybox '
        - name: digest
          image: busybox@sha256:abc
        - name: none
          image: ''
---
apiVersion: v1
kind: Secret
metadata: {{name: broken}}
type: kubernetes.io/dockerconfigjson
data:
  .dockerconfigjson: not-base64!
---
apiVersion: v1
kind: ConfigMap
metadata: {{name: config}}
"
    );
    world.file("all.yaml", &text);
    let run = world.larder(&["ensure", "-f", "all.yaml"]).expect(2);
    run.with_sorted_events().golden("bad-documents.txt", &world);
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    world.file("good.yaml", GOOD);
    world.file("empty.yaml", "# nothing\n");
    world.file("services.yaml", "apiVersion: v1\nkind: Service\n");
    fs_err::create_dir(world.home.path().join("nothing")).unwrap();
    fs_err::write(world.home.path().join("binary.yaml"), b"a: 1\nb: \xff\n").unwrap();
    let huge = fs_err::File::create(world.home.path().join("huge.yaml")).unwrap();
    huge.set_len((16 << 20) + 1).unwrap();
    let files =
        ["missing.yaml", "empty.yaml", "services.yaml", "nothing", "binary.yaml", "huge.yaml", "good.yaml"];
    let arguments: Vec<_> =
        ["ensure"].into_iter().chain(files.iter().flat_map(|file| ["-f", file])).collect();
    world.larder(&arguments).expect(2).golden("bad-files.txt", &world);
}

#[test]
fn easy_slips_in_manifests_get_a_hint() {
    let world = CliFixture::new();
    let pod = |spec: &str| format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec: {spec}\n");
    for (text, hint) in [
        (pod("{containrs: [{name: a, image: 'a:1'}]}"), "containrs: did you mean containers?"),
        (pod("{containers: [{name: a, Image: 'a:1'}]}"), "Image: did you mean image?"),
        (pod("{containers: {name: a, image: 'a:1'}}"), "begin each entry with a dash"),
        (pod("{containers: [], containers: []}"), "remove one of them"),
        (
            pod("\n  containers:\n    - image: {{ .Values.image }}:{{ .Values.tag }}"),
            "this is a template: helm template CHART | larder ensure -f -",
        ),
        (pod("\n\tcontainers: []"), "indent with spaces, not tabs"),
    ] {
        let run = world.larder_reading(&text, &["ensure", "-f", "-"]).expect(2);
        assert!(run.stderr.contains(&format!("\nhint: {hint}\n")), "{text}\n{}", run.stderr);
    }
    let json = world
        .larder_reading("{\"apiVersion\": \"v1\",\n \"kind\" \"Pod\"}", &["ensure", "-f", "-"])
        .expect(2);
    assert!(
        json.stderr.contains("standard input:2: document 1: not valid JSON: missing or extra comma, colon, "),
        "{json:?}"
    );
    fs_err::write(world.home.path().join("wide.yaml"), b"\xff\xfea\0:\0").unwrap();
    let wide = world.larder(&["ensure", "-f", "wide.yaml"]).expect(2);
    assert!(
        wide.stderr.contains("hint: iconv -f UTF-16 -t UTF-8 wide.yaml | larder ensure -f -"),
        "{wide:?}"
    );
}

#[test]
fn input_without_anything_to_ensure_is_an_error() {
    let world = CliFixture::new();
    world.file("services.yaml", "apiVersion: v1\nkind: Service\n");
    world.larder(&["ensure", "-f", "services.yaml"]).expect(2).golden("nothing-to-ensure.txt", &world);
    assert_eq!(world.cri.received(), [], "the runtime is not asked");
}

#[test]
fn bad_arguments_are_named_and_the_good_ones_proceed() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    let long = "a/".repeat(200) + "a";
    let run = world.larder(&["ensure", "busybox:1.36", "Busybox", "", "https://r.example/app", &long]);
    let run = run.expect(2);
    for part in [
        "argument: \"Busybox\": repository name must be lowercase\nhint: did you mean busybox?",
        "argument: \"\": an image name must not be empty",
        "hint: did you mean r.example/app?",
        "repository name must not be more than 255 characters",
    ] {
        assert!(run.stderr.contains(part), "{part}: {}", run.stderr);
    }
    assert!(run.stdout.contains("0 present, 1 pulled, 0 failed"), "{run:?}");
}

#[test]
fn blank_names_are_refused_by_every_command_and_the_runtime_is_not_asked() {
    let world = CliFixture::new();
    for command in ["rm", "inspect", "pull", "ensure"] {
        for blank in ["", " "] {
            let run = world.larder(&[command, blank]).expect(2);
            assert!(run.stderr.starts_with(&format!("error: argument: {blank:?}: ")), "{command}: {run:?}");
        }
        world.larder(&["--backend", "/nowhere.sock", command, ""]).expect(2);
    }
    assert_eq!(world.cri.received(), []);
}

#[test]
fn contradictory_and_unknown_flags_are_bad_input() {
    let world = CliFixture::new();
    for arguments in [
        &["ensure"][..],
        &["ensure", "-R", "busybox:1"],
        &["ensure", "-n", "Team A", "busybox:1"],
        &["ensure", "-n", "", "busybox:1"],
        &["ensure", "--frob", "busybox:1"],
        &["ensure", "--policy", "Sometimes", "busybox:1"],
        &["ensure", "--retry-for", "soon", "busybox:1"],
        &["ensure", "--max-parallel-image-pulls", "0", "busybox:1"],
        &["ensure", "--serialize-image-pulls", "--max-parallel-image-pulls=2", "busybox:1"],
        &["ensure", "--backend", "tcp://127.0.0.1:1", "busybox:1"],
        &["images", "--timeout", "0", "-q"],
        &["images", "--timeout", "100000000h"],
        &["ensure", "--retry-for", "5000000000000000h", "busybox:1"],
        &["pull", "--username", "larder", "busybox:1"],
        &["pull", "--username", "larder", "--password-stdin", "busybox:1"],
        &["frob"],
    ] {
        let run = world.larder(arguments).expect(2);
        assert!(run.stderr.starts_with("error: "), "{arguments:?}: {run:?}");
        assert_eq!(run.stdout, "", "{arguments:?}");
    }
}

#[test]
fn an_authfile_that_cannot_be_used_is_named() {
    let world = CliFixture::new();
    fs_err::create_dir(world.home.path().join("directory")).unwrap();
    world.file("broken.json", "{\"auths\": {\"r.example\": {\"auth\": \"hunter2!\"}}}");
    let huge = fs_err::File::create(world.home.path().join("huge.json")).unwrap();
    huge.set_len(17 << 20).unwrap();
    for file in ["missing.json", "directory", "broken.json", "huge.json"] {
        let run = world.larder(&["pull", "--authfile", file, "busybox:1"]).expect(2);
        assert!(run.stderr.contains(&format!("error: --authfile: {file}: ")), "{run:?}");
        assert!(run.stderr.contains("hint: "), "{run:?}");
        assert!(!run.stderr.contains("hunter2"), "{run:?}");
    }
}

#[test]
fn a_skipped_docker_config_is_reported() {
    let world = CliFixture::offering(&["busybox:1"]);
    let config = world.file(".docker/config.json", "{\"auths\": 1}");
    let run = world.larder(&["pull", "busybox:1"]).expect(0);
    assert!(run.stderr.contains("warning: skipped credentials: "), "{run:?}");
    assert!(run.stderr.contains(&*config.to_string_lossy()), "{run:?}");
    world.file(".docker/config.json", "{\"credsStore\": \"pass\"}");
    let run = world.larder(&["pull", "busybox:1"]).expect(0);
    assert!(run.stderr.contains("docker-credential-pass not found in PATH"), "{run:?}");
}

#[test]
fn a_daemon_that_cannot_compare_settings_causes_no_warning() {
    let world = CliFixture::new();
    let socket = world.cri.endpoint().to_string();
    let mut command = larder(world.home.path());
    command.args(["--daemon", &socket, "--state", "state", "gc", "--dry-run"]);
    let run = CliOutput::of(command.output().unwrap()).expect(1);
    assert!(
        run.stderr.starts_with("error: ") && run.stderr.contains("does not support this call"),
        "{run:?}"
    );
}

#[test]
fn a_missing_socket_is_one_clear_line_and_exit_code_3() {
    let world = CliFixture::new();
    for command in
        [&["ensure", "busybox:1"][..], &["pull", "a:1"], &["images"], &["df"], &["runtime"], &["rm", "a"]]
    {
        let run = world.larder(&[&["--backend", "/nowhere/cri.sock"], command].concat()).expect(3);
        let lines: Vec<_> = run.stderr.lines().collect();
        assert_eq!(lines[0], "error: unix:///nowhere/cri.sock: socket not found", "{command:?}");
        assert!(lines.len() == 2 && lines[1].starts_with("hint: "), "{command:?}: {run:?}");
    }
}

#[test]
fn ensure_without_arguments_prints_its_usage() {
    let run = CliFixture::new().larder(&["ensure"]).expect(2);
    assert!(
        run.stderr.starts_with("error: nothing to ensure: name images or give -f FILE\nhint: "),
        "{run:?}"
    );
    let usage = CliFixture::new().larder(&["pull"]).expect(2).stderr;
    assert!(!usage.contains("--backend"), "{usage}");
}

#[test]
fn the_variable_names_a_runtime_and_a_bad_one_is_named() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    let run = |backend: &str| {
        let mut command = world.command(&["runtime"]);
        command.env("LARDER_BACKEND", backend);
        command.env("CONTAINER_RUNTIME_ENDPOINT", world.cri.endpoint().to_string());
        CliOutput::of(command.output().unwrap())
    };
    run("cri").expect(0);
    let gone = run("/nowhere.sock").expect(3);
    assert!(gone.stderr.ends_with("hint: the socket is set by LARDER_BACKEND\n"), "{gone:?}");
    let bad = run("http://x").expect(2);
    assert!(bad.stderr.starts_with("error: LARDER_BACKEND http://x: "), "{bad:?}");
}

#[test]
fn a_runtime_that_hangs_after_its_greeting_is_unreachable() {
    let world = CliFixture::new();
    world.cri.hold_next(Rpc::Version).release(); // the first call of the connection
    world.cri.hang_next(Rpc::Version);
    let run = world.larder(&["--timeout", "100ms", "runtime"]).expect(3);
    assert!(run.stderr.starts_with("error: the runtime did not answer in time: "), "{run:?}");
    let hint = format!(
        "\nhint: {} did not answer within 100ms: the runtime hangs, or --timeout is too short",
        world.cri.endpoint()
    );
    assert!(run.stderr.contains(&hint), "{run:?}");
}

#[test]
fn a_runtime_that_starts_within_the_retry_time_is_waited_for() {
    let mut world = CliFixture::offering(&["busybox:1.36"]);
    world.cri.stop();
    let mut command = world.command(&["ensure", "--retry-for", "60", "busybox:1.36"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut note = String::new();
    stderr.read_line(&mut note).unwrap();
    assert!(note.starts_with("note: waiting up to 1m0s for the runtime: unix:///"), "{note}");
    world.cri.restart();
    assert!(child.wait().unwrap().success());
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert!(!rest.contains("waiting"), "printed once: {rest}");
}

#[test]
fn an_unreachable_backend_outranks_bad_input_which_outranks_failure() {
    let mut world = CliFixture::new();
    world.cri.refuse(Rpc::PullImage, Code::Unknown, "no route to host");
    world.larder(&["ensure", "busybox:1"]).expect(1);
    world.larder(&["ensure", "busybox:1", "Bad"]).expect(2);
    world.cri.stop();
    world.larder(&["ensure", "busybox:1", "Bad"]).expect(3);
}

#[test]
fn programs_get_their_data_even_if_the_backend_is_unreachable() {
    let world = CliFixture::new();
    world.file("pods.yaml", &format!("{GOOD}{}", GOOD.replace("busybox:1.36", "Bad").replace("good", "bad")));
    for format in ["json", "yaml"] {
        let arguments = ["--backend", "/nowhere/cri.sock", "ensure", "-f", "pods.yaml", "-o", format];
        let run = world.larder(&arguments).expect(3);
        let value: serde_json::Value = serde_saphyr::from_str(&run.stdout).unwrap();
        assert_eq!(value["images"][0]["result"], "Unfinished", "{run:?}");
        assert_eq!(value["summary"]["unfinished"], 1, "{run:?}");
        assert_eq!(value["badInput"][0]["object"], "Pod default/bad", "{run:?}");
        assert!(run.stderr.contains("unix:///nowhere/cri.sock: socket not found"), "{run:?}");
        assert!(!run.stderr.contains("interrupted"), "{run:?}");
    }
}

#[test]
fn unreadable_files_are_reported_to_the_user() {
    if rustix::process::geteuid().is_root() {
        return; // root may read everything
    }
    let world = CliFixture::new();
    let path = world.file("locked.yaml", GOOD);
    fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
    let run = world.larder(&["ensure", "-f", "locked.yaml"]).expect(2);
    assert!(run.stderr.contains("locked.yaml: permission denied"), "{run:?}");
}

#[test]
fn a_file_that_is_given_as_an_image_is_pointed_out() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    for (name, step) in [("pod.yaml", "ensure -f"), ("app.tar", "load")] {
        let file = world.file(name, GOOD);
        let file = file.to_str().unwrap();
        for command in ["ensure", "pull"] {
            let run = world.larder(&[command, file]).expect(2);
            assert!(run.stderr.contains(&format!("{file} is a file here: larder ")), "{run:?}");
            assert!(run.stderr.contains(&format!(" {step} {file}")), "{run:?}");
        }
    }
}
