//! The span of a call that larder serves, with the caller's span as its parent.

use hyper::body::Frame;
use larder::trace_context::fail;
use tonic::codegen::Bytes;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tonic::{Code, Status};
use tracing::Span;
use tracing::field::Empty;

/// The span of one call; it ends when the last part of the response has been sent or is dropped.
pub(crate) struct ServerSpan {
    span: Span,
    noted: bool,
}

impl ServerSpan {
    /// Named as the OpenTelemetry instrumentation of gRPC names it; disabled unless traces are on.
    pub(crate) fn begin<B>(request: &Request<B>) -> ServerSpan {
        if !super::is_on() {
            return ServerSpan { span: Span::none(), noted: true };
        }
        #[cfg(feature = "traces")]
        let _caller = super::context::enter_remote(request.headers());
        let method = request.uri().path().trim_start_matches('/');
        let span = tracing::trace_span!(
            "call",
            otel.name = method,
            otel.kind = "server",
            otel.status_description = Empty,
            rpc.system.name = "grpc",
            rpc.method = method,
            rpc.response.status_code = Empty,
            error.type = Empty,
        );
        ServerSpan { span, noted: false }
    }

    pub(crate) fn span(&self) -> &Span {
        &self.span
    }

    /// Reads the status of the call, if it is among these fields.
    pub(crate) fn note(&mut self, fields: &HeaderMap) -> bool {
        let status = if self.noted { None } else { Status::from_header_map(fields) };
        if let Some(status) = &status {
            self.note_status(status);
        }
        self.noted
    }

    fn note_status(&mut self, status: &Status) {
        self.noted = true;
        let code = status_word(status.code());
        self.span.record("rpc.response.status_code", code);
        if is_server_error(status.code()) {
            fail(&self.span, code, status.message());
        }
    }

    /// Reads the status of the call, if this part of the response has it.
    pub(crate) fn note_part(&mut self, part: &Result<Frame<Bytes>, Status>) {
        match part {
            Ok(frame) => {
                if let Some(trailers) = frame.trailers_ref() {
                    self.note(trailers);
                }
            }
            Err(status) if !self.noted => self.note_status(status),
            Err(_) => {}
        }
    }

    /// Whether nothing more is to be noted.
    pub(crate) fn is_complete<T>(&mut self, response: &Response<T>) -> bool {
        self.span.is_disabled() || self.note(response.headers())
    }
}

/// The code as OpenTelemetry writes it.
fn status_word(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

/// The codes that are errors of a server span by the semantic conventions.
fn is_server_error(code: Code) -> bool {
    matches!(
        code,
        Code::Unknown
            | Code::DeadlineExceeded
            | Code::Unimplemented
            | Code::Internal
            | Code::Unavailable
            | Code::DataLoss
    )
}
