//! Settings of larder's own.

use larder::credentials::TokenPolicy;
use larder::gc::{Accounting, AgeRule, ClockRule, GcPolicy, HookRule, InodeThresholds, UseRule};
use larder::pull::{DuplicatePullPolicy, NewCredentialsPolicy, RateLimitAction};
use serde_json::json;
use tracing::Level;

use super::super::LogFormat;
use super::super::codecs::{
    AbsolutePathCodec, BoolCodec, ByteSizeCodec, DurationCodec, EnumCodec, FileModeCodec, FlagValueKind,
    IntegerCodec, OptionalDurationCodec, OptionalPathCodec, OptionalStringCodec, SettingCodec,
    SocketAddrCodec,
};
use super::super::lists::{read_keep, read_prefetch, show_keep, show_prefetch};
use super::values::BackendCodec;
use super::{ReloadSupport, Setting, setting};
use crate::manifest::InputProblem;
use crate::manifest::tree::NodeCursor;

/// Those at the top of the file.
pub(super) const TOP: &[Setting] = &[
    setting!(
        "root",
        AbsolutePathCodec,
        root,
        Restart,
        "The folder of larder's own store, which is made if there is none."
    )
    .default("`/var/lib/larder`; for others than root `~/.local/share/larder`"),
    setting!(
        "state",
        OptionalPathCodec,
        state,
        Restart,
        "Where larder notes when images were used, what it removed, and what to keep. Empty: the folder `collect` of the store; for a runtime, one for its socket in the store's usual place."
    ),
    setting!(
        "backend",
        BackendCodec,
        backend,
        Restart,
        "Where images live: `store` is larder's own store, `cri` the runtime that `containerRuntimeEndpoint` names, or that is found, `unix:///path/to.sock` that runtime, and `docker` the Docker Engine that `DOCKER_HOST` names or that listens where engines usually do (`docker:///path/to.sock` for another one)."
    )
    .default("`store`; `cri` where `containerRuntimeEndpoint` or `imageServiceEndpoint` is set, also in kubelet's file"),
    Setting::new(
        "prefetch",
        (|| "list of images".into(), FlagValueKind::Text),
        |draft, at| {
            draft.config.prefetch = read_prefetch(at)?;
            Ok(())
        },
        |config| show_prefetch(&config.prefetch),
        ReloadSupport::Live,
        "Images that are kept present although no pod has asked for them. See below.",
    ),
];

/// Those in sections.
pub(super) const SECTIONS: &[Setting] = &[
    setting!("listen.socket", AbsolutePathCodec, listen.socket, Restart, "The socket that larder serves.")
        .default("`/run/larder/larder.sock`; for others than root `$XDG_RUNTIME_DIR/larder/larder.sock`; with `--root`, `larder.sock` in that folder"),
    setting!("listen.mode", FileModeCodec, listen.mode, Restart, "The mode of the socket, in quotes."),
    setting!(
        "listen.group",
        OptionalStringCodec,
        listen.group,
        Restart,
        "The group of the socket, by name or number. Empty: larder's own. Who may open it can mount anywhere as larder's user: as \
         root, if that is root."
    ),
    setting!(
        "metrics.address",
        SocketAddrCodec,
        metrics.address,
        Restart,
        "Where metrics are served over plain HTTP, on loopback. Empty: nowhere."
    ),
    setting!(
        "metrics.allowRemote",
        BoolCodec,
        metrics.allow_remote,
        Restart,
        "Whether `metrics.address` may be one that other machines reach."
    ),
    setting!("log.level", EnumCodec<Level>, log.level, Live, "The least important lines that are logged. `LARDER_LOG` overrides it."),
    setting!("log.format", EnumCodec<LogFormat>, log.format, Live, "Lines for people, or one JSON object a line."),
    setting!(
        "pull.overRate",
        EnumCodec<RateLimitAction>,
        pull.over_rate,
        Live,
        "What happens to a pull over the limit of `registryPullQPS`: it waits, or it fails."
    )
    .kubelet_has("`refuse`"),
    setting!(
        "pull.sameImage",
        EnumCodec<DuplicatePullPolicy>,
        pull.same_image,
        Live,
        "What happens when an image is wanted that is being pulled already: one pull serves all whose credentials lead to the same, or each has its own."
    )
    .kubelet_has("`eachRequest`"),
    setting!(
        "pull.newCredentials",
        EnumCodec<NewCredentialsPolicy>,
        pull.new_credentials,
        Live,
        "What happens when a pod whose pull failed not long ago comes with another pull secret: the image is pulled at once, or it waits for the back-off."
    )
    .kubelet_has("`wait`"),
    setting!(
        "pull.timeout",
        OptionalDurationCodec,
        pull.pull_timeout,
        Live,
        "How long a pull may take once it has its turn; 0 is no bound."
    ),
    setting!(
        "pull.backoffInitial",
        DurationCodec<1>,
        pull.backoff_initial,
        Live,
        "How long an image is left alone after its first failure; each further one doubles it."
    ),
    setting!("pull.backoffMax", DurationCodec<1>, pull.backoff_max, Live, "How long an image is left alone at most."),
    setting!(
        "pull.credentialTokens",
        EnumCodec<TokenPolicy>,
        credential_tokens,
        Restart,
        "What is done with identity and registry tokens of pull secrets and docker configs."
    )
    .kubelet_has("`ignore`"),
    setting!(
        "pull.ensuredLease",
        DurationCodec<0>,
        ensured_lease,
        Restart,
        "How long an image that was just ensured is spared by collection although nothing uses it yet."
    )
    .kubelet_has("`0s`"),
    setting!(
        "gc.minimumFreeBytes",
        ByteSizeCodec<0>,
        gc.min_free_bytes,
        Live,
        "Collect as well when fewer bytes are free than this; 0 leaves it to the percents."
    ),
    inode_setting("gc.inodeHighThresholdPercent", InodeThreshold::High).kubelet_has("`100`"),
    inode_setting("gc.inodeLowThresholdPercent", InodeThreshold::Low),
    setting!(
        "gc.freeMarginPercent",
        IntegerCodec<u32, 0, 100>,
        gc.free_margin_percent,
        Live,
        "How many percent more than asked for are freed on demand (`larder gc --free`)."
    ),
    setting!(
        "gc.accounting",
        EnumCodec<Accounting>,
        gc.accounting,
        Live,
        "How freed room is counted: `exact` counts shared layers once and measures after each removal, `nominal` adds up the sizes of images."
    )
    .kubelet_has("`nominal`"),
    setting!(
        "gc.neverUsed",
        EnumCodec<AgeRule>,
        gc.age,
        Live,
        "The age of an image that nothing has used, for `imageMaximumGCAge`: from when it was first seen, or beyond any bound."
    )
    .kubelet_has("`infinitelyOld`"),
    setting!(
        "gc.uses",
        EnumCodec<UseRule>,
        gc.uses,
        Live,
        "What a container must name for its image to be in use: its id or one of its names, or its id only."
    )
    .kubelet_has("`ids`"),
    setting!(
        "gc.clock",
        EnumCodec<ClockRule>,
        gc.clock,
        Live,
        "What steps of the wall clock do to ages: nothing, or what they say."
    )
    .kubelet_has("`believe`"),
    setting!(
        "gc.hooks",
        EnumCodec<HookRule>,
        gc.hooks,
        Live,
        "Which images are told to be left after a collection: all that are present, or those that were looked at and kept."
    )
    .kubelet_has("`examined`"),
    Setting::new(
        "gc.keep",
        (|| "list of rules".into(), FlagValueKind::Text),
        |draft, at| {
            draft.config.gc.keep = read_keep(at)?;
            Ok(())
        },
        |config| show_keep(&config.gc.keep),
        ReloadSupport::Live,
        "Images to spare, beside those of `larder keep`. See below.",
    ),
    setting!("gc.period", DurationCodec<1>, gc_intervals.collect, Restart, "How often larder collects."),
    setting!("gc.listPeriod", DurationCodec<1>, gc_intervals.list, Restart, "How often the list of images is refreshed."),
    setting!(
        "gc.pressurePeriod",
        OptionalDurationCodec,
        gc_intervals.pressure,
        Restart,
        "How often larder looks how full the disk is, to collect at once; 0 is never."
    )
    .kubelet_has("`0s`"),
];

/// Those in sections, after the ones of the store.
pub(super) const REST: &[Setting] = &[
    setting!(
        "runtime.connectTimeout",
        DurationCodec<1>,
        runtime.connect_timeout,
        Restart,
        "How long opening a connection to the runtime may take."
    ),
    setting!(
        "runtime.imageVolumes",
        BoolCodec,
        runtime.image_volumes,
        Restart,
        "Find out which images are mounted as volumes. Costs one call for each container the first time it is seen."
    ),
    setting!(
        "docker.pruneBuildCache",
        BoolCodec,
        prune_build_cache,
        Restart,
        "With `backend: docker`: when the disk is past a limit, have the engine remove what its builder does not use right now, before any image goes. It is what `docker builder prune` does."
    ),
    setting!(
        "drain.gracePeriod",
        DurationCodec<0>,
        drain_grace_period,
        Live,
        "How long calls may go on once larder is told to stop."
    ),
    setting!(
        "events.ringSize",
        IntegerCodec<usize, 0, 1_000_000>,
        event_ring_size,
        Restart,
        "How many events are kept for those who watch later."
    ),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum InodeThreshold {
    High,
    Low,
}

type PercentCodec = IntegerCodec<i32, 0, 100>;

const fn inode_setting(key: &'static str, which: InodeThreshold) -> Setting {
    let form = (<PercentCodec as SettingCodec>::name as fn() -> String, FlagValueKind::Number);
    match which {
        InodeThreshold::High => Setting::new(
            key,
            form,
            |draft, at| inodes(&mut draft.config.gc, at, |inodes, percent| inodes.high_percent = percent),
            |config| json!(config.gc.inodes.map_or(100, |inodes| inodes.high_percent)),
            ReloadSupport::Live,
            "Collect when so many percent of the inodes are in use; 100 is never.",
        ),
        InodeThreshold::Low => Setting::new(
            key,
            form,
            |draft, at| inodes(&mut draft.config.gc, at, |inodes, percent| inodes.low_percent = percent),
            |config| json!(config.gc.inodes.map_or(100, |inodes| inodes.low_percent)),
            ReloadSupport::Live,
            "Free until so many percent of the inodes are in use; not above the high threshold.",
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
