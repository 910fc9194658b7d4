//! A collector of traces: takes OTLP over gRPC and over HTTP on one port, and keeps what it gets.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::error::Error;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use http_body_util::{BodyExt as _, Collected};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span};
use prost::Message as _;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_rustls::TlsAcceptor;
use tonic::body::Body;
use tonic::codegen::Service as _;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tonic::{Status, async_trait};

use super::process::{WAIT_LIMIT, poll};
use super::tls::Certificates;
use super::{PeerError, PeerResult};

/// The collector. Dropping it closes its port.
#[derive(Debug)]
pub struct OtlpReceiver {
    address: SocketAddr,
    received: Received,
    _runtime: Runtime,
}

/// A span as it was exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedSpan {
    /// Its name.
    pub name: String,
    /// 32 hexadecimal digits.
    pub trace_id: String,
    /// 16 hexadecimal digits.
    pub span_id: String,
    /// Empty for the first span of a trace.
    pub parent_id: String,
    /// `internal`, `server` or `client`.
    pub kind: &'static str,
    /// Nanoseconds since the epoch.
    pub start: u64,
    /// Nanoseconds since the epoch.
    pub end: u64,
    /// As text.
    pub attributes: BTreeMap<String, String>,
    /// The text of an error.
    pub error: Option<String>,
    /// The spans that it refers to.
    pub links: Vec<String>,
    /// The process that it is of.
    pub resource: BTreeMap<String, String>,
    /// All of it, to search in.
    pub raw: String,
}

/// A request with spans.
#[derive(Debug, Clone)]
pub struct ReceivedBatch {
    /// Its header fields.
    pub headers: BTreeMap<String, String>,
    /// Its spans.
    pub spans: Vec<ReceivedSpan>,
}

#[derive(Debug, Clone, Default)]
struct Received(Arc<Mutex<Vec<ReceivedBatch>>>);

impl OtlpReceiver {
    /// On a free port of 127.0.0.1.
    pub fn start() -> PeerResult<OtlpReceiver> {
        OtlpReceiver::start_at(0)
    }

    /// On this port of 127.0.0.1.
    pub fn start_at(port: u16) -> PeerResult<OtlpReceiver> {
        OtlpReceiver::start_with(port, None)
    }

    /// With TLS; if it requires a client certificate, then one of the same authority.
    pub fn start_tls(
        certificates: &Certificates,
        requires_client_certificate: bool,
    ) -> PeerResult<OtlpReceiver> {
        let acceptor = tls_acceptor(certificates, requires_client_certificate);
        let acceptor = acceptor.map_err(|error| PeerError::new("open a collector with TLS", error))?;
        OtlpReceiver::start_with(0, Some(acceptor))
    }

    fn start_with(port: u16, tls: Option<TlsAcceptor>) -> PeerResult<OtlpReceiver> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let listener = runtime
            .block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, port)))
            .map_err(|error| PeerError::new("open a collector", error))?;
        let (address, received) = (listener.local_addr()?, Received::default());
        runtime.spawn(serve(listener, tls, received.clone()));
        Ok(OtlpReceiver { address, received, _runtime: runtime })
    }

    /// `127.0.0.1:PORT`.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Returns the batches received so far.
    pub fn batches(&self) -> Vec<ReceivedBatch> {
        self.received.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// All spans that have come, in the order of their start.
    pub fn spans(&self) -> Vec<ReceivedSpan> {
        let mut spans: Vec<_> = self.batches().into_iter().flat_map(|batch| batch.spans).collect();
        spans.sort_by_key(|span| (span.start, span.end));
        spans
    }

    /// Waits until a span of this name has come, and returns the spans of its trace.
    ///
    /// # Panics
    ///
    /// If none comes.
    #[track_caller]
    pub fn trace_with(&self, name: &str) -> Trace {
        let found = poll(WAIT_LIMIT, || {
            let spans = self.spans();
            let trace = spans.iter().find(|span| span.name == name)?.trace_id.clone();
            Some(Trace { spans: spans.into_iter().filter(|span| span.trace_id == trace).collect() })
        });
        found.unwrap_or_else(|| panic!("waited for a span {name:?} in {:#?}", self.spans()))
    }
}

/// The spans of one trace, in the order of their start.
#[derive(Debug, Clone)]
pub struct Trace {
    /// All of them.
    pub spans: Vec<ReceivedSpan>,
}

impl Trace {
    /// The only span of this name.
    ///
    /// # Panics
    ///
    /// If there is none or another one.
    #[track_caller]
    pub fn span(&self, name: &str) -> &ReceivedSpan {
        match self.all(name)[..] {
            [span] => span,
            ref others => panic!("{} spans {name:?} in\n{}", others.len(), self.tree()),
        }
    }

    /// The spans of this name.
    pub fn all(&self, name: &str) -> Vec<&ReceivedSpan> {
        self.spans.iter().filter(|span| span.name == name).collect()
    }

    /// The names from the first span of the trace to this one.
    pub fn path(&self, span: &ReceivedSpan) -> Vec<&str> {
        let mut path = Vec::new();
        let mut at = self.spans.iter().find(|other| other.span_id == span.span_id);
        while let Some(span) = at {
            path.insert(0, span.name.as_str());
            at = self.spans.iter().find(|other| other.span_id == span.parent_id);
        }
        path
    }

    /// One line for each span, below its parent, with its duration and attributes.
    pub fn tree(&self) -> String {
        let mut text = String::new();
        let is_known = |id: &str| self.spans.iter().any(|span| span.span_id == id);
        for root in self.spans.iter().filter(|span| !is_known(&span.parent_id)) {
            self.show(root, 0, &mut text);
        }
        text
    }

    fn show(&self, span: &ReceivedSpan, depth: usize, text: &mut String) {
        let attributes: Vec<_> =
            span.attributes.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let micros = span.end.saturating_sub(span.start) / 1000;
        let _ = writeln!(
            text,
            "{:indent$}{} {}.{:03}ms {}{}",
            "",
            span.name,
            micros / 1000,
            micros % 1000,
            attributes.join(" "),
            span.error.as_ref().map(|error| format!(" ERROR {error}")).unwrap_or_default(),
            indent = 2 * depth
        );
        for child in self.spans.iter().filter(|child| child.parent_id == span.span_id) {
            self.show(child, depth + 1, text);
        }
    }
}

fn tls_acceptor(
    certificates: &Certificates,
    requires_client_certificate: bool,
) -> Result<TlsAcceptor, Box<dyn Error>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
    let builder = if requires_client_certificate {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&certificates.ca)?)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
        builder.with_client_cert_verifier(verifier)
    } else {
        builder.with_no_client_auth()
    };
    let chain = vec![CertificateDer::from_pem_file(&certificates.certificate)?];
    let mut config = builder.with_single_cert(chain, PrivateKeyDer::from_pem_file(&certificates.key)?)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn serve(listener: TcpListener, tls: Option<TlsAcceptor>, received: Received) {
    while let Ok((stream, _)) = listener.accept().await {
        let (received, tls) = (received.clone(), tls.clone());
        tokio::spawn(async move {
            match tls {
                None => serve_connection(stream, received).await,
                Some(tls) => {
                    if let Ok(stream) = tls.accept(stream).await {
                        serve_connection(stream, received).await;
                    }
                }
            }
        });
    }
}

async fn serve_connection(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, received: Received) {
    let service = service_fn(move |request| answer(request, received.clone()));
    // A connection that breaks is noticed by the exporter.
    let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
}

async fn answer(request: Request<Incoming>, received: Received) -> Result<Response<Body>, Infallible> {
    let kind = request.headers().get("content-type").map(|kind| kind.as_bytes().to_vec()).unwrap_or_default();
    if kind.starts_with(b"application/grpc") {
        let service = GrpcReceiver { received, headers: request.headers().clone() };
        return TraceServiceServer::new(service).call(request).await;
    }
    let (head, body) = request.into_parts();
    let body = body.collect().await.map(Collected::to_bytes).unwrap_or_default();
    let is_json = kind == b"application/json";
    let spans = if is_json {
        serde_json::from_slice(&body).ok()
    } else {
        ExportTraceServiceRequest::decode(body).ok()
    };
    let mut response = Response::new(Body::empty());
    match spans {
        Some(spans) if head.uri.path() == "/v1/traces" => received.add(&head.headers, spans),
        _ => *response.status_mut() = tonic::codegen::http::StatusCode::BAD_REQUEST,
    }
    let kind = if is_json { "application/json" } else { "application/x-protobuf" };
    response.headers_mut().insert("content-type", tonic::codegen::http::HeaderValue::from_static(kind));
    Ok(response)
}

struct GrpcReceiver {
    received: Received,
    headers: HeaderMap,
}

#[async_trait]
impl TraceService for GrpcReceiver {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, Status> {
        self.received.add(&self.headers, request.into_inner());
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Received {
    fn add(&self, headers: &HeaderMap, request: ExportTraceServiceRequest) {
        let headers = headers
            .iter()
            .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()));
        let spans = request.resource_spans.into_iter().flat_map(spans_of).collect();
        let batch = ReceivedBatch { headers: headers.collect(), spans };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(batch);
    }
}

fn spans_of(process: ResourceSpans) -> Vec<ReceivedSpan> {
    let resource = process.resource.map(|resource| texts(&resource.attributes)).unwrap_or_default();
    let spans = process.scope_spans.into_iter().flat_map(|scope| scope.spans);
    spans.map(|span| received(span, resource.clone())).collect()
}

fn received(span: Span, resource: BTreeMap<String, String>) -> ReceivedSpan {
    ReceivedSpan {
        raw: format!("{span:?}"),
        trace_id: hex(&span.trace_id),
        span_id: hex(&span.span_id),
        parent_id: hex(&span.parent_span_id),
        kind: match span.kind {
            2 => "server",
            3 => "client",
            _ => "internal",
        },
        start: span.start_time_unix_nano,
        end: span.end_time_unix_nano,
        attributes: texts(&span.attributes),
        error: span.status.filter(|status| status.code == 2).map(|status| status.message),
        links: span.links.iter().map(|link| hex(&link.span_id)).collect(),
        name: span.name,
        resource,
    }
}

fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    attributes.iter().map(|attribute| (attribute.key.clone(), text(attribute))).collect()
}

fn text(attribute: &KeyValue) -> String {
    match attribute.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::BoolValue(flag)) => flag.to_string(),
        other => format!("{other:?}"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
