//! Retention: why an image must not be removed.
//!
//! A [`RetentionSource`] reports reasons: containers and mounts, leases, declarations of static pods and image sets. A
//! [`RetentionSet`] collects them by image; the runtime's pins and keep rules are added to them. Everything that
//! removes or describes images asks this model: GC's plan, removals by clients, `explain`, `df`, the list of images,
//! the dashboard and the pins that CRI shows.
//!
//! The [`RemovalGate`] orders the two that race: an image that was reported present is leased before the answer, and a
//! removal begins only without a lease. It has every lease on an image, and saves them for later processes. What a pull
//! needs while there is no image yet is another question, which a backend answers for itself.

mod entry;
pub(crate) mod keep;
mod lease_file;
mod removal_gate;
pub(crate) mod set;
pub(crate) mod source;

pub use entry::{Lease, LeasePurpose, Retention, RetentionClass, RetentionError, RetentionPurpose};
pub use keep::{KeepRule, KeepWarning, KeptBy, Selector, nearest_names};
pub use lease_file::LeaseFileError;
pub use removal_gate::{PresenceCheck, RemovalGate, RemovalGuard};
pub use set::RetentionSet;
pub use source::{BackendRetentions, RetentionSource, SourceScope};
