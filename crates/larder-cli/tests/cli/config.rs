//! `larder config`: what is in force, and what is wrong with it.

use std::process::Stdio;

use crate::world::{CliFixture, CliOutput};

const HEAD: &str = "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n";

/// A world with a file of larder's and one of kubelet's.
fn world() -> CliFixture {
    let world = CliFixture::new();
    world.file("c.yaml", &format!("{HEAD}imageGCHighThresholdPercent: 90\ngc:\n  period: 1m\n"));
    world.file(
        "k.yaml",
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 7\n\
         imageGCHighThresholdPercent: 75\nimageGCLowThresholdPercent: 60\n",
    );
    world
}

#[test]
fn each_value_names_its_source() {
    let world = world();
    let run = world
        .larder(&[
            "config",
            "--config",
            "c.yaml",
            "--kubelet-config",
            "k.yaml",
            "--image-gc-low-threshold=50",
        ])
        .expect(0);
    for line in [
        "imageGCHighThresholdPercent: 90 # c.yaml:3".to_owned(),
        "imageGCLowThresholdPercent: 50 # --image-gc-low-threshold".to_owned(),
        "  period: 1m0s # c.yaml:5".to_owned(),
        format!("backend: {} # LARDER_BACKEND", world.cri.endpoint()),
        "registryBurst: 10 # default".to_owned(),
    ] {
        assert!(run.stdout.lines().any(|printed| printed == line), "{line}\n{}", run.stdout);
    }
    let data = world
        .larder(&["config", "--config", "c.yaml", "--kubelet-config", "k.yaml", "-o", "json"])
        .expect(0)
        .json();
    assert_eq!(data["config"]["gc"]["period"], "1m0s");
    let low = serde_json::json!({"from": "kubeletFile", "name": "k.yaml", "line": 5});
    assert_eq!(data["origins"]["imageGCLowThresholdPercent"], low);
}

#[test]
fn the_printed_settings_are_a_file_with_the_same_settings() {
    let world = world();
    let printed = world.larder(&["config", "--config", "c.yaml"]).expect(0).stdout;
    world.file("printed.yaml", &printed);
    let run = world.larder(&["config", "--check", "printed.yaml"]).expect(0);
    assert_eq!((run.stdout.as_str(), run.stderr.as_str()), ("printed.yaml: valid\n", ""));
    let values = |text: &str| -> Vec<String> {
        text.lines().map(|line| line.split(" # ").next().unwrap_or_default().to_owned()).collect()
    };
    let again = world.larder(&["config", "--config", "printed.yaml"]).expect(0).stdout;
    assert_eq!(values(&again), values(&printed));
}

#[test]
fn all_errors_are_reported_and_nothing_else() {
    let world = world();
    world.file("bad.yaml", &format!("{HEAD}registryBurst: -1\nrot: /x\ngc:\n  perriod: 1m\n"));
    for arguments in [&["config", "--check", "bad.yaml"][..], &["config", "--config", "bad.yaml"]] {
        let run = world.larder(arguments).expect(2);
        assert_eq!(run.stdout, "");
        assert_eq!(
            run.stderr,
            "error: bad.yaml:4: rot: unknown setting\nhint: did you mean root?\n\
             error: bad.yaml:6: gc.perriod: unknown setting\nhint: did you mean gc.period?\n\
             error: bad.yaml:3: registryBurst: invalid configuration: registryBurst (--registry-burst) -1 must not be \
             a negative number\n"
        );
    }
}

#[test]
fn the_file_may_be_named_by_a_variable() {
    let world = world();
    let run = |name: &str| {
        let mut command = world.command(&["config"]);
        CliOutput::of(command.env("LARDER_CONFIG", name).stdin(Stdio::null()).output().unwrap())
    };
    assert!(run("c.yaml").expect(0).stdout.contains("90 # c.yaml:3"));
    let absent = run("absent.yaml").expect(2);
    assert!(absent.stderr.starts_with("error: absent.yaml: file not found\n"), "{}", absent.stderr);
}

#[test]
fn flags_of_kubelet_are_only_in_the_long_help() {
    let world = world();
    assert!(!world.larder(&["config", "-h"]).expect(0).stdout.contains("--image-gc-high-threshold"));
    assert!(world.larder(&["help", "config"]).expect(0).stdout.contains("--image-gc-high-threshold"));
}

#[test]
fn a_check_reports_a_group_that_does_not_exist() {
    let world = CliFixture::new();
    world.file("c.yaml", &format!("{HEAD}listen:\n  group: no-such-group\n"));
    let run = world.larder(&["config", "--check", "c.yaml"]).expect(2);
    assert!(run.stderr.contains("c.yaml:4: listen.group: group not found: no-such-group"), "{run:?}");
    assert!(run.stderr.contains("hint: create it with groupadd"), "{run:?}");
    world.larder(&["config", "--config", "c.yaml"]).expect(0);
}
