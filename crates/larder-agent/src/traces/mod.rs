//! Traces over OTLP, with the feature `traces`.
//!
//! Code makes spans with `tracing` whether or not the feature is built in; without it, and until traces start, a span
//! that no log line shows is not made at all. One process has one exporter, set up once.
//!
//! ```text
//! spans -> TraceLayer -> sampler -> queue -> task of the exporter -> collector
//! ```

mod caller;
#[cfg(feature = "traces")]
mod context;
#[cfg(feature = "traces")]
mod export;
#[cfg(feature = "traces")]
mod layer;
#[cfg(feature = "traces")]
mod options;
#[cfg(feature = "traces")]
mod queue;
#[cfg(feature = "traces")]
mod running;
pub(crate) mod server_span;

pub use caller::continue_from_environment;
#[cfg(feature = "traces")]
pub(crate) use layer::TraceLayer;
#[cfg(feature = "traces")]
pub use running::{counts, current_trace_id, flush, is_on, start};

#[cfg(not(feature = "traces"))]
mod absent;
#[cfg(not(feature = "traces"))]
pub use absent::{counts, current_trace_id, flush, is_on, start};

/// Counts of exported and dropped spans since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TraceCounts {
    /// The endpoint has them.
    pub exported: u64,
    /// Dropped: too many ended at once, or the endpoint was slow.
    pub queue_full: u64,
    /// Dropped: the endpoint did not take them.
    pub export_failed: u64,
}
