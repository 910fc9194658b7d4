//! Images that the node desires without a request: those of static pods and of the prefetch list.
//!
//! [`desired`] keeps images present and spared from collection while a pod or the prefetch list needs them;
//! `static_pods` and `prefetch` say who wants what.

pub(crate) mod desired;
pub(super) mod prefetch;
pub(super) mod static_pods;
