//! The queue between spans that end and the exporter.
//!
//! Promises: a span that ends never waits: where the queue is full, it is dropped and counted; an endpoint that does
//! not answer is reported once, until it answers again; a flush ends within its limit.

use std::fmt::Display;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use opentelemetry::Context;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter, SpanProcessor};
use tokio::sync::{mpsc, oneshot};
use tokio::time;

use super::TraceCounts;
use super::export::LastCause;
use super::options::BatchLimits;

/// Counts of exported and dropped spans.
#[derive(Debug, Default)]
pub(super) struct SpanCounts {
    exported: AtomicU64,
    queue_full: AtomicU64,
    export_failed: AtomicU64,
}

impl SpanCounts {
    pub(super) fn now(&self) -> TraceCounts {
        TraceCounts {
            exported: self.exported.load(Ordering::Relaxed),
            queue_full: self.queue_full.load(Ordering::Relaxed),
            export_failed: self.export_failed.load(Ordering::Relaxed),
        }
    }
}

/// The end of the queue that spans go into.
#[derive(Debug)]
pub(super) struct SpanQueue {
    spans: mpsc::Sender<SpanData>,
    counts: Arc<SpanCounts>,
}

impl SpanProcessor for SpanQueue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if span.span_context.is_sampled() && self.spans.try_send(span).is_err() {
            self.counts.queue_full.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// Asks for the spans that have ended to be sent now.
#[derive(Debug, Clone)]
pub(super) struct Flush(mpsc::Sender<oneshot::Sender<()>>);

impl Flush {
    /// Returns when they are sent, or after `limit`.
    pub(super) async fn within(&self, limit: Duration) {
        let flush = async {
            let (done, sent) = oneshot::channel();
            if self.0.send(done).await.is_ok() {
                let _ = sent.await;
            }
        };
        let _ = time::timeout(limit, flush).await;
    }
}

/// A queue, and the task that empties it.
pub(super) fn queue<E: SpanExporter>(
    exporter: E,
    limits: BatchLimits,
    endpoint: String,
    cause: LastCause,
) -> (SpanQueue, Flush, Arc<SpanCounts>, impl Future<Output = ()> + Send + use<E>) {
    let (spans, receiver) = mpsc::channel(limits.queue);
    let (flush, flushes) = mpsc::channel(1);
    let counts = Arc::<SpanCounts>::default();
    let sending = SpanSender {
        spans: receiver,
        flushes,
        batch: Vec::new(),
        exporter,
        limits,
        counts: Arc::clone(&counts),
        outage: Outage { endpoint, lost: None },
        cause,
    };
    (SpanQueue { spans, counts: Arc::clone(&counts) }, Flush(flush), counts, sending.run())
}

struct SpanSender<E> {
    spans: mpsc::Receiver<SpanData>,
    flushes: mpsc::Receiver<oneshot::Sender<()>>,
    batch: Vec<SpanData>,
    exporter: E,
    limits: BatchLimits,
    counts: Arc<SpanCounts>,
    outage: Outage,
    cause: LastCause,
}

impl<E: SpanExporter> SpanSender<E> {
    async fn run(mut self) {
        loop {
            tokio::select! {
                biased;
                Some(done) = self.flushes.recv() => {
                    while let Ok(span) = self.spans.try_recv() {
                        self.batch.push(span);
                        if self.batch.len() >= self.limits.batch {
                            self.export().await;
                        }
                    }
                    self.export().await;
                    let _ = done.send(());
                }
                is_open = collect(&mut self.spans, &mut self.batch, self.limits) => {
                    self.export().await;
                    if !is_open {
                        return;
                    }
                }
            }
        }
    }

    async fn export(&mut self) {
        let batch = std::mem::take(&mut self.batch);
        let count = batch.len() as u64;
        if count == 0 {
            return;
        }
        let exported = time::timeout(self.limits.timeout, self.exporter.export(batch)).await;
        let failure = match exported {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(self.cause.added_to(error.to_string())),
            Err(_) => Some(format!("no answer within {}", larder::go_format::duration(self.limits.timeout))),
        };
        let counter = if failure.is_some() { &self.counts.export_failed } else { &self.counts.exported };
        counter.fetch_add(count, Ordering::Relaxed);
        match self.outage.note(failure.as_ref(), count) {
            Some(OutageNotice::Began(text)) => tracing::warn!("{text}"),
            Some(OutageNotice::Ended(text)) => tracing::info!("{text}"),
            None => {}
        }
    }
}

/// Adds the spans of one batch: waits for the first one, and then for the delay or a full batch. Returns whether more
/// may follow. If it is dropped, the batch has what was received.
async fn collect(
    spans: &mut mpsc::Receiver<SpanData>,
    batch: &mut Vec<SpanData>,
    limits: BatchLimits,
) -> bool {
    if batch.is_empty() {
        match spans.recv().await {
            Some(span) => batch.push(span),
            None => return false,
        }
    }
    let fill = async {
        while batch.len() < limits.batch {
            match spans.recv().await {
                Some(span) => batch.push(span),
                None => return false,
            }
        }
        true
    };
    time::timeout(limits.delay, fill).await.unwrap_or(true)
}

/// Whether the endpoint takes spans.
struct Outage {
    endpoint: String,
    /// Spans lost since it does not.
    lost: Option<u64>,
}

#[derive(Debug, PartialEq, Eq)]
enum OutageNotice {
    Began(String),
    Ended(String),
}

impl Outage {
    fn note(&mut self, failure: Option<impl Display>, spans: u64) -> Option<OutageNotice> {
        match (failure, self.lost) {
            (None, None) => None,
            (None, Some(lost)) => {
                self.lost = None;
                let text = format!("exporting traces to {} again; lost {lost} spans", self.endpoint);
                Some(OutageNotice::Ended(text))
            }
            (Some(_), Some(lost)) => {
                self.lost = Some(lost.saturating_add(spans));
                None
            }
            (Some(failure), None) => {
                self.lost = Some(spans);
                let failure = failure.to_string();
                let next_step = next_step(&failure).map(|step| format!("; {step}")).unwrap_or_default();
                Some(OutageNotice::Began(format!(
                    "cannot export traces to {}: {failure}; dropping spans until it answers{next_step}",
                    self.endpoint
                )))
            }
        }
    }
}

/// Next step for a certificate, from the text, which is all that the exporters report: that of rustls over gRPC.
fn next_step(failure: &str) -> Option<&'static str> {
    if ["UnknownIssuer", "not trusted"].iter().any(|text| failure.contains(text)) {
        Some("set OTEL_EXPORTER_OTLP_CERTIFICATE to a file with the CA certificate of the collector")
    } else if ["CertificateRequired", "requires a client certificate"]
        .iter()
        .any(|text| failure.contains(text))
    {
        Some("set OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {

    use opentelemetry::trace::{Tracer as _, TracerProvider as _};
    use opentelemetry_sdk::error::OTelSdkError;
    use opentelemetry_sdk::trace::SdkTracerProvider;
    use parking_lot::Mutex;

    use super::*;

    /// Records the sizes of batches, or hangs, or fails.
    #[derive(Debug, Clone)]
    struct FakeExporter {
        batches: Arc<Mutex<Vec<usize>>>,
        hangs: bool,
        fails: bool,
    }

    impl SpanExporter for FakeExporter {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            if self.hangs {
                std::future::pending::<()>().await;
            }
            if self.fails {
                return Err(OTelSdkError::InternalFailure("refused".into()));
            }
            self.batches.lock().push(batch.len());
            Ok(())
        }
    }

    const LIMITS: BatchLimits =
        BatchLimits { queue: 8, batch: 4, delay: Duration::from_secs(5), timeout: Duration::from_secs(30) };

    fn started(
        hangs: bool,
        fails: bool,
    ) -> (SdkTracerProvider, Flush, Arc<SpanCounts>, Arc<Mutex<Vec<usize>>>) {
        let batches = Arc::<Mutex<Vec<usize>>>::default();
        let exporter = FakeExporter { batches: Arc::clone(&batches), hangs, fails };
        let (queue, flush, counts, sending) =
            queue(exporter, LIMITS, "http://c".into(), LastCause::default());
        tokio::spawn(sending);
        (SdkTracerProvider::builder().with_span_processor(queue).build(), flush, counts, batches)
    }

    fn end_spans(provider: &SdkTracerProvider, count: usize) {
        let tracer = provider.tracer("test");
        (0..count).for_each(|_| drop(tracer.start("span")));
    }

    #[test]
    fn the_next_step_is_that_for_the_certificate() {
        let step = |failure| next_step(failure).unwrap_or_default();
        for untrusted in ["invalid peer certificate: UnknownIssuer", "issued by CN=ca, which is not trusted"]
        {
            assert!(step(untrusted).contains("OTEL_EXPORTER_OTLP_CERTIFICATE"));
        }
        for required in
            ["received fatal alert: CertificateRequired", "the server requires a client certificate"]
        {
            assert!(step(required).contains("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"));
        }
        assert_eq!(step("invalid peer certificate: Expired"), "", "the error says it");
    }

    #[tokio::test(start_paused = true)]
    async fn spans_are_sent_in_batches_after_the_delay_or_when_one_is_full() {
        let (provider, flush, counts, batches) = started(false, false);
        end_spans(&provider, 5);
        time::sleep(Duration::from_secs(1)).await;
        assert_eq!(*batches.lock(), [4], "the delay is not over");
        time::sleep(Duration::from_secs(5)).await;
        assert_eq!(*batches.lock(), [4, 1]);
        end_spans(&provider, 2);
        flush.within(Duration::from_secs(1)).await;
        assert_eq!(*batches.lock(), [4, 1, 2], "a flush does not wait for the delay");
        assert_eq!(counts.now(), TraceCounts { exported: 7, ..TraceCounts::default() });
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_queue_drops_spans_and_counts_them() {
        let (provider, flush, counts, _) = started(true, false);
        // One batch hangs in the exporter, the queue has room for eight.
        end_spans(&provider, 4);
        time::sleep(Duration::from_millis(1)).await;
        end_spans(&provider, 11);
        assert_eq!(counts.now(), TraceCounts { queue_full: 3, ..TraceCounts::default() });
        let before = time::Instant::now();
        flush.within(Duration::from_secs(2)).await;
        assert_eq!(before.elapsed(), Duration::from_secs(2), "a flush is bounded");
    }

    #[tokio::test(start_paused = true)]
    async fn spans_of_failed_exports_are_counted() {
        let (provider, flush, counts, _) = started(false, true);
        end_spans(&provider, 3);
        flush.within(Duration::from_secs(1)).await;
        assert_eq!(counts.now(), TraceCounts { export_failed: 3, ..TraceCounts::default() });
    }

    #[test]
    fn an_outage_is_reported_once_and_its_end_with_what_was_lost() {
        let mut outage = Outage { endpoint: "http://c".into(), lost: None };
        assert_eq!(outage.note(None::<&str>, 1), None);
        let began = "cannot export traces to http://c: refused; dropping spans until it answers";
        assert_eq!(outage.note(Some("refused"), 2), Some(OutageNotice::Began(began.into())));
        assert_eq!(outage.note(Some("refused"), 3), None);
        let ended = "exporting traces to http://c again; lost 5 spans";
        assert_eq!(outage.note(None::<&str>, 1), Some(OutageNotice::Ended(ended.into())));
        assert_eq!(outage.note(None::<&str>, 1), None);
    }
}
