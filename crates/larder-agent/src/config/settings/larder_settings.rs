//! Settings of larder's own.

use larder::credentials::TokenPolicy;
use larder::gc::{GcPolicy, GcStrategy, InodeThresholds, WhenUnreachable};
use larder::pull::{DuplicatePullPolicy, NewCredentialsPolicy, RateLimitAction};
use serde_json::json;
use tracing::Level;

use super::super::codecs::{
    AbsolutePathCodec, BoolCodec, ByteSizeCodec, DurationCodec, EnumCodec, FileModeCodec, FlagValueKind,
    IntegerCodec, OptionalDurationCodec, OptionalPathCodec, OptionalStringCodec, SettingCodec,
    SocketAddrCodec, StringListCodec,
};
use super::super::lists::{read_keep, read_prefetch, show_keep, show_prefetch};
use super::super::{DashboardServing, KubeletImageService, LogFormat, TraceProtocol};
use super::values::{BackendCodec, TraceEndpointCodec};
use super::{ReloadSupport, Setting, setting};
use crate::manifest::InputProblem;
use crate::manifest::tree::NodeCursor;

/// Settings at the top of the file.
pub(super) const TOP: &[Setting] = &[
    setting!(
        "root",
        AbsolutePathCodec,
        root,
        Restart,
        "The directory of larder's own store. `serve`, `ensure`, `pull` and `load` create it if missing."
    )
    .default("`/var/lib/larder`; as another user than root, `~/.local/share/larder`"),
    setting!(
        "state",
        OptionalPathCodec,
        state,
        Restart,
        "The directory for last uses, removed images and keep rules. Empty: `collect` in `root`; with a runtime, a directory for its socket below the default `root`."
    ),
    setting!(
        "backend",
        BackendCodec,
        backend,
        Restart,
        "Where images are stored: `store` is larder's own store, `cri` the runtime of `containerRuntimeEndpoint`, `unix:///path/to.sock` the runtime on that socket, `docker` the Docker Engine of `DOCKER_HOST` or on a usual socket, `docker:///path/to.sock` the one on that socket, `podman` the Podman service of `CONTAINER_HOST` or on a usual socket."
    )
    .default("`store`; `cri` if `containerRuntimeEndpoint` or `imageServiceEndpoint` is set, also in kubelet's file"),
    Setting::new(
        "prefetch",
        || "list of images".into(),
        FlagValueKind::Text,
        |draft, at| {
            draft.config.prefetch = read_prefetch(at)?;
            Ok(())
        },
        |config| show_prefetch(&config.prefetch),
        ReloadSupport::Live,
        "Images to pull before a pod needs them, and keep. See [below](#items-of-prefetch).",
    ),
];

/// Settings in sections.
pub(super) const SECTIONS: &[Setting] = &[
    setting!("listen.socket", AbsolutePathCodec, listen.socket, Restart, "The socket that the daemon listens on.")
        .default("`/run/larder/larder.sock`; as another user than root, `$XDG_RUNTIME_DIR/larder/larder.sock`; with `--root`, `larder.sock` in that directory"),
    setting!("listen.mode", FileModeCodec, listen.mode, Restart, "The file mode of the socket, in quotes."),
    setting!(
        "listen.group",
        OptionalStringCodec,
        listen.group,
        Restart,
        "The group of the socket, by name or number. Empty: the daemon's group. Access to the socket allows mounts anywhere as the daemon's user."
    ),
    setting!(
        "metrics.address",
        SocketAddrCodec,
        metrics.address,
        Restart,
        "Where metrics are served over plain HTTP. Empty: only on the socket."
    ),
    setting!(
        "metrics.allowRemote",
        BoolCodec,
        metrics.allow_remote,
        Restart,
        "Allow a `metrics.address` that other machines can reach."
    ),
    setting!(
        "metrics.kubeletNames",
        BoolCodec,
        metrics.kubelet_names,
        Live,
        "Serve metrics that kubelet has under kubelet's names, which begin with `kubelet_` instead of `larder_`. Where kubelet's own metrics are collected as well, sums count both."
    ),
    setting!(
        "dashboard.serve",
        EnumCodec<DashboardServing>,
        dashboard.serve,
        Restart,
        "When the [dashboard](dashboard.md) is served on `metrics.address`: only if that is a loopback address, `always`, or `never`. Needs a larder with the feature `dashboard`, which packages have."
    ),
    setting!(
        "dashboard.hosts",
        StringListCodec,
        dashboard.hosts,
        Restart,
        "Host names by which browsers reach the dashboard, such as that of the node, without port. Requests to other names are refused, except `localhost` and the address itself."
    ),
    setting!(
        "cri.pinKept",
        BoolCodec,
        cri_pins.kept,
        Live,
        "Report images of keep rules, of `prefetch` and of static pods as pinned over CRI: kubelet's GC and `crictl rmi --prune` skip them."
    ),
    setting!(
        "cri.pinMounted",
        BoolCodec,
        cri_pins.mounted,
        Live,
        "With larder's own store: report mounted images as pinned over CRI. The store refuses to remove a mounted image whatever the value."
    ),
    setting!(
        "cri.pinLeased",
        BoolCodec,
        cri_pins.leased,
        Live,
        "Report images with a lease of `larder lease` as pinned as well. The leases of pulls and ensures never pin an image: `PullImage` takes one, too."
    ),
    setting!(
        "cri.kubelet",
        EnumCodec<KubeletImageService>,
        kubelet_images,
        Restart,
        "Where the kubelet of this host asks for images: `larder` (its `imageServiceEndpoint` is larder's socket, so that images can be hidden from it), `runtime` (it asks the runtime, which hides none: images are prefetched without credentials), or `none` (there is no kubelet: credentials are used and no image is hidden). With larder's own store, `runtime` means `larder`. See [kubelet](kubelet.md#images-that-kubelet-does-not-see-yet)."
    )
    .default("`larder` if kubelet's file names larder's socket as `imageServiceEndpoint`, else `runtime`"),
    setting!(
        "containerd.snapshotter",
        BoolCodec,
        containerd.snapshotter,
        Restart,
        "With larder's own store: serve containerd's snapshot service on the socket, so that containerd can keep its snapshots in the store. See [snapshotter](snapshotter.md)."
    ),
    setting!(
        "containerd.fetchLayers",
        BoolCodec,
        containerd.fetch_layers,
        Restart,
        "With `containerd.snapshotter`: fetch the layers of an image that containerd pulls by itself, if it names the image (its CRI with `disable_snapshot_annotations = false`, its transfer service with `enable_remote_snapshot_annotations`). With the node's credentials or none; containerd fetches what cannot be fetched so."
    ),
    setting!(
        "containerd.socket",
        OptionalStringCodec,
        containerd.socket,
        Restart,
        "With `containerd.snapshotter`: the socket of that containerd, `unix:///run/containerd/containerd.sock`. Images are published there as soon as they are pulled, for CRI and the namespace `k8s.io`, and withdrawn when they are removed. Empty: none."
    ),
    setting!("log.level", EnumCodec<Level>, log.level, Live, "The lowest level that is logged. `LARDER_LOG` overrides it."),
    setting!("log.format", EnumCodec<LogFormat>, log.format, Live, "Text, or one JSON object per line."),
    setting!(
        "tracing.endpoint",
        TraceEndpointCodec,
        tracing.endpoint,
        Restart,
        "The collector that traces are exported to, over OTLP. Empty: `OTEL_EXPORTER_OTLP_ENDPOINT`; `localhost:4317` if `tracing.samplingRatePerMillion` is set. An endpoint without a scheme is called without TLS. See [tracing](tracing.md)."
    )
    .of_kubelet(),
    setting!(
        "tracing.samplingRatePerMillion",
        IntegerCodec<u32, 0, 1_000_000>,
        tracing.sampled_per_million,
        Restart,
        "How many of a million traces are sampled that begin in larder. Calls of kubelet's traces are sampled if kubelet samples them."
    )
    .of_kubelet(),
    setting!(
        "tracing.protocol",
        EnumCodec<TraceProtocol>,
        tracing.protocol,
        Restart,
        "The protocol of `tracing.endpoint`."
    ),
    setting!(
        "pull.overRate",
        EnumCodec<RateLimitAction>,
        pull.over_rate,
        Live,
        "Whether a pull above `registryPullQPS` waits or fails."
    )
    .kubelet_has("`refuse`"),
    setting!(
        "pull.sameImage",
        EnumCodec<DuplicatePullPolicy>,
        pull.same_image,
        Live,
        "Whether requests for the same image `share` one pull (if their credentials resolve to the same), or `eachRequest` starts its own."
    )
    .kubelet_has("`eachRequest`"),
    setting!(
        "pull.newCredentials",
        EnumCodec<NewCredentialsPolicy>,
        pull.new_credentials,
        Live,
        "Whether a request with other credentials than the failed pull starts a pull at once, or waits for the back-off."
    )
    .kubelet_has("`wait`"),
    setting!(
        "pull.timeout",
        OptionalDurationCodec,
        pull.pull_timeout,
        Live,
        "Timeout of a pull, from its start after queueing; 0 is no limit."
    ),
    setting!(
        "pull.backoffInitial",
        DurationCodec<1>,
        pull.backoff_initial,
        Live,
        "Back-off after the first failed pull of an image; each further failure doubles it."
    ),
    setting!("pull.backoffMax", DurationCodec<1>, pull.backoff_max, Live, "Longest back-off of an image."),
    setting!(
        "pull.credentialTokens",
        EnumCodec<TokenPolicy>,
        credential_tokens,
        Restart,
        "Whether identity and registry tokens of pull secrets and Docker configs are used."
    )
    .kubelet_has("`ignore`"),
    setting!(
        "pull.ensuredLease",
        DurationCodec<0>,
        ensured_lease,
        Restart,
        "Longest lease of an ensured image: GC retains it until its first container has been seen, for this long at most; 0 is no lease."
    )
    .kubelet_has("`0s`"),
    setting!(
        "gc.strategy",
        EnumCodec<GcStrategy>,
        gc.strategy,
        Live,
        "Whose rules choose images. `larder`: a layer counts once and the filesystem is measured after each removal; an image that was never used is as old as its first observation; containers and mounts protect images by ID and name; ages do not change when the wall clock is set. `kubelet`: image sizes add up; an image that was never used is older than any `imageMaximumGCAge`; containers protect images by ID only; ages follow the wall clock; pull records are kept only of images that a round examined and retained; `gc.minimumFreeBytes`, the inode thresholds and `gc.whenUnreachable` do not apply."
    )
    .kubelet_has("`kubelet`"),
    setting!(
        "gc.minimumFreeBytes",
        ByteSizeCodec<0>,
        gc.min_free_bytes,
        Live,
        "GC also starts when less than this is free; 0 is never."
    ),
    inode_setting("gc.inodeHighThresholdPercent", InodeThreshold::High),
    inode_setting("gc.inodeLowThresholdPercent", InodeThreshold::Low),
    setting!(
        "gc.freeMarginPercent",
        IntegerCodec<u32, 0, 100>,
        gc.free_margin_percent,
        Live,
        "Percentage that `larder gc --free` frees in addition to the requested size."
    ),
    setting!(
        "gc.whenUnreachable",
        EnumCodec<WhenUnreachable>,
        gc.when_unreachable,
        Live,
        "What is removed when all candidates together do not free enough. `all`: every candidate. `worthwhile`: as few images as bring usage below the high threshold, if that is possible; else all candidates if they free at least half of what is missing; else only images that each free at least a tenth of it. `nothing`: no image."
    ),
    setting!(
        "gc.keepBytes",
        ByteSizeCodec<0>,
        gc.keep_bytes,
        Live,
        "When space is needed, GC retains the most recently used images up to this size on disk, each layer counted once; 0 is none. `imageMaximumGCAge` and `larder gc --all-unused` ignore it."
    ),
    Setting::new(
        "gc.keep",
        || "list of rules".into(),
        FlagValueKind::Text,
        |draft, at| {
            draft.config.gc.keep = read_keep(at)?;
            Ok(())
        },
        |config| show_keep(&config.gc.keep),
        ReloadSupport::Live,
        "Keep rules, in addition to those of `larder keep`. See [below](#items-of-gckeep).",
    ),
    setting!(
        "gc.exitedContainerAge",
        OptionalDurationCodec,
        exited_container_age,
        Live,
        "On hosts without kubelet, with a CRI runtime: containers that exited longer ago than this are removed, because they keep their images in use; 0 is never. Containers labelled `io.kubernetes.pod.uid` are skipped, and nothing is removed where a kubelet runs, where larder reads kubelet's settings, or where it cannot see the host's processes."
    ),
    setting!("gc.period", DurationCodec<1>, gc_intervals.collect, Restart, "Interval of GC rounds."),
    setting!("gc.listPeriod", DurationCodec<1>, gc_intervals.list, Restart, "Interval at which the list of images is refreshed."),
    setting!(
        "gc.pressurePeriod",
        OptionalDurationCodec,
        gc_intervals.pressure,
        Restart,
        "Interval at which disk usage is checked to start GC early; 0 is never."
    )
    .kubelet_has("`0s`"),
];

/// Settings in sections, after the ones of the store.
pub(super) const REST: &[Setting] = &[
    setting!(
        "runtime.connectTimeout",
        DurationCodec<1>,
        runtime.connect_timeout,
        Restart,
        "Timeout to connect to the runtime."
    ),
    setting!(
        "runtime.imageVolumes",
        BoolCodec,
        runtime.image_volumes,
        Restart,
        "Detect images that are mounted as volumes. Costs one call for each new container."
    ),
    setting!(
        "runtime.sandboxImages",
        StringListCodec,
        runtime.sandbox_images,
        Restart,
        "Images that are pinned, as patterns with `*`, for runtimes that do not pin their sandbox image: GC and, without `--force`, `larder rm` retain them. `configured` is the image that the runtime's own configuration names."
    )
    .kubelet_has("`[]`"),
    setting!(
        "docker.pruneBuildCache",
        BoolCodec,
        prune_build_cache,
        Restart,
        "With `backend: docker`: when GC starts, let the engine remove unused build cache (as `docker builder prune` does) before any image."
    ),
    setting!(
        "drain.gracePeriod",
        DurationCodec<0>,
        drain_grace_period,
        Live,
        "How long in-flight calls may continue after a request to stop. Pulls end at once: the next process continues them."
    ),
    setting!(
        "events.ringSize",
        IntegerCodec<usize, 0, 1_000_000>,
        event_ring_size,
        Restart,
        "Number of recent events kept for later watchers."
    ),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum InodeThreshold {
    High,
    Low,
}

type PercentCodec = IntegerCodec<i32, 0, 100>;

const fn inode_setting(key: &'static str, which: InodeThreshold) -> Setting {
    let (name, kind) = (<PercentCodec as SettingCodec>::name as fn() -> String, FlagValueKind::Number);
    match which {
        InodeThreshold::High => Setting::new(
            key,
            name,
            kind,
            |draft, at| inodes(&mut draft.config.gc, at, |inodes, percent| inodes.high_percent = percent),
            |config| json!(config.gc.inodes.map_or(100, |inodes| inodes.high_percent)),
            ReloadSupport::Live,
            "GC also starts at this inode usage, in percent; 100 is never, and the default if `imageGCHighThresholdPercent` is 100.",
        ),
        InodeThreshold::Low => Setting::new(
            key,
            name,
            kind,
            |draft, at| inodes(&mut draft.config.gc, at, |inodes, percent| inodes.low_percent = percent),
            |config| json!(config.gc.inodes.map_or(100, |inodes| inodes.low_percent)),
            ReloadSupport::Live,
            "GC frees inodes down to this usage, in percent; not above the high threshold.",
        ),
    }
}

fn inodes(
    policy: &mut GcPolicy,
    at: &NodeCursor<'_>,
    set: fn(&mut InodeThresholds, i32),
) -> Result<(), Vec<InputProblem>> {
    let percent = PercentCodec::parse(at).map_err(|problem| vec![problem])?;
    let never = InodeThresholds { high_percent: 100, low_percent: 100 };
    set(policy.inodes.get_or_insert(never), percent);
    Ok(())
}
