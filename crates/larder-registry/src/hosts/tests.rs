use std::error::Error as _;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

/// A directory with one `hosts.toml` for the registry.
fn configured(registry: &str, hosts_toml: &str) -> (TempDir, RegistryConfig) {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join(registry);
    fs_err::create_dir_all(&dir).unwrap();
    fs_err::write(dir.join("hosts.toml"), hosts_toml).unwrap();
    let config = RegistryConfig { config_dirs: vec![root.path().to_owned()], ..RegistryConfig::default() };
    (root, config)
}

fn hosts(registry: &str, hosts_toml: &str) -> Result<Vec<RegistryHost>, HostsError> {
    let (_root, config) = configured(registry, hosts_toml);
    hosts_of(registry, &config, &|_| ())
}

fn bases(registry: &str, hosts_toml: &str) -> Vec<String> {
    hosts(registry, hosts_toml).unwrap().iter().map(|host| host.base.to_string()).collect()
}

#[test]
fn without_files_the_registry_serves_itself_over_https_and_on_loopback_over_http_as_well() {
    let plain = RegistryConfig {
        config_dirs: Vec::new(),
        plain_http: vec!["old.example:5000".into()],
        ..RegistryConfig::default()
    };
    for (registry, base, skip_verify, plain_fallback) in [
        ("docker.io", "https://registry-1.docker.io/v2", false, false),
        ("reg.example", "https://reg.example/v2", false, false),
        ("reg.example:5000", "https://reg.example:5000/v2", false, false),
        ("old.example:5000", "http://old.example:5000/v2", false, false),
        ("localhost:5000", "https://localhost:5000/v2", true, true),
        ("127.0.0.1:5000", "https://127.0.0.1:5000/v2", true, true),
        ("[::1]:5000", "https://[::1]:5000/v2", true, true),
        ("localhost:443", "https://localhost/v2", true, false),
        ("localhost:80", "http://localhost/v2", false, false),
        ("localhost.example:5000", "https://localhost.example:5000/v2", false, false),
    ] {
        let hosts = hosts_of(registry, &plain, &|_| ()).unwrap();
        assert_eq!(hosts.len(), 1);
        assert_eq!(hosts[0].base.as_str(), base);
        assert_eq!(
            (hosts[0].tls.skip_verify, hosts[0].plain_fallback),
            (skip_verify, plain_fallback),
            "{base}"
        );
        assert!(hosts[0].is_registry && hosts[0].pull && hosts[0].resolve);
    }
}

#[test]
fn hosts_are_asked_in_the_order_of_the_file_and_the_server_last() {
    let file = r#"
        server = "https://registry-1.docker.io"
        [host."https://z.example"]
        [host."http://a.example:5000"]
          capabilities = ["pull"]
        [host."m.example/proxy/hub"]
          capabilities = ["Resolve", "push", "referrers"]
    "#;
    let hosts = hosts("docker.io", file).unwrap();
    let lists: Vec<_> = hosts.iter().map(|host| host.referrers).collect();
    assert_eq!(lists, [true, false, true, true]);
    let seen: Vec<_> =
        hosts.iter().map(|host| (host.base.as_str(), host.pull, host.resolve, host.is_registry)).collect();
    assert_eq!(
        seen,
        [
            ("https://z.example/v2", true, true, false),
            ("http://a.example:5000/v2", true, false, false),
            ("https://m.example/proxy/hub/v2", false, true, false),
            ("https://registry-1.docker.io/v2", true, true, true),
        ]
    );
}

#[test]
fn a_path_is_completed_unless_it_is_said_to_be_complete() {
    let file = r#"
        [host."https://a.example/v2"]
        [host."https://b.example/v2/hub/"]
          override_path = true
        [host."https://c.example"]
          override_path = true
    "#;
    assert_eq!(
        bases("reg.example", file),
        ["https://a.example/v2", "https://b.example/v2/hub", "https://c.example/", "https://reg.example/v2"]
    );
}

#[test]
fn a_server_on_another_host_is_still_the_registry_and_a_mirror_is_not() {
    let file = "server = \"http://10.0.0.1:5000\"\nskip_verify = true\n[host.\"https://reg.example\"]\n[host.\"https://x.example\"]";
    let hosts = hosts("reg.example", file).unwrap();
    let seen: Vec<_> = hosts.iter().map(|host| (host.name(), host.is_registry)).collect();
    assert_eq!(
        seen,
        [("reg.example".into(), true), ("x.example".into(), false), ("10.0.0.1:5000".to_owned(), true)]
    );
    assert!(hosts[2].tls.skip_verify && !hosts[1].tls.skip_verify);
}

#[test]
fn a_host_that_is_also_the_server_is_asked_once() {
    let file = "server = \"https://a.example\"\n[host.\"https://a.example\"]\n[host.\"https://b.example\"]\n[host.\"https://b.example/v2\"]";
    assert_eq!(
        bases("reg.example", file),
        ["https://a.example/v2", "https://b.example/v2", "https://a.example/v2"],
        "once before the last resort, and as the last resort"
    );
}

#[test]
fn header_fields_are_one_text_or_several() {
    let file = "[host.\"https://a.example\".header]\n x-one = \"1\"\n x-two = [\"2\", \"3\"]";
    let headers = &hosts("reg.example", file).unwrap()[0].headers;
    let seen: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
    assert_eq!(seen, [("x-one", "1"), ("x-two", "2"), ("x-two", "3")]);
    assert!(!format!("{headers:?}").contains("\"1\""), "values may be tokens and do not print");
}

#[test]
fn the_most_specific_directory_decides() {
    let root = tempfile::tempdir().unwrap();
    let config = RegistryConfig { config_dirs: vec![root.path().to_owned()], ..RegistryConfig::default() };
    let first = |registry: &str| hosts_of(registry, &config, &|_| ()).unwrap()[0].name();
    for (dir, registry) in [
        ("_default", "reg.example:5000"),
        ("reg.example:5000", "reg.example:5000"),
        ("reg.example_5000_", "reg.example:5000"),
    ] {
        let path = root.path().join(dir);
        fs_err::create_dir_all(&path).unwrap();
        let name = dir.replace(['_', ':'], "-");
        let name = name.trim_matches('-');
        fs_err::write(path.join("hosts.toml"), format!("[host.\"https://{name}.test\"]")).unwrap();
        assert_eq!(first(registry), format!("{name}.test"));
    }
    let other = hosts_of("other.example", &config, &|_| ()).unwrap();
    assert_eq!(other[0].name(), "default.test");
    assert_eq!(other[1].base.as_str(), "https://other.example/v2", "the default's server is the registry");
}

#[test]
fn errors_have_file_line_and_key() {
    for (file, parts) in [
        ("server = 5", &["hosts.toml: line 1: server: expected a string, found integer"][..]),
        ("\n\nserver = \"ftp://x\"", &["line 3: server", "http://"]),
        ("server = \"https://u:p@x\"", &["server", "credentials"]),
        (
            "[host.\"https://a\"]\ncapabilities = \"pull\"",
            &["line 2: host.\"https://a\".capabilities: expected an array"],
        ),
        ("[host.\"https://a\"]\ncapabilities = [\"pul\"]", &["unknown capability \"pul\""]),
        ("[host.\"https://a\"]\nskip_verify = \"yes\"", &["skip_verify: expected true or false"]),
        ("[host]\n\"https://a\" = 1", &["host.\"https://a\": expected a table"]),
        ("[host.\"https://a\".header]\n\"bad name\" = \"x\"", &["header.bad name", "invalid header name"]),
        ("[host.\"https://a\"]\nclient = [[\"a\", \"b\", \"c\"]]", &["client: expected [certificate, key]"]),
        ("[host.\"https://\"]", &["host.\"https://\""]),
        ("server = ", &["hosts.toml: line 1"]),
        ("server = \"a\"\nserver = \"b\"", &["line 2", "duplicate"]),
    ] {
        let error = hosts("reg.example", file).expect_err(file);
        for part in parts {
            assert!(error.to_string().contains(part), "{file}: {error}");
        }
        assert!(error.hint().is_some());
    }
}

#[test]
fn unknown_keys_are_reported_with_the_most_similar_known_key() {
    let (root, config) = configured(
        "reg.example",
        "servr = \"https://a\"\ndial_timeout = \"1s\"\n[host.\"https://a\"]\n  capabilites = [\"pull\"]\n  \
         dial_timeout = \"1s\"\n  server = \"x\"\n  header.x-any = \"1\"",
    );
    let reported = std::cell::RefCell::new(Vec::new());
    let hosts =
        hosts_of("reg.example", &config, &|unknown| reported.borrow_mut().push(unknown.to_string())).unwrap();
    assert_eq!(hosts.len(), 2, "the rest holds");
    let file = root.path().join("reg.example/hosts.toml");
    let line = |text: &str| format!("{}: {text}", file.display());
    let reported = reported.into_inner();
    assert_eq!(reported.len(), 3, "{reported:#?}");
    for expected in [
        line("line 4: unknown key host.\"https://a\".capabilites, ignored; did you mean capabilities?"),
        line("line 6: unknown key host.\"https://a\".server, ignored"),
        line("line 1: unknown key servr, ignored; did you mean server?"),
    ] {
        assert!(reported.contains(&expected), "{expected} in {reported:#?}");
    }
}

#[test]
fn certificates_that_are_missing_or_wrong_are_named() {
    let error = hosts("reg.example", "ca = \"nothing.crt\"").unwrap_err();
    assert!(error.source().unwrap().to_string().contains("nothing.crt"), "{error}");

    let (root, config) = configured("reg.example", "ca = [\"hosts.toml\"]");
    let error = hosts_of("reg.example", &config, &|_| ()).unwrap_err();
    assert!(error.to_string().contains("ca of"), "{error}");
    assert!(error.to_string().contains(&root.path().display().to_string()), "{error}");
    assert_eq!(error.source().unwrap().to_string(), "contains no PEM certificate (BEGIN CERTIFICATE)");
}

#[test]
fn the_hint_of_a_bad_ca_file_is_about_that_file() {
    let (root, config) = configured("reg.example", "ca = \"ca.crt\"");
    let file = root.path().join("reg.example/ca.crt");
    let (certificate, key) =
        larder_testkit_peers::tls::CertificateRequest { subject: "reg.example", ..Default::default() }
            .make(root.path(), "made")
            .unwrap();
    let certificate = fs_err::read_to_string(certificate).unwrap();
    let key = fs_err::read_to_string(key).unwrap();
    let problem = || {
        let error = hosts_of("reg.example", &config, &|_| ()).unwrap_err();
        format!("{}; hint: {}", error.source().unwrap(), error.hint().unwrap())
    };
    let missing = problem();
    assert!(missing.contains("put the file there, or correct its path in hosts.toml"), "{missing}");
    for (text, expected) in [
        ("", "is empty; hint: put a PEM file there"),
        (&*key, "no certificate; hint: put the certificate there, in PEM (BEGIN CERTIFICATE);"),
        (&certificate[..certificate.len() / 2], "can be parsed; hint: it may be truncated: copy"),
        ("text", "contains no PEM certificate (BEGIN CERTIFICATE); hint: put the certificate there"),
    ] {
        fs_err::write(&file, text).unwrap();
        let found = problem();
        assert!(found.contains(expected), "{expected}: {found}");
    }
    fs_err::remove_file(&file).unwrap();
    fs_err::create_dir(&file).unwrap();
    let directory = problem();
    assert!(directory.contains("replace the directory by a file"), "{directory}");
}

#[test]
fn docker_s_files_are_read_where_there_is_no_hosts_toml() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("localhost:5000");
    fs_err::create_dir_all(&dir).unwrap();
    let config = RegistryConfig { config_dirs: vec![root.path().to_owned()], ..RegistryConfig::default() };
    let host = &hosts_of("localhost:5000", &config, &|_| ()).unwrap()[0];
    assert!(host.plain_fallback, "an empty dir says nothing");
    fs_err::write(dir.join("ca.crt"), "no certificate").unwrap();
    let error = hosts_of("localhost:5000", &config, &|_| ()).unwrap_err();
    assert!(error.to_string().contains("ca.crt: authority"), "{error}");
}

/// Every `toml` block of the page about registries is a `hosts.toml` without unknown keys.
#[test]
fn the_examples_of_the_documentation_are_read() {
    let page =
        fs_err::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/registries.md")).unwrap();
    let examples: Vec<_> =
        page.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(examples.len() > 5);
    for example in examples {
        let (root, config) = configured("registry.example", example);
        let dir = root.path().join("registry.example");
        let (certificate, key) = larder_testkit_peers::tls::CertificateRequest {
            subject: "registry.example",
            ..Default::default()
        }
        .make(&dir, "made")
        .unwrap();
        for name in ["ca.crt", "server.crt", "client.cert"] {
            fs_err::copy(&certificate, dir.join(name)).unwrap();
        }
        fs_err::copy(&key, dir.join("client.key")).unwrap();
        let read = hosts_of("registry.example", &config, &|unknown| panic!("{unknown}"));
        assert!(
            read.unwrap().iter().any(|host| host.is_registry || example.contains("registry-1.docker.io"))
        );
    }
}

proptest! {
    #[test]
    fn no_file_panics(text in "\\PC{0,120}") {
        let _ = hosts("reg.example", &text);
    }

    #[test]
    fn nothing_near_the_format_panics(text in "(server|host|ca|client|header|capabilities|override_path|skip_verify|=|\\.|\\[|\\]|\"https://a\"|\"pull\"|true|5|,|\n| ){0,40}") {
        if let Ok(hosts) = hosts("reg.example", &text) {
            prop_assert!(!hosts.is_empty());
            prop_assert!(hosts.iter().all(|host| matches!(host.base.scheme(), "http" | "https")));
        }
    }
}
