//! How long a check of the pull records takes from memory, and how it grows with what is recorded.
//!
//! `cargo run --profile dist -p larder-testkit-peers --example records_bench` prints a line for each number of recorded
//! credentials: nanoseconds for one check, once spread over images and once all in one record.

use std::error::Error;
use std::hint::black_box;
use std::io::Write as _;

use larder::credentials::{PodCredentials, SecretCoordinates};
use larder::records::{
    ImagePullCredentials, LEARNED_SECRETS, PullRecordStore, RecordedSecret, Rfc3339Time, Verification,
};
use larder::reference::{ImageId, ImageName};
use rustix::time::{ClockId, clock_gettime};

const CHECKS: u32 = 500_000;
/// The best run counts: what else the machine does only adds.
const RUNS: usize = 7;
const NAME: &str = "registry.example/team/app";

fn at(number: usize) -> SecretCoordinates {
    SecretCoordinates {
        uid: format!("6c9d3f3e-0000-4000-8000-{number:012}"),
        namespace: format!("namespace-{}", number % 50),
        name: "registry-credentials".into(),
    }
}

fn hash(number: usize) -> String {
    format!("{:064x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

fn secret(number: usize) -> RecordedSecret {
    RecordedSecret { at: at(number), hash: hash(number) }
}

fn image_ref(number: usize) -> ImageId {
    format!("sha256:{number:064x}").into()
}

/// Time of this thread on a processor, in nanoseconds.
#[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
fn cpu_nanos() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Nanoseconds for a check, with so many credentials in records of so many each.
async fn measured(credentials: usize, in_each: usize) -> Result<f64, Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let records = PullRecordStore::open(dir.path(), Verification::of_unconfigured_kubelet())?;
    let image = ImageName::from(format!("{NAME}:v1"));
    let images = credentials / in_each;
    for number in 0..images {
        let secrets = (number * in_each..(number + 1) * in_each).map(secret).collect();
        let access = ImagePullCredentials { secrets, ..ImagePullCredentials::default() };
        records.pulled(&image, &image_ref(number), Some(access), Rfc3339Time(1_800_000_000)).await?;
    }
    let asked: Vec<_> = (0..1000)
        .map(|n| {
            let number = n * 7919 % credentials;
            let pod = PodCredentials { secrets: vec![(at(number), hash(number))], service_account: None };
            (image_ref(number / in_each), pod)
        })
        .collect();
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let began = cpu_nanos();
        for n in 0..CHECKS {
            let (image_ref, pod) = &asked[n as usize % asked.len()];
            let result = records.check_from_memory(black_box(&image), image_ref, pod);
            if result.is_none_or(larder::records::MustPullCheckResult::must_pull) {
                return Err(format!("{result:?} for {image_ref}").into());
            }
        }
        best = best.min((cpu_nanos() - began) / f64::from(CHECKS));
    }
    Ok(best)
}

fn main() -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "credentials  spread  in one record")?;
    for credentials in [100, 1000, 10_000, 100_000] {
        let spread = runtime.block_on(measured(credentials, LEARNED_SECRETS.min(20)))?;
        let in_one = runtime.block_on(measured(credentials, credentials))?;
        writeln!(out, "{credentials:>11}  {spread:>3.0} ns  {in_one:>3.0} ns")?;
    }
    Ok(())
}
