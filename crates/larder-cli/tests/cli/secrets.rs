//! Which credentials reach the runtime, and that passwords reach nothing else.

use larder_cri::proto::AuthConfig;
use larder_testkit_peers::fake_cri::Rpc;
use tonic::Code;

use crate::world::CliFixture;

const IMAGE: &str = "127.0.0.1:5000/private/ledger:3.1";

fn secret(namespace: &str, kind: &str) -> String {
    format!(
        "apiVersion: v1
kind: Secret
metadata: {{name: regcred, namespace: {namespace}}}
type: {kind}
stringData:
  .dockerconfigjson: '{{\"auths\": {{\"127.0.0.1:5000\": {{\"username\": \"larder\", \"password\": \"pantry\"}}}}}}'
---
"
    )
}

fn pod() -> String {
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: ledger, namespace: finance}}
spec:
  imagePullSecrets: [{{name: regcred}}]
  containers: [{{name: main, image: '{IMAGE}'}}]
---
"
    )
}

/// User and password of each pull; empty for an anonymous one.
fn pulls(world: &CliFixture) -> Vec<String> {
    let pulls = world.cri.received().into_iter().filter(|received| received.rpc == Rpc::PullImage);
    let auth = |auth: AuthConfig| format!("{}:{}", auth.username, auth.password);
    pulls.map(|pull| pull.auth.map(auth).unwrap_or_default()).collect()
}

/// Content of [`secret`].
const LARDER: &str = "larder:pantry";

#[test]
fn a_pod_gets_the_pull_secret_that_it_names() {
    let world = CliFixture::offering(&[IMAGE]);
    let file = world.file("all.yaml", &(pod() + &secret("finance", "kubernetes.io/dockerconfigjson")));
    let run = world.larder(&["-vv", "ensure", "-f", &file.to_string_lossy()]).expect(0);
    assert_eq!(pulls(&world), [LARDER]);
    assert!(!format!("{run:?}").contains("pantry"), "{run:?}");
}

#[test]
fn a_secret_may_be_in_a_separate_file() {
    let world = CliFixture::offering(&[IMAGE]);
    world.file("secret.yaml", &secret("finance", "kubernetes.io/dockerconfigjson"));
    world.file("pod.yaml", &pod());
    world.larder(&["ensure", "-f", "pod.yaml", "--secret", "secret.yaml"]).expect(0);
    world.larder(&["ensure", "--policy=Always", IMAGE, "--secret", "secret.yaml"]).expect(0);
    assert_eq!(pulls(&world), [LARDER, LARDER]);
}

#[test]
fn a_secret_of_another_namespace_or_type_is_not_used_and_the_pod_is_warned() {
    for (secret, warning) in [
        (secret("elsewhere", "kubernetes.io/dockerconfigjson"), "not found, pulling without it"),
        (secret("finance", "Opaque"), "type Opaque is not a pull secret"),
    ] {
        let world = CliFixture::offering(&[IMAGE]);
        world.file("all.yaml", &(pod() + &secret));
        let run = world.larder(&["ensure", "-f", "all.yaml"]).expect(0);
        let line = run.stderr.lines().find(|line| line.starts_with("warning: ")).unwrap_or_default();
        assert!(line.contains("pull secret regcred of pod/ledger in namespace finance"), "{run:?}");
        assert!(line.contains(warning), "{run:?}");
        assert_eq!(pulls(&world), [""]);
    }
}

#[test]
fn a_pod_that_names_a_broken_secret_is_not_served_and_the_others_are() {
    let broken = secret("finance", "kubernetes.io/dockerconfigjson").replace("pantry\"}", "pantry\"");
    let other = pod().replace("ledger", "open").replace("imagePullSecrets: [{name: regcred}]", "");
    let template = "apiVersion: apps/v1
kind: Deployment
metadata: {name: api, namespace: finance}
spec: {template: {spec: {imagePullSecrets: [{name: absent}, {name: regcred}], containers: [{name: main, image: a}]}}}
";
    let world = CliFixture::offering(&["127.0.0.1:5000/private/open:3.1"]);
    world.file("secret.yaml", &broken);
    world.file("pods.yaml", &(pod() + &other + template));
    let all = world.file("all.yaml", &(broken.clone() + &pod() + &other + template));
    for files in [&["-f", "all.yaml"][..], &["-f", "pods.yaml", "--secret", "secret.yaml"]] {
        let run = world.larder(&[&["ensure", "-o", "json"], files].concat()).expect(2);
        let images = run.json()["images"].as_array().unwrap().len();
        assert_eq!(images, 1, "the pod without secrets: {run:?}");
        let problems = run.json()["badInput"].as_array().unwrap().clone();
        let printed: Vec<_> = problems
            .iter()
            .map(|problem| {
                let text = |key: &str| problem[key].as_str().unwrap().to_owned();
                (text("object"), text("field"), text("message"))
            })
            .skip(1)
            .collect();
        let file = if files.len() == 2 { "all.yaml" } else { "secret.yaml" };
        let message =
            format!("the pull secret regcred is invalid ({file}: document 1 (Secret finance/regcred))");
        let expected = [
            ("Pod finance/ledger", "spec.imagePullSecrets[0]"),
            ("Deployment finance/api", "spec.template.spec.imagePullSecrets[1]"),
        ];
        assert_eq!(
            printed,
            expected.map(|(object, field)| (object.into(), field.into(), message.clone())),
            "{run:?}"
        );
        assert!(!run.stderr.contains("in none of the files"), "{run:?}");
        assert!(!format!("{run:?}").contains("pantry"), "{run:?}");
    }
    assert_eq!(pulls(&world), [""], "no pull but that of the pod without secrets");
    let run = world.larder(&["ensure", "-f", &all.to_string_lossy()]).expect(2);
    assert!(
        run.stderr.contains(":12: document 2 (Pod finance/ledger): spec.imagePullSecrets[0]: "),
        "{run:?}"
    );
}

#[test]
fn arguments_are_not_pulled_without_the_secrets_given_for_them() {
    let world = CliFixture::offering(&[IMAGE]);
    world.file(
        "secret.yaml",
        &secret("default", "kubernetes.io/dockerconfigjson").replace("auths", "auths\""),
    );
    for file in ["secret.yaml", "missing.yaml"] {
        let run = world.larder(&["ensure", IMAGE, "--secret", file]).expect(2);
        assert!(run.stderr.contains(&format!("argument: skipped {IMAGE}: ")), "{run:?}");
    }
    assert_eq!(pulls(&world), [""; 0]);
}

#[test]
fn unusable_entries_are_reported_once() {
    let world = CliFixture::offering(&[IMAGE]);
    let secret = secret("finance", "kubernetes.io/dockerconfigjson").replace(
        "{\"auths\": {",
        "{\"auths\": {\"https://bob:hunter2 @r.example\": {\"username\": \"bob\"}, ",
    );
    let two = pod() + &pod().replace("ledger}", "x}").replace("name: ledger,", "name: other,");
    world.file("all.yaml", &(secret + &two));
    let run = world.larder(&["ensure", "--policy=Always", "-f", "all.yaml"]).expect(0);
    let warnings: Vec<_> = run.stderr.lines().filter(|line| line.starts_with("warning: ")).collect();
    let expected = "warning: all.yaml: document 1 (Secret finance/regcred): one entry ignored: its location is not a URL";
    assert_eq!(warnings, [expected], "{run:?}");
    assert!(!format!("{run:?}").contains("hunter2"), "{run:?}");
    assert_eq!(pulls(&world).first().map(String::as_str), Some(LARDER));
}

#[test]
fn secrets_given_by_the_flag_must_be_pull_secrets() {
    let world = CliFixture::offering(&[IMAGE]);
    world.file("opaque.yaml", &secret("default", "Opaque"));
    let run = world.larder(&["ensure", IMAGE, "--secret", "opaque.yaml"]).expect(2);
    assert!(run.stderr.contains("opaque.yaml: document 1 (Secret default/regcred): type: "), "{run:?}");
    world.file("pod.yaml", &pod());
    let run = world.larder(&["ensure", IMAGE, "--secret", "pod.yaml"]).expect(2);
    assert!(run.stderr.contains("pod.yaml: contains no Secret"), "{run:?}");
}

#[test]
fn a_password_is_read_from_standard_input_for_one_registry() {
    let world = CliFixture::offering(&[IMAGE, "busybox:1"]);
    let flags = ["-vv", "pull", "--username", "larder", "--password-stdin"];
    let run = world.larder_reading("pantry\n", &[&flags[..], &[IMAGE]].concat()).expect(0);
    assert_eq!(pulls(&world), [LARDER]);
    assert!(!format!("{run:?}").contains("pantry"), "{run:?}");
    let run = world.larder_reading("pantry\n", &[&flags[..], &[IMAGE, "busybox:1"]].concat()).expect(2);
    assert!(run.stderr.contains("several registries (127.0.0.1:5000, docker.io)"), "{run:?}");
    assert_eq!(pulls(&world).len(), 1, "nothing more was pulled");
}

#[test]
fn the_users_docker_config_is_used_unless_another_file_is_named() {
    let world = CliFixture::offering(&[IMAGE]);
    // "larder:pantry" and "other:word" in base64
    world.file(".docker/config.json", r#"{"auths": {"127.0.0.1:5000": {"auth": "bGFyZGVyOnBhbnRyeQ=="}}}"#);
    world.file("auth.json", r#"{"auths": {"127.0.0.1:5000": {"auth": "b3RoZXI6d29yZA=="}}}"#);
    world.larder(&["pull", IMAGE]).expect(0);
    world.larder(&["pull", "--authfile", "auth.json", IMAGE]).expect(0);
    assert_eq!(pulls(&world), [LARDER, "other:word"]);
}

#[test]
fn tokens_are_sent_but_not_with_kubelets_behaviour() {
    let world = CliFixture::offering(&[IMAGE]);
    let config = r#"{"auths": {"127.0.0.1:5000": {"identitytoken": "pantry-token"}}}"#;
    let secret = secret("finance", "kubernetes.io/dockerconfigjson");
    let value = format!("  .dockerconfigjson: '{config}'");
    let lines = secret.lines().map(|line| if line.contains("auths") { &value } else { line });
    let secret = lines.collect::<Vec<_>>().join("\n") + "\n";
    world.file("pod.yaml", &(secret + &pod()));
    world.file("auth.json", config);
    for (flags, token) in [(&[][..], "pantry-token"), (&["--kubelet"], "")] {
        for from in [&["-f", "pod.yaml"][..], &["--authfile", "auth.json", IMAGE]] {
            let command = ["-vv", "ensure", "--policy=Always"];
            let run = world.larder(&[&command[..], flags, from].concat()).expect(0);
            assert!(!format!("{run:?}").contains("pantry"), "{run:?}");
            let mut pulls =
                world.cri.received().into_iter().filter(|received| received.rpc == Rpc::PullImage);
            let auth = pulls.next_back().unwrap().auth.unwrap();
            assert_eq!(auth.identity_token, token, "{flags:?} {from:?}");
        }
    }
}

#[test]
fn standard_input_is_read_once() {
    let world = CliFixture::new();
    let arguments = ["ensure", "-f", "-", "--username", "larder", "--password-stdin"];
    let run = world.larder_reading("pantry\n", &arguments).expect(2);
    assert!(run.stderr.contains("standard input can be read only once"), "{run:?}");
}

#[test]
fn a_denied_pull_names_the_credentials_that_were_tried() {
    let world = CliFixture::new();
    world.cri.refuse(Rpc::PullImage, Code::Unknown, "r.example/app:1: 401 Unauthorized");
    world.file("auth.json", r#"{"auths": {"r.example": {"username": "u", "password": "pantry"}}}"#);
    for command in ["ensure", "pull"] {
        let run = world.larder(&["-v", command, "--authfile", "auth.json", "r.example/app:1"]).expect(1);
        assert!(
            run.stderr.contains("hint: the registry rejected the credentials of auth.json (user u); larder login r.example replaces them\n"),
            "{run:?}"
        );
        assert!(
            run.stderr.contains("info: credentials for r.example/app:1: auth.json (user u)\n"),
            "{run:?}"
        );
        assert!(!run.stderr.contains("--retry-for") && !run.stderr.contains("pantry"), "{run:?}");
        let run = world.larder(&[command, "--authfile", "auth.json", "q.example/app:1"]).expect(1);
        assert!(
            run.stderr.contains("hint: no credential matches q.example (auth.json has: r.example)\n"),
            "{run:?}"
        );
    }
}
