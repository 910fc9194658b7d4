//! Images that the node itself wants, without anybody asking: those of static pods, and those to prefetch.
//!
//! [`desired`] keeps images present and spared from collection while a pod or the prefetch list needs them; `static_pods` and
//! `prefetch` say who wants what.

pub(super) mod desired;
pub(super) mod prefetch;
pub(super) mod static_pods;
