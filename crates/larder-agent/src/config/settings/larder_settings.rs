//! Settings of larder's own.

use larder::credentials::TokenPolicy;
use larder::gc::{GcPolicy, GcStrategy, InodeThresholds, WhenUnreachable};
use larder::pull::{DuplicatePullPolicy, NewCredentialsPolicy, RateLimitAction};
use tracing::Level;

use super::super::codecs::{
    AbsolutePathCodec, BoolCodec, ByteSizeCodec, DurationCodec, EnumCodec, FileModeCodec, IntegerCodec,
    ListCodec, OptionalCodec, OptionalDurationCodec, SettingCodec, SocketAddrCodec, StringCodec,
};
use super::super::lists::{KeepRulesCodec, PrefetchCodec, SelectorsCodec};
use super::super::{DashboardServing, KubeletImageService, LogFormat, TraceProtocol};
use super::values::{BackendCodec, TraceEndpointCodec};
use super::{ConfigDraft, ReloadSupport, Setting, settings};

settings! {
    /// Settings at the top of the file.
    TOP:
    /// The directory of larder's own store. `serve`, `ensure`, `pull` and `load` create it if missing.
    "root": AbsolutePathCodec => root, Restart,
        default("`/var/lib/larder`; as another user than root, `~/.local/share/larder`");

    /// The directory for last uses, removed images and keep rules. Empty: `collect` in `root`; with a runtime, a
    /// directory for its socket below the default `root`.
    "state": OptionalCodec<AbsolutePathCodec> => state, Restart;

    /// Where images are stored: `store` is larder's own store, `cri` the runtime of `containerRuntimeEndpoint`,
    /// `unix:///path/to.sock` the runtime on that socket, `docker` the Docker Engine of `DOCKER_HOST` or on a usual
    /// socket, `docker:///path/to.sock` the one on that socket, `podman` the Podman service of `CONTAINER_HOST` or on a
    /// usual socket.
    "backend": BackendCodec => backend, Restart,
        default("`store`; `cri` if `containerRuntimeEndpoint` or `imageServiceEndpoint` is set, also in kubelet's file");

    /// Images to pull before a pod needs them, and keep. See [below](#items-of-prefetch).
    "prefetch": PrefetchCodec => prefetch, Live;
}

settings! {
    /// Settings in sections.
    SECTIONS:
    /// The socket that the daemon listens on.
    "listen.socket": AbsolutePathCodec => listen.socket, Restart,
        default("`/run/larder/larder.sock`; as another user than root, `$XDG_RUNTIME_DIR/larder/larder.sock`; with `--root`, `larder.sock` in that directory");

    /// The file mode of the socket, in quotes.
    "listen.mode": FileModeCodec => listen.mode, Restart;

    /// The group of the socket, by name or number. Empty: the daemon's group. Access to the socket allows mounts
    /// anywhere as the daemon's user.
    "listen.group": OptionalCodec<StringCodec> => listen.group, Restart;

    /// Where metrics are served over plain HTTP. Empty: only on the socket.
    "metrics.address": OptionalCodec<SocketAddrCodec> => metrics.address, Restart;

    /// Allow a `metrics.address` that other machines can reach.
    "metrics.allowRemote": BoolCodec => metrics.allow_remote, Restart;

    /// Serve metrics that kubelet has under kubelet's names, which begin with `kubelet_` instead of `larder_`. Where
    /// kubelet's own metrics are collected as well, sums count both.
    "metrics.kubeletNames": BoolCodec => metrics.kubelet_names, Live;

    /// When the [dashboard](dashboard.md) is served on `metrics.address`: only if that is a loopback address, `always`,
    /// or `never`. Needs a larder with the feature `dashboard`, which packages have.
    "dashboard.serve": EnumCodec<DashboardServing> => dashboard.serve, Restart;

    /// Host names by which browsers reach the dashboard, such as that of the node, without port. Requests to other
    /// names are refused, except `localhost` and the address itself.
    "dashboard.hosts": ListCodec<StringCodec> => dashboard.hosts, Restart;

    /// Report images of keep rules, of `prefetch` and of static pods as pinned over CRI: kubelet's GC and
    /// `crictl rmi --prune` skip them.
    "cri.pinKept": BoolCodec => cri_pins.kept, Live;

    /// With larder's own store: report mounted images as pinned over CRI. The store refuses to remove a mounted image
    /// whatever the value.
    "cri.pinMounted": BoolCodec => cri_pins.mounted, Live;

    /// Report images with a lease of `larder lease` or `prefetch` as pinned as well. The leases of pulls and ensures
    /// never pin an image: `PullImage` takes one, too.
    "cri.pinLeased": BoolCodec => cri_pins.leased, Live;

    /// Where the kubelet of this host asks for images: `larder` (its `imageServiceEndpoint` is larder's socket, so that
    /// images can be hidden from it), `runtime` (it asks the runtime, which hides none: images are prefetched without
    /// credentials), or `none` (there is no kubelet: credentials are used and no image is hidden). With larder's own
    /// store, `runtime` means `larder`. See [kubelet](kubelet.md#images-that-kubelet-does-not-see-yet).
    "cri.kubelet": EnumCodec<KubeletImageService> => kubelet_images, Restart,
        default("`larder` if kubelet's file names larder's socket as `imageServiceEndpoint`, else `runtime`");

    /// With larder's own store: serve containerd's snapshot service on the socket, so that containerd can keep its
    /// snapshots in the store. See [snapshotter](snapshotter.md).
    "containerd.snapshotter": BoolCodec => containerd.snapshotter, Restart;

    /// With `containerd.snapshotter`: fetch the layers of an image that containerd pulls by itself, if it names the
    /// image (its CRI with `disable_snapshot_annotations = false`, its transfer service with
    /// `enable_remote_snapshot_annotations`). With the node's credentials or none; containerd fetches what cannot be
    /// fetched so.
    "containerd.fetchLayers": BoolCodec => containerd.fetch_layers, Restart;

    /// With `containerd.snapshotter`: the socket of that containerd, `unix:///run/containerd/containerd.sock`. Images
    /// are published there as soon as they are pulled, for CRI and the namespace `k8s.io`, and withdrawn when they are
    /// removed. Empty: none.
    "containerd.socket": OptionalCodec<StringCodec> => containerd.socket, Restart;

    /// The lowest level that is logged. `LARDER_LOG` overrides it.
    "log.level": EnumCodec<Level> => log.level, Live;

    /// Text, or one JSON object per line.
    "log.format": EnumCodec<LogFormat> => log.format, Live;

    /// The collector that traces are exported to, over OTLP. Empty: `OTEL_EXPORTER_OTLP_ENDPOINT`; `localhost:4317` if
    /// `tracing.samplingRatePerMillion` is set. An endpoint without a scheme is called without TLS. See
    /// [tracing](tracing.md).
    "tracing.endpoint": OptionalCodec<TraceEndpointCodec> => tracing.endpoint, Restart, of_kubelet();

    /// How many of a million traces are sampled that begin in larder. Calls of kubelet's traces are sampled if kubelet
    /// samples them.
    "tracing.samplingRatePerMillion": IntegerCodec<u32, 0, 1_000_000> => tracing.sampled_per_million, Restart,
        of_kubelet();

    /// The protocol of `tracing.endpoint`.
    "tracing.protocol": EnumCodec<TraceProtocol> => tracing.protocol, Restart;

    /// Whether a pull above `registryPullQPS` waits or fails.
    "pull.overRate": EnumCodec<RateLimitAction> => pull.over_rate, Live, kubelet_has("`refuse`");

    /// Whether requests for the same image `share` one pull (if their credentials resolve to the same), or
    /// `eachRequest` starts its own.
    "pull.sameImage": EnumCodec<DuplicatePullPolicy> => pull.same_image, Live, kubelet_has("`eachRequest`");

    /// Whether a request with other credentials than the failed pull starts a pull at once, or waits for the back-off.
    "pull.newCredentials": EnumCodec<NewCredentialsPolicy> => pull.new_credentials, Live, kubelet_has("`wait`");

    /// Timeout of a pull, from its start after queueing; 0 is no limit.
    "pull.timeout": OptionalDurationCodec => pull.pull_timeout, Live;

    /// Back-off after the first failed pull of an image; each further failure doubles it.
    "pull.backoffInitial": DurationCodec<1> => pull.backoff_initial, Live;

    /// Longest back-off of an image.
    "pull.backoffMax": DurationCodec<1> => pull.backoff_max, Live;

    /// Whether identity and registry tokens of pull secrets and Docker configs are used.
    "pull.credentialTokens": EnumCodec<TokenPolicy> => credential_tokens, Restart, kubelet_has("`ignore`");

    /// Longest lease of an ensured image: GC retains it until its first container has been seen, for this long at most;
    /// 0 is no lease.
    "pull.ensuredLease": DurationCodec<0> => ensured_lease, Restart, kubelet_has("`0s`");

    /// Images whose containers may start before all layers are there, as [items of `gc.keep`](#items-of-gckeep) with
    /// `name` or `digest`; empty is none. Takes effect in a daemon with larder's own store, for layers with a table of
    /// contents (zstd:chunked, eStargz, SOCI); see [lazy pulls](lazy-pulls.md).
    "pull.lazy.images": SelectorsCodec => lazy.images, Restart;

    /// Smaller layers of these images are pulled in full. Compressed size.
    "pull.lazy.minimumSize": ByteSizeCodec<0> => lazy.minimum_size, Restart;

    /// Time that a container waits for data of an incomplete layer; then its read fails with an input/output error.
    /// From `1s` to `8760h`.
    "pull.lazy.readTimeout": DurationCodec<1> => lazy.read_timeout, Restart;

    /// Whose rules choose images. `larder`: a layer counts once and the filesystem is measured after each removal; an
    /// image that was never used is as old as its first observation; containers and mounts protect images by ID and
    /// name; ages do not change when the wall clock is set. `kubelet`: image sizes add up; an image that was never used
    /// is older than any `imageMaximumGCAge`; containers protect images by ID only; ages follow the wall clock; pull
    /// records are kept only of images that a round examined and retained; `gc.minimumFreeBytes`, the inode thresholds
    /// and `gc.whenUnreachable` do not apply.
    "gc.strategy": EnumCodec<GcStrategy> => gc.strategy, Live, kubelet_has("`kubelet`");

    /// GC also starts when less than this is free; 0 is never.
    "gc.minimumFreeBytes": ByteSizeCodec<0> => gc.min_free_bytes, Live;

    /// GC also starts at this inode usage, in percent; 100 is never, and the default if `imageGCHighThresholdPercent`
    /// is 100.
    "gc.inodeHighThresholdPercent": PercentCodec => {
        |draft, percent| inodes(&mut draft.config.gc).high_percent = percent,
        |config| PercentCodec::print(&config.gc.inodes.unwrap_or(NO_INODE_THRESHOLDS).high_percent)
    }, Live;

    /// GC frees inodes down to this usage, in percent; not above the high threshold.
    "gc.inodeLowThresholdPercent": PercentCodec => {
        |draft, percent| inodes(&mut draft.config.gc).low_percent = percent,
        |config| PercentCodec::print(&config.gc.inodes.unwrap_or(NO_INODE_THRESHOLDS).low_percent)
    }, Live;

    /// Percentage that `larder gc --free` frees in addition to the requested size.
    "gc.freeMarginPercent": IntegerCodec<u32, 0, 100> => gc.free_margin_percent, Live;

    /// Images removed when all candidates together do not free enough. `all`: every candidate. `worthwhile`: as few
    /// images as bring usage below the high threshold, if that is possible; else all candidates if they free at least
    /// half of what is missing; else only images that each free at least a tenth of it. `nothing`: no image.
    "gc.whenUnreachable": EnumCodec<WhenUnreachable> => gc.when_unreachable, Live;

    /// When space is needed, GC retains the most recently used images up to this size on disk, each layer counted once;
    /// 0 is none. `imageMaximumGCAge` and `larder gc --all-unused` ignore it.
    "gc.keepBytes": ByteSizeCodec<0> => gc.keep_bytes, Live;

    /// Keep rules, in addition to those of `larder keep`. See [below](#items-of-gckeep).
    "gc.keep": KeepRulesCodec => gc.keep, Live;

    /// On hosts without kubelet, with a CRI runtime: containers that exited longer ago than this are removed, because
    /// they keep their images in use; 0 is never. Containers labelled `io.kubernetes.pod.uid` are skipped, and nothing
    /// is removed where a kubelet runs, where larder reads kubelet's settings, or where it cannot see the host's
    /// processes.
    "gc.exitedContainerAge": OptionalDurationCodec => exited_container_age, Live;

    /// Interval of GC rounds.
    "gc.period": DurationCodec<1> => gc_intervals.collect, Restart;

    /// Interval at which the list of images is refreshed.
    "gc.listPeriod": DurationCodec<1> => gc_intervals.list, Restart;

    /// Interval at which disk usage is checked to start GC early; 0 is never.
    "gc.pressurePeriod": OptionalDurationCodec => gc_intervals.pressure, Restart, kubelet_has("`0s`");
}

settings! {
    /// Settings in sections, after the ones of the store.
    REST:
    /// Timeout to connect to the runtime.
    "runtime.connectTimeout": DurationCodec<1> => runtime.connect_timeout, Restart;

    /// Detect images that are mounted as volumes. Costs one call for each new container.
    "runtime.imageVolumes": BoolCodec => runtime.image_volumes, Restart;

    /// Images that are pinned, as patterns with `*`, for runtimes that do not pin their sandbox image: GC and, without
    /// `--force`, `larder rm` retain them. `configured` is the image that the runtime's own configuration names.
    "runtime.sandboxImages": ListCodec<StringCodec> => runtime.sandbox_images, Restart, kubelet_has("`[]`");

    /// With `backend: docker`: when GC starts, let the engine remove unused build cache (as `docker builder prune`
    /// does) before any image.
    "docker.pruneBuildCache": BoolCodec => prune_build_cache, Restart;

    /// How long in-flight calls may continue after a request to stop. Pulls end at once: the next process continues
    /// them.
    "drain.gracePeriod": DurationCodec<0> => drain_grace_period, Live;

    /// Number of recent events kept for later watchers.
    "events.ringSize": IntegerCodec<usize, 0, 1_000_000> => event_ring_size, Restart;
}

type PercentCodec = IntegerCodec<i32, 0, 100>;

const NO_INODE_THRESHOLDS: InodeThresholds = InodeThresholds { high_percent: 100, low_percent: 100 };

fn inodes(policy: &mut GcPolicy) -> &mut InodeThresholds {
    policy.inodes.get_or_insert(NO_INODE_THRESHOLDS)
}
