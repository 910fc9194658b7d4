//! How fast the daemon answers, and whether anything stays behind: ensures of images that are present, through its
//! socket.
//!
//! ```text
//! larder-serve-bench SOCKET IMAGE...
//! ```
//!
//! 1. Ensures of the first image at 1,000 per second for ten seconds. Each is timed from the moment at which it is
//!    sent; who sends does not wait for answers, so that one that comes late makes those behind it late as well.
//! 2. Ten rounds of 1,000 ensures at once, over all images. Open files, threads and memory of the daemon before and
//!    after.

#![allow(clippy::disallowed_macros, reason = "a tool for developers")]

use std::time::Duration;

use larder_api::v1::control_client::ControlClient;
use larder_api::v1::ensure_update::Update;
use larder_api::v1::{EnsureRequest, StatusRequest, WantedImage};
use larder_cri::Endpoint;
use larder_cri::channel::CriChannel;
use tokio::task::JoinSet;
use tokio::time::{self, Instant};
use tonic::codegen::http::Uri;

type BenchClient = ControlClient<CriChannel>;
type BoxError = Box<dyn std::error::Error + Send + Sync>;

const RATE: u32 = 1000;
const SECONDS: u32 = 10;
const ROUNDS: usize = 10;
const AT_ONCE: usize = 1000;

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().ok_or("larder-serve-bench SOCKET IMAGE...")?;
    let images: Vec<String> = arguments.collect();
    let first = images.first().ok_or("larder-serve-bench SOCKET IMAGE...")?;
    let channel = CriChannel::new(Endpoint::parse(&socket)?, Duration::from_secs(5));
    let client = BenchClient::with_origin(channel, Uri::from_static("http://localhost"));

    for image in &images {
        ensure(client.clone(), image.clone()).await?;
    }
    let mut times = at_a_rate(&client, first).await?;
    times.sort();
    let at = |percent: usize| times[(times.len() * percent / 100).min(times.len() - 1)];
    say(&format!(
        "ensure of a present image at {RATE} per second: p50 {:?}, p99 {:?}, longest {:?}",
        at(50),
        at(99),
        at(100)
    ));

    let process = client.clone().status(StatusRequest::default()).await?.into_inner().pid;
    say(&format!("before: {}", held(process)?));
    for _ in 0..ROUNDS {
        at_once(&client, &images).await?;
    }
    say(&format!("after {ROUNDS} rounds of {AT_ONCE} ensures at once: {}", held(process)?));
    Ok(())
}

async fn at_a_rate(client: &BenchClient, image: &str) -> Result<Vec<Duration>, BoxError> {
    let mut running = JoinSet::new();
    let begin = Instant::now();
    for number in 0..RATE * SECONDS {
        let due = begin + Duration::from_secs(1) / RATE * number;
        time::sleep_until(due).await;
        let (client, image) = (client.clone(), image.to_owned());
        let sent = Instant::now();
        running.spawn(async move { ensure(client, image).await.map(|()| sent.elapsed()) });
    }
    running.join_all().await.into_iter().collect()
}

async fn at_once(client: &BenchClient, images: &[String]) -> Result<(), BoxError> {
    let mut running = JoinSet::new();
    for image in images.iter().cycle().take(AT_ONCE) {
        running.spawn(ensure(client.clone(), image.clone()));
    }
    running.join_all().await.into_iter().collect()
}

async fn ensure(mut client: BenchClient, image: String) -> Result<(), BoxError> {
    let wanted = WantedImage { image, ..WantedImage::default() };
    let request = EnsureRequest { images: vec![wanted], ..EnsureRequest::default() };
    let mut updates = client.ensure(request).await?.into_inner();
    let mut ended = Err("the call ended early".into());
    // To its end: a call that is dropped before it is reset, which costs the daemon more than an answer.
    while let Some(update) = updates.message().await? {
        match update.update {
            Some(Update::Ensured(_)) => ended = Ok(()),
            Some(Update::Failed(failed)) => ended = Err(failed.message.into()),
            _ => {}
        }
    }
    ended
}

/// Returns the resources of a process: open files, threads, resident memory.
fn held(process: i32) -> Result<String, BoxError> {
    let files = fs_err::read_dir(format!("/proc/{process}/fd"))?.count();
    let status = fs_err::read_to_string(format!("/proc/{process}/status"))?;
    let lines = status.lines().filter(|line| line.starts_with("Threads") || line.starts_with("VmRSS"));
    let rest: Vec<String> = lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    Ok(format!("{files} open files, {}", rest.join(", ")))
}

fn say(text: &str) {
    println!("{text}");
}
