//! Credentials of a kubeconfig that change while a client is in use.

use std::time::Duration;

use larder::credentials::plugin::ServiceAccountClient as _;
use larder_kube::{Cluster, ClusterError, ClusterOptions, ClusterServiceAccounts, PullSecrets};
use larder_testkit::kube_api::{ApiFault, KubeApi, PolicyRule};
use serde_json::json;
use tempfile::TempDir;
use tokio::time;

const SECRETS: &str = "/api/v1/namespaces/default/secrets";

fn reads_secrets() -> Vec<PolicyRule> {
    let rule = PolicyRule {
        api_groups: vec![String::new()],
        resources: vec!["secrets".into()],
        verbs: vec!["get".into()],
        ..PolicyRule::default()
    };
    vec![rule]
}

/// A server with a secret that `token` may read.
fn server(token: &str) -> KubeApi {
    let api = KubeApi::in_process();
    api.create(SECRETS, &json!({ "metadata": { "name": "s", "namespace": "default" }, "type": "Opaque" }));
    api.authorize(token, "system:node:n1", reads_secrets());
    api
}

#[tokio::test]
async fn a_rotated_credential_is_read_after_the_old_one_was_rejected() {
    let api = server("old");
    let path = api.kubeconfig("old");
    let cluster = Cluster::open(&ClusterOptions { kubeconfig: Some(path.clone()), node: "n1".into() });
    let get = async || PullSecrets::of(&cluster, Duration::ZERO, Duration::ZERO).get("default", "s").await;
    get().await.expect("the token is valid");
    api.authorize("new", "system:node:n1", reads_secrets());
    api.revoke("old");
    let rotated = fs_err::read_to_string(&path).expect("a file").replace("old", "new");
    fs_err::write(&path, rotated).expect("a file");
    let rejected = get().await;
    assert!(matches!(rejected, Err(ClusterError::Unauthorized { .. })), "{rejected:?}");
    get().await.expect("the file was read again");
}

#[tokio::test]
async fn a_kubeconfig_that_is_written_after_the_start_is_used_and_a_broken_one_is_named() {
    let api = server("t");
    let valid = fs_err::read_to_string(api.kubeconfig("t")).expect("a file");
    let path = api.kubeconfig("unused").with_file_name("later.conf");
    let cluster = Cluster::open(&ClusterOptions { kubeconfig: Some(path.clone()), node: "n1".into() });
    let (secrets, accounts) =
        (PullSecrets::of(&cluster, Duration::ZERO, Duration::ZERO), ClusterServiceAccounts::of(&cluster));
    let problem = secrets.get("default", "s").await.expect_err("there is no file").to_string();
    assert!(problem.starts_with(&format!("{}: ", path.display())), "{problem}");
    let problem = accounts.get("default", "default").await.expect_err("nor for accounts");
    assert!(problem.contains("later.conf"), "{problem}");
    fs_err::write(&path, &valid).expect("a file");
    secrets.get("default", "s").await.expect("it is read now");
}

#[tokio::test]
async fn a_read_that_is_throttled_is_repeated_when_the_server_says() {
    let api = server("t");
    api.fault("/secrets/", 2, ApiFault::Throttle(0));
    let cluster = Cluster::open(&ClusterOptions { kubeconfig: Some(api.kubeconfig("t")), node: "n1".into() });
    PullSecrets::of(&cluster, Duration::ZERO, Duration::ZERO).get("default", "s").await.expect("repeated");
    let statuses: Vec<u16> = api.requests().into_iter().map(|request| request.status).collect();
    assert_eq!(statuses, [429, 429, 200]);
}

#[tokio::test]
async fn an_exec_plugin_that_hangs_is_named_after_half_a_minute() {
    let api = server("t");
    let path = api.kubeconfig("t");
    let valid = fs_err::read_to_string(&path).expect("a file");
    // Until the file is removed with the server, at the end of the test.
    let hang = format!("while test -e '{}'; do sleep 0.1; done", path.display());
    let plugin = json!({
        "apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", hang],
        "interactiveMode": "Never",
    });
    let mut kubeconfig: serde_json::Value = serde_saphyr::from_str(&valid).expect("a kubeconfig");
    kubeconfig["users"][0]["user"] = json!({ "exec": plugin });
    fs_err::write(&path, kubeconfig.to_string()).expect("a file");
    let options = ClusterOptions { kubeconfig: Some(path), node: "n1".into() };
    let connecting = tokio::spawn(async move { Cluster::connect(&options).await.map(drop) });
    // It begins to read the files, and waits for them.
    tokio::task::yield_now().await;
    time::pause();
    time::advance(Duration::from_secs(31)).await;
    let error = connecting.await.expect("no panic").expect_err("it hangs");
    assert!(error.is_temporary() && error.to_string().contains("an exec plugin may hang"), "{error}");
}

#[tokio::test]
async fn an_exec_plugin_gives_the_token() {
    let api = server("from-plugin");
    let path = api.kubeconfig("inline");
    let valid = fs_err::read_to_string(&path).expect("a file");
    let answer = r#"{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"from-plugin"}}"#;
    let plugin = json!({
        "apiVersion": "client.authentication.k8s.io/v1", "command": "printf",
        "args": ["%s", answer], "interactiveMode": "Never",
    });
    let mut kubeconfig: serde_json::Value = serde_saphyr::from_str(&valid).expect("a kubeconfig");
    kubeconfig["users"][0]["user"] = json!({ "exec": plugin });
    fs_err::write(&path, kubeconfig.to_string()).expect("a file");
    let cluster = Cluster::open(&ClusterOptions { kubeconfig: Some(path), node: "n1".into() });
    PullSecrets::of(&cluster, Duration::ZERO, Duration::ZERO)
        .get("default", "s")
        .await
        .expect("the plugin's token");
}

/// Returns the failure to connect with a kubeconfig of this content; `None` is a file that does not exist.
async fn problem_of(content: Option<&str>) -> String {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("kubeconfig");
    if let Some(content) = content {
        fs_err::write(&path, content).expect("a file");
    }
    let options = ClusterOptions { kubeconfig: Some(path.clone()), node: "n1".into() };
    let problem = Cluster::connect(&options).await.err().expect("it cannot be used").to_string();
    let rest = problem.strip_prefix(&format!("{}: ", path.display()));
    rest.unwrap_or_else(|| panic!("no place: {problem}")).to_owned()
}

#[tokio::test]
async fn a_kubeconfig_that_cannot_be_used_is_named_once_with_the_place_and_without_its_token() {
    let with_user = |user: &str| {
        format!(
            "current-context: c\nusers:\n- name: u\n  user: {user}\nclusters:\n- name: c\n  cluster: {CLUSTER}\n\
             contexts:\n- name: c\n  context: {{ cluster: c, user: u }}\n"
        )
    };
    let missing_file = with_user("{ client-certificate: /missing.crt, client-key: /missing.key }");
    let plugin = |script: &str| {
        let user = json!({ "exec": {
            "apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", script],
            "env": [{ "name": "OWN", "value": "sekret" }], "interactiveMode": "Never",
        } });
        with_user(&user.to_string())
    };
    let (failing, wrong) = (plugin("echo sekret; exit 3"), plugin("echo '{\"status\": [\"sekret\"]}'"));
    let other_cluster = with_user("{}").replace("cluster: c,", "cluster: other,");
    for (content, expected) in [
        (None, "cannot be read: No such file or directory (os error 2)"),
        (Some(""), "not a kubeconfig: it has no current-context"),
        (Some("<html>sekret</html>"), "not a kubeconfig: line 1 column 1: expected mapping start"),
        (
            Some(&with_user("{ token: [sekret] }")),
            "not a kubeconfig: line 4 column 18: expected string scalar",
        ),
        (Some(&other_cluster), "has no cluster \"other\", that of its current-context"),
        (Some(&failing), "the exec plugin of the kubeconfig failed: exit status: 3"),
        (Some(&wrong), "the exec plugin of the kubeconfig did not print an ExecCredential"),
        (Some("current-context: c"), "has no context \"c\", its current-context"),
        (
            Some(&missing_file),
            "Failed to infer provided configuration: failed to load client certificate: failed to read file '\"/missing.crt\"': No such file or directory (os error 2)",
        ),
    ] {
        assert_eq!(problem_of(content).await, expected);
    }
}

const CLUSTER: &str = "{ server: 'https://127.0.0.1:1', insecure-skip-tls-verify: true }";

#[tokio::test]
async fn a_client_certificate_of_version_1_is_named_with_the_next_step() {
    let directory = TempDir::new().expect("a directory");
    let (certificate, key) = (directory.path().join("client.crt"), directory.path().join("client.key"));
    fs_err::write(&certificate, CERTIFICATE_V1).expect("a file");
    fs_err::write(&key, KEY).expect("a file");
    let user = json!({ "client-certificate": certificate, "client-key": key });
    let kubeconfig = format!(
        "current-context: c\nusers: [{{ name: u, user: {user} }}]\nclusters: [{{ name: c, cluster: {CLUSTER} }}]\n\
         contexts: [{{ name: c, context: {{ cluster: c, user: u }} }}]"
    );
    let problem = problem_of(Some(&kubeconfig)).await;
    assert!(problem.starts_with("client certificate of X.509 version 1: version 3 is required"), "{problem}");
}

const CERTIFICATE_V1: &str = "-----BEGIN CERTIFICATE-----
MIIBGDCBvwIUEcqzI7QP9nZvvVt/N6BaYULhQucwCgYIKoZIzj0EAwIwDjEMMAoG
A1UEAwwDb2xkMCAXDTI2MTEyMzIxNTIwMloYDzIxMjYxMDMwMjE1MjAyWjAOMQww
CgYDVQQDDANvbGQwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAASGovtbXzdYCg3+
PA2nTJ/TQAuBwU63HavTjZsjfpKaKp1uPxHbgiF5kODrX2TT1ALcHuj6knsCv004
a8f5qgTrMAoGCCqGSM49BAMCA0gAMEUCIA4CTRgQcxUXdlFVw4S+dAUw36lcTtz/
Ouhpxbx+uwHoAiEAtlTfVWl3NAC28ArPeIsj6tOlACk7YoNBJiavDFYyr8k=
-----END CERTIFICATE-----
";
/// It signs nothing else.
const KEY: &str = "-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg59sxYCpDLIeqRgbk
mTU8mf8oCuKS7HBbV5Pz1ejrhnahRANCAASGovtbXzdYCg3+PA2nTJ/TQAuBwU63
HavTjZsjfpKaKp1uPxHbgiF5kODrX2TT1ALcHuj6knsCv004a8f5qgTr
-----END PRIVATE KEY-----
";
