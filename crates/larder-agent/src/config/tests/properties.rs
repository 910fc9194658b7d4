//! Properties of all settings.

use std::fmt::Write as _;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::{HEAD, KUBELET_HEAD, places, read, read_both, read_whole};
use crate::config::read::ConfigReader;
use crate::config::settings::{self, Setting};
use crate::config::{as_data, as_yaml, diff};

#[test]
fn each_setting_stands_in_the_table_once_and_sections_together() {
    let keys: Vec<_> = settings::all().map(|setting| setting.key).collect();
    let mut sections: Vec<_> =
        keys.iter().map(|key| key.split_once('.').map_or("", |(section, _)| section)).collect();
    sections.dedup();
    let all = sections.len();
    sections.sort_unstable();
    sections.dedup();
    assert_eq!(sections.len(), all, "a section that is opened twice is a key that is there twice");
    let mut unique = keys.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), keys.len());
}

/// A value for a setting that differs from its default.
fn another(setting: &Setting) -> &'static str {
    match setting.key {
        "maxParallelImagePulls" => "7",
        "registry.retryInitial" => "2s",
        "imageMaximumGCAge" => "300h",
        "imageGCHighThresholdPercent" => "97",
        "nodeStatusMaxImages" => "-1",
        "preloadedImagesVerificationAllowlist" => "[a/b, 'c/*']",
        "imagePullCredentialsVerificationPolicy" => "NeverVerifyAllowlistedImages",
        "imageCredentialProviderConfig" => "/plugins.yaml",
        "imageCredentialProviderBinDir" => "/plugins",
        "containerRuntimeEndpoint" | "imageServiceEndpoint" => "unix:///x.sock",
        "backend" => "cri",
        "listen.mode" => "'0600'",
        "listen.group" => "'1000'",
        "metrics.address" => "'[::1]:1'",
        "dashboard.serve" => "never",
        "cri.kubelet" => "none",
        "dashboard.hosts" => "[node-1, node-1.example]",
        "log.level" => "trace",
        "log.format" => "json",
        "pull.overRate" => "refuse",
        "pull.sameImage" => "eachRequest",
        "pull.newCredentials" => "wait",
        "pull.credentialTokens" => "ignore",
        "gc.whenUnreachable" => "all",
        "gc.strategy" => "kubelet",
        "gc.keep" => {
            "[{digest: 'sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', ttl: 1m}, {label: 'a=b: #c'}]"
        }
        "pull.lazy.images" => "[{name: 'a/*'}]",
        "prefetch" => "[{image: a, schedule: '00:00'}]",
        "containerd.socket" => "unix:///c.sock",
        "registry.proxy" => "http://p:1",
        "registry.noProxy" => "'no, on'",
        "runtime.sandboxImages" => "['r.example/pause:*']",
        "registry.plainHTTP" => "['1:2', 'a:1']",
        "registry.certsDirs" => "['/a b', /c]",
        "tracing.endpoint" => "https://c:4317",
        "tracing.samplingRatePerMillion" => "77",
        "tracing.protocol" => "http/json",
        "kubernetes.nodeName" => "node-1",
        "root"
        | "state"
        | "staticPodPath"
        | "listen.socket"
        | "kubernetes.nodeKubeconfig"
        | "kubernetes.kubeconfig" => "/p/q",
        "serializeImagePulls"
        | "metrics.allowRemote"
        | "metrics.kubeletNames"
        | "docker.pruneBuildCache"
        | "containerd.snapshotter"
        | "cri.pinLeased"
        | "store.verifyReads"
        | "kubernetes.enabled" => "true",
        "cri.pinKept"
        | "cri.pinMounted"
        | "containerd.fetchLayers"
        | "runtime.imageVolumes"
        | "kubernetes.pods"
        | "kubernetes.imageSets"
        | "kubernetes.events"
        | "featureGates.KubeletEnsureSecretPulledImages" => "false",
        key if key.starts_with("featureGates.") => "true",
        _ => match (setting.codec_name)().as_str() {
            "duration" => "77s",
            "size" => "77MiB",
            "percent" => "88",
            "whole number" => "11",
            form => panic!("{}: no example of {form}", setting.key),
        },
    }
}

/// A file that sets some of the settings, by their place in the table.
fn file_of(chosen: &[bool]) -> String {
    let lines = settings::all().zip(chosen).filter(|(_, chosen)| **chosen);
    format!("{HEAD}{}", nested(lines.map(|(setting, _)| (setting.key, another(setting)))))
}

/// `a.b` and its value as mappings.
fn nested<'a>(lines: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let (mut text, mut open) = (String::new(), Vec::new());
    for (key, value) in lines {
        let parts: Vec<&str> = key.split('.').collect();
        let sections = &parts[..parts.len() - 1];
        let already = open.iter().zip(sections).take_while(|(open, section)| open == section).count();
        for (depth, part) in parts.iter().enumerate().skip(already) {
            let value = if depth == sections.len() { format!(" {value}") } else { String::new() };
            let _ = writeln!(text, "{}{part}:{value}", "  ".repeat(depth));
        }
        open = sections.to_vec();
    }
    text
}

/// Settings that mean nothing without another.
const PARTNERS: [(&str, &str); 4] = [
    ("registry.noProxy", "registry.proxy"),
    ("imageCredentialProviderConfig", "imageCredentialProviderBinDir"),
    ("imageCredentialProviderBinDir", "imageCredentialProviderConfig"),
    ("preloadedImagesVerificationAllowlist", "imagePullCredentialsVerificationPolicy"),
];

/// Settings whose examples exclude each other.
const RIVALS: [(&str, &str); 2] = [
    ("serializeImagePulls", "maxParallelImagePulls"),
    ("featureGates.KubeletEnsureSecretPulledImages", "imagePullCredentialsVerificationPolicy"),
];

#[test]
fn each_setting_alone_is_read_shown_and_printed() {
    let default = read("").unwrap();
    for setting in settings::all() {
        let partner = PARTNERS.iter().find(|(key, _)| *key == setting.key).map(|(_, partner)| *partner);
        let chosen: Vec<bool> =
            settings::all().map(|other| other.key == setting.key || Some(other.key) == partner).collect();
        let config = read_whole(&file_of(&chosen)).unwrap_or_else(|wrong| panic!("{}: {wrong}", setting.key));
        let changes = diff(&default, &config);
        let mut all = changes.reloadable.iter().chain(&changes.needs_restart);
        assert!(all.any(|change| change.key == setting.key), "{} has no effect", setting.key);
        let again = read_whole(&as_yaml(&config)).unwrap_or_else(|wrong| panic!("{}: {wrong}", setting.key));
        assert!(diff(&config, &again).is_empty(), "{}:\n{}", setting.key, as_yaml(&config));
    }
}

proptest! {
    #[test]
    fn printed_values_are_read_back(chosen in vec(any::<bool>(), settings::all().count())) {
        let place = |key: &str| settings::all().position(|setting| setting.key == key).unwrap();
        let mut chosen = chosen;
        for (key, rival) in RIVALS {
            chosen[place(key)] &= !chosen[place(rival)];
        }
        for (key, partner) in PARTNERS {
            chosen[place(key)] &= chosen[place(partner)];
        }
        let config = read_whole(&file_of(&chosen)).map_err(|wrong| TestCaseError::fail(wrong.to_string()))?;
        let printed = as_yaml(&config);
        let again = read_whole(&printed).map_err(|wrong| TestCaseError::fail(format!("{wrong}\n{printed}")))?;
        let changes = diff(&config, &again);
        prop_assert!(changes.is_empty(), "{changes:?}\n{printed}");
        prop_assert_eq!(&as_data(&config)["config"], &as_data(&again)["config"]);
    }

    #[test]
    fn any_text_is_printed_so_that_it_is_read_back(
        path in "/\\PC{0,30}", group in "\\PC{1,20}", name in "\\PC{1,20}", key in "[^=]{1,9}", bytes in 1_u64..1 << 60,
    ) {
        let json = |text: &str| serde_json::to_string(text).unwrap();
        let text = format!(
            "root: {}\nlisten: {{group: {}}}\ngc: {{keep: [{{name: {}, budget: {bytes}}}, {{label: {}}}]}}",
            json(&path), json(&group), json(&name), json(&format!("{key}={name}")),
        );
        if let Ok(config) = read(&text) {
            let printed = as_yaml(&config);
            let again = read_whole(&printed).map_err(|wrong| TestCaseError::fail(format!("{wrong}\n{printed}")))?;
            prop_assert!(diff(&config, &again).is_empty(), "{}", printed);
        }
    }

    #[test]
    fn no_text_panics(text in ".*") {
        let _ = read_whole(&text);
        let _ = read_both(&text, &text);
    }

    #[test]
    fn no_value_panics(
        keys in vec(select(settings::all().map(|setting| setting.key).collect::<Vec<_>>()), 1..6),
        values in vec("[-0-9a-zA-Z:/.{}\\[\\], ']{0,20}|null|[0-9]{1,25}|-?[0-9.]{1,9}[a-zé%]{0,3}", 6),
    ) {
        let text = nested(keys.iter().copied().zip(values.iter().map(String::as_str)));
        let _ = read(&text);
        let mut reading = ConfigReader::new(&places());
        reading.take_text(std::path::Path::new("k"), &format!("{KUBELET_HEAD}{text}"), true);
        let _ = reading.finish();
    }
}
