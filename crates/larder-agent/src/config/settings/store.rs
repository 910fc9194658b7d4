//! Settings of larder's own store and of how it talks to registries.

use larder_registry::Proxy;
use serde_json::json;

use super::super::codecs::{
    AbsolutePathCodec, BoolCodec, ByteSizeCodec, DurationCodec, IntegerCodec, ListCodec, OptionalCodec,
    SettingCodec, StringCodec,
};
use super::values::{CacheSizeCodec, ProxyUrlCodec, RegistryCodec};
use super::{ConfigDraft, ReloadSupport, Setting, settings};

type CountCodec<const MAX: i64> = IntegerCodec<usize, 1, MAX>;
type AttemptCountCodec = IntegerCodec<u32, 1, 100>;

settings! {
    SETTINGS:
    /// Directories with a subdirectory for each registry, with a `hosts.toml` (containerd's format) or certificates
    /// (Docker's layout). The first directory that has the registry is used.
    "registry.certsDirs": ListCodec<AbsolutePathCodec> => registry.config_dirs, Restart,
        default("`/etc/containerd/certs.d`, `/etc/docker/certs.d`; before them, as another user than root, `~/.config/larder/certs.d`");

    /// Registries, as HOST or HOST:PORT, to connect to over plain HTTP. Registries on loopback need no entry.
    "registry.plainHTTP": ListCodec<RegistryCodec> => registry.plain_http, Restart;

    /// Limit of connections to one registry for blobs, over all pulls.
    "registry.maxConnections": CountCodec<1000> => registry.connections, Restart;

    /// Limit of connections for one blob.
    "registry.maxConnectionsPerBlob": CountCodec<1000> => registry.connections_per_blob, Restart;

    /// Larger blobs are fetched in ranges of this size, over several connections.
    "registry.rangeSize": ByteSizeCodec<65536> => registry.range_size, Restart;

    /// Timeout to connect, including the TLS handshake.
    "registry.connectTimeout": DurationCodec<1> => registry.connect_timeout, Restart;

    /// Timeout from a request to the headers of its response, including the connection.
    "registry.headerTimeout": DurationCodec<1> => registry.header_timeout, Restart;

    /// A transfer that receives less than `registry.stallBytes` in this time is aborted and retried.
    "registry.stallWindow": DurationCodec<1> => registry.stall_window, Restart;

    /// See `registry.stallWindow`.
    "registry.stallBytes": ByteSizeCodec<1> => registry.stall_bytes, Restart;

    /// Attempts for one request if the registry fails.
    "registry.tries": AttemptCountCodec => registry.tries, Restart;

    /// Attempts for one request to a mirror while other hosts are left.
    "registry.mirrorTries": AttemptCountCodec => registry.tries_of_mirror, Restart;

    /// Wait before the first retry; each further wait is twice as long.
    "registry.retryInitial": DurationCodec<0> => registry.retry_initial, Restart;

    /// Longest wait before a retry.
    "registry.retryMax": DurationCodec<0> => registry.retry_max, Restart;

    /// If a registry requests a longer wait (`Retry-After`), the pull fails.
    "registry.longestHold": DurationCodec<0> => registry.longest_hold, Restart;

    /// The proxy for registries: `environment` reads HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, `none` is no
    /// proxy, or a URL without credentials. Hosts on loopback are always connected directly.
    "registry.proxy": ProxyUrlCodec => registry.proxy, Restart;

    /// Hosts to connect to without the proxy of `registry.proxy`, in the syntax of NO_PROXY.
    "registry.noProxy": OptionalCodec<StringCodec> => {
        |draft, hosts| draft.no_proxy = hosts,
        |config| match &config.registry.proxy {
            Proxy::Fixed { except, .. } => json!(except),
            Proxy::FromEnvironment | Proxy::None => json!(""),
        }
    }, Restart;

    /// Limit of layers fetched and unpacked concurrently from one registry, over all pulls; the limit over all
    /// registries is twice as high. Each uses up to 3 MiB of memory.
    "store.layersAtOnce": CountCodec<64> => store.layers_at_once, Restart;

    /// Bytes per second. A layer or pull that is slower gives way to other pulls that wait for it or for its slot.
    /// Without waiting pulls, it may be slower. 0: no layer or pull gives way.
    "store.minimumRate": ByteSizeCodec<0> => store.minimum_rate.bytes_per_second, Restart;

    /// Time over which the rate of `store.minimumRate` is measured, and after which a layer or pull of any rate gives
    /// way to those for pods of a namespace with fewer slots.
    "store.minimumRateWindow": DurationCodec<1> => store.minimum_rate.window, Restart;

    /// Space that stays free on the store's filesystem, or on that of containerd's images in front of containerd. A
    /// pull or load whose minimum size does not fit is rejected; one that grows more fails.
    "store.reserveBytes": ByteSizeCodec<0> => store.reserve_bytes, Restart;

    /// Inodes that stay free, likewise.
    "store.reserveInodes": IntegerCodec<u64, 0, 1_000_000_000> => store.reserve_inodes, Restart;

    /// Uncompressed size of one layer, and the sum of its files' sizes, holes of sparse files included. A pull or load
    /// of a larger one fails.
    "store.maxLayerBytes": ByteSizeCodec<1> => store.max_layer_bytes, Restart;

    /// Uncompressed size of the layers that a pull or load of one image unpacks.
    "store.maxImageBytes": ByteSizeCodec<1> => store.max_image_bytes, Restart;

    /// How many uncompressed bytes an image may have for each compressed byte, beyond 1 GiB; 0 is no limit. Runs of
    /// zeros do not count: they take no space.
    "store.maxExpansion": IntegerCodec<u64, 0, 1_000_000> => store.max_expansion, Restart;

    /// Verify each MiB of a complete layer when containers first read it, and the metadata of a layer before it is
    /// mounted; what is damaged on the disk is repaired from the registry before it is read, or the read fails after
    /// `pull.lazy.readTimeout`. Takes effect in a daemon with larder's own store, where [lazy
    /// pulls](lazy-pulls.md#what-it-needs) are possible; see [damaged layers](lazy-pulls.md#damaged-layers).
    "store.verifyReads": BoolCodec => store.verify_reads, Restart;

    /// Memory for the page cache of the database.
    "store.databaseCache": CacheSizeCodec => store.config.database_cache_bytes, Restart;

    /// How long a partially fetched blob is kept for resuming, from its last byte.
    "store.ingestKeep": DurationCodec<0> => store.config.ingest_keep, Restart;

    /// Interval at which downloads are synced to disk: a power failure loses at most this much.
    "store.ingestSync": DurationCodec<1> => store.config.ingest_sync, Restart;
}
