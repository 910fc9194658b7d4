//! Reports slow pulls, and a runtime that does not respond during one.

use std::time::Duration;

use larder::pull::{PullPhase, PullStatus};
use larder_agent::client::EnsureCalls;
use tokio::time::{self, Instant, MissedTickBehavior};

use crate::output::progress::{ProgressLines, push_progress};
use crate::output::progress_timeline::wait_of;
use crate::output::size;
use crate::printer::Printer;

/// How often stalls are reported.
const PERIOD: Duration = Duration::from_secs(30);
/// How long a runtime that pulls may take to say its version.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// How many pulls are named in one report.
const SHOWN: usize = 12;

/// Reports until dropped; it never ends. On a terminal, where progress shows the pulls, it only reports a
/// runtime that does not answer.
pub(super) async fn print_stalls(pulls: &EnsureCalls, progress: &ProgressLines, out: &Printer) {
    let mut ticks = time::interval_at(Instant::now() + PERIOD, PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut answers = true;
    loop {
        ticks.tick().await;
        let in_flight = pulls.pulls();
        if !progress.is_live() {
            for line in lines(&in_flight, Instant::now()) {
                out.info(line);
            }
        }
        if !in_flight.iter().any(|pull| pull.phase == PullPhase::Pulling) {
            continue;
        }
        let unanswered = silence_reason(pulls).await;
        if let Some(reason) = unanswered.as_ref().filter(|_| answers) {
            out.warning(format_args!("the runtime does not respond during the pull: {reason}"));
        }
        answers = unanswered.is_none();
    }
}

/// Why a backend does not answer a simple question.
async fn silence_reason(pulls: &EnsureCalls) -> Option<String> {
    match time::timeout(ANSWER_WITHIN, pulls.client().check_backend()).await {
        Ok(Ok(())) => None,
        Ok(Err(failure)) => Some(failure.message().to_owned()),
        Err(_) => Some(format!("no answer within {}", size::whole_seconds(ANSWER_WITHIN))),
    }
}

/// A line for each pull that has begun a while ago, and for each thing that others wait for.
fn lines(pulls: &[PullStatus], now: Instant) -> Vec<String> {
    // Rounded to seconds: progress is updated a few times a second.
    let age = |pull: &PullStatus| {
        let age = now.saturating_duration_since(pull.since) + Duration::from_millis(500);
        Duration::from_secs(age.as_secs())
    };
    let old: Vec<_> = pulls.iter().filter(|pull| age(pull) >= PERIOD).collect();
    let (pulling, waiting): (Vec<_>, Vec<_>) =
        old.into_iter().partition(|pull| pull.phase == PullPhase::Pulling);
    let line = |pull: &&PullStatus| {
        let waits = wait_of(pull).map(|wait| format!(": {}", wait.at(now))).unwrap_or_default();
        let mut text = format!("still pulling {} ({})", pull.image, size::duration(age(pull)));
        push_progress(&mut text, pull, now);
        text + &waits
    };
    let mut lines: Vec<_> = pulling.iter().take(SHOWN).map(line).collect();
    if pulling.len() > SHOWN {
        lines.push(format!("still pulling {} more", pulling.len() - SHOWN));
    }
    let mut reasons: Vec<_> = waiting.iter().filter_map(|pull| pull.waiting.as_deref()).collect();
    reasons.sort_unstable();
    reasons.dedup();
    for reason in reasons {
        let images: Vec<_> = waiting
            .iter()
            .filter(|pull| pull.waiting.as_deref() == Some(reason))
            .map(|pull| pull.image.as_str())
            .collect();
        lines.push(match images.as_slice() {
            [one] => format!("still queued: {one} waits for {reason}"),
            several => format!("still queued: {} images wait for {reason}", several.len()),
        });
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use larder::backend::{ByteProgress, LayerPhase, LayerProgress, PullDetail, PullStep, PullWait};
    use larder::events::LogSink;
    use larder::pod::Pod;
    use larder::pull::{EnsureRequest, PullPolicy};
    use larder_agent::config::Config;
    use larder_testkit::fake_backend::{BackendOp, FakeBackend, ScriptedPull, error};

    use super::*;
    use crate::commands::ensure_runner::tests::pulls_with;
    use crate::printer::tests::TestWriter;

    /// Returns the output while three images are pulled one by one, each in this time.
    async fn printed(backend: FakeBackend, time: Duration) -> String {
        let page = TestWriter::default();
        let out = Printer::to(Box::new(std::io::sink()), Box::new(page.clone()));
        for image in ["a:1", "b:1", "c:1"] {
            backend.on_pull_of(image, ScriptedPull::ok("sha256:1", 100).after(time));
        }
        let serial = |config: &mut Config| config.pull.serialize_image_pulls = true;
        let (pulls, _dir) = pulls_with(backend, Arc::new(LogSink), serial);
        let requests =
            ["a:1", "b:1", "c:1"].map(|image| EnsureRequest::new(image, PullPolicy::Always, Pod::default()));
        let [a, b, c] = &requests;
        let progress = ProgressLines::new(false);
        tokio::select! {
            () = print_stalls(&pulls, &progress, &out) => {}
            _ = async { tokio::join!(pulls.ensure(a), pulls.ensure(b), pulls.ensure(c)) } => {}
        }
        page.text()
    }

    #[tokio::test(start_paused = true)]
    async fn long_pulls_are_reported_with_the_queue_of_the_others() {
        assert_eq!(printed(FakeBackend::new(), Duration::from_secs(5)).await, "");
        assert_eq!(
            printed(FakeBackend::new(), Duration::from_secs(21)).await,
            "still pulling b:1 (30s)\n\
             still queued: c:1 waits for earlier pulls (serializeImagePulls)\n\
             still pulling c:1 (1m0s)\n"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_line_has_bytes_rate_time_left_and_the_reason_to_wait() {
        let since = Instant::now();
        let layer = LayerProgress {
            digest: "sha256:a".into(),
            phase: LayerPhase::Fetching,
            bytes: ByteProgress { done: 25_000_000, total: Some(100_000_000) },
            rate: Some(10_000_000),
            waiting: None,
        };
        let detail = PullDetail {
            step: PullStep::Layers,
            rate: Some(10_000_000),
            layers: vec![layer],
            ..PullDetail::default()
        };
        let mut pull = PullStatus {
            image: "a:1".into(),
            phase: PullPhase::Pulling,
            waiting: None,
            bytes: Some(ByteProgress { done: 25_000_000, total: Some(100_000_000) }),
            detail: Some(detail),
            since,
        };
        let printed = |pull: &PullStatus| lines(std::slice::from_ref(pull), since + PERIOD).join("\n");
        assert_eq!(printed(&pull), "still pulling a:1 (30s)   25MB of 100MB (25%)   10MB/s   ETA 8s");
        let wait = PullWait { reason: "rate limited by r.example".into(), until: None };
        pull.detail.as_mut().unwrap().layers[0].waiting = Some(wait);
        assert!(printed(&pull).ends_with("10MB/s: rate limited by r.example"), "{}", printed(&pull));
    }

    #[tokio::test(start_paused = true)]
    async fn a_runtime_lost_during_a_pull_is_reported_once() {
        let backend = FakeBackend::new();
        backend.fail_next(BackendOp::Info, error("gone"));
        backend.fail_next(BackendOp::Info, error("gone"));
        let text = printed(backend, Duration::from_secs(40)).await;
        assert_eq!(
            text.matches("warning: the runtime does not respond during the pull: gone\n").count(),
            1,
            "{text}"
        );
    }
}
