//! Nothing that the daemon and its clients produce holds a secret: secrets are planted everywhere, and looked for
//! everywhere.

use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use larder::credentials::{Secret, encode_auth};
use larder_testkit_peers::registry::{PASSWORD, USER};
use larder_testkit_peers::{ImageBuilder, RegistryAccess, RegistryOptions};
use rustix::process::Signal;
use serde_json::json;

use crate::served::CriDaemon;
use crate::world::{LarderOutput, RuntimeFixture, pod_with_secrets};

/// All that is planted; the one with which the registry can be used is the last.
const PLANTED: [&str; 9] = [
    "planted-in-secret",
    "planted-in-file",
    "planted-in-helper",
    "planted-in-provider",
    "planted-in-env",
    "planted-on-stderr",
    "planted-as-token",
    "planted-in-login",
    PASSWORD,
];

/// Whose passwords are planted; a token has no user.
const USERS: [&str; 5] = [USER, "of-file", "of-helper", "of-provider", ""];

fn docker_config(registry: &str, user: &str, password: &str) -> serde_json::Value {
    json!({"auths": {registry: {"username": user, "password": password}}})
}

fn secret(name: &str, registry: &str, password: &str) -> String {
    secret_with(name, &docker_config(registry, USER, password))
}

fn secret_with(name: &str, config: &serde_json::Value) -> String {
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name},
        "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": config.to_string()},
    });
    format!("{secret}\n---\n")
}

/// Plants what can be planted on the machine. Programs note how they were started.
fn plant(world: &RuntimeFixture, host: &str) -> Vec<String> {
    fs_err::create_dir_all(world.path(".docker")).unwrap();
    let mut config = docker_config(host, "of-file", PLANTED[1]);
    config["credHelpers"] = json!({host: "test"});
    world.file(".docker/config.json", &config.to_string());
    let noted = world.path("noted");
    fs_err::create_dir_all(&noted).unwrap();
    let note = |name: &str| {
        format!(
            "cat /proc/$$/environ > {noted}/{name}-environ; tr '\\0' ' ' < /proc/$$/cmdline > {noted}/{name}-cmdline"
        )
    };
    let answer = json!({"Username": "of-helper", "Secret": PLANTED[2]});
    let script = format!("{}; cat >&2; echo {} >&2; echo '{answer}'", note("helper"), PLANTED[5]);
    world.program("helpers/docker-credential-test", &script);
    let version = "credentialprovider.kubelet.k8s.io/v1";
    let answer = json!({
        "kind": "CredentialProviderResponse", "apiVersion": version, "cacheKeyType": "Registry",
        "auth": {host: {"username": "of-provider", "password": PLANTED[3]}},
    });
    let script =
        format!("{}; cat > /dev/null; echo $KEY {} >&2; echo '{answer}'", note("provider"), PLANTED[5]);
    world.program("providers/test", &script);
    let config = json!({
        "kind": "CredentialProviderConfig", "apiVersion": "kubelet.config.k8s.io/v1",
        "providers": [{
            "name": "test", "matchImages": [host], "defaultCacheDuration": "0s", "apiVersion": version,
            "env": [{"name": "KEY", "value": PLANTED[4]}],
        }],
    });
    vec![
        "--image-credential-provider-config".into(),
        world.file("providers.json", &config.to_string()),
        "--image-credential-provider-bin-dir".into(),
        world.path("providers"),
    ]
}

/// All files below a directory.
fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs_err::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            files(&path, found);
        } else if path.is_file() {
            found.push(path);
        }
    }
}

#[track_caller]
fn assert_clean(place: &str, bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    for planted in PLANTED {
        let at = text.find(planted).unwrap_or_default();
        let around: String = text.chars().skip(at.saturating_sub(200)).take(500).collect();
        assert!(!text.contains(planted), "{planted} is in {place}: ... {around} ...");
        for user in USERS {
            let encoded = encode_auth(user, &Secret::new(planted));
            assert!(!text.contains(encoded.reveal()), "{planted} of {user:?}, encoded, is in {place}");
        }
    }
}

#[test]
fn no_planted_secret_is_in_anything_that_the_daemon_and_its_clients_produce() {
    let options = RegistryOptions { auth: RegistryAccess::Basic, ..RegistryOptions::default() };
    for world in RuntimeFixture::of_each_backend(options) {
        ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
        let (image, host) = (world.registry.image("shop/web:1"), world.registry.address());
        let flags = plant(&world, &host);
        let state = world.path("state");
        let mut arguments = vec!["--metrics-address", "", "--log-level", "trace", "--state", &state];
        arguments.extend(flags.iter().map(String::as_str));
        let daemon = CriDaemon::with(&world, &arguments);
        let socket = daemon.socket.to_string_lossy().into_owned();
        let ask = |arguments: &[&str]| -> LarderOutput {
            world.larder(&[&["-v", "-v", "-v", "--daemon", &socket][..], arguments].concat())
        };
        let pod = |name: &str, secrets: &[&str]| pod_with_secrets(name, "Always", &[&image], secrets);
        let token = secret_with("token", &json!({"auths": {host.as_str(): {"identitytoken": PLANTED[6]}}}));
        let wrong = pod("wrong", &["s", "token"]) + &secret("s", &host, PLANTED[0]) + &token;
        let wrong = world.file("wrong.yaml", &wrong);
        let right = world.file("right.yaml", &(pod("right", &["s"]) + &secret("s", &host, PASSWORD)));
        let log_in = |password: &str| -> LarderOutput {
            let authfile = world.path("logins.json");
            let login =
                ["-v", "-v", "-v", "login", "-u", USER, "--password-stdin", "--authfile", &authfile, &host];
            world.larder_reading(&login, &world.file("password", password))
        };

        let mut runs = vec![
            ("a pull that fails", ask(&["ensure", "-f", &wrong]).expect(1)),
            ("a pull that fails, as data", ask(&["ensure", "-f", &wrong, "-o", "json"]).expect(1)),
            ("a pull", ask(&["ensure", "-f", &right]).expect(0)),
            ("a login that fails", log_in(PLANTED[7]).expect(1)),
            ("a login", log_in(PASSWORD).expect(0)),
            ("explain access", ask(&["explain", "access", &image, "-f", &wrong]).expect(1)),
        ];
        let tried = world.registry.refused_users();
        for user in [USER, "of-file", "of-helper", "of-provider"] {
            assert!(tried.iter().any(|refused| refused == user), "{user} was not tried: {tried:?}");
        }
        for arguments in [
            &["events", "-o", "json"][..],
            &["status", "-o", "json"],
            &["images", "-o", "json"],
            &["inspect", &image],
            &["explain", "-o", "json", &image],
            &["gc", "log", "-o", "json"],
        ] {
            runs.push((arguments[0], ask(arguments).expect(0)));
        }
        for (what, run) in &runs {
            assert_clean(what, format!("{}{}", run.stdout, run.stderr).as_bytes());
        }
        assert_clean("the metrics", daemon.metrics().as_bytes());
        let process = format!("/proc/{}", daemon.running.pid());
        for name in ["cmdline", "environ"] {
            assert_clean(name, &fs_err::read(format!("{process}/{name}")).unwrap());
        }
        for name in ["helper-environ", "helper-cmdline", "provider-cmdline"] {
            assert_clean(name, &fs_err::read(world.path(&format!("noted/{name}"))).unwrap());
        }
        let of_provider = fs_err::read(world.path("noted/provider-environ")).unwrap();
        assert!(String::from_utf8_lossy(&of_provider).contains(PLANTED[4]), "its own is for it");

        let log = daemon.stop();
        assert!(log.stderr.contains("of-file") || log.stderr.contains("Failed to pull image"), "{log:?}");
        assert_clean("the daemon's log", format!("{}{}", log.stdout, log.stderr).as_bytes());
        let mut written = Vec::new();
        files(Path::new(&state), &mut written);
        if !world.has_containerd() {
            files(&world.place(), &mut written);
        }
        assert!(written.iter().any(|path| path.to_string_lossy().contains("image_manager")), "{written:?}");
        for path in &written {
            assert_clean(&path.display().to_string(), &fs_err::read(path).unwrap());
            if path.to_string_lossy().contains("image_manager") {
                let mode = fs_err::metadata(path).unwrap().permissions().mode() & 0o777;
                assert_eq!(mode & 0o077, 0, "{}: {mode:o}", path.display());
            }
        }
    }
}

/// Lets a program have core files, and says whether it leaves one when it ends by an abort.
fn leaves_core(mut command: Command, dir: &Path) -> bool {
    let program = command.get_program().to_owned();
    let arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -c unlimited; exec \"$0\" \"$@\" 2>&1"]).arg(program).args(arguments);
    shell.current_dir(dir).env("HOME", dir);
    command = shell;
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    // Both say something once they run.
    let said = child.stdout.as_mut().unwrap().read(&mut [0; 1]).unwrap();
    assert_eq!(said, 1, "it runs");
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, Signal::ABORT).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(Signal::ABORT.as_raw()), "it lived until then");
    status.core_dumped()
}

#[test]
fn the_daemon_leaves_no_core_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = Command::new("cat");
    other.args(["/proc/self/cmdline", "-"]);
    if !leaves_core(other, dir.path()) {
        eprintln!("SKIPPED: this machine writes no core files, so nothing can be seen");
        return;
    }
    let mut serve = Command::new(env!("CARGO_BIN_EXE_larder"));
    serve.args(["serve", "--metrics-address", "", "--root"]).arg(dir.path().join("store"));
    assert!(!leaves_core(serve, dir.path()));
}
