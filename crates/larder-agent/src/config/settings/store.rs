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
        "Directories with a subdirectory for each registry, with a `hosts.toml` (containerd's format) or certificates (Docker's layout). The first directory that has the registry is used."
    )
    .default("`/etc/containerd/certs.d`, `/etc/docker/certs.d`; before them, as another user than root, `~/.config/larder/certs.d`"),
    setting!(
        "registry.plainHTTP",
        RegistryListCodec,
        registry.plain_http,
        Restart,
        "Registries, as HOST or HOST:PORT, to connect to over plain HTTP. Registries on loopback need no entry."
    ),
    setting!(
        "registry.maxConnections",
        CountCodec<1000>,
        registry.connections,
        Restart,
        "Limit of connections to one registry for blobs, over all pulls."
    ),
    setting!(
        "registry.maxConnectionsPerBlob",
        CountCodec<1000>,
        registry.connections_per_blob,
        Restart,
        "Limit of connections for one blob."
    ),
    setting!(
        "registry.rangeSize",
        ByteSizeCodec<65536>,
        registry.range_size,
        Restart,
        "Larger blobs are fetched in ranges of this size, over several connections."
    ),
    setting!(
        "registry.connectTimeout",
        DurationCodec<1>,
        registry.connect_timeout,
        Restart,
        "Timeout to connect, including the TLS handshake."
    ),
    setting!(
        "registry.headerTimeout",
        DurationCodec<1>,
        registry.header_timeout,
        Restart,
        "Timeout from a request to the headers of its response, including the connection."
    ),
    setting!(
        "registry.stallWindow",
        DurationCodec<1>,
        registry.stall_window,
        Restart,
        "A transfer that receives less than `registry.stallBytes` in this time is aborted and retried."
    ),
    setting!("registry.stallBytes", ByteSizeCodec<1>, registry.stall_bytes, Restart, "See `registry.stallWindow`."),
    setting!(
        "registry.tries",
        AttemptCountCodec,
        registry.tries,
        Restart,
        "Attempts for one request if the registry fails."
    ),
    setting!(
        "registry.mirrorTries",
        AttemptCountCodec,
        registry.tries_of_mirror,
        Restart,
        "Attempts for one request to a mirror while other hosts are left."
    ),
    setting!(
        "registry.retryInitial",
        DurationCodec<0>,
        registry.retry_initial,
        Restart,
        "Wait before the first retry; each further wait is twice as long."
    ),
    setting!("registry.retryMax", DurationCodec<0>, registry.retry_max, Restart, "Longest wait before a retry."),
    setting!(
        "registry.longestHold",
        DurationCodec<0>,
        registry.longest_hold,
        Restart,
        "If a registry requests a longer wait (`Retry-After`), the pull fails."
    ),
    setting!(
        "registry.proxy",
        ProxyUrlCodec,
        registry.proxy,
        Restart,
        "The proxy for registries: `environment` reads HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, `none` is no proxy, or a URL without credentials. Hosts on loopback are always connected directly."
    ),
    Setting::new(
        "registry.noProxy",
        OptionalStringCodec::name,
        FlagValueKind::Text,
        |draft, at| {
            draft.no_proxy = OptionalStringCodec::parse(at).map_err(|problem| vec![problem])?;
            Ok(())
        },
        |config| match &config.registry.proxy {
            Proxy::Fixed { except, .. } => json!(except),
            Proxy::FromEnvironment | Proxy::None => json!(""),
        },
        ReloadSupport::Restart,
        "Hosts to connect to without the proxy of `registry.proxy`, in the syntax of NO_PROXY.",
    ),
    setting!(
        "store.layersAtOnce",
        CountCodec<64>,
        store.layers_at_once,
        Restart,
        "Limit of layers fetched and unpacked concurrently from one registry, over all pulls; the limit over all registries is twice as high. Each uses up to 3 MiB of memory."
    ),
    setting!(
        "store.minimumRate",
        ByteSizeCodec<0>,
        store.minimum_rate.bytes_per_second,
        Restart,
        "Bytes per second. A layer or pull that is slower gives way to other pulls that wait for it or for its slot. Without waiting pulls, it may be slower. 0: it never gives way."
    ),
    setting!(
        "store.minimumRateWindow",
        DurationCodec<1>,
        store.minimum_rate.window,
        Restart,
        "Time over which the rate of `store.minimumRate` is measured."
    ),
    setting!(
        "store.reserveBytes",
        ByteSizeCodec<0>,
        store.reserve_bytes,
        Restart,
        "Space that stays free on the store's filesystem. A pull or load whose minimum size does not fit is rejected; one that grows more fails."
    ),
    setting!(
        "store.reserveInodes",
        IntegerCodec<u64, 0, 1_000_000_000>,
        store.reserve_inodes,
        Restart,
        "Inodes that stay free, likewise."
    ),
    setting!(
        "store.maxLayerBytes",
        ByteSizeCodec<1>,
        store.max_layer_bytes,
        Restart,
        "Uncompressed size of one layer, and the sum of its files' sizes, holes of sparse files included. A pull or load of a larger one fails."
    ),
    setting!(
        "store.maxImageBytes",
        ByteSizeCodec<1>,
        store.max_image_bytes,
        Restart,
        "Uncompressed size of the layers that a pull or load of one image unpacks."
    ),
    setting!(
        "store.maxExpansion",
        IntegerCodec<u64, 0, 1_000_000>,
        store.max_expansion,
        Restart,
        "How many uncompressed bytes an image may have for each compressed byte, beyond 1 GiB; 0 is no limit. Runs of zeros do not count: they take no space."
    ),
    setting!(
        "store.databaseCache",
        CacheSizeCodec,
        store.config.database_cache_bytes,
        Restart,
        "Memory for the page cache of the database."
    ),
    setting!(
        "store.ingestKeep",
        DurationCodec<0>,
        store.config.ingest_keep,
        Restart,
        "How long a partially fetched blob is kept for resuming, from its last byte."
    ),
    setting!(
        "store.ingestSync",
        DurationCodec<1>,
        store.config.ingest_sync,
        Restart,
        "Interval at which downloads are synced to disk: a power failure loses at most this much."
    ),
];
