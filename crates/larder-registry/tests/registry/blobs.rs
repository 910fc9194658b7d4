//! Blobs in ranges, broken and resumed; each test counts what was downloaded again.

use larder_registry::{
    BlobError, BlobSink, ByteRanges, FetchNotice, RegistryClient, RegistryConfig, fetch_blob, fetch_range,
};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, LoggedRequest, ResponseFault};
use std::sync::Arc;
use std::time::Duration;

use crate::support::*;

const SIZE: usize = 1_000_000;

#[tokio::test]
async fn a_large_blob_is_fetched_in_parallel_ranges_each_byte_once() {
    let registry = FaultRegistry::start();
    let (content, blob) = put_blob(&registry, SIZE);
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::Trickle(20_000, Duration::from_millis(3)));
    let (session, notices) = watched(&session(quick(), &registry.image("a/b")));
    let sink = MemorySink::new();
    fetch_blob(&session, &blob, &ByteRanges::new(), sink.clone()).await.unwrap();
    assert_eq!(sink.content(), content);
    assert_eq!(hosts(&notices), [registry.address()]);
    assert_eq!(registry.bytes_sent(blob.digest.as_str()), SIZE as u64);
    assert_eq!(registry.requests().len(), 10, "ten ranges of 100 kB");
    assert_eq!(registry.most_connections(), 4);
    let reported: u64 =
        notices.lock().unwrap().iter().map(|n| if let FetchNotice::Bytes(n) = n { *n } else { 0 }).sum();
    assert_eq!(reported, SIZE as u64);
}

#[tokio::test]
async fn a_small_blob_is_fetched_in_one_request() {
    let registry = FaultRegistry::start();
    let (content, blob) = put_blob(&registry, 99_000);
    let sink = MemorySink::new();
    fetch_blob(&session(quick(), &registry.image("a/b")), &blob, &ByteRanges::new(), sink.clone())
        .await
        .unwrap();
    assert_eq!(sink.content(), content);
    assert_eq!(registry.requests().len(), 1);
    assert_eq!(registry.requests()[0].range, None);

    let (_, empty) = put_blob(&registry, 0);
    fetch_blob(&session(quick(), &registry.image("a/b")), &empty, &ByteRanges::new(), MemorySink::new())
        .await
        .unwrap();
    assert_eq!(registry.requests().len(), 1, "an empty blob needs no request");
}

#[tokio::test]
async fn each_kind_of_break_costs_less_than_a_range_and_the_blob_is_whole() {
    for fault in [
        ResponseFault::ResetAfter(60_000),
        ResponseFault::CloseAfter(60_000),
        ResponseFault::StallAfter(60_000),
        ResponseFault::Hangup,
        ResponseFault::status(500),
        ResponseFault::status(503),
        ResponseFault::SlowHeaders(Duration::from_secs(3600)),
    ] {
        let registry = FaultRegistry::start();
        let (content, blob) = put_blob(&registry, SIZE);
        registry.fault(FaultTrigger::path("/blobs/").nth(2..=4), fault.clone());
        let (config, limit, hang_after) = match fault {
            ResponseFault::StallAfter(sent) => (without_header_timeout(), quick().stall_window, Some(sent)),
            ResponseFault::SlowHeaders(_) => (quick(), quick().header_timeout, Some(0)),
            _ => (quick(), Duration::ZERO, None),
        };
        let client = RegistryClient::new(config);
        let session = client.session(&reference(&registry.image("a/b")), None).unwrap();
        // When the other seven of the ten ranges are complete.
        let hang = |requests: &[LoggedRequest]| {
            let received = load_of(&client, &registry).bytes;
            requests.len() == 10 && hang_after.is_some_and(|sent| received == 700_000 + 3 * sent)
        };
        let (sink, none) = (MemorySink::new(), ByteRanges::new());
        let fetched = tokio::select! {
            fetched = fetch_blob(&session, &blob, &none, sink.clone()) => fetched,
            () = pass_limit(&client, &registry, limit, hang) => unreachable!("it never ends"),
        };
        fetched.unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        assert!(sink.content() == content, "{fault:?}");
        let again = registry.bytes_sent(blob.digest.as_str()) - SIZE as u64;
        assert!(again < 4 * 100_000, "{fault:?}: {again} bytes came twice");
    }
}

#[tokio::test]
async fn a_break_is_resumed_at_the_byte_that_was_reached() {
    let registry = FaultRegistry::start();
    let (content, blob) = put_blob(&registry, 90_000);
    registry.fault(FaultTrigger::path("/blobs/").once(), ResponseFault::ResetAfter(60_000));
    let sink = MemorySink::new();
    fetch_blob(&session(quick(), &registry.image("a/b")), &blob, &ByteRanges::new(), sink.clone())
        .await
        .unwrap();
    assert!(sink.content() == content);
    assert_eq!(registry.bytes_sent(blob.digest.as_str()), 90_000, "not a byte came twice");
    let ranges: Vec<_> = registry.requests().into_iter().map(|request| request.range).collect();
    assert_eq!(ranges, [None, Some("bytes=60000-89999".to_owned())]);
}

#[tokio::test]
async fn a_blob_whose_connection_breaks_again_and_again_arrives_as_long_as_it_progresses() {
    let registry = FaultRegistry::start();
    let (content, blob) = put_blob(&registry, 90_000);
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::ResetAfter(4000));
    let sink = MemorySink::new();
    fetch_blob(&session(quick(), &registry.image("a/b")), &blob, &ByteRanges::new(), sink.clone())
        .await
        .unwrap();
    assert!(sink.content() == content);
    assert!(registry.requests().len() > 20);

    registry.clear_faults();
    registry.forget_requests();
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::ResetAfter(100));
    let outcome =
        fetch_blob(&session(quick(), &registry.image("a/b")), &blob, &ByteRanges::new(), MemorySink::new())
            .await;
    let BlobError::Fetch(error) = outcome.unwrap_err() else { panic!("the registry's side") };
    assert_eq!(kind(&error), "truncated", "{error}");
    assert_eq!(registry.requests().len(), 5, "drops are no progress");
}

#[tokio::test]
async fn bytes_present_before_a_restart_are_not_fetched_again() {
    let registry = FaultRegistry::start();
    let (content, blob) = put_blob(&registry, SIZE);
    let mut left = content.clone();
    let present: ByteRanges = [0..250_000, 400_000..900_000].into_iter().collect();
    for missing in present.missing(0..SIZE as u64) {
        left[index(missing.start)..index(missing.end)].fill(0);
    }
    let sink = MemorySink::holding(&left);
    let session = session(quick(), &registry.image("a/b"));
    fetch_blob(&session, &blob, &present, sink.clone()).await.unwrap();
    assert!(sink.content() == content);
    assert_eq!(registry.bytes_sent(blob.digest.as_str()), 250_000);

    let all: ByteRanges = std::iter::once(0..SIZE as u64).collect();
    registry.forget_requests();
    fetch_blob(&session, &blob, &all, sink).await.unwrap();
    assert_eq!(registry.requests(), []);
}

#[tokio::test]
async fn a_server_that_ignores_ranges_sends_the_blob_over_one_connection() {
    let registry = FaultRegistry::start();
    let (content, blob) = put_blob(&registry, SIZE);
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::IgnoreRange);
    let sink = MemorySink::new();
    let session = session(quick(), &registry.image("a/b"));
    fetch_blob(&session, &blob, &ByteRanges::new(), sink.clone()).await.unwrap();
    assert!(sink.content() == content);
    assert_eq!(registry.requests().len(), 1);

    // Bytes that are already present are received again, which cannot be avoided, and not written.
    let present: ByteRanges = std::iter::once(0..700_000).collect();
    let sink = MemorySink::holding(&content[..700_000]);
    let (session, notices) = watched(&session);
    fetch_blob(&session, &blob, &present, sink.clone()).await.unwrap();
    assert!(sink.content() == content);
    let reported: u64 =
        notices.lock().unwrap().iter().map(|n| if let FetchNotice::Bytes(n) = n { *n } else { 0 }).sum();
    assert_eq!(reported, 300_000);
}

#[tokio::test]
async fn a_server_that_ignores_ranges_after_a_break_is_begun_again() {
    let registry = FaultRegistry::start();
    let (content, blob) = put_blob(&registry, 90_000);
    registry.fault(FaultTrigger::path("/blobs/").once(), ResponseFault::CloseAfter(50_000));
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::IgnoreRange);
    let sink = MemorySink::new();
    fetch_blob(&session(quick(), &registry.image("a/b")), &blob, &ByteRanges::new(), sink.clone())
        .await
        .unwrap();
    assert!(sink.content() == content);
    assert_eq!(registry.bytes_sent(blob.digest.as_str()), 140_000);
}

/// Ways in which registries and proxies fail to serve a range.
fn wrong_ranges() -> [ResponseFault; 5] {
    let content_range = |text: &str| ResponseFault::ContentRange(text.into());
    [
        content_range("bytes 0-99/1000000"),
        content_range("bytes 0-99999/2000000"),
        content_range("nonsense"),
        content_range("bytes 0-18446744073709551615/*"),
        ResponseFault::status(416),
    ]
}

#[tokio::test]
async fn a_blob_whose_ranges_are_served_wrongly_is_fetched_whole_once() {
    for fault in wrong_ranges() {
        for present in [0, 300_000, 999_999] {
            let registry = FaultRegistry::start();
            let (content, blob) = put_blob(&registry, SIZE);
            // The first range of a blob begins at 0, which one of the cases serves correctly.
            registry.fault(FaultTrigger::path("/blobs/").ranged().nth(2..=usize::MAX), fault.clone());
            if present > 0 {
                registry.fault(FaultTrigger::path("/blobs/").ranged(), fault.clone());
            }
            let session = session(quick(), &registry.image("a/b"));
            let sink = MemorySink::holding(&content[..present]);
            let known = std::iter::once(0..present as u64).collect();
            let fetching = fetch_blob(&session, &blob, &known, sink.clone());
            let fetched = tokio::time::timeout(Duration::from_secs(30), fetching).await;
            fetched.unwrap_or_else(|_| panic!("{fault:?}, {present} present: it never ends")).unwrap();
            assert!(sink.content() == content, "{fault:?}, {present} present");
            let whole = registry.requests().iter().filter(|request| request.range.is_none()).count();
            assert_eq!(whole, 1, "{fault:?}, {present} present");
        }
    }
}

#[tokio::test]
async fn a_range_that_no_request_named_is_refused() {
    let registry = FaultRegistry::start();
    let (_, blob) = put_blob(&registry, SIZE);
    for (fault, text) in [
        (ResponseFault::status(416), "416"),
        (ResponseFault::status(206), "partial response to a request without a range"),
    ] {
        registry.clear_faults();
        registry.forget_requests();
        registry.fault(FaultTrigger::path("/blobs/"), fault);
        let session = session(quick(), &registry.image("a/b"));
        let error = fetch_blob(&session, &blob, &ByteRanges::new(), MemorySink::new()).await.unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert!(error.to_string().contains(&registry.address()), "{error}");
        assert!(registry.requests().len() <= 5, "{:?}", registry.requests());
    }
}

#[tokio::test]
async fn a_body_of_another_length_than_the_manifest_says_is_refused() {
    let registry = FaultRegistry::start();
    let (_, blob) = put_blob(&registry, 50_000);
    let session = session(quick(), &registry.image("a/b"));
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::Truncate(20_000));
    let error = fetch_blob(&session, &blob, &ByteRanges::new(), MemorySink::new()).await.unwrap_err();
    assert!(error.to_string().contains("Content-Length is 20000, the manifest says 50000"), "{error}");

    registry.clear_faults();
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::Overlong(1));
    let sink = MemorySink::new();
    let error = fetch_blob(&session, &blob, &ByteRanges::new(), sink.clone()).await.unwrap_err();
    assert!(error.to_string().contains("too large"), "{error}");
    assert!(sink.content().len() <= 50_000, "nothing is written beyond the end");
}

#[tokio::test]
async fn a_stalled_body_is_aborted_and_a_slow_one_is_not() {
    let registry = FaultRegistry::start();
    let (content, blob) = put_blob(&registry, 30_000);
    let client = RegistryClient::new(without_header_timeout());
    let session = client.session(&reference(&registry.image("a/b")), None).unwrap();
    let window = client.config().stall_window;
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::Trickle(1000, Duration::from_millis(30)));
    let sink = MemorySink::new();
    let none = ByteRanges::new();
    // At least 4 kB in half a window, where 2 kB are wanted in a window.
    let is_slow = async {
        let mut received = 0;
        loop {
            received = load_until(&client, &registry, |load| load.bytes >= received + 4000).await.bytes;
            advance(window / 2);
        }
    };
    tokio::select! {
        fetched = fetch_blob(&session, &blob, &none, sink.clone()) => fetched.unwrap(),
        () = is_slow => {}
    }
    assert!(sink.content() == content);
    assert_eq!(registry.requests().len(), 1);

    registry.clear_faults();
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::Trickle(10, Duration::from_millis(30)));
    let some_bytes = |requests: &[LoggedRequest]| {
        requests.last().is_some_and(|request| (10..2000).contains(&request.sent))
    };
    let error = tokio::select! {
        fetched = fetch_blob(&session, &blob, &none, MemorySink::new()) => fetched.unwrap_err(),
        () = pass_limit(&client, &registry, window, some_bytes) => unreachable!("it never ends"),
    };
    assert!(error.to_string().contains("stalled: fewer than 2000 bytes within 30s"), "{error}");
    assert_eq!(error.fetch_kind().map(|_| error.hint().is_some()), Some(true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_written_once_the_fetch_is_dropped() {
    /// Reports each write, and blocks for a while.
    struct SlowSink(std::sync::mpsc::Sender<()>);

    impl BlobSink for SlowSink {
        fn write_at(&self, _: u64, _: &[u8]) -> std::io::Result<()> {
            let sent = self.0.send(());
            std::thread::yield_now();
            sent.map_err(std::io::Error::other)
        }
    }

    let registry = FaultRegistry::start();
    let (_, blob) = put_blob(&registry, 5_000_000);
    // So that no fetch is over before it is dropped.
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::StallAfter(600_000));
    let config = RegistryConfig { range_size: 1_000_000, ..quick() };
    let session = session(config, &registry.image("a/b"));
    for _ in 0..20 {
        let (writes, written) = std::sync::mpsc::channel();
        let fetch = {
            let (session, blob) = (session.clone(), blob.clone());
            tokio::spawn(async move {
                fetch_blob(&session, &blob, &ByteRanges::new(), Arc::new(SlowSink(writes))).await
            })
        };
        tokio::task::block_in_place(|| written.recv()).unwrap(); // the first write
        fetch.abort();
        assert!(fetch.await.unwrap_err().is_cancelled());
        while written.try_recv().is_ok() {}
        // Blocking threads may still hold the sink; when the last of them lets go, the channel closes without a word.
        assert!(tokio::task::block_in_place(|| written.recv()).is_err());
    }
}

#[tokio::test]
async fn the_host_of_a_blob_is_reported_before_its_bytes() {
    let registry = FaultRegistry::start();
    let (_, blob) = put_blob(&registry, 1000);
    let (session, notices) = watched(&session(quick(), &registry.image("a/b")));
    fetch_blob(&session, &blob, &ByteRanges::new(), MemorySink::new()).await.unwrap();
    assert_eq!(*notices.lock().unwrap(), [FetchNotice::Host(registry.address()), FetchNotice::Bytes(1000)]);
}

#[tokio::test]
async fn a_full_disk_is_the_sink_s_error_and_ends_the_download() {
    let registry = FaultRegistry::start();
    let (_, blob) = put_blob(&registry, SIZE);
    let session = session(quick(), &registry.image("a/b"));
    let error =
        fetch_blob(&session, &blob, &ByteRanges::new(), MemorySink::full_after(150_000)).await.unwrap_err();
    let BlobError::Sink { cause, digest } = error else { panic!("the sink's side") };
    assert_eq!(cause.kind(), std::io::ErrorKind::StorageFull);
    assert_eq!(digest, blob.digest);
}

#[tokio::test]
async fn connections_to_a_registry_are_bounded_over_all_pulls() {
    let registry = FaultRegistry::start();
    let blobs: Vec<_> = (1..=6).map(|number| put_blob(&registry, SIZE / 2 + number)).collect();
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::Trickle(20_000, Duration::from_millis(5)));
    let config = RegistryConfig { connections: 5, ..quick() };
    let client = RegistryClient::new(config);
    let session = client.session(&reference(&registry.image("a/b")), None).unwrap();
    let none = ByteRanges::new();
    let fetches = blobs.iter().map(|(content, blob)| {
        let (session, none) = (session.clone(), &none);
        async move {
            let sink = MemorySink::new();
            fetch_blob(&session, blob, none, sink.clone()).await.unwrap();
            assert!(sink.content() == *content);
        }
    });
    futures_util::future::join_all(fetches).await;
    assert_eq!(registry.most_connections(), 5);
}

#[tokio::test]
async fn one_range_is_fetched_again_where_it_breaks_and_a_registry_without_ranges_is_named() {
    let registry = FaultRegistry::start();
    let (content, blob) = put_blob(&registry, SIZE);
    let session = session(quick(), &registry.image("a/b"));
    registry.fault(FaultTrigger::path("/blobs/").once(), ResponseFault::ResetAfter(10));
    assert_eq!(fetch_range(&session, &blob, 5..70_000).await.unwrap(), content[5..70_000]);
    assert_eq!(registry.requests()[1].range.as_deref(), Some("bytes=5-69999"));
    registry.fault(FaultTrigger::path("/blobs/"), ResponseFault::IgnoreRange);
    let error = fetch_range(&session, &blob, 5..70_000).await.unwrap_err();
    assert!(matches!(error, BlobError::NoRanges { .. }), "{error}");
}

#[tokio::test]
async fn a_range_that_a_reader_waits_for_does_not_queue_behind_blobs() {
    let registry = FaultRegistry::start();
    let (content, blob) = put_blob(&registry, SIZE);
    let config = RegistryConfig { connections: 1, ..quick() };
    let session = session(config, &registry.image("a/b"));
    let first = FaultTrigger::path("/blobs/").from(0);
    registry.fault(first, ResponseFault::Trickle(1, Duration::from_secs(1)));
    let (sink, none) = (MemorySink::new(), ByteRanges::new());
    let whole = fetch_blob(&session, &blob, &none, sink);
    let range = async {
        while registry.requests().is_empty() {
            tokio::task::yield_now().await;
        }
        fetch_range(&session, &blob, 700..900).await.unwrap()
    };
    tokio::select! {
        range = range => assert_eq!(range, content[700..900]),
        _ = whole => panic!("it takes days"),
    }
}
