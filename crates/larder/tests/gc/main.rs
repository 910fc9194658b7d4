//! Image collection: plans against brute force, sweeps, records, loops, stalls, and weeks of a simulated node.

mod abandoned;
mod clocks;
mod dangling;
mod feed;
mod kept;
mod last_use;
mod loops;
mod plans;
mod race;
mod reclaim;
mod records;
mod room;
mod simulation;
mod stacked;
mod stalled;
mod sweeps;
mod unreachable;
mod uses;
mod world;
