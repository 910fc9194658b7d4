//! Garbage collection: removes images when space is needed, with a reason for each decision.
//!
//! ```text
//! reclaim -> observe (images, uses, records) -> plan -> sweep -> history
//! ```
//!
//! Read [`Collector::round`] first. [`plan()`] decides, and is pure: [`Collector::dry_run`] returns the plan, and a
//! round executes it. [`GcStrategy`] selects the algorithm: larder's, or kubelet's for [`GcPolicy::kubelet`].

mod activity;
mod builder;
mod collector;
mod dependencies;
mod disk_space;
mod error;
mod estimate;
pub mod filesystem_stats;
mod goal;
mod history;
mod inspect;
mod labels;
mod layers;
mod loops;
mod meter;
mod node_status;
mod open_files;
mod plan;
mod policy;
mod pressure_wait;
mod progress;
mod reclaim;
mod remover;
mod report;
mod retentions;
mod room;
mod round;
mod spans;
mod state;
mod sweep;
pub(crate) mod unix_millis;
mod usage_records;

pub use activity::{ActivityFeed, ActivityKind, ImageActivity};
pub use builder::CollectorBuilder;
pub use collector::Collector;
pub use dependencies::PostImageGcHook;
pub use disk_space::DiskSpace;
pub use error::GcError;
pub use filesystem_stats::{FilesystemContent, FsStatsProvider, OtherFilesystem, size_text};
pub use goal::GcGoal;
pub use history::{HistoryFile, RemovalHistory, RemovalHistoryEntry};
pub use inspect::InspectLayerSource;
pub use labels::{ImageLabels, MAX_LABEL_VALUE};
pub use layers::{LayerSource, LayerUsageIndex, MeasuredLayer};
pub use loops::{FailureCount, GcIntervals, GcLoops, GcStatus, ImageCache};
pub use meter::ReclaimWait;
pub use node_status::{NodeImage, NodeStatusError, images_for_node_status};
pub use open_files::{SpaceHolder, deleted_open_files};
pub use plan::{
    GcDecision, GcImage, GcPlan, GcSnapshot, ImageDecision, PlannedRemoval, RemovalReason, RetainReason,
    RetentionBreakdown, RetentionClassUsage, plan, usage_by_class,
};
pub use policy::{GcPolicy, GcStrategy, InodeThresholds, PolicyError, ThresholdKind, WhenUnreachable};
pub use progress::{GcPhase, GcRoundProgress};
pub use reclaim::{ReclaimOutcome, ReclaimTrigger, ReclaimableSpace, SpaceReclaimer};
pub use remover::GcCounts;
pub use report::{DryRun, GcReport, GcRoundResult};
pub use sweep::{RemovedImage, SweepReport};
pub use unix_millis::UnixMillis;
pub use usage_records::{
    Clock, ClockReading, ImageUsageRecord, ImageUsageRecords, LoadedUsageRecords, SystemClock,
    UsageRecordFileStore, UsageRecordSaveError, UsageRecordStore, VolatileUsageRecords,
};
