//! Removes images when the disk needs the room, and can say why.
//!
//! ```text
//! list + uses -> records -> plan -> sweep -> history
//! ```
//!
//! Read [`Collector::collect`] first. [`plan()`] decides, and is pure: a dry run and a real run are the same plan.
//! [`sweep()`] acts, through one small trait. The rules are kubelet's; where larder does something else, a field of
//! [`GcPolicy`] brings kubelet's way back, and [`GcPolicy::kubelet`] all of it.

mod amount;
mod builder;
mod collector;
pub mod disk;
mod error;
mod estimate;
mod feed;
mod gate;
mod hand;
mod history;
mod inspect;
mod keep;
mod layers;
mod loops;
mod node_status;
mod parts;
mod plan;
mod policy;
mod records;
mod report;
mod state;
mod sweep;
mod time;
mod uses;

pub use amount::Amount;
pub use builder::CollectorBuilder;
pub use collector::Collector;
pub use disk::{Measure, size_text};
pub use error::GcError;
pub use feed::{Seen, Sighting, UseFeed};
pub use gate::{Gate, Look, Removing};
pub use history::{Entry, History, HistoryFile};
pub use inspect::InspectedLayers;
pub use keep::{KeepRule, KeepWarning, Selector, nearest_names};
pub use layers::{Layer, LayerSource, Layers};
pub use loops::{FailureCount, GcLoops, GcStatus, ImageCache, Periods};
pub use node_status::{NodeImage, NodeStatusError, images_for_node_status};
pub use parts::{Hook, Reclaim};
pub use plan::{
    Goal, Holder, Holders, Holding, ImageVerdict, Plan, Removal, Scene, Stays, Subject, Verdict, Why,
    holders, plan, plan_round,
};
pub use policy::{
    Accounting, AgeRule, ClockRule, GcPolicy, HookRule, InodeThresholds, PolicyError, UseRule, Which,
};
pub use records::{
    Anchor, Clock, ClockReading, FileStore, Loaded, MemoryStore, Record, RecordStore, Records, SaveError,
    SystemClock,
};
pub use report::{GcCounts, Report, Round};
pub use sweep::{Done, Hands, Outcome, Patience, RemoveError, Swept, sweep};
pub use time::Stamp;
pub use uses::{BackendUses, Found, Use, UseError, UseSource, Uses};
