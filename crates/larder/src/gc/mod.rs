//! Garbage collection: removes images when space is needed, with a reason for each decision.
//!
//! ```text
//! reclaim -> list + uses -> records -> plan -> sweep -> history
//! ```
//!
//! Read [`Collector::collect`] first. [`plan()`] decides, and is pure: a dry run and a real run are the same plan.
//! [`sweep()`] executes the plan through one small trait. The rules are kubelet's; where larder differs, a field of
//! [`GcPolicy`] restores kubelet's behaviour, and [`GcPolicy::kubelet`] restores all of it.

mod activity;
mod builder;
mod collector;
mod dependencies;
mod disk_space;
mod error;
mod estimate;
pub mod filesystem_stats;
mod gated_remover;
mod history;
mod inspect;
mod keep;
mod kept_images;
mod layers;
mod loops;
mod node_status;
mod open_files;
mod plan;
mod policy;
mod pressure_wait;
mod progress;
mod reclaim;
mod removal_gate;
mod report;
mod spans;
mod state;
mod sweep;
mod unix_millis;
mod usage_records;
mod uses;

pub use activity::{ActivityFeed, ActivityKind, ImageActivity};
pub use builder::CollectorBuilder;
pub use collector::Collector;
pub use dependencies::PostImageGcHook;
pub use disk_space::DiskSpace;
pub use error::GcError;
pub use filesystem_stats::{FilesystemContent, FsStatsProvider, OtherFilesystem, size_text};
pub use history::{HistoryFile, RemovalHistory, RemovalHistoryEntry};
pub use inspect::InspectLayerSource;
pub use keep::{KeepRule, KeepWarning, Selector, nearest_names};
pub use kept_images::KeptBy;
pub use layers::{LayerSource, LayerUsageIndex, MeasuredLayer};
pub use loops::{FailureCount, GcIntervals, GcLoops, GcStatus, ImageCache};
pub use node_status::{NodeImage, NodeStatusError, images_for_node_status};
pub use open_files::{SpaceHolder, deleted_open_files};
pub use plan::{
    GcDecision, GcGoal, GcImage, GcPlan, GcSnapshot, ImageDecision, PlannedRemoval, RemovalReason,
    RetainReason, RetentionBreakdown, RetentionClass, RetentionClassUsage, holders, plan, plan_round,
};
pub use policy::{
    Accounting, AgeRule, ClockRule, GcPolicy, HookRule, InodeThresholds, PolicyError, ThresholdKind, UseRule,
    WhenUnreachable,
};
pub use progress::{GcPhase, GcRoundProgress};
pub use reclaim::{ReclaimOutcome, ReclaimTrigger, SpaceBesideImages, SpaceReclaimer};
pub use removal_gate::{PresenceCheck, RemovalGate, RemovalGuard};
pub use report::{GcCounts, GcReport, GcRoundResult};
pub use sweep::{ImageRemover, ReclaimWait, RemovalError, RemovalOutcome, RemovedImage, SweepReport, sweep};
pub use unix_millis::UnixMillis;
pub use usage_records::{
    Clock, ClockReading, ImageUsageRecord, ImageUsageRecords, LoadedUsageRecords, SavedClockReading,
    SystemClock, UsageRecordFileStore, UsageRecordSaveError, UsageRecordStore, VolatileUsageRecords,
};
pub use uses::{BackendUseSource, ImageUse, ImageUseError, ImageUseIndex, ImageUseSource, ReportedUse};
