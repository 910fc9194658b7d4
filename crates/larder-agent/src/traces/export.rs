//! Makes the exporter, the sampler and the description of this process.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use larder_registry::PlainClientTls;
use opentelemetry::{Key, KeyValue};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{
    ExporterBuildError, Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _,
    WithTonicConfig as _,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider, SpanExporter as _, SpanProcessor};
use parking_lot::Mutex;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use super::options::{NamedFile, TraceOptions};
use crate::config::TraceProtocol;
use crate::error::Error;

/// How long a connection to the endpoint may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the last request failed: the exporter over HTTP does not report it.
#[derive(Debug, Clone, Default)]
pub(super) struct LastCause(Arc<Mutex<Option<String>>>);

impl LastCause {
    /// A failure of the exporter with its cause, where that is known.
    pub(super) fn added_to(&self, failure: String) -> String {
        match self.0.lock().take() {
            Some(cause) => format!("{failure}: {cause}"),
            None => failure,
        }
    }
}

/// A client that notes why requests fail.
#[derive(Debug)]
struct NotingClient<C> {
    client: C,
    cause: LastCause,
}

#[async_trait]
impl<C: HttpClient> HttpClient for NotingClient<C> {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let sent = self.client.send_bytes(request).await;
        let cause = sent.as_ref().err().map(|error| innermost(&**error));
        *self.cause.0.lock() = cause;
        sent
    }
}

/// The text of the error that caused the others, which may name a URL with a token.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    if let Some(problem) = larder_registry::TlsProblem::behind(error) {
        return problem.to_string();
    }
    error.source().map_or_else(|| error.to_string(), innermost)
}

/// The exporter for these options, with the resource of its spans. Must be called within a runtime.
pub(super) fn exporter(
    options: &TraceOptions,
    resource: &Resource,
    cause: &LastCause,
) -> Result<SpanExporter, Error> {
    let is_tls = options.shown_endpoint.starts_with("https://");
    let tls = if is_tls { Some(client_tls(options)?) } else { None };
    let files =
        options.tls.authority.iter().chain(options.tls.client.iter().map(|(certificate, _)| certificate));
    for (variable, _) in files.filter(|_| !is_tls) {
        tracing::warn!("{variable} has no effect: {} is without TLS", options.shown_endpoint);
    }
    let built = match options.protocol {
        TraceProtocol::Grpc => grpc(options, tls),
        TraceProtocol::HttpProtobuf => http(options, tls, Protocol::HttpBinary, cause)?,
        TraceProtocol::HttpJson => http(options, tls, Protocol::HttpJson, cause)?,
    };
    let mut exporter = built.map_err(|error| {
        Error::bad_input(format!("cannot export traces to {}: {error}", options.shown_endpoint))
            .hint("correct tracing.endpoint, or the variables OTEL_EXPORTER_OTLP_*")
    })?;
    exporter.set_resource(resource);
    Ok(exporter)
}

fn client_tls(options: &TraceOptions) -> Result<PlainClientTls, Error> {
    Ok(PlainClientTls {
        authority: options.tls.authority.as_ref().map(read).transpose()?,
        client: match &options.tls.client {
            Some((certificate, key)) => Some((read(certificate)?, read(key)?)),
            None => None,
        },
    })
}

fn read((variable, path): &NamedFile) -> Result<Vec<u8>, Error> {
    fs_err::read(path).map_err(|error| {
        Error::bad_input(format!("{variable}: {error}"))
            .hint("name a PEM file that larder can read, or unset it")
    })
}

fn grpc(options: &TraceOptions, tls: Option<PlainClientTls>) -> Result<SpanExporter, ExporterBuildError> {
    let mut builder = SpanExporter::builder().with_tonic();
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let Some(PlainClientTls { authority, client }) = tls {
        let mut config = match authority {
            Some(pem) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)),
            None => ClientTlsConfig::new().with_native_roots(),
        };
        if let Some((certificate, key)) = client {
            config = config.identity(Identity::from_pem(certificate, key));
        }
        builder = builder.with_tls_config(config);
    }
    builder.build()
}

fn http(
    options: &TraceOptions,
    tls: Option<PlainClientTls>,
    protocol: Protocol,
    cause: &LastCause,
) -> Result<Result<SpanExporter, ExporterBuildError>, Error> {
    let client = larder_registry::plain_client(tls, CONNECT_TIMEOUT).map_err(|error| {
        Error::failed(format!("cannot export traces to {}: {error}", options.shown_endpoint))
    })?;
    let mut builder = SpanExporter::builder()
        .with_http()
        .with_http_client(NotingClient { client, cause: cause.clone() })
        .with_protocol(protocol)
        .with_headers(HashMap::from([("User-Agent".to_owned(), larder_registry::USER_AGENT.to_owned())]));
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    Ok(builder.build())
}

/// Provider of the spans. The sampler follows the caller's decision in either case.
pub(super) fn provider(
    options: &TraceOptions,
    processor: impl SpanProcessor + 'static,
    resource: Resource,
) -> SdkTracerProvider {
    let builder = SdkTracerProvider::builder().with_span_processor(processor).with_resource(resource);
    match options.sampled_per_million {
        None => builder.build(),
        Some(rate) => {
            let own = match rate {
                0 => Sampler::AlwaysOff,
                rate => Sampler::TraceIdRatioBased(f64::from(rate) / 1e6),
            };
            builder.with_sampler(Sampler::ParentBased(Box::new(own))).build()
        }
    }
}

/// This process; the environment variables of OpenTelemetry override it.
pub(super) fn resource() -> Resource {
    let given = Resource::builder().build();
    let is_given = |key: &'static str| {
        let value = given.get(&Key::new(key)).map(|value| value.to_string());
        value.is_some_and(|value| !value.starts_with("unknown_service"))
    };
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let own = [
        KeyValue::new("service.name", "larder"),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("host.name", host),
    ];
    let missing = own.into_iter().filter(|own| match own.key.as_str() {
        "service.name" => !is_given("service.name"),
        "service.version" => !is_given("service.version"),
        _ => !is_given("host.name"),
    });
    Resource::builder().with_attributes(missing).build()
}

#[cfg(test)]
mod tests {
    use super::super::options::{BatchLimits, TlsFiles};
    use super::*;

    #[tokio::test]
    async fn an_http_collector_that_is_down_is_reported_with_the_cause() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let second = Duration::from_secs(1);
        let options = TraceOptions {
            endpoint: Some(format!("http://{free}/v1/traces")),
            shown_endpoint: format!("http://{free}"),
            protocol: TraceProtocol::HttpProtobuf,
            sampled_per_million: None,
            tls: TlsFiles::default(),
            batch: BatchLimits { queue: 1, batch: 1, delay: second, timeout: second },
        };
        let cause = LastCause::default();
        let exporter = exporter(&options, &resource(), &cause).unwrap();
        let failure = exporter.export(Vec::new()).await.unwrap_err().to_string();
        let text = cause.added_to(failure);
        assert!(text.contains("Connection refused"), "{text}");
        assert_eq!(cause.added_to("later".into()), "later");
    }
}
