//! One round of garbage collection, or what it would do.

use larder::gc::{Collector, GcError, GcGoal, GcPolicy, GcRoundResult, usage_by_class};
use larder::go_format;
use larder::hint::Hint;
use larder::image_service::FilesystemError;
use larder::retention::LeasePurpose;
use larder_api::is_gone;
use larder_api::v1::collect_request::Goal;
use larder_api::v1::{CollectRequest, Collection, EndedLeases, SpaceHolder, UsageByState};

use super::report::{self, usage_by_state};
use crate::error::Error;

/// The leases of larder that a round ends first, by purpose. A round for thresholds or space ends none.
pub(super) fn ended_leases(request: &CollectRequest) -> Result<&'static [LeasePurpose], Error> {
    let ends = match request.ended_leases() {
        EndedLeases::Unspecified => return Ok(&[]),
        EndedLeases::Pulls => &[LeasePurpose::Ensure][..],
        EndedLeases::All => &LeasePurpose::ALL,
    };
    match request.goal {
        Some(Goal::AllUnused(true) | Goal::Dangling(true)) => Ok(ends),
        _ => Err(Error::bad_input("leases can be ended only for all unused images")
            .hint(Hint::new().command(["gc", "--all-unused", "--force-leases"]))),
    }
}

/// Plans a round without running it. Records which images are present.
pub(super) async fn dry_run(
    collector: &Collector,
    policy: &GcPolicy,
    goal: GcGoal,
    ended: &[LeasePurpose],
) -> Result<Collection, Error> {
    match collector.dry_run(goal, policy, ended).await {
        Ok(run) => Ok(report::of_dry_run(goal, &run, policy)),
        Err(error) => Err(failure_of(collector, error).await),
    }
}

/// The report on a GC round, with incomplete removals.
pub(super) async fn report(
    collector: &Collector,
    policy: &GcPolicy,
    goal: GcGoal,
    round: &GcRoundResult,
) -> Collection {
    let report = report::of_round(goal, round, policy);
    match &round.error {
        None => report,
        Some(GcError::Insufficient(_)) => Collection {
            usage_by_state: retained_usage(collector, policy).await,
            error: Some(insufficient(&report).into()),
            ..report
        },
        Some(error) => {
            Collection { error: Some(failure_of(collector, error.clone()).await.into()), ..report }
        }
    }
}

/// Disk usage by the reasons for which images are retained; `None` if it cannot be determined.
async fn retained_usage(collector: &Collector, policy: &GcPolicy) -> Option<UsageByState> {
    let mut snapshot = collector.snapshot(policy).await.ok()?;
    collector.add_filesystem(&mut snapshot).await.ok()?;
    Some(usage_by_state(&usage_by_class(&snapshot, policy)))
}

/// The bytes that a round freed, and those that it had to.
fn shortfall(report: &Collection) -> String {
    let freed = go_format::bytes(u64::try_from(report.freed_bytes.unwrap_or(0)).unwrap_or(0));
    if report.needed_bytes == 0 && report.needed_inodes > 0 {
        let inodes: u64 = report.removals.iter().map(|removal| removal.promised_inodes).sum();
        return format!("not enough reclaimable inodes: freed {inodes} of {}", report.needed_inodes);
    }
    format!("not enough reclaimable space: freed {freed} of {}", go_format::bytes(report.needed_bytes))
}

/// Why a round did not do all that it should: if the backend is lost, that is the cause.
pub(crate) async fn failure_of(collector: &Collector, error: GcError) -> Error {
    if matches!(error, GcError::Uses(_) | GcError::Age { .. } | GcError::Space { .. })
        && let Err(error) = collector.backend_answers().await
        && is_gone(&error)
    {
        return error.into();
    }
    failure(error)
}

/// Why a round did not free enough.
fn insufficient(report: &Collection) -> Error {
    let mut error = Error::failed(shortfall(report));
    if report.lagging {
        error = error.hint("stopped: removed images freed less than planned; their files may still be open");
    }
    for SpaceHolder { process, command, bytes } in &report.space_holders {
        let bytes = go_format::bytes(*bytes);
        error = error.hint(format!("process {process} ({command}) holds {bytes} of deleted files open"));
    }
    if report.when_unreachable.is_empty() {
        return error;
    }
    error.hint(format!(
        "all candidates would free {}: gc.whenUnreachable is {}; all removes every candidate",
        go_format::bytes(report.reclaimable_bytes),
        report.when_unreachable
    ))
}

/// Why a round did not do all that it should, as a failure with its exit code.
pub(crate) fn failure(error: GcError) -> Error {
    match error {
        GcError::List(error)
        | GcError::Layers(error)
        | GcError::Labels(error)
        | GcError::Reclaim(error)
        | GcError::Disk(FilesystemError::Backend(error)) => error.into(),
        GcError::Uses(error) => {
            Error::failed(format!("cannot determine image usage: {error}; removed nothing"))
                .hint(Hint::from("fix the cause, then rerun ").command(["gc"]))
        }
        // Kubelet's number for all that there is.
        GcError::Space { wanted: i64::MAX, errors, .. } => {
            Error::failed(format!("cannot remove all unused images: {errors}"))
        }
        other => Error::failed(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use larder::backend::{BackendError, Container, ContainerInventory, EndpointFailure};
    use larder::gc::{
        DiskSpace, FsStatsProvider, ReclaimOutcome, ReclaimTrigger, ReclaimableSpace, SpaceReclaimer,
        WhenUnreachable,
    };
    use larder::image_service::FsStats;
    use larder_api::v1::DecisionReason;
    use larder_testkit::fake_backend::{FakeBackend, image};

    use super::*;

    async fn run_round(collector: &Collector, policy: &GcPolicy, goal: GcGoal) -> Collection {
        report(collector, policy, goal, &collector.round(goal, policy).await).await
    }
    use crate::error::ErrorKind;

    struct FullDisk;

    #[async_trait::async_trait]
    impl FsStatsProvider for FullDisk {
        async fn measure(&self) -> Result<FsStats, FilesystemError> {
            Ok(FsStats { capacity: 1000, ..FsStats::default() })
        }
    }

    #[tokio::test]
    async fn a_dry_run_looks_at_images_by_the_policy_of_the_request() {
        let backend = FakeBackend::new();
        backend.add_image("a:1", image("sha256:1", 500));
        // Kubelet's rule counts ids alone.
        let container = Container { image_id: "a:1".into(), ..Container::default() };
        backend
            .set_in_use(ContainerInventory { containers: vec![container], ..ContainerInventory::default() });
        let default = GcPolicy { minimum_age: Duration::ZERO, ..GcPolicy::default() };
        let kubelet = GcPolicy { minimum_age: Duration::ZERO, ..GcPolicy::kubelet() };
        for goal in [GcGoal::Thresholds, GcGoal::Free { bytes: 1 }, GcGoal::AllUnused] {
            let planned = async |policy| {
                let backend = Arc::new(backend.clone());
                let collector = Collector::builder(backend).disk(Arc::new(FullDisk)).build();
                dry_run(&collector, policy, goal, &[]).await.unwrap().removals.len()
            };
            assert_eq!((planned(&default).await, planned(&kubelet).await), (0, 1), "{goal:?}");
        }
    }

    #[tokio::test]
    async fn a_high_threshold_of_100_is_never_for_one_round_too() {
        let never = |policy| GcPolicy { high_threshold_percent: 100, inodes: None, ..policy };
        for policy in [never(GcPolicy::default()), never(GcPolicy::kubelet())] {
            let policy = GcPolicy { minimum_age: Duration::ZERO, ..policy };
            let backend = FakeBackend::new();
            backend.add_image("a:1", image("sha256:1", 500));
            let collector = Collector::builder(Arc::new(backend.clone())).disk(Arc::new(FullDisk)).build();
            let goal = policy.scheduled_goal();
            let planned = dry_run(&collector, &policy, goal, &[]).await.unwrap();
            let done = run_round(&collector, &policy, goal).await;
            for report in [planned, done] {
                assert!(report.disabled && report.reached && report.error.is_none(), "{report:?}");
                assert!(report.removals.is_empty());
            }
            let asked = run_round(&collector, &policy, GcGoal::AllUnused).await;
            assert_eq!((asked.removals.len(), asked.disabled), (1, false), "who asks for it has it");
        }
    }

    /// Remains of a failed pull; some of it nothing can use any more.
    struct Leftovers;

    #[async_trait::async_trait]
    impl SpaceReclaimer for Leftovers {
        async fn reclaimable(&self, trigger: ReclaimTrigger) -> Result<ReclaimableSpace, BackendError> {
            let bytes = if trigger == ReclaimTrigger::Schedule { 10 } else { 100 };
            Ok(ReclaimableSpace { trash: DiskSpace { bytes, inodes: 0 }, ..ReclaimableSpace::default() })
        }

        async fn reclaim(&self, trigger: ReclaimTrigger) -> ReclaimOutcome {
            self.reclaimable(trigger).await.into()
        }
    }

    #[tokio::test]
    async fn a_round_without_thresholds_reclaims_what_nothing_can_use() {
        let never = |policy| GcPolicy {
            high_threshold_percent: 100,
            inodes: None,
            minimum_age: Duration::ZERO,
            ..policy
        };
        for policy in [never(GcPolicy::default()), never(GcPolicy::kubelet())] {
            let backend = FakeBackend::new();
            backend.add_image("a:1", image("sha256:1", 500));
            let collector = Collector::builder(Arc::new(backend.clone()))
                .disk(Arc::new(FullDisk))
                .reclaimer(Arc::new(Leftovers))
                .build();
            let goal = policy.scheduled_goal();
            let planned = dry_run(&collector, &policy, goal, &[]).await.unwrap();
            let done = run_round(&collector, &policy, goal).await;
            for report in [planned, done] {
                assert!(
                    report.disabled && report.error.is_none() && report.removals.is_empty(),
                    "{report:?}"
                );
                let trash = report.reclaimed.unwrap().trash.unwrap();
                assert_eq!(trash.size_bytes, 10, "dry run: {}", report.dry_run);
            }
        }
    }

    #[tokio::test]
    async fn a_goal_out_of_reach_is_reported_with_the_rule_that_retains_images() {
        for (rule, word) in
            [(WhenUnreachable::Worthwhile, "worthwhile"), (WhenUnreachable::Nothing, "nothing")]
        {
            let backend = FakeBackend::new();
            backend.add_image("a:1", image("sha256:1", 10));
            let collector = Collector::builder(Arc::new(backend.clone())).disk(Arc::new(FullDisk)).build();
            let policy =
                GcPolicy { minimum_age: Duration::ZERO, when_unreachable: rule, ..GcPolicy::default() };
            let goal = policy.scheduled_goal();
            let planned = dry_run(&collector, &policy, goal, &[]).await.unwrap();
            let done = run_round(&collector, &policy, goal).await;
            for report in [&planned, &done] {
                assert!(!report.reached && report.removals.is_empty());
                assert_eq!((report.when_unreachable.as_str(), report.reclaimable_bytes), (word, 10));
                assert_eq!(report.images[0].reason(), DecisionReason::Unreachable);
            }
            let error = done.error.unwrap();
            let hints = format!("{:?}", error.hints);
            assert!(hints.contains(&format!("gc.whenUnreachable is {word}")), "{error:?}");
        }
    }

    #[tokio::test]
    async fn a_round_reports_a_lost_backend_and_removals_that_failed() {
        let backend = FakeBackend::new();
        let collector = Collector::builder(Arc::new(backend.clone())).build();
        let failed = || GcError::Space { wanted: i64::MAX, freed: 0, errors: "in use".into() };
        let failure = failure_of(&collector, failed()).await;
        assert_eq!(failure.kind(), ErrorKind::Failed);
        assert_eq!(failure.message(), "cannot remove all unused images: in use");
        let problem = EndpointFailure::Reported { problem: "no such socket".into(), hint: "start it".into() };
        backend.set_down(Some(BackendError::Unreachable { endpoint: "unix:///d.sock".into(), problem }));
        for error in [failed(), GcError::Uses(larder::retention::RetentionError::other("closed"))] {
            let failure = failure_of(&collector, error).await;
            assert_eq!(failure.kind(), ErrorKind::Unavailable);
            assert!(failure.message().contains("no such socket"), "{}", failure.message());
        }
    }
}
