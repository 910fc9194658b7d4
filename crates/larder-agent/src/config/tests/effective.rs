//! Meaning and origin of settings, and their changes at a reload.

use std::num::NonZeroU32;
use std::time::Duration;

use larder::gc::GcPolicy;
use larder::pull::PullConfig;
use larder::retention::{KeepRule, Selector};
use larder_cri::Endpoint;
use larder_registry::{Proxy, RegistryConfig};

use super::{path, read, read_both};
use crate::config::{
    BackendSetting, KubeletImageService, PrefetchRetention, PrefetchSchedule, SettingOrigin, SettingsSource,
    SettingsSources, diff, load,
};

#[test]
fn without_settings_everything_is_as_larder_has_it() {
    let config = read("").unwrap();
    assert_eq!(config.pull, PullConfig::default());
    assert_eq!(config.gc, GcPolicy::default());
    assert_eq!(config.registry, RegistryConfig::default());
    assert_eq!(config.backend, BackendSetting::Store);
    assert_eq!((config.listen.socket, config.listen.mode), (path("/run/larder.sock"), 0o660));
    assert_eq!(config.warnings, [""; 0]);
}

#[test]
fn each_default_that_is_not_kubelets_can_be_set_back() {
    let kubelet = "serializeImagePulls: true\npull: {overRate: refuse, sameImage: eachRequest, newCredentials: wait}\n\
        gc: {strategy: kubelet, pressurePeriod: 0}\n";
    let config = read(kubelet).unwrap();
    assert_eq!(config.pull, PullConfig::kubelet());
    assert_eq!(config.gc_intervals, larder::gc::GcIntervals::kubelet());
    assert_eq!(config.gc, GcPolicy::kubelet());
}

#[test]
fn a_high_threshold_of_100_is_never_for_inodes_too_unless_they_have_thresholds_of_their_own() {
    let never = "imageGCHighThresholdPercent: 100\n";
    assert!(!read(never).unwrap().gc.is_enabled());
    let inodes = format!("{never}gc: {{inodeHighThresholdPercent: 95}}\n");
    assert!(read(&inodes).unwrap().gc.is_enabled());
    let free = format!("{never}gc: {{minimumFreeBytes: 1GiB}}\n");
    assert!(read(&free).unwrap().gc.is_enabled());
}

#[test]
fn pulls_are_serialised_or_bounded() {
    for (settings, serial, bound) in [
        ("", false, Some(4)),
        ("serializeImagePulls: true", true, None),
        ("serializeImagePulls: false", false, Some(4)),
        ("maxParallelImagePulls: 1", false, Some(1)),
        ("maxParallelImagePulls: 9", false, Some(9)),
        ("maxParallelImagePulls: null", false, Some(4)),
        ("serializeImagePulls: true\nmaxParallelImagePulls: 1", true, Some(1)),
    ] {
        let pull = read(settings).unwrap().pull;
        let wanted = (serial, bound.and_then(NonZeroU32::new));
        assert_eq!((pull.serialize_image_pulls, pull.max_parallel_image_pulls), wanted, "{settings}");
    }
}

#[test]
fn kubelets_rules_of_zero_hold() {
    let config =
        read("registryBurst: 0\nimageMinimumGCAge: 0\nruntimeRequestTimeout: 0s\nregistryPullQPS: 0")
            .unwrap();
    assert_eq!((config.pull.registry_burst, config.pull.registry_pull_qps), (10, 0));
    assert_eq!(config.gc.minimum_age, Duration::from_secs(120));
    assert_eq!(config.images.runtime_request_timeout.to_string(), "2m0s");
}

#[test]
fn larders_file_overrides_kubelets() {
    let config = read_both(
        "imageGCHighThresholdPercent: 70\nimageGCLowThresholdPercent: 60\n",
        "imageGCHighThresholdPercent: 90\n",
    )
    .unwrap();
    assert_eq!((config.gc.high_threshold_percent, config.gc.low_threshold_percent), (90, 60));
    let high = SettingOrigin::File { path: path("c.yaml"), line: 3 };
    assert_eq!(*config.origin("imageGCHighThresholdPercent"), high);
    assert_eq!(config.origin("imageGCLowThresholdPercent").to_string(), "kubelet's k.yaml:4");
    assert_eq!(*config.origin("registryBurst"), SettingOrigin::Default);
}

#[test]
fn kubelet_may_name_larders_socket_as_its_image_service() {
    let endpoints =
        "containerRuntimeEndpoint: unix:///c.sock\nimageServiceEndpoint: unix:///run/larder.sock\n";
    let config = read_both(endpoints, "backend: cri\n").unwrap();
    assert_eq!(config.images.image_service_endpoint, "");
    let (endpoint, cri) = config.cri().unwrap();
    assert_eq!((endpoint, cri.image_endpoint), (Some(Endpoint::at("/c.sock")), None));
}

#[test]
fn the_backend_is_the_store_unless_a_runtime_is_named() {
    assert!(read("registryBurst: 5").unwrap().cri().is_none());
    let named = read("containerRuntimeEndpoint: /c.sock").unwrap();
    assert_eq!(named.cri().unwrap().0, Some(Endpoint::at("/c.sock")));
    assert_eq!(named.origin("backend").to_string(), "c.yaml:3");
    assert!(read("backend: store\ncontainerRuntimeEndpoint: /c.sock").unwrap().cri().is_none());
    let of_kubelet = read_both("containerRuntimeEndpoint: unix:///k.sock\n", "registryBurst: 5\n").unwrap();
    assert_eq!(of_kubelet.cri().unwrap().0, Some(Endpoint::at("/k.sock")));
    let behind_kubelet = read_both("imageServiceEndpoint: unix:///run/larder.sock\n", "").unwrap();
    assert_eq!(
        behind_kubelet.cri().unwrap().0,
        None,
        "kubelet's images come from here; its runtime is looked for"
    );
    assert_eq!(read("backend: cri").unwrap().cri().unwrap().0, None, "to be looked for");
    let config = read(
        "backend: cri\ncontainerRuntimeEndpoint: /c.sock\nimageServiceEndpoint: /i.sock\nruntimeRequestTimeout: 9s",
    );
    let (runtime, cri) = config.unwrap().cri().unwrap();
    assert_eq!((runtime, cri.image_endpoint), (Some(Endpoint::at("/c.sock")), Some(Endpoint::at("/i.sock"))));
    assert_eq!(cri.request_timeout, Duration::from_secs(9));
    let named = read("backend: unix:///x.sock\nimageServiceEndpoint: /i.sock").unwrap();
    let (runtime, cri) = named.cri().unwrap();
    assert_eq!((runtime, cri.image_endpoint), (Some(Endpoint::at("/x.sock")), None));
}

#[test]
fn lazily_pulled_images_are_none_unless_selected() {
    let lazy = |text: &str| read(text).unwrap().lazy;
    assert!(lazy("").images.is_empty());
    let set = lazy("pull: {lazy: {images: [{name: app/*}], minimumSize: 2MiB, readTimeout: 9s}}");
    assert_eq!(set.images, [Selector::Name("app/*".into())]);
    assert_eq!((set.minimum_size, set.read_timeout), (2 << 20, Duration::from_secs(9)));
}

#[test]
fn reads_are_verified_only_where_that_is_set() {
    let verifies = |text: &str| read(text).unwrap().store_pull().verify_reads;
    assert!(!verifies("") && verifies("store: {verifyReads: true}"));
}

#[test]
fn lists_are_read_whole() {
    let config = read(
        "gc:\n  keep:\n    - {name: app/*, ttl: 1h, budget: 5GiB}\n    - {label: team=a=b}\n    - {repository: '*', newest: 3}\n\
         prefetch:\n  - image: a\n  - {image: b, interval: 1h, jitter: 5m, keep: false}\n  - {image: c, schedule: '03:30', lease: 2h}\n",
    )
    .unwrap();
    let named = KeepRule {
        select: Selector::Name("app/*".into()),
        ttl: Some(Duration::from_secs(3600)),
        budget_bytes: Some(5 << 30),
    };
    assert_eq!(config.gc.keep[0], named);
    assert_eq!(config.gc.keep[1].select, Selector::Label("team".into(), Some("a=b".into())));
    assert_eq!(config.gc.keep[2].select, Selector::Newest { repository: "*".into(), count: 3 });
    let how = |index: usize| (config.prefetch[index].when, config.prefetch[index].hold);
    assert_eq!(how(0), (PrefetchSchedule::Start, PrefetchRetention::Keep));
    assert_eq!(how(1), (PrefetchSchedule::Every(Duration::from_secs(3600)), PrefetchRetention::Nothing));
    assert_eq!(
        how(2),
        (
            PrefetchSchedule::Daily { hour: 3, minute: 30 },
            PrefetchRetention::Lease(Duration::from_secs(7200))
        )
    );
    assert_eq!(config.prefetch[1].jitter, Duration::from_secs(300));
}

#[test]
fn a_proxy_and_what_needs_none() {
    let config = read("registry: {noProxy: 'a,b', proxy: 'http://p:1'}").unwrap();
    assert_eq!(config.registry.proxy, Proxy::Fixed { url: "http://p:1".into(), except: "a,b".into() });
}

#[test]
fn changes_are_sorted_by_whether_a_running_daemon_takes_them_over() {
    let old = read("").unwrap();
    assert!(diff(&old, &read("registryPullQPS: 5 # as before\n").unwrap()).is_empty());
    let new = read(
        "registryPullQPS: 7\nroot: /other\nlisten: {mode: '0600'}\ngc: {keep: [{name: a}]}\nlog: {level: debug}\n",
    );
    let changes = diff(&old, &new.unwrap());
    let keys = |changes: &[crate::config::SettingChange]| {
        changes.iter().map(|change| change.key).collect::<Vec<_>>()
    };
    assert_eq!(keys(&changes.reloadable), ["registryPullQPS", "log.level", "gc.keep"]);
    assert_eq!(keys(&changes.needs_restart), ["root", "listen.mode"]);
    assert_eq!((&changes.reloadable[0].old, &changes.reloadable[0].new), (&5.into(), &7.into()));
}

#[test]
fn docker_is_a_backend_with_or_without_an_address() {
    for text in ["docker", "docker:///d.sock", "docker://build.example:2376"] {
        let config = read(&format!("backend: {text}")).unwrap();
        assert_eq!(config.backend, BackendSetting::Docker(text.into()));
        assert!(config.cri().is_none(), "{text} is no CRI runtime");
    }
    assert!(read("backend: docker://").is_err());
}

#[test]
fn settings_of_the_store_that_have_no_effect_are_warned_of() {
    let set = "pull: {lazy: {images: [{name: a}]}}\nstore: {verifyReads: true}\n";
    let warnings = |backend: &str| read(&format!("backend: {backend}\n{set}")).unwrap().warnings;
    assert_eq!(warnings("store"), [""; 0]);
    for backend in ["cri", "docker"] {
        let warnings = warnings(backend);
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(
            warnings[0]
                .ends_with("pull.lazy.images has no effect: it needs larder's own store (backend: store)")
        );
        assert!(warnings[1].contains("store.verifyReads has no effect"), "{warnings:?}");
    }
}

#[test]
fn a_node_where_no_process_collects_is_warned_of() {
    let never = "imageGCHighThresholdPercent: 100\n";
    let idle = read_both(never, "").unwrap().warnings;
    assert!(idle.len() == 1 && idle[0].contains("k.yaml:3: imageGCHighThresholdPercent 100"), "{idle:?}");
    for larder in
        ["imageGCHighThresholdPercent: 80\nimageGCLowThresholdPercent: 70", "gc: {minimumFreeBytes: 1Gi}"]
    {
        assert_eq!(read_both(never, larder).unwrap().warnings, [""; 0], "{larder}");
    }
}

#[test]
fn evictions_that_come_before_gc_are_warned_of() {
    let warnings = |evictions: &str, larder: &str| {
        let evictions = format!("evictionHard: {{{evictions}, memory.available: 1Gi}}\n");
        read_both(&evictions, larder).unwrap().warnings.join("\n")
    };
    let thresholds = "imageGCHighThresholdPercent: 80\nimageGCLowThresholdPercent: 75";
    let minimum = "gc: {minimumFreeBytes: 11Gi}";
    for (evictions, larder, expected) in [
        ("imagefs.available: 10%", "", ""),
        ("imagefs.available: 15%", thresholds, ""),
        ("imagefs.available: 10Gi", minimum, ""),
        (
            "imagefs.available: 15%",
            "",
            "imagefs.available 15%: kubelet evicts at 85% usage, before larder's GC starts",
        ),
        ("imagefs.available: 12Gi", minimum, "a size is compared only with gc.minimumFreeBytes"),
        ("imagefs.inodesFree: '1000'", "", "imagefs.inodesFree 1000: a number of inodes is not compared"),
        ("imagefs.inodesFree: 50%", "", "kubelet evicts at 50% usage"),
    ] {
        let warned = warnings(evictions, larder);
        assert_eq!(warned.is_empty(), expected.is_empty(), "{evictions}: {warned}");
        assert!(warned.contains(expected), "{evictions}: {warned}");
    }
}

#[test]
fn an_empty_section_tracing_of_kubelets_file_turns_traces_on() {
    for (section, is_on) in [
        ("tracing: {}\n", true),
        ("tracing:\n", false),
        ("", false),
        ("tracing: {endpoint: 'c:4317'}\n", true),
    ] {
        assert_eq!(read_both(section, "").unwrap().tracing.is_set(), is_on, "{section}");
    }
    assert!(!read_both("", "tracing: {}\n").unwrap().tracing.is_set(), "larder's own file");
}

#[test]
fn kubelets_file_says_whether_kubelet_asks_larder_for_images() {
    let names_larder = |kubelet: &str, own: &str| {
        let own = format!("listen: {{socket: /l.sock}}\n{own}");
        read_both(kubelet, &own).unwrap().kubelet_images == KubeletImageService::Larder
    };
    assert!(names_larder("imageServiceEndpoint: unix:///l.sock\n", ""));
    assert!(!names_larder("imageServiceEndpoint: unix:///l.sock\n", "cri: {kubelet: runtime}\n"));
    assert!(!names_larder("imageServiceEndpoint: unix:///other.sock\n", ""));
    assert!(names_larder("", "cri: {kubelet: larder}\n"));
}

#[test]
fn root_on_the_command_line_names_the_backend_that_it_overrides() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.yaml");
    fs_err::write(&file, format!("{}backend: docker\n", super::HEAD)).unwrap();
    let given = |key, value: &str| SettingsSource::Given {
        by: SettingOrigin::Flag("--root"),
        key,
        value: value.to_owned(),
    };
    let layers = vec![
        SettingsSource::File { path: file.clone(), required: true },
        given("root", "/var/lib/other"),
        given("backend", "store"),
    ];
    let config = load(&SettingsSources { places: super::places(), layers: layers.clone() }).unwrap();
    let expected = format!("{}:3: backend has no effect: --root selects larder's own store", file.display());
    assert_eq!(config.warnings, [expected]);
    fs_err::write(&file, format!("{}backend: store\n", super::HEAD)).unwrap();
    let config = load(&SettingsSources { places: super::places(), layers: layers.clone() }).unwrap();
    assert!(config.warnings.is_empty(), "it is the store anyway: {:?}", config.warnings);
    let only_root = layers[1..].to_vec();
    let config = load(&SettingsSources { places: super::places(), layers: only_root }).unwrap();
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
}
