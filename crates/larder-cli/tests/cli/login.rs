//! `larder login` and `larder logout`.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::process::Stdio;

use larder_testkit::fault_registry::{FaultRegistry, FaultRegistryAuth};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};
use serde_json::{Value, json};

use crate::world::{CliFixture, CliOutput, larder};

const PASSWORD: &str = "planted-password";

fn registry() -> FaultRegistry {
    let registry = FaultRegistry::start();
    registry.require(FaultRegistryAuth::Basic { user: "bob".into(), password: PASSWORD.into() });
    registry
}

fn log_in(world: &CliFixture, registry: &str, user: &str, password: &str) -> CliOutput {
    world.larder_reading(
        &format!("{password}\n"),
        &["-vv", "login", "--username", user, "--password-stdin", registry],
    )
}

fn config(world: &CliFixture) -> Value {
    let text = fs_err::read_to_string(world.home.path().join(".docker/config.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[track_caller]
fn assert_untold(run: &CliOutput) {
    assert!(!format!("{run:?}").contains("planted"), "{run:?}");
}

#[test]
fn a_login_that_the_registry_takes_is_written_and_one_that_it_refuses_is_not() {
    let (world, registry) = (CliFixture::new(), registry());
    let host = registry.address();
    let run = log_in(&world, &host, "bob", "planted-wrong").expect(1);
    assert!(run.stderr.contains(&format!("{host} rejected the credentials: 401")), "{run:?}");
    assert_untold(&run);
    assert!(!world.home.path().join(".docker").exists());

    let run = log_in(&world, &format!("http://{host}/"), "bob", PASSWORD).expect(0);
    assert_eq!(run.stdout, "Login Succeeded\n");
    assert_untold(&run);
    // bob:planted-password
    assert_eq!(config(&world), json!({"auths": {host.as_str(): {"auth": "Ym9iOnBsYW50ZWQtcGFzc3dvcmQ="}}}));
    let mode = |name: &str| fs_err::metadata(world.home.path().join(name)).unwrap().permissions().mode();
    assert_eq!((mode(".docker") & 0o777, mode(".docker/config.json") & 0o777), (0o700, 0o600));

    assert_eq!(world.larder(&["logout", &host]).expect(0).stdout, format!("logged out of {host}\n"));
    assert_eq!(config(&world), json!({"auths": {}}));
    assert_eq!(world.larder(&["logout", &host]).expect(0).stdout, format!("not logged in to {host}\n"));
}

#[test]
fn other_content_of_the_file_is_kept_and_a_link_remains_a_link() {
    let (world, registry) = (CliFixture::new(), registry());
    let host = registry.address();
    let before = json!({"detachKeys": "ctrl-e", "auths": {"other.example": {"auth": "eDp5"}}});
    let real = world.file("real.json", &before.to_string());
    fs_err::set_permissions(&real, std::fs::Permissions::from_mode(0o644)).unwrap();
    fs_err::create_dir(world.home.path().join(".docker")).unwrap();
    std::os::unix::fs::symlink(&real, world.home.path().join(".docker/config.json")).unwrap();
    log_in(&world, &host, "bob", PASSWORD).expect(0);
    let after = config(&world);
    assert_eq!(after["detachKeys"], before["detachKeys"]);
    assert_eq!(after["auths"]["other.example"], before["auths"]["other.example"]);
    assert!(after["auths"][&host]["auth"].is_string());
    assert!(fs_err::symlink_metadata(world.home.path().join(".docker/config.json")).unwrap().is_symlink());
    assert_eq!(fs_err::metadata(&real).unwrap().permissions().mode() & 0o777, 0o600);

    let named = world.home.path().join("auth.json");
    let arguments = ["login", "-u", "bob", "--password-stdin", "--authfile", named.to_str().unwrap(), &host];
    world.larder_reading(PASSWORD, &arguments).expect(0);
    assert!(named.exists());
}

#[test]
fn a_broken_file_is_reported_before_a_password_is_read_and_not_changed() {
    let (world, registry) = (CliFixture::new(), registry());
    let file = world.file(".docker/config.json", "{\"auths\": planted");
    let run = log_in(&world, &registry.address(), "bob", PASSWORD).expect(2);
    assert!(run.stderr.contains("config.json: line 1"), "{run:?}");
    assert_untold(&run);
    assert_eq!(fs_err::read_to_string(file).unwrap(), "{\"auths\": planted");
    assert_eq!(registry.requests(), []);
}

#[test]
fn a_helper_stores_and_erases_the_logins_that_the_file_assigns_to_it() {
    let (world, registry) = (CliFixture::new(), registry());
    let host = registry.address();
    world.file(".docker/config.json", r#"{"credsStore": "test"}"#);
    let script = |text: &str| {
        let path = world.file("helpers/docker-credential-test", &format!("#!/bin/sh\n{text}\n"));
        fs_err::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    let run = |arguments: &[&str]| {
        let mut command = world.command(arguments);
        let helpers = world.home.path().join("helpers");
        command.env("PATH", format!("{}:/usr/bin:/bin", helpers.display()));
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(PASSWORD.as_bytes()).unwrap();
        CliOutput::of(child.wait_with_output().unwrap())
    };
    let login = ["-vv", "login", "-u", "bob", "--password-stdin", host.as_str()];

    script("cat >&2; exit 1");
    let failed = run(&login).expect(1);
    assert!(failed.stderr.contains("docker-credential-test store failed for"), "{failed:?}");
    assert_untold(&failed);
    assert_eq!(config(&world), json!({"credsStore": "test"}));

    script("cat > \"$HOME/kept.$1\"; cat \"$HOME/kept.$1\" >&2");
    assert_untold(&run(&login).expect(0));
    let kept: Value =
        serde_json::from_str(&fs_err::read_to_string(world.home.path().join("kept.store")).unwrap()).unwrap();
    assert_eq!(kept, json!({"ServerURL": host.as_str(), "Username": "bob", "Secret": PASSWORD}));
    assert_eq!(config(&world), json!({"credsStore": "test", "auths": {host.as_str(): {}}}));

    run(&["logout", &host]).expect(0);
    assert_eq!(fs_err::read_to_string(world.home.path().join("kept.erase")).unwrap(), host);
    assert_eq!(config(&world), json!({"credsStore": "test", "auths": {}}));
    script("echo credentials not found in native keychain; exit 1");
    run(&["logout", &host]).expect(0);

    let both = json!({"credsStore": "test", "auths": {host.as_str(): {"auth": "dTpw"}}}).to_string();
    for broken in [Some("exit 1"), None] {
        world.file(".docker/config.json", &both);
        match broken {
            Some(text) => script(text),
            None => fs_err::remove_file(world.home.path().join("helpers/docker-credential-test")).unwrap(),
        }
        let printed = run(&["logout", &host]).expect(1);
        assert!(printed.stderr.contains("docker-credential-test"), "{printed:?}");
        assert!(printed.stderr.contains("the credentials in the file were removed"), "{printed:?}");
        assert_eq!(config(&world), json!({"credsStore": "test", "auths": {}}), "the plain one is gone");
    }
}

#[test]
fn the_file_keeps_its_owner_and_mode() {
    if !rustix::process::geteuid().is_root() {
        assert!(std::env::var_os("CI").is_none(), "CI must not skip this: run the tests as root");
        eprintln!("==== SKIPPED: only root can write a file that is another user's ====");
        return;
    }
    let (world, registry) = (CliFixture::new(), registry());
    for (before, after) in [(0o640, 0o640), (0o660, 0o660), (0o664, 0o600), (0o600, 0o600)] {
        let file = world.file(".docker/config.json", "{}");
        std::os::unix::fs::chown(&file, Some(65534), Some(12)).unwrap();
        fs_err::set_permissions(&file, std::fs::Permissions::from_mode(before)).unwrap();
        log_in(&world, &registry.address(), "bob", PASSWORD).expect(0);
        let found = fs_err::metadata(&file).unwrap();
        assert_eq!((found.uid(), found.gid(), found.mode() & 0o777), (65534, 12, after));
    }
}

#[test]
fn leftovers_of_a_killed_login_are_removed_by_the_next_command() {
    let (world, registry) = (CliFixture::new(), registry());
    world.file(".docker/config.json", "{}");
    for arguments in
        [&["logout", "r.example"][..], &["login", "-u", "bob", "--password-stdin", &registry.address()]]
    {
        world.file(".docker/.config.json.new", "all logins");
        world.larder_reading(PASSWORD, arguments).expect(0);
        let left = fs_err::read_dir(world.home.path().join(".docker")).unwrap();
        let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["config.json"]);
    }
}

#[test]
fn a_token_request_for_a_login_names_no_repository() {
    let (world, registry) = (CliFixture::new(), FaultRegistry::start());
    let login = Some(("bob".to_owned(), PASSWORD.to_owned()));
    registry.require(FaultRegistryAuth::Token { realm: String::new(), login, expires_in: 60 });
    log_in(&world, &registry.address(), "bob", PASSWORD).expect(0);
    let run = log_in(&world, &registry.address(), "bob", "planted-wrong").expect(1);
    assert!(run.stderr.contains("rejected the credentials: 401 Unauthorized"), "{run:?}");
    assert_untold(&run);
}

#[test]
fn a_registry_without_authentication_is_reported() {
    let (world, registry) = (CliFixture::new(), FaultRegistry::start());
    let run = log_in(&world, &registry.address(), "bob", PASSWORD).expect(0);
    assert!(run.stderr.contains("does not require authentication; credentials not verified"), "{run:?}");
}

#[test]
fn bad_input_is_refused_and_never_repeated() {
    let world = CliFixture::new();
    for (arguments, said) in [
        (&["login", "-u", "bob", "--password-stdin", "planted/x"][..], "invalid registry name"),
        (&["login", "-u", "bo:b", "--password-stdin", "r.example"], "has a colon or a control character"),
        (&["login", "-u", "bob", "r.example"], "standard input is not a terminal"),
        (&["login", "r.example"], "standard input is not a terminal"),
    ] {
        let run = world.larder_reading(PASSWORD, arguments).expect(2);
        assert!(run.stderr.contains(said), "{arguments:?}: {run:?}");
        assert_untold(&run);
    }
    world.larder_reading(PASSWORD, &["login", "--password-stdin", "r.example"]).expect(2);
}

/// Both ends of a terminal.
fn terminal() -> (OwnedFd, OwnedFd) {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = openpt(flags).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap();
    let theirs = fs_err::OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    (ours, theirs.into_parts().0.into())
}

#[test]
fn the_terminal_is_asked_and_shows_the_user_but_not_the_password() {
    let (world, registry) = (CliFixture::new(), registry());
    let (ours, theirs) = terminal();
    let echoes = || tcgetattr(&theirs).unwrap().local_modes.contains(LocalModes::ECHO);
    let end = || Stdio::from(theirs.try_clone().unwrap());
    let mut command = larder(world.home.path());
    command.args(["login", &registry.address()]).stdin(end()).stdout(end()).stderr(end());
    let mut child = command.spawn().unwrap();
    let mut shown = String::new();
    let mut terminal = std::fs::File::from(ours.as_fd().try_clone_to_owned().unwrap());
    let mut read_until = |text: &str| {
        let mut bytes = [0; 256];
        while !shown.contains(text) {
            let read = terminal.read(&mut bytes).unwrap();
            shown.push_str(&String::from_utf8_lossy(&bytes[..read]));
        }
        shown.clone()
    };
    let mut typed = std::fs::File::from(ours);
    read_until(&format!("Username for {}: ", registry.address()));
    assert!(echoes());
    typed.write_all(b"bob\n").unwrap();
    read_until(&format!("Password for bob at {}: ", registry.address()));
    assert!(!echoes(), "what is typed now would be shown");
    typed.write_all(format!("{PASSWORD}\n").as_bytes()).unwrap();
    let shown = read_until("Login Succeeded");
    assert!(child.wait().unwrap().success());
    assert!(shown.contains("bob") && !shown.contains("planted"), "{shown}");
    assert!(echoes(), "as it was before");
    assert!(config(&world)["auths"][registry.address()]["auth"].is_string());
}
