//! Layers whose data comes after their containers have started.
//!
//! ```text
//! table of contents -> skeleton: a layer's file with all metadata, its data a hole
//! read of a hole -> pre-content event -> chunk from the registry -> verified, written -> the read goes on
//! the whole blob, in order -> unpacked into the skeleton -> compared with it -> the layer is complete
//! ```
//!
//! Complete layers are verified by the same events, when their data is first read:
//!
//! ```text
//! read of a piece that was not verified -> its SHA-256 -> right: the read goes on
//!                                                      -> damaged: parts of the blob -> the piece, written again
//! ```
//!
//! A reader gets the layer's bytes, or waits, or gets an error after a bounded time; never the zeros of a hole.

pub(crate) mod fill_activity;
pub(crate) mod group;
pub(crate) mod journal;
mod keeper;
pub(crate) mod missing_pieces;
pub(crate) mod partial_layer;
mod partial_layers;
pub(crate) mod read_demand;
pub(crate) mod reads;
pub(crate) mod skeleton;
pub(crate) mod start_reads;
pub(crate) mod toc;
pub(crate) mod verified_layer;
mod verified_layers;

pub use fill_activity::{FetchPurpose, FillObserver, ReadEnd};
pub(crate) use group::GroupState;
pub use keeper::{GroupKeeper, KeptGroup};
pub use partial_layer::FillProgress;
pub(crate) use partial_layers::PartialLayers;
pub use skeleton::{LayerSkeleton, read_skeleton};
pub(crate) use verified_layers::{BegunLayer, VerifiedLayers};
pub use verified_layers::{DamageObserver, LayerDamage, ReadVerification};

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// A jump of the wall clock neither fails reads that wait nor keeps them waiting: nothing here knows that clock.
    #[test]
    fn waits_are_measured_by_a_clock_that_does_not_jump() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lazy");
        let mut checked = 0;
        for entry in fs_err::read_dir(sources).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() || path.ends_with("mod.rs") {
                continue;
            }
            let source = fs_err::read_to_string(&path).unwrap();
            let wall_clocks =
                ["SystemTime", "ClockReading", "Timestamp", "CLOCK_REALTIME", "std::time::Instant"];
            let found = wall_clocks.iter().find(|clock| source.contains(**clock));
            assert_eq!(
                found,
                None,
                "{}: tokio's Instant is monotonic, and tests simulate it",
                path.display()
            );
            checked += 1;
        }
        assert!(checked > 10, "{checked} files");
    }
}
