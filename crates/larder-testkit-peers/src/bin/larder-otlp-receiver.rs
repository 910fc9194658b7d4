//! Takes traces over OTLP, gRPC or HTTP, and prints each span as a line of JSON: `larder-otlp-receiver PORT`.

#![allow(
    clippy::disallowed_macros,
    clippy::disallowed_methods,
    reason = "a program that polls and prints lines"
)]

use std::error::Error;
use std::thread;
use std::time::Duration;

use larder_testkit_peers::otlp_receiver::OtlpReceiver;
use serde_json::json;

fn main() -> Result<(), Box<dyn Error>> {
    let port = std::env::args().nth(1).ok_or("usage: larder-otlp-receiver PORT")?;
    let receiver = OtlpReceiver::start_at(port.parse()?)?;
    let mut printed = 0;
    loop {
        for batch in receiver.batches().drain(printed..) {
            for span in batch.spans {
                let line = json!({
                    "trace": span.trace_id, "id": span.span_id, "parent": span.parent_id, "name": span.name, "kind": span.kind,
                    "start": span.start, "end": span.end, "service": span.resource.get("service.name"),
                    "attributes": span.attributes, "error": span.error,
                });
                println!("{line}");
            }
            printed += 1;
        }
        thread::sleep(Duration::from_millis(200));
    }
}
