//! Where traces go and which are sampled: the settings `tracing`, else the environment variables of OpenTelemetry.
//!
//! The exporter itself reads the variables that only it needs: headers and timeout.

use std::path::PathBuf;
use std::time::Duration;

use crate::config::{TraceProtocol, TracingSettings};
use crate::error::Error;

/// The collector of kubelet's default, on this node.
const KUBELET_ENDPOINT: &str = "localhost:4317";

/// What is exported, and where to.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TraceOptions {
    /// The URL; `None` where the exporter reads it from the environment.
    pub(super) endpoint: Option<String>,
    /// The endpoint for messages: scheme, host and port only.
    pub(super) shown_endpoint: String,
    pub(super) protocol: TraceProtocol,
    /// Of the traces that begin here; `None` where the SDK reads the sampler from the environment.
    pub(super) sampled_per_million: Option<u32>,
    /// The file with the CA certificates of the endpoint.
    pub(super) certificate: Option<PathBuf>,
    pub(super) batch: BatchLimits,
}

/// How spans are queued and sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatchLimits {
    pub(super) queue: usize,
    pub(super) batch: usize,
    pub(super) delay: Duration,
    pub(super) timeout: Duration,
}

impl TraceOptions {
    /// `None` where traces are off.
    pub(super) fn of(
        settings: &TracingSettings,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<TraceOptions>, Error> {
        if variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let first = |names: [&str; 2]| names.into_iter().find_map(variable);
        let endpoint = first(["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"]);
        // Variables that are for other programs do not keep a daemon without traces from starting.
        if !settings.is_set() && endpoint.is_none() {
            return Ok(None);
        }
        match variable("OTEL_TRACES_EXPORTER").as_deref() {
            None | Some("otlp") => {}
            Some("none") => return Ok(None),
            Some(other) => {
                return Err(Error::bad_input(format!("OTEL_TRACES_EXPORTER={other:?}: unknown exporter"))
                    .hint("use otlp or none"));
            }
        }
        let batch = BatchLimits::of(variable)?;
        let compression = ["OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION"];
        if let Some(kind) = first(compression).filter(|kind| kind != "none") {
            tracing::warn!("{}={kind:?} has no effect: traces are sent uncompressed", compression[1]);
        }
        let certificate = first(["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"]);
        let certificate = certificate.map(PathBuf::from);
        if settings.is_set() {
            let endpoint = settings.endpoint.as_deref().unwrap_or(KUBELET_ENDPOINT);
            if endpoint.starts_with("unix:") && settings.protocol != TraceProtocol::Grpc {
                let what = format!("tracing.endpoint {endpoint:?}: a Unix socket requires the protocol grpc");
                return Err(
                    Error::bad_input(what).hint("set tracing.protocol to grpc, or name host and port")
                );
            }
            let endpoint = endpoint_url(endpoint, settings.protocol);
            return Ok(Some(TraceOptions {
                shown_endpoint: without_path(&endpoint),
                endpoint: Some(endpoint),
                protocol: settings.protocol,
                sampled_per_million: Some(settings.sampled_per_million),
                certificate,
                batch,
            }));
        }
        let endpoint = endpoint.unwrap_or_default();
        let protocol = first(["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"]);
        let protocol = protocol.map_or(Ok(TraceProtocol::HttpProtobuf), |text| protocol_of(&text))?;
        Ok(Some(TraceOptions {
            endpoint: None,
            shown_endpoint: without_path(&endpoint),
            protocol,
            sampled_per_million: None,
            certificate,
            batch,
        }))
    }
}

impl BatchLimits {
    fn of(variable: &dyn Fn(&str) -> Option<String>) -> Result<BatchLimits, Error> {
        let number = |name: &str, default: u64| match variable(name) {
            None => Ok(default),
            Some(text) => text.trim().parse().map_err(|_| {
                Error::bad_input(format!("{name}={text:?}: not a number")).hint("write a number, or unset it")
            }),
        };
        let size = |name, default| {
            number(name, default).map(|size| usize::try_from(size).unwrap_or(usize::MAX).clamp(1, 1 << 20))
        };
        let queue = size("OTEL_BSP_MAX_QUEUE_SIZE", 2048)?;
        Ok(BatchLimits {
            queue,
            batch: size("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)?.min(queue),
            delay: Duration::from_millis(number("OTEL_BSP_SCHEDULE_DELAY", 5000)?),
            timeout: Duration::from_millis(number("OTEL_BSP_EXPORT_TIMEOUT", 30_000)?.max(1)),
        })
    }
}

fn protocol_of(text: &str) -> Result<TraceProtocol, Error> {
    match text {
        "grpc" => Ok(TraceProtocol::Grpc),
        "http/protobuf" => Ok(TraceProtocol::HttpProtobuf),
        "http/json" => Ok(TraceProtocol::HttpJson),
        other => Err(Error::bad_input(format!("OTEL_EXPORTER_OTLP_PROTOCOL={other:?}: unknown protocol"))
            .hint("use grpc, http/protobuf or http/json")),
    }
}

/// Kubelet's endpoints have no scheme, or one of gRPC's, and no TLS. A URL names its own.
fn endpoint_url(endpoint: &str, protocol: TraceProtocol) -> String {
    let bare = endpoint.strip_prefix("dns://").map_or(endpoint, |name| name.trim_start_matches('/'));
    let url = match bare.split_once("://") {
        Some(_) => bare.to_owned(),
        None if bare.starts_with("unix:") => bare.to_owned(),
        None => format!("http://{bare}"),
    };
    let has_path = url.split_once("://").is_some_and(|(_, rest)| rest.trim_end_matches('/').contains('/'));
    match protocol {
        TraceProtocol::Grpc => url,
        TraceProtocol::HttpProtobuf | TraceProtocol::HttpJson if has_path => url,
        TraceProtocol::HttpProtobuf | TraceProtocol::HttpJson => {
            format!("{}/v1/traces", url.trim_end_matches('/'))
        }
    }
}

/// Scheme, host and port: the rest may have a token.
fn without_path(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    if scheme == "unix" {
        return url.to_owned();
    }
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    format!("{scheme}://{}", authority.rsplit('@').next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(settings: &TracingSettings, variables: &[(&str, &str)]) -> Result<Option<TraceOptions>, Error> {
        TraceOptions::of(settings, &|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn nothing_is_exported_unless_an_endpoint_or_a_rate_is_set() {
        let off = TracingSettings::default();
        assert_eq!(of(&off, &[]).unwrap(), None);
        for other in [
            ("OTEL_SERVICE_NAME", "x"),
            ("OTEL_TRACES_EXPORTER", "console"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ] {
            assert_eq!(of(&off, &[other]).unwrap(), None, "{other:?}");
        }
        let on = [("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:secret@c:4318/token")];
        let options = of(&off, &on).unwrap().unwrap();
        assert_eq!(options.shown_endpoint, "http://c:4318");
        assert_eq!((options.endpoint, options.protocol), (None, TraceProtocol::HttpProtobuf));
        assert_eq!(options.sampled_per_million, None);
        for disabled in [("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_TRACES_EXPORTER", "none")] {
            assert_eq!(of(&off, &[on[0], disabled]).unwrap(), None, "{disabled:?}");
        }
        let rate = TracingSettings { sampled_per_million: 5, ..off };
        let options = of(&rate, &[]).unwrap().unwrap();
        assert_eq!(options.endpoint.as_deref(), Some("http://localhost:4317"));
        assert_eq!((options.protocol, options.sampled_per_million), (TraceProtocol::Grpc, Some(5)));
    }

    #[test]
    fn endpoints_are_written_as_kubelet_does_or_as_urls() {
        use TraceProtocol::{Grpc, HttpJson, HttpProtobuf};
        for (endpoint, protocol, url) in [
            ("c:4317", Grpc, "http://c:4317"),
            ("dns:///c:4317", Grpc, "http://c:4317"),
            ("unix:///run/c.sock", Grpc, "unix:///run/c.sock"),
            ("https://c:4317", Grpc, "https://c:4317"),
            ("c:4318", HttpProtobuf, "http://c:4318/v1/traces"),
            ("https://c/", HttpJson, "https://c/v1/traces"),
            ("https://c/in/traces", HttpProtobuf, "https://c/in/traces"),
        ] {
            assert_eq!(endpoint_url(endpoint, protocol), url, "{endpoint} {protocol:?}");
        }
    }

    #[test]
    fn values_that_cannot_be_used_are_named() {
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c");
        for (name, value) in [
            ("OTEL_TRACES_EXPORTER", "zipkin"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "thrift"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ] {
            let error = of(&TracingSettings::default(), &[endpoint, (name, value)]).unwrap_err();
            assert!(error.message().starts_with(&format!("{name}={value:?}: ")), "{error:?}");
        }
    }

    #[test]
    fn a_socket_without_a_port_takes_grpc_only() {
        let endpoint = Some("unix:///run/c.sock".to_owned());
        let settings = TracingSettings { endpoint, ..TracingSettings::default() };
        assert!(of(&settings, &[]).is_ok());
        let http = TracingSettings { protocol: TraceProtocol::HttpProtobuf, ..settings };
        let error = of(&http, &[]).unwrap_err();
        assert!(error.message().contains("requires the protocol grpc"), "{error:?}");
    }

    #[test]
    fn a_batch_is_no_larger_than_the_queue() {
        let limits = of(
            &TracingSettings::default(),
            &[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c"), ("OTEL_BSP_MAX_QUEUE_SIZE", "10")],
        );
        let BatchLimits { queue, batch, delay, .. } = limits.unwrap().unwrap().batch;
        assert_eq!((queue, batch, delay), (10, 10, Duration::from_secs(5)));
    }
}
