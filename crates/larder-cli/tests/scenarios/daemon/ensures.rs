//! Ensures through the daemon: shared, given up, drained, remembered.

use std::time::Duration;

use larder_testkit_peers::process::{pause, wait_until};
use larder_testkit_peers::{ImageBuilder, RegistryAccess, RegistryOptions, RegistryProcess};

use super::MachineWithDaemon;
use crate::world::{LarderProcess, pod};

#[test]
fn progress_reaches_the_client_and_a_second_ensure_pulls_nothing() {
    let Some(machine) = MachineWithDaemon::serving() else { return };
    let gate = machine.gate();
    machine.push(1, "shop/web:1");
    let web = gate.image("shop/web:1");
    gate.hold_blobs_after(1000);
    let running = machine.start(&["ensure", "-o", "json", &web]);
    gate.wait_until_held(1);
    wait_until("the daemon reports the pull", || {
        let status = machine.status();
        let layers = status["pulls"][0]["layers"].as_array().into_iter().flatten();
        layers.into_iter().any(|layer| layer["phase"] == "fetching")
    });
    // Progress is sent a few times a second.
    pause(Duration::from_secs(1));
    gate.open();
    let printed = running.finish().expect(0).json();
    let phases: Vec<_> = printed["progress"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|record| record["phase"].as_str())
        .collect();
    assert!(phases.contains(&"fetching") || phases.contains(&"pulling"), "{printed}");
    let reasons: Vec<_> =
        printed["events"].as_array().unwrap().iter().filter_map(|event| event["reason"].as_str()).collect();
    assert_eq!(reasons, ["Pulling", "Pulled"]);
    for kind in ["events", "progress"] {
        let time = printed[kind][0]["time"].as_str().unwrap();
        assert!(time.len() <= "2026-11-22T21:14:00.551Z".len(), "{kind} in milliseconds: {time}");
    }
    machine.registry.forget_requests();
    let again = machine.larder(&["ensure", &web]).expect(0);
    assert_eq!(again.lines_with(&["already present on machine"]), 1, "{again:?}");
    assert_eq!(machine.registry.requests().len(), 0);
}

#[test]
fn two_clients_that_want_one_image_cause_one_pull_and_one_may_die() {
    let Some(machine) = MachineWithDaemon::serving() else { return };
    let gate = machine.gate();
    machine.push(1, "shop/web:1");
    let web = gate.image("shop/web:1");
    gate.hold_blobs_after(0);
    let [mut first, mut second] = [(); 2].map(|()| machine.start(&["ensure", &web]));
    for client in [&mut first, &mut second] {
        client.wait_for_output("Pulling image");
    }
    gate.wait_until_held(1);
    drop(first); // it is killed
    wait_until("the daemon notices", || machine.status()["connections"] == 2);
    gate.open();
    let run = second.finish().expect(0);
    assert_eq!(run.lines_with(&["Successfully pulled"]), 1, "{run:?}");
    assert_eq!(gate.count("GET", "/manifests/1"), 1, "{:?}", gate.seen());
}

#[test]
fn the_last_client_that_dies_takes_its_pull_along() {
    let Some(machine) = MachineWithDaemon::serving() else { return };
    let gate = machine.gate();
    machine.push(1, "shop/web:1");
    let web = gate.image("shop/web:1");
    gate.hold_blobs_after(0);
    let client = machine.start(&["ensure", &web]);
    gate.wait_until_held(1);
    assert_eq!(machine.status()["pulls"].as_array().unwrap().len(), 1);
    drop(client);
    wait_until("no pull is in flight", || machine.status()["pulls"].as_array().unwrap().is_empty());
    gate.open();
    assert_eq!(machine.larder(&["images", "-q"]).expect(0).stdout, "");
    machine.larder(&["ensure", &web]).expect(0);
}

#[test]
fn a_stopping_daemon_ends_an_ensure_and_a_watch() {
    let Some(mut machine) = MachineWithDaemon::serving() else { return };
    let gate = machine.gate();
    machine.push(1, "shop/web:1");
    let web = gate.image("shop/web:1");
    gate.hold_blobs_after(0);
    let client = machine.start(&["ensure", &web]);
    let mut events = machine.start(&["events", "-w"]);
    gate.wait_until_held(1);
    events.wait_for_output("Pulling");
    let daemon = machine.daemon.take().unwrap();
    daemon.terminate();
    let ended = events.finish();
    assert_eq!(ended.code, 3, "who watches does not keep it from stopping: {ended:?}");
    let ended = client.finish();
    assert!(ended.code == 3 && ended.stdout.contains("larder is shutting down: the next pull"), "{ended:?}");
    daemon.finish().expect(0);
    assert_eq!(machine.larder(&["images", "-q"]).expect(0).stdout, "");
    gate.open();
    machine.larder(&["ensure", &web]).expect(0);
}

#[test]
fn a_daemon_that_dies_in_the_middle_is_an_error_and_not_a_hang() {
    let Some(mut machine) = MachineWithDaemon::serving() else { return };
    let gate = machine.gate();
    machine.push(1, "shop/web:1");
    let web = gate.image("shop/web:1");
    gate.hold_blobs_after(0);
    let clients =
        [&["ensure", &web][..], &["pull", &web], &["events", "-w"]].map(|arguments| machine.start(arguments));
    gate.wait_until_held(1);
    wait_until("all of them are there", || machine.status()["connections"] == 4);
    drop(machine.daemon.take());
    for client in clients {
        let run = client.finish().expect(3);
        assert!(run.stderr.contains("error: the daemon at"), "{run:?}");
    }
    assert!(machine.root().join("daemon").exists(), "it had no time to remove the note");
    machine.larder(&["-v", "images"]).expect(0);
    gate.open();
    machine.serve();
    machine.larder(&["ensure", &web]).expect(0);
}

#[test]
fn credentials_of_one_call_serve_only_that_call_and_are_printed_nowhere() {
    let Some(mut machine) = MachineWithDaemon::serving() else { return };
    let private =
        RegistryProcess::start(RegistryOptions { auth: RegistryAccess::Basic, ..RegistryOptions::default() })
            .unwrap();
    ImageBuilder::small(1, 10_000).push(&private, "shop/web:1").unwrap();
    let image = private.image("shop/web:1");
    let entry = serde_json::json!({"auths": {private.address(): {
        "username": larder_testkit_peers::registry::USER,
        "password": larder_testkit_peers::registry::PASSWORD,
    }}});
    let authfile = machine.home.path().join("auth.json");
    fs_err::write(&authfile, entry.to_string()).unwrap();
    let denied = machine.larder(&["pull", &image]).expect(1);
    assert!(denied.stderr.contains("no credentials for"), "{denied:?}");
    let authfile = authfile.to_string_lossy();
    machine.larder(&["pull", "--authfile", &authfile, &image]).expect(0);
    machine.larder(&["pull", &image]).expect(1);
    let printed = [machine.larder(&["events", "-o", "json"]), machine.larder(&["status", "-o", "json"])];
    let daemon = machine.stop();
    for run in printed.iter().chain([&daemon]) {
        let all = format!("{}{}", run.stdout, run.stderr);
        assert!(!all.contains(larder_testkit_peers::registry::PASSWORD), "{all}");
    }
}

#[test]
fn static_pods_are_pulled_with_the_docker_config_of_the_node() {
    let Some(mut machine) = MachineWithDaemon::new() else { return };
    let private =
        RegistryProcess::start(RegistryOptions { auth: RegistryAccess::Basic, ..RegistryOptions::default() })
            .unwrap();
    ImageBuilder::small(1, 10_000).push(&private, "shop/web:1").unwrap();
    let image = private.image("shop/web:1");
    let entry = serde_json::json!({"auths": {private.address(): {
        "username": larder_testkit_peers::registry::USER,
        "password": larder_testkit_peers::registry::PASSWORD,
    }}});
    let (docker, pods) = (machine.home.path().join(".docker"), machine.home.path().join("pods"));
    fs_err::create_dir(&docker).unwrap();
    fs_err::write(docker.join("config.json"), entry.to_string()).unwrap();
    fs_err::create_dir(&pods).unwrap();
    let pod = serde_json::json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
        "spec": {"containers": [{"name": "web", "image": image}]}});
    fs_err::write(pods.join("web.json"), pod.to_string()).unwrap();
    machine.serve_with(&["--pod-manifest-path", &pods.to_string_lossy()]);
    wait_until("the image of the static pod is here", || {
        machine.larder(&["images"]).expect(0).stdout.contains("shop/web")
    });
    let daemon = machine.stop();
    let all = format!("{}{}", daemon.stdout, daemon.stderr);
    assert!(!all.contains(larder_testkit_peers::registry::PASSWORD), "{all}");
}

#[test]
fn events_are_replayed_and_followed() {
    let Some(machine) = MachineWithDaemon::serving() else { return };
    let web = machine.push(1, "shop/web:1");
    let manifest = machine.home.path().join("pod.yaml");
    fs_err::write(&manifest, pod("web", "IfNotPresent", &[&web])).unwrap();
    let mut watching = machine.start(&["events", "-w", "-o", "json"]);
    machine.larder(&["ensure", "-f", &manifest.to_string_lossy()]).expect(0);
    watching.wait_for_output("Successfully pulled");
    let lines: Vec<serde_json::Value> =
        watching.stdout().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["reason"], "Pulling");
    assert_eq!(lines[1]["name"], "web");
    let since = lines[1]["number"].to_string();
    let later = machine.larder(&["events", "--since", &since]).expect(0);
    assert_eq!(
        (later.lines_with(&["Successfully pulled"]), later.lines_with(&["Pulling"])),
        (1, 0),
        "{later:?}"
    );
    let table = machine.larder(&["events"]).expect(0);
    assert_eq!(table.lines_with(&["Normal", "Pulling", "pod/web"]), 1, "{table:?}");
    for command in ["pull", "ensure"] {
        machine.larder(&[command, &web]).expect(0);
        let events = machine.larder(&["events", "-o", "json"]).expect(0).stdout;
        let last: serde_json::Value = serde_json::from_str(events.lines().last().unwrap()).unwrap();
        assert_eq!(last["uid"], format!("image/{web}"), "{command}");
    }
    watching.interrupt();
    assert_eq!(watching.finish().code, 130);
}

#[test]
fn a_watch_ends_with_its_reader_and_does_not_affect_the_daemon() {
    let Some(machine) = MachineWithDaemon::serving() else { return };
    let web = machine.push(1, "shop/web:1");
    machine.larder(&["ensure", &web]).expect(0);
    let larder = machine.command(&["events", "-w"]);
    let words: Vec<_> = std::iter::once(larder.get_program()).chain(larder.get_args()).collect();
    let line = words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let mut shell = std::process::Command::new("sh");
    let run = LarderProcess::start({
        shell.args(["-c", &format!("{{ {line}; echo ended $? >&2; }} | head -n 1")]);
        shell
    })
    .finish()
    .expect(0);
    assert!(run.stderr.contains("ended 0"), "{run:?}");
    wait_until("its connection is gone", || machine.status()["connections"] == 1);
}

#[test]
fn keep_rules_and_leases_survive_a_restart() {
    let Some(mut machine) = MachineWithDaemon::serving() else { return };
    let [web, api, old] = [(1, "shop/web:1"), (2, "shop/api:1"), (3, "shop/old:1")]
        .map(|(seed, name)| machine.push(seed, name));
    machine.larder(&["ensure", &web, &api, &old]).expect(0);
    machine.larder(&["keep", "*/web"]).expect(0);
    machine.larder(&["lease", &api, "2h"]).expect(0);
    for restarted in [false, true] {
        if restarted {
            machine.stop().expect(0);
            machine.serve();
        }
        assert_eq!(machine.larder(&["keep"]).expect(0).lines_with(&["*/web"]), 1);
        let why = |image: &str| machine.larder(&["explain", "-o", "json", image]).expect(0).json();
        assert_eq!(why(&api)["reason"], "Leased", "restarted: {restarted}");
        assert!(why(&api)["usedBy"].to_string().contains("lease (expires in "), "{}", why(&api));
    }
}
