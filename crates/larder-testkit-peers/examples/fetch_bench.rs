//! How fast blobs come from a registry on loopback into a file.
//!
//! `cargo run --profile dist -p larder-testkit-peers --example fetch_bench [MB]`
//!
//! Starts a docker-registry of its own, pushes an image with one layer that does not compress, and fetches it several
//! times with one connection and with four.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use larder::reference::Reference;
use larder_registry::manifest::PlatformMatcher;
use larder_registry::{BlobSink, ByteRanges, RegistryClient, RegistryConfig, fetch_blob};
use larder_testkit_peers::{ImageBuilder, RegistryOptions, RegistryProcess};
use tokio::time::Instant;

struct FileSink(File);

impl BlobSink for FileSink {
    fn write_at(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.0.write_all_at(data, offset)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let megabytes: usize = std::env::args().nth(1).map_or(Ok(500), |text| text.parse())?;
    let registry = RegistryProcess::start(RegistryOptions::default())?;
    ImageBuilder::small(1, megabytes << 20).push(&registry, "bench/blob:1")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    for connections_per_blob in [1, 2, 4, 8] {
        let config = RegistryConfig { connections_per_blob, ..RegistryConfig::default() };
        let session =
            RegistryClient::new(config).session(&Reference::parse(&registry.image("bench/blob:1"))?, None)?;
        for _ in 0..3 {
            let (bytes, took, cpu) = runtime.block_on(async {
                let documents = session.documents(&PlatformMatcher::host()).await?;
                let layer = &documents.layers.layers[0];
                let sink = Arc::new(FileSink(tempfile::tempfile()?));
                let (start, cpu) = (Instant::now(), cpu_seconds());
                fetch_blob(&session, layer, &ByteRanges::new(), sink).await?;
                Ok::<_, Box<dyn std::error::Error>>((layer.size, start.elapsed(), cpu_seconds() - cpu))
            })?;
            #[expect(clippy::cast_precision_loss, reason = "a speed for people")]
            let speed = bytes as f64 / 1e6 / took.as_secs_f64();
            eprintln!(
                "{connections_per_blob} connections: {speed:.0} MB/s, {cpu:.2} s of CPU, peak {} MB",
                peak_megabytes()
            );
        }
    }
    Ok(())
}

fn cpu_seconds() -> f64 {
    let stat = fs_err::read_to_string("/proc/self/stat").unwrap_or_default();
    let ticks: f64 = stat.split(' ').skip(13).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    ticks / 100.0
}

fn peak_megabytes() -> u64 {
    let status = fs_err::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) / 1024
}
