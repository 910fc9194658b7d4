//! How long disk pressure starts no other round after one that did not end it.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

use super::collector::Collector;
use super::loops::GcIntervals;
use super::plan::{GcDecision, GcPlan, RetainReason};
use crate::backend::Image;
use crate::reference::ImageId;
use crate::retention::source::collect;
use crate::retention::{Retention, RetentionPurpose};

/// The images and uses that a round saw. Another round may remove more once these have changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RoundBasis {
    images: BTreeSet<ImageId>,
    uses: BTreeSet<(ImageId, String)>,
}

impl RoundBasis {
    fn new(images: &[Image], uses: &[Retention]) -> RoundBasis {
        // Neither the rest of a lease nor the end of a container's process makes its image a candidate.
        let key = |by: &RetentionPurpose| match by {
            RetentionPurpose::Container { id, .. } => format!("container {id}"),
            lease if lease.is_lease() => "lease".to_owned(),
            other => other.to_string(),
        };
        RoundBasis {
            images: images.iter().map(|image| image.id.clone()).collect(),
            uses: uses.iter().map(|reported| (reported.image.clone(), key(&reported.purpose))).collect(),
        }
    }

    /// Whether the images are other ones `now`, or a use has ended.
    fn has_changed(&self, now: &RoundBasis) -> bool {
        self.images != now.images || !self.uses.is_subset(&now.uses)
    }
}

/// When disk pressure may start a round again.
#[derive(Debug, Clone)]
pub(super) struct PressureWait {
    /// Not before this.
    earliest: Instant,
    /// From then on, in any case.
    latest: Instant,
    /// Between the two, once this has changed; `None` if it is unknown.
    basis: Option<RoundBasis>,
}

impl PressureWait {
    /// Until then, whatever happens.
    pub(super) fn until(at: Instant) -> PressureWait {
        PressureWait { earliest: at, latest: at, basis: None }
    }

    /// After a round that ended `now` and freed too little by `plan`: until time makes the next image a candidate, but
    /// no longer than the timer waits.
    pub(super) fn after(
        now: Instant,
        periods: &GcIntervals,
        plan: Option<&GcPlan>,
        basis: Option<RoundBasis>,
    ) -> PressureWait {
        let earliest = now + periods.list.min(periods.collect);
        let next = plan.and_then(next_candidate_in).unwrap_or(periods.collect).min(periods.collect);
        PressureWait { earliest, latest: earliest.max(now + next), basis }
    }

    /// Returns true if the wait depends on the images and uses at `now`.
    pub(super) fn needs_basis(&self, now: Instant) -> bool {
        self.basis.is_some() && now >= self.earliest && now < self.latest
    }

    /// Returns true once the wait has ended.
    pub(super) fn is_over(&self, now: Instant, current: Option<&RoundBasis>) -> bool {
        let changed = self.basis.as_ref().zip(current).is_some_and(|(seen, now)| seen.has_changed(now));
        now >= self.latest || (now >= self.earliest && changed)
    }
}

/// The time after the plan until the first retained image is a candidate although nothing else changes: its leases end,
/// or it reaches the minimum age.
fn next_candidate_in(plan: &GcPlan) -> Option<Duration> {
    let waits = plan.decisions.iter().filter_map(|image| match &image.decision {
        GcDecision::Retain(RetainReason::Leased { left }) => Some(*left).filter(|left| !left.is_zero()),
        GcDecision::Retain(RetainReason::TooYoung { age, minimum }) => Some(minimum.saturating_sub(*age)),
        _ => None,
    });
    waits.min()
}

impl Collector {
    /// The images and uses that a round now would see; `None` if it cannot be determined.
    pub(super) async fn round_basis(&self) -> Option<RoundBasis> {
        let images = self.parts.backend.list().await.ok()?;
        let uses = collect(&self.parts.sources).await.ok()?;
        Some(RoundBasis::new(&images, &uses))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gc::goal::GcGoal;
    use crate::gc::plan::{GcImage, GcSnapshot, plan};
    use crate::gc::{DiskSpace, GcPolicy, ImageLabels, LayerUsageIndex, UnixMillis};
    use crate::retention::{Lease, LeasePurpose};

    const SECOND: Duration = Duration::from_secs(1);

    fn image(id: &str, uses: Vec<RetentionPurpose>, first_seen: i64) -> GcImage {
        GcImage {
            id: id.into(),
            handler: String::new(),
            artifact_type: String::new(),
            names: [].into(),
            size: 1,
            pinned: false,
            first_seen: UnixMillis(first_seen),
            last_used: None,
            retained_by: uses,
            failed: None,
        }
    }

    fn next(images: Vec<GcImage>) -> Option<Duration> {
        let start = UnixMillis(0);
        let snapshot = GcSnapshot {
            now: UnixMillis(100_000),
            began: start,
            watched: start,
            images,
            layers: LayerUsageIndex::unknown(),
            labels: ImageLabels::new(),
            disk: None,
            reclaimed: DiskSpace::ZERO,
        };
        let policy = GcPolicy { minimum_age: 60 * SECOND, ..GcPolicy::default() };
        next_candidate_in(&plan(&snapshot, &policy, GcGoal::AllUnused))
    }

    fn lease(seconds: u32) -> RetentionPurpose {
        RetentionPurpose::Lease(Lease { purpose: LeasePurpose::Request, left: seconds * SECOND })
    }

    #[test]
    fn the_next_candidate_is_the_first_whose_leases_or_minimum_age_end() {
        let container = RetentionPurpose::UnlistedContainer { id: "c".into(), namespace: "n".into() };
        assert_eq!(next(vec![image("used", vec![container.clone()], 0)]), None);
        assert_eq!(next(vec![image("both", vec![container, lease(5)], 0)]), None);
        assert_eq!(next(vec![image("leases", vec![lease(5), lease(40)], 0)]), Some(40 * SECOND));
        let leased = image("leased", vec![lease(30)], 0);
        assert_eq!(next(vec![leased.clone(), image("young", vec![], 80_000)]), Some(30 * SECOND));
        assert_eq!(next(vec![leased, image("young", vec![], 50_000)]), Some(10 * SECOND));
        assert_eq!(next(vec![image("unknown end", vec![lease(0)], 0)]), None);
    }

    #[test]
    fn a_wait_ends_early_when_an_image_changes_or_a_use_ends() {
        let image = |id: &str| Image { id: id.into(), ..Image::default() };
        let used = |id: &str, running| Retention {
            image: id.into(),
            handler: None,
            purpose: RetentionPurpose::Container {
                id: "c".into(),
                name: String::new(),
                pod: String::new(),
                running,
            },
        };
        let seen = RoundBasis::new(&[image("a")], &[used("a", true)]);
        let now = Instant::now();
        let periods = GcIntervals::default();
        let wait = PressureWait::after(now, &periods, None, Some(seen.clone()));
        let over = |after: Duration, current: &RoundBasis| wait.is_over(now + after, Some(current));
        assert!(!over(periods.list, &seen));
        assert!(!over(periods.list, &RoundBasis::new(&[image("a")], &[used("a", false)])), "it still exists");
        let (ended, pulled) = (
            RoundBasis::new(&[image("a")], &[]),
            RoundBasis::new(&[image("a"), image("b")], &[used("a", true)]),
        );
        for changed in [ended, pulled] {
            assert!(over(periods.list, &changed));
            assert!(
                !over(periods.list.saturating_sub(SECOND), &changed),
                "rounds that free nothing are not repeated at once"
            );
        }
        assert!(over(periods.collect, &seen));
    }
}
