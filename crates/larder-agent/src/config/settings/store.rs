//! Settings of larder's own store and of how it talks to registries.

use larder_registry::Proxy;
use serde_json::json;

use super::super::codecs::{
    ByteSizeCodec, DurationCodec, FlagValueKind, IntegerCodec, OptionalStringCodec, PathListCodec,
    SettingCodec,
};
use super::values::{CacheSizeCodec, ProxyUrlCodec, RegistryListCodec};
use super::{ReloadSupport, Setting, setting};

type CountCodec<const MAX: i64> = IntegerCodec<usize, 1, MAX>;
type AttemptCountCodec = IntegerCodec<u32, 1, 100>;

pub(super) const SETTINGS: &[Setting] = &[
    setting!(
        "registry.certsDirs",
        PathListCodec,
        registry.config_dirs,
        Restart,
        "Folders with one folder for each registry, which holds a `hosts.toml` (containerd's format) or certificates (Docker's way). The first that knows a registry decides."
    )
    .default("`/etc/containerd/certs.d`, `/etc/docker/certs.d`; before them, for others than root, `~/.config/larder/certs.d`"),
    setting!(
        "registry.plainHTTP",
        RegistryListCodec,
        registry.plain_http,
        Restart,
        "Registries, as HOST or HOST:PORT, that are spoken to over plain HTTP. Those on loopback need no entry."
    ),
    setting!(
        "registry.maxConnections",
        CountCodec<1000>,
        registry.connections,
        Restart,
        "Connections to one registry that carry blobs, over all pulls."
    ),
    setting!(
        "registry.maxConnectionsPerBlob",
        CountCodec<1000>,
        registry.connections_per_blob,
        Restart,
        "Connections that one blob may use at a time."
    ),
    setting!(
        "registry.rangeSize",
        ByteSizeCodec<65536>,
        registry.range_size,
        Restart,
        "Larger blobs are fetched in ranges of this size, several at a time."
    ),
    setting!(
        "registry.connectTimeout",
        DurationCodec<1>,
        registry.connect_timeout,
        Restart,
        "Until a connection stands, TLS included."
    ),
    setting!(
        "registry.headerTimeout",
        DurationCodec<1>,
        registry.header_timeout,
        Restart,
        "From a request to the headers of its reply, connecting included."
    ),
    setting!(
        "registry.stallWindow",
        DurationCodec<1>,
        registry.stall_window,
        Restart,
        "A body that gives fewer than `registry.stallBytes` in this time is given up and tried again."
    ),
    setting!("registry.stallBytes", ByteSizeCodec<1>, registry.stall_bytes, Restart, "See `registry.stallWindow`."),
    setting!(
        "registry.tries",
        AttemptCountCodec,
        registry.tries,
        Restart,
        "How often one request is tried when the registry is at fault."
    ),
    setting!(
        "registry.mirrorTries",
        AttemptCountCodec,
        registry.tries_of_mirror,
        Restart,
        "The same for a mirror while others are left to ask."
    ),
    setting!(
        "registry.retryInitial",
        DurationCodec<0>,
        registry.retry_initial,
        Restart,
        "First wait between two tries; each further one doubles it."
    ),
    setting!("registry.retryMax", DurationCodec<0>, registry.retry_max, Restart, "Longest wait between two tries."),
    setting!(
        "registry.longestHold",
        DurationCodec<0>,
        registry.longest_hold,
        Restart,
        "A registry that asks for a longer wait than this fails the pull instead."
    ),
    setting!(
        "registry.proxy",
        ProxyUrlCodec,
        registry.proxy,
        Restart,
        "The proxy that leads to registries: `environment` is what HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY say, `none` is none, else a URL without credentials. Hosts on loopback are never reached through one."
    ),
    Setting::new(
        "registry.noProxy",
        (OptionalStringCodec::name, FlagValueKind::Text),
        |draft, at| {
            draft.no_proxy = OptionalStringCodec::parse(at).map_err(|problem| vec![problem])?;
            Ok(())
        },
        |config| match &config.registry.proxy {
            Proxy::Fixed { except, .. } => json!(except),
            Proxy::FromEnvironment | Proxy::None => json!(""),
        },
        ReloadSupport::Restart,
        "Hosts not to reach through the proxy that `registry.proxy` names, as in NO_PROXY.",
    ),
    setting!(
        "store.layersAtOnce",
        CountCodec<64>,
        store.layers_at_once,
        Restart,
        "Layers fetched and unpacked at once, over all pulls. Each takes up to 3 MiB of memory."
    ),
    setting!(
        "store.reserveBytes",
        ByteSizeCodec<0>,
        store.reserve_bytes,
        Restart,
        "What must stay free on the store's file system. A pull or load is refused where even the least that it could take does not fit beside it."
    ),
    setting!(
        "store.reserveInodes",
        IntegerCodec<u64, 0, 1_000_000_000>,
        store.reserve_inodes,
        Restart,
        "The same for inodes."
    ),
    setting!(
        "store.databaseCache",
        CacheSizeCodec,
        store.config.database_cache_bytes,
        Restart,
        "Memory for pages of the database."
    ),
    setting!(
        "store.ingestKeep",
        DurationCodec<0>,
        store.config.ingest_keep,
        Restart,
        "How long a half-fetched blob is kept for resuming after the last byte came."
    ),
    setting!(
        "store.ingestSync",
        DurationCodec<1>,
        store.config.ingest_sync,
        Restart,
        "How much of a download, in time, a power cut may cost."
    ),
];
