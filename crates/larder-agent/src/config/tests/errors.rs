//! Each error is reported with file, line, key and next step.

use super::{read, read_both, read_whole};
use crate::config::read::{SettingsSource, SettingsSources, load};
use crate::config::{ConfigErrors, SettingOrigin};
use crate::environment::DefaultPaths;

/// The reported errors, with hints in brackets.
fn reported(errors: &ConfigErrors) -> Vec<String> {
    let each = errors.each().iter();
    each.map(|error| match error.hints() {
        [] => error.to_string(),
        hints => {
            let hints: Vec<_> = hints.iter().map(ToString::to_string).collect();
            format!("{error} [{}]", hints.join("; "))
        }
    })
    .collect()
}

#[track_caller]
fn expect(settings: &str, wanted: &[&str]) {
    let errors = read(settings).expect_err(settings);
    assert_eq!(reported(&errors), wanted, "{settings}");
}

#[test]
fn values_of_the_wrong_type_are_named() {
    for (settings, wanted) in [
        ("registryPullQPS: many", "c.yaml:3: registryPullQPS: must be a number, is a string"),
        (
            "registryPullQPS: '5'",
            "c.yaml:3: registryPullQPS: must be a number, is a string [leave out the quotes]",
        ),
        (
            "registryPullQPS: 1.5",
            "c.yaml:3: registryPullQPS: must be a whole number from -2147483648 to 2147483647, is \"1.5\"",
        ),
        (
            "registryBurst: 99999999999",
            "c.yaml:3: registryBurst: must be a whole number from -2147483648 to 2147483647, is \"99999999999\"",
        ),
        ("registryBurst: [1]", "c.yaml:3: registryBurst: must be a number, is a list"),
        ("serializeImagePulls: 1", "c.yaml:3: serializeImagePulls: must be true or false, is the number 1"),
        (
            "serializeImagePulls: 'true'",
            "c.yaml:3: serializeImagePulls: must be true or false, is a string [leave out the quotes]",
        ),
        (
            "imageMinimumGCAge: 120",
            "c.yaml:3: imageMinimumGCAge: must be a duration, is the number 120 [add the unit, such as 90s]",
        ),
        (
            "imageMinimumGCAge: 2 minutes",
            "c.yaml:3: imageMinimumGCAge: \"2 minutes\": not a duration; use a form like 90s, 5m or 1h30m",
        ),
        (
            "kubernetes: {nodeName: Node 1!}",
            "c.yaml:3: kubernetes.nodeName: must be a lowercase RFC 1123 subdomain, is \"Node 1!\" [`kubectl get nodes` lists the names]",
        ),
        ("gc: 5", "c.yaml:3: gc: must be a mapping of settings, is the number 5"),
        ("gc: [5]", "c.yaml:3: gc: must be a mapping of settings, is a list"),
        ("gc: {period: 0s}", "c.yaml:3: gc.period: must be from 1s to 8760h (one year), is 0s"),
        ("gc: {period: -1s}", "c.yaml:3: gc.period: must be from 1s to 8760h (one year), is -1s"),
        ("gc: {period: 9000h}", "c.yaml:3: gc.period: must be from 1s to 8760h (one year), is 9000h0m0s"),
        (
            "gc: {minimumFreeBytes: lots}",
            "c.yaml:3: gc.minimumFreeBytes: \"lots\" is not a size; write it like 500MB or 10GiB",
        ),
        ("gc: {minimumFreeBytes: -5}", "c.yaml:3: gc.minimumFreeBytes: must be from 0 to 1024PiB, is -5"),
        (
            "pull: {lazy: {minimumSize: -1MiB}}",
            "c.yaml:3: pull.lazy.minimumSize: must be from 0 to 1024PiB, is -1MiB",
        ),
        (
            "pull: {lazy: {minimumSize: 9999999TiB}}",
            "c.yaml:3: pull.lazy.minimumSize: must be from 0 to 1024PiB, is 9999999TiB",
        ),
        (
            "registry: {rangeSize: 1KiB}",
            "c.yaml:3: registry.rangeSize: must be from 64KiB to 1024PiB, is 1KiB",
        ),
        (
            "gc: {inodeHighThresholdPercent: 101}",
            "c.yaml:3: gc.inodeHighThresholdPercent: must be a whole number from 0 to 100, is \"101\"",
        ),
        (
            "gc: {strategy: Kubelet}",
            "c.yaml:3: gc.strategy: must be one of larder, kubelet; is \"Kubelet\" [did you mean kubelet?]",
        ),
        (
            "cri: {kubelet: true}",
            "c.yaml:3: cri.kubelet: must be one of larder, runtime, none, is the boolean true",
        ),
        (
            "pull: {sameImage: once}",
            "c.yaml:3: pull.sameImage: must be one of share, eachRequest; is \"once\"",
        ),
        (
            "log: {level: loud}",
            "c.yaml:3: log.level: must be one of error, warn, info, debug, trace; is \"loud\"",
        ),
        (
            "listen: {mode: 0660}",
            "c.yaml:3: listen.mode: must be a mode such as \"0660\", is the number 660 [put it in quotes]",
        ),
        (
            "listen: {mode: '0999'}",
            "c.yaml:3: listen.mode: must be an octal mode from \"0000\" to \"0777\", is \"0999\"",
        ),
        ("root: images", "c.yaml:3: root: must be an absolute path, is \"images\" [begin it with /]"),
        ("staticPodPath: [/a]", "c.yaml:3: staticPodPath: must be a string, is a list"),
        (
            "metrics: {address: localhost}",
            "c.yaml:3: metrics.address: \"localhost\": not an address with a port [write it like 127.0.0.1:9464 or \
             [::1]:9464]",
        ),
        (
            "registry: {certsDirs: /etc/certs}",
            "c.yaml:3: registry.certsDirs: must be a list, is a string [begin each entry with a dash]",
        ),
        (
            "registry: {certsDirs: [certs]}",
            "c.yaml:3: registry.certsDirs[0]: must be an absolute path, is \"certs\" [begin it with /]",
        ),
        (
            "registry: {proxy: proxy.example}",
            "c.yaml:3: registry.proxy: \"proxy.example\": not environment, none or a URL [write it like \
             http://proxy.example:3128]",
        ),
    ] {
        expect(settings, &[wanted]);
    }
}

#[test]
fn unknown_settings_are_refused_with_the_nearest_name() {
    for (settings, wanted) in [
        ("registryPullQps: 5", "c.yaml:3: registryPullQps: unknown setting [did you mean registryPullQPS?]"),
        (
            "imageGCLowThreshold: 70",
            "c.yaml:3: imageGCLowThreshold: unknown setting [did you mean imageGCLowThresholdPercent?]",
        ),
        (
            "imageGC: 70",
            "c.yaml:3: imageGC: unknown setting [did you mean imageGCHighThresholdPercent or imageGCLowThresholdPercent?]",
        ),
        ("gc: {perriod: 5m}", "c.yaml:3: gc.perriod: unknown setting [did you mean gc.period?]"),
        ("strategy: larder", "c.yaml:3: strategy: unknown setting [write strategy below gc:]"),
        ("gc: {root: /x}", "c.yaml:3: gc.root: unknown setting [write root at the top of the file]"),
        ("gc.period: 5m", "c.yaml:3: [gc.period]: unknown setting [write period below gc:]"),
        (
            "evictionHard: {}",
            "c.yaml:3: evictionHard: unknown setting [larder config --reference lists all settings]",
        ),
        (
            "drain: {quickly: true}",
            "c.yaml:3: drain.quickly: unknown setting [known below drain: gracePeriod]",
        ),
    ] {
        expect(settings, &[wanted]);
    }
}

#[test]
fn contradicting_settings_are_reported_at_their_place() {
    for (settings, wanted) in [
        (
            "imageGCHighThresholdPercent: 70",
            "c.yaml:3: imageGCHighThresholdPercent: invalid configuration: imageGCLowThresholdPercent \
             (--image-gc-low-threshold) 80 must be less than imageGCHighThresholdPercent (--image-gc-high-threshold) 70 \
             [imageGCLowThresholdPercent is set by default, imageGCHighThresholdPercent is set by c.yaml:3]",
        ),
        (
            "serializeImagePulls: true\nmaxParallelImagePulls: 2",
            "c.yaml:4: maxParallelImagePulls: invalid configuration: maxParallelImagePulls cannot be larger than 1 \
             unless SerializeImagePulls (--serialize-image-pulls) is set to false \
             [maxParallelImagePulls is set by c.yaml:4, serializeImagePulls is set by c.yaml:3]",
        ),
        ("runtimeRequestTimeout: -1s", "c.yaml:3: runtimeRequestTimeout: must not be negative, is -1s"),
        (
            "imageServiceEndpoint: tcp://10.0.0.1:1",
            "c.yaml:3: imageServiceEndpoint: \"tcp://10.0.0.1:1\": only support unix socket endpoint [write it as \
             unix:///path/to.sock]",
        ),
        (
            "registry: {plainHTTP: ['good.example:5000', 'http://bad.example']}",
            "c.yaml:3: registry.plainHTTP[1]: \"http://bad.example\": not a registry as in an image name [write \
             HOST or HOST:PORT, such as registry.example:5000, without http:// and without a path]",
        ),
        (
            "backend: containerd",
            "c.yaml:3: backend: \"containerd\": not store, cri, docker, podman or a socket [write a socket as \
             unix:///path/to.sock]",
        ),
        (
            "backend: /run/larder.sock",
            "c.yaml:3: backend: is the socket that larder listens on [name the runtime's socket]",
        ),
        (
            "imageServiceEndpoint: unix:///run/larder.sock",
            "c.yaml:3: imageServiceEndpoint: is the socket that larder listens on [name the runtime's socket]",
        ),
        (
            "imageCredentialProviderBinDir: /bin",
            "c.yaml:3: imageCredentialProviderBinDir: requires imageCredentialProviderConfig",
        ),
        (
            "metrics: {address: '0.0.0.0:9464'}",
            "c.yaml:3: metrics.address: 0.0.0.0:9464 is reachable from other machines, without encryption or \
             authentication [use 127.0.0.1, or set metrics.allowRemote: true to allow it]",
        ),
        (
            "dashboard: {hosts: [node-1.example, 'http://node-1:9464']}",
            "c.yaml:3: dashboard.hosts: \"http://node-1:9464\": not a host name [write it without scheme and port]",
        ),
        (
            "gc: {inodeHighThresholdPercent: 50}",
            "c.yaml:3: gc.inodeHighThresholdPercent: low inode threshold 85 is above high inode threshold \
             50; lower it",
        ),
        ("pull: {backoffMax: 5s}", "c.yaml:3: pull.backoffMax: pull.backoffMax is below pull.backoffInitial"),
        (
            "registry: {retryMax: 1ms}",
            "c.yaml:3: registry.retryMax: registry.retryMax is below registry.retryInitial",
        ),
        (
            "registry: {noProxy: localhost}",
            "c.yaml:3: registry.noProxy: requires a URL as registry.proxy [set NO_PROXY in larder's \
             environment]",
        ),
    ] {
        expect(settings, &[wanted]);
    }
    let long = "x".repeat(120);
    let errors = read(&format!("listen: {{socket: /{long}}}")).unwrap_err();
    assert!(errors.to_string().contains("121 bytes, the limit is 107"), "{errors}");
}

#[test]
fn credentials_of_a_proxy_are_refused_and_not_shown() {
    for url in ["http://u:hunter2@proxy.example:1", "u:hunter2@proxy.example", "socks5://hunter2@x"] {
        let errors = read(&format!("registry: {{proxy: '{url}'}}")).unwrap_err();
        assert!(errors.to_string().ends_with("registry.proxy: must not hold credentials"), "{errors}");
        assert!(!format!("{errors:?}").contains("hunter2"), "{errors:?}");
    }
}

#[test]
fn errors_name_the_item_of_a_list() {
    expect(
        "gc:\n  keep:\n    - name: a\n      digest: sha256:b\n    - nam: a\n    - newest: 3\n    - label: ''\n    - 5\n",
        &[
            "c.yaml:5: gc.keep[0]: a keep rule must have exactly one selector [write one of name, digest, label, type, or \
             repository with newest; write further rules as further items]",
            "c.yaml:5: gc.keep[0]: sha256:b: not a digest; use sha256: and 64 hexadecimal digits",
            "c.yaml:7: gc.keep[1].nam: unknown key [did you mean name?]",
            "c.yaml:8: gc.keep[2]: repository and newest must be used together [write both, such as repository: app/* and \
             newest: 3]",
            "c.yaml:9: gc.keep[3]: label without key; use KEY or KEY=VALUE",
            "c.yaml:10: gc.keep[4]: must be a mapping, is the number 5 [write it like - name: ...]",
        ],
    );
    let hint = "must have name or digest, and nothing else [write it like - name: registry.example/*]";
    expect(
        "pull:\n  lazy:\n    images:\n    - {}\n    - {name: a, digest: b}\n    - {label: a}\n    - {name: a, ttl: 1h}\n    \
         - name: Bad/[x\n",
        &[
            &format!("c.yaml:6: pull.lazy.images[0]: {hint}"),
            &format!("c.yaml:7: pull.lazy.images[1]: {hint}"),
            "c.yaml:7: pull.lazy.images[1]: b: not a digest; use sha256: and 64 hexadecimal digits",
            "c.yaml:8: pull.lazy.images[2].label: unknown key [known keys: name, digest]",
            "c.yaml:9: pull.lazy.images[3].ttl: unknown key [known keys: name, digest]",
            "c.yaml:10: pull.lazy.images[4]: \"Bad/[x\": invalid reference format; expected \
             [registry[:port]/]repository[:tag][@digest]",
        ],
    );
    expect(
        "prefetch:\n- image: Bad\n- jitter: 1m\n- {image: a, interval: 1h, schedule: '3:30'}\n- {image: a, interval: 1h, \
         schedule: '03:30', keep: true, lease: 1h}\n",
        &[
            "c.yaml:4: prefetch[0]: couldn't parse image name \"Bad\": invalid reference format: repository name \
             (library/Bad) must be lowercase",
            "c.yaml:5: prefetch[1].image: required",
            "c.yaml:6: prefetch[2].schedule: must be a time of day [write a time of day in quotes, such as \"03:30\"]",
            "c.yaml:7: prefetch[3]: interval and schedule exclude each other [remove one of them]",
            "c.yaml:7: prefetch[3]: keep and lease exclude each other [remove one of them]",
        ],
    );
    expect(
        "prefetch:\n- image: https://bob:sekret@r.example/app\n",
        &["c.yaml:4: prefetch[0]: image is a URL [write it without scheme and credentials, such as \
           registry.example/app:1]"],
    );
    expect(
        "prefetch:\n- image: a\n- image: b\n- image: a\n",
        &["c.yaml:6: prefetch[2]: a is listed twice [remove one of them]"],
    );
}

#[test]
fn all_errors_are_reported_together() {
    expect(
        "gc:\n  period: soon\nimageGCHighThresholdPercent: 101\nregistryBurst: -1\nroots: /x\nlog: {level: 5}\n",
        &[
            "c.yaml:4: gc.period: \"soon\": not a duration; use a form like 90s, 5m or 1h30m",
            "c.yaml:7: roots: unknown setting [did you mean root?]",
            "c.yaml:8: log.level: must be one of error, warn, info, debug, trace, is the number 5",
            "c.yaml:5: imageGCHighThresholdPercent: invalid configuration: imageGCHighThresholdPercent \
             (--image-gc-high-threshold) 101 must be between 0 and 100, inclusive",
            "c.yaml:6: registryBurst: invalid configuration: registryBurst (--registry-burst) -1 must not be a negative \
             number",
        ],
    );
}

#[test]
fn a_value_that_cannot_be_read_contradicts_nothing() {
    expect(
        "imageGCHighThresholdPercent: 70\nimageGCLowThresholdPercent: '60'\n",
        &["c.yaml:4: imageGCLowThresholdPercent: must be a number, is a string [leave out the quotes]"],
    );
}

#[test]
fn a_file_of_another_kind_is_reported() {
    let begin = "begin with apiVersion: larder.dev/v1alpha1 and kind: LarderConfiguration";
    for (text, wanted) in [
        ("", vec![format!("c.yaml: is empty [{begin}]")]),
        ("# nothing\n", vec![format!("c.yaml: is empty [{begin}]")]),
        ("- a\n", vec![format!("c.yaml:1: must be a mapping of settings, is a list [{begin}]")]),
        ("root\n", vec![format!("c.yaml:1: must be a mapping of settings, is a string [{begin}]")]),
        (
            "kind: KubeletConfiguration\nfoo: 1\n",
            vec!["c.yaml:1: this is a KubeletConfiguration [use it with --kubelet-config]".to_owned()],
        ),
        (
            "root: /x\n",
            vec![
                "c.yaml:1: apiVersion: required [write apiVersion: larder.dev/v1alpha1]".to_owned(),
                "c.yaml:1: kind: required [write kind: LarderConfiguration]".to_owned(),
            ],
        ),
        (
            "apiVersion: larder.dev/v2\nkind: LarderConfiguration\n",
            vec!["c.yaml:1: apiVersion: must be larder.dev/v1alpha1".to_owned()],
        ),
        (
            "root: /x\nroot: /y\n",
            vec![
                "c.yaml:2: root: not valid YAML: a mapping has the same key twice [remove one of them]"
                    .to_owned(),
            ],
        ),
        ("a: 1\n---\nb: 1\n", vec!["c.yaml:3: not valid YAML: more than one document".to_owned()]),
    ] {
        assert_eq!(reported(&read_whole(text).expect_err(text)), wanted, "{text}");
    }
    let tabs = reported(&read_whole("gc:\n\tperiod: 5m\n").unwrap_err());
    assert!(tabs[0].starts_with("c.yaml:2: ") && tabs[0].contains("tabs"), "{tabs:?}");
}

#[test]
fn in_kubelets_file_only_settings_about_images_count() {
    let config = read_both("maxPods: nonsense\nroot: 5\nstaticPodPath: 7\nregistryPullQPS: 7\n", "").unwrap();
    assert_eq!(config.images.registry_pull_qps, 7);
    let errors = read_both("registryPullQPS: '7'\nfeatureGates: 5\n", "registryBurst: x\n").unwrap_err();
    assert_eq!(
        reported(&errors),
        [
            "k.yaml:3: registryPullQPS: must be a number, is a string [leave out the quotes]",
            "k.yaml:4: featureGates: must be a mapping, is the number 5",
            "c.yaml:3: registryBurst: must be a number, is a string",
        ]
    );
}

#[test]
fn a_kubelet_that_asks_larder_for_images_is_not_denied() {
    let kubelet = "imageServiceEndpoint: unix:///l.sock\n";
    let errors = read_both(kubelet, "listen: {socket: /l.sock}\ncri: {kubelet: none}\n").unwrap_err();
    assert_eq!(
        reported(&errors),
        ["c.yaml:4: cri.kubelet: is none, but kubelet's file has larder's socket as imageServiceEndpoint \
             [set it to larder: kubelet must not see images that it has no credentials for]"]
    );
}

/// Loads one file of larder's.
fn load_file(path: &std::path::Path, required: bool) -> Result<(), Vec<String>> {
    let layers = vec![SettingsSource::File { path: path.to_owned(), required }];
    let loaded = load(&SettingsSources { places: super::places(), layers });
    loaded.map(drop).map_err(|errors| {
        reported(&errors).into_iter().map(|line| line.replace(&*path.to_string_lossy(), "F")).collect()
    })
}

#[test]
fn an_invalid_endpoint_of_traces_is_named_without_its_path_which_may_be_a_token() {
    let hint = |host: &str| format!("[write it like {host}:4317]");
    for (endpoint, wanted) in [
        ("ftp://h:1/sekret", "\"ftp://h:1\": not an endpoint".to_owned()),
        ("collector/sekret", format!("\"collector\": no port {}", hint("collector"))),
        ("h:4317/sekret", format!("\"h:4317\": a path requires http:// or https:// {}", hint("h"))),
        ("h:99999", format!("\"h:99999\": invalid port {}", hint("h"))),
        ("http://h:99999/sekret", format!("\"http://h:99999\": invalid port {}", hint("h"))),
        ("http:///sekret", format!("\"http://\": no host {}", hint("localhost"))),
        ("dns:///[::1]", format!("\"dns:///[::1]\": no port {}", hint("[::1]"))),
    ] {
        let errors = read(&format!("tracing: {{endpoint: '{endpoint}'}}\n")).expect_err(endpoint);
        let reported = reported(&errors).join("\n");
        assert!(reported.contains(&wanted) && !reported.contains("sekret"), "{endpoint}: {reported}");
    }
    for endpoint in [
        "",
        "c:4317",
        "dns:///c:4317",
        "[::1]:4317",
        "http://c",
        "https://c:4318/token",
        "unix:///run/c.sock",
    ] {
        read(&format!("tracing: {{endpoint: '{endpoint}'}}\n")).expect(endpoint);
    }
}

#[test]
fn unreadable_files_are_reported_with_the_cause() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let one = |path: &std::path::Path| load_file(path, true).expect_err("no settings").remove(0);
    assert!(one(&path("absent")).starts_with("F: file not found"));
    assert_eq!(load_file(&path("absent"), false), Ok(()), "the usual file need not be there");
    assert_eq!(load_file(&path("absent/in/nothing"), false), Ok(()));
    assert_eq!(one(dir.path()), "F: is a directory [name the file in it]");
    fs_err::write(path("latin"), b"apiVersion: x\nkind: \xe4\n").unwrap();
    assert_eq!(one(&path("latin")), "F:2: not valid UTF-8 [save the file as UTF-8]");
    fs_err::write(path("huge"), vec![b'#'; (1 << 20) + 1]).unwrap();
    assert_eq!(one(&path("huge")), "F: larger than the limit of 1 MiB");
    rustix::fs::mknodat(rustix::fs::CWD, path("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    assert!(one(&path("pipe")).starts_with("F: not a regular file"), "a pipe would be waited for");
}

#[test]
fn errors_name_flags_and_variables() {
    let given = |by, key, value: &str| SettingsSource::Given { by, key, value: value.to_owned() };
    let sources = SettingsSources {
        places: DefaultPaths::default(),
        layers: vec![
            given(SettingOrigin::Variable("LARDER_BACKEND"), "backend", "x"),
            given(SettingOrigin::Flag("--certs-d"), "registry.certsDirs", "certs"),
            given(SettingOrigin::Flag("--registry-qps"), "registryPullQPS", "many"),
            given(SettingOrigin::Flag("--image-gc-high-threshold"), "imageGCHighThresholdPercent", "50"),
            given(SettingOrigin::Flag("--serialize-image-pulls"), "serializeImagePulls", "perhaps"),
        ],
    };
    let lines = reported(&load(&sources).unwrap_err());
    assert_eq!(
        lines,
        [
            "LARDER_BACKEND: backend: \"x\": not store, cri, docker, podman or a socket [write a socket as unix:///path/to.sock]",
            "--certs-d: registry.certsDirs[0]: must be an absolute path, is \"certs\" [begin it with /]",
            "--registry-qps: registryPullQPS: must be a whole number from -2147483648 to 2147483647, is \"many\"",
            "--serialize-image-pulls: serializeImagePulls: must be true or false, is a string",
            "--image-gc-high-threshold: imageGCHighThresholdPercent: invalid configuration: imageGCLowThresholdPercent \
             (--image-gc-low-threshold) 80 must be less than imageGCHighThresholdPercent (--image-gc-high-threshold) 50 \
             [imageGCLowThresholdPercent is set by default, imageGCHighThresholdPercent is set by --image-gc-high-threshold]",
            "configuration: root: no default: neither XDG_DATA_HOME nor HOME is set [name a directory: --root DIR]",
            "configuration: listen.socket: no default: neither XDG_RUNTIME_DIR nor HOME is set [name a socket: --socket PATH]",
        ]
    );
}
