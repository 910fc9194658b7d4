//! Unpacks layer files and says how fast: `unpack_bench [--threads 1|2] [--at-once N] INTO LAYER...`
//!
//! `INTO` is an empty directory on the filesystem to measure, a new one for each run (see `docs/benchmarks.md` for
//! why). Each layer file is read once before the clock starts, so that its digests are known and it is in the page
//! cache. `--at-once N` unpacks N layers side by side.

use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use larder::reference::Digest;
use larder_store::unpack::{
    ExpectedLayer, MergedLayers, UnpackOptions, UnpackThreads, UnpackedLayer, unpack_layer,
};
use rustix::time::{ClockId, clock_gettime};

type BoxResult<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> BoxResult<()> {
    let (mut threads, mut at_once, mut paths) = (UnpackThreads::Two, 1, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--threads" => {
                threads = match arguments.next().as_deref() {
                    Some("1") => UnpackThreads::One,
                    _ => UnpackThreads::Two,
                };
            }
            "--at-once" => at_once = arguments.next().ok_or("how many at once?")?.parse()?,
            _ => paths.push(PathBuf::from(argument)),
        }
    }
    let (into, layers) =
        paths.split_first().ok_or("usage: unpack_bench [--threads 1|2] [--at-once N] INTO LAYER...")?;
    let known = layers.iter().map(|layer| digests(layer)).collect::<io::Result<Vec<_>>>()?;
    let (wall, cpu) = (clock(ClockId::Monotonic), clock(ClockId::ProcessCPUTime));
    let next = AtomicUsize::new(0);
    let unpacked = std::thread::scope(|scope| {
        let work = || {
            let mut done = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some((layer, known)) = layers.get(at).zip(known.get(at)) else { return done };
                done.push(unpack(&into.join(at.to_string()), layer, known, threads));
            }
        };
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).flatten().collect::<Vec<_>>()
    });
    let (wall, cpu) = (since(ClockId::Monotonic, wall), since(ClockId::ProcessCPUTime, cpu));
    let unpacked = unpacked.into_iter().collect::<Result<Vec<_>, _>>()?;
    let before = clock(ClockId::Monotonic);
    rustix::fs::syncfs(fs_err::File::open(into)?)?;
    let sync = since(ClockId::Monotonic, before);
    let sum = |count: fn(&UnpackedLayer) -> u64| unpacked.iter().map(count).sum::<u64>();
    let (plain, compressed) = (sum(|layer| layer.plain_bytes), sum(|layer| layer.compressed_bytes));
    writeln!(
        io::stdout(),
        "{} entries, {} MB from {} MB: {:.3} s wall, {:.3} s CPU, {} MB/s, sync {:.3} s",
        sum(|layer| layer.entries),
        plain / 1_000_000,
        compressed / 1_000_000,
        wall.as_secs_f64(),
        cpu.as_secs_f64(),
        per_second(plain, wall),
        sync.as_secs_f64(),
    )?;
    Ok(())
}

struct BenchLayer {
    digest: Digest,
    diff_id: Digest,
    size: u64,
}

/// The digests of a layer file, found with the same code that checks them: it reports what it finds.
fn digests(layer: &Path) -> io::Result<BenchLayer> {
    use larder_store::unpack::DetectedCompression;
    use sha2::{Digest as _, Sha256};
    let bytes = fs_err::read(layer)?;
    let compression = DetectedCompression::detect(&bytes);
    let mut reader: Box<dyn Read> = match compression {
        DetectedCompression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(&bytes[..])),
        DetectedCompression::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(&bytes[..])?),
        DetectedCompression::None => Box::new(&bytes[..]),
        other => return Err(io::Error::other(format!("a layer in {other}"))),
    };
    let (mut plain, mut buffer) = (Sha256::new(), vec![0; 256 << 10]);
    loop {
        match reader.read(&mut buffer)? {
            0 => break,
            read => plain.update(&buffer[..read]),
        }
    }
    let digest = |hash: &[u8]| {
        let hex = hash.iter().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
        Digest::parse(&format!("sha256:{hex}")).map_err(io::Error::other)
    };
    Ok(BenchLayer {
        digest: digest(&Sha256::digest(&bytes))?,
        diff_id: digest(&plain.finalize())?,
        size: bytes.len() as u64,
    })
}

fn unpack(into: &Path, layer: &Path, known: &BenchLayer, threads: UnpackThreads) -> BoxResult<UnpackedLayer> {
    let expected =
        ExpectedLayer { digest: Some(&known.digest), size: Some(known.size), diff_id: &known.diff_id };
    let options = UnpackOptions { threads, ..UnpackOptions::default() };
    let (unpacked, pending) = unpack_layer(fs_err::File::open(layer)?, &expected, into, &options)?;
    pending.finish(&MergedLayers::default(), &options.progress)?;
    Ok(unpacked)
}

fn clock(id: ClockId) -> Duration {
    let now = clock_gettime(id);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.try_into().unwrap_or(0))
}

fn since(id: ClockId, start: Duration) -> Duration {
    clock(id).saturating_sub(start)
}

/// Megabytes in a second.
fn per_second(bytes: u64, wall: Duration) -> u128 {
    u128::from(bytes) / wall.as_micros().max(1)
}
