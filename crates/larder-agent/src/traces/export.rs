//! Makes the exporter, the sampler and the description of this process.

use std::collections::HashMap;
use std::time::Duration;

use opentelemetry::{Key, KeyValue};
use opentelemetry_otlp::{
    ExporterBuildError, Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _,
    WithTonicConfig as _,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider, SpanExporter as _, SpanProcessor};
use tonic::transport::{Certificate, ClientTlsConfig};

use super::options::TraceOptions;
use crate::config::TraceProtocol;
use crate::error::Error;

/// How long a connection to the endpoint may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The exporter for these options, with the resource of its spans. Must be called within a runtime.
pub(super) fn exporter(options: &TraceOptions, resource: &Resource) -> Result<SpanExporter, Error> {
    let authority = match &options.certificate {
        Some(path) => Some(
            fs_err::read(path)
                .map_err(|error| Error::failed(format!("OTEL_EXPORTER_OTLP_CERTIFICATE: {error}")))?,
        ),
        None => None,
    };
    let built = match options.protocol {
        TraceProtocol::Grpc => grpc(options, authority),
        TraceProtocol::HttpProtobuf => http(options, authority, Protocol::HttpBinary)?,
        TraceProtocol::HttpJson => http(options, authority, Protocol::HttpJson)?,
    };
    let mut exporter = built.map_err(|error| {
        Error::bad_input(format!("cannot export traces to {}: {error}", options.shown_endpoint))
            .hint("correct tracing.endpoint, or the variables OTEL_EXPORTER_OTLP_*")
    })?;
    exporter.set_resource(resource);
    Ok(exporter)
}

fn grpc(options: &TraceOptions, authority: Option<Vec<u8>>) -> Result<SpanExporter, ExporterBuildError> {
    let mut builder = SpanExporter::builder().with_tonic();
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if options.shown_endpoint.starts_with("https://") {
        let tls = match authority {
            Some(pem) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)),
            None => ClientTlsConfig::new().with_native_roots(),
        };
        builder = builder.with_tls_config(tls);
    }
    builder.build()
}

fn http(
    options: &TraceOptions,
    authority: Option<Vec<u8>>,
    protocol: Protocol,
) -> Result<Result<SpanExporter, ExporterBuildError>, Error> {
    let with_tls = options.shown_endpoint.starts_with("https://");
    let client = larder_registry::plain_client(with_tls, authority, CONNECT_TIMEOUT).map_err(|error| {
        Error::failed(format!("cannot export traces to {}: {error}", options.shown_endpoint))
    })?;
    let mut builder = SpanExporter::builder()
        .with_http()
        .with_http_client(client)
        .with_protocol(protocol)
        .with_headers(HashMap::from([("User-Agent".to_owned(), larder_registry::USER_AGENT.to_owned())]));
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    Ok(builder.build())
}

/// What makes the spans. The sampler follows the caller's decision in either case.
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
