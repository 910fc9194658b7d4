//! One round of garbage collection, or what it would do.

use larder::gc::{Collector, GcError, GcGoal, GcPolicy, GcSnapshot, holders as who_holds, plan, plan_round};
use larder::go_format;
use larder::hint::Hint;
use larder::image_service::FilesystemError;
use larder_api::is_gone;
use larder_api::v1alpha1::Collection;

use super::report::{self, usage_by_state};
use crate::error::Error;

/// The plan alone. What is present and used is looked at, and written down.
pub(super) async fn dry_run(
    collector: &Collector,
    policy: &GcPolicy,
    goal: GcGoal,
) -> Result<Collection, Error> {
    let found = match goal {
        GcGoal::AllUnused => scene(collector, policy).await?,
        _ => match collector.snapshot_for(policy).await {
            Ok(found) => found,
            Err(error) => return Err(failure_of(collector, error).await),
        },
    };
    let planned = match goal {
        GcGoal::Thresholds => plan_round(&found, policy),
        goal => plan(&found, policy, goal),
    };
    let enough = planned.reachable;
    Ok(Collection {
        warnings: collector.warnings(&found).iter().map(ToString::to_string).collect(),
        usage_by_state: (!enough).then(|| usage_by_state(&who_holds(&found, policy))),
        ..report::of_plan(&planned, found.disk, policy)
    })
}

/// One GC round; its report includes incomplete removals.
pub(super) async fn run_round(collector: &Collector, policy: &GcPolicy, goal: GcGoal) -> Collection {
    let round = collector.round_by(policy, goal).await;
    let usage_by_state = match &round.error {
        Some(GcError::Insufficient(_)) => {
            let scene = collector.snapshot_for(policy).await.ok();
            scene.map(|scene| usage_by_state(&who_holds(&scene, policy)))
        }
        _ => None,
    };
    let report = report::of_round(goal, &round, policy);
    let error = match round.error.clone() {
        // Kubelet's text is for events; the command prints the same in its own units.
        Some(GcError::Insufficient(_)) => Some(Error::failed(shortfall(&report)).into()),
        Some(error) => Some(failure_of(collector, error).await.into()),
        None => None,
    };
    Collection {
        warnings: round.report.warnings.iter().map(ToString::to_string).collect(),
        usage_by_state,
        error,
        ..report
    }
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

/// Everything that a plan depends on; a filesystem that cannot be read is left out.
pub(super) async fn scene(collector: &Collector, policy: &GcPolicy) -> Result<GcSnapshot, Error> {
    let scene = match collector.snapshot_for(policy).await {
        Err(GcError::Disk(error)) => {
            tracing::warn!("cannot determine disk usage: {error}");
            collector.snapshot().await
        }
        scene => scene,
    };
    match scene {
        Ok(scene) => Ok(scene),
        Err(error) => Err(failure_of(collector, error).await),
    }
}

/// Why a round did not do all that it should: if the backend is lost, that is the cause.
pub(super) async fn failure_of(collector: &Collector, error: GcError) -> Error {
    if matches!(error, GcError::Uses(_) | GcError::Age { .. } | GcError::Space { .. })
        && let Err(gone) = collector.backend_answers().await
        && is_gone(&gone)
    {
        return gone.into();
    }
    failure(error)
}

/// Why a round did not do all that it should, as a failure with its exit code.
pub(crate) fn failure(error: GcError) -> Error {
    match error {
        GcError::List(error) | GcError::Layers(error) | GcError::Disk(FilesystemError::Backend(error)) => {
            error.into()
        }
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
    use larder::gc::FsStatsProvider;
    use larder::image_service::FsStats;
    use larder_testkit::fake_backend::{FakeBackend, image};

    use super::*;
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
                dry_run(&collector, policy, goal).await.unwrap().removals.len()
            };
            assert_eq!((planned(&default).await, planned(&kubelet).await), (0, 1), "{goal:?}");
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
        for error in [failed(), GcError::Uses(larder::gc::ImageUseError::other("closed"))] {
            let failure = failure_of(&collector, error).await;
            assert_eq!(failure.kind(), ErrorKind::Unavailable);
            assert!(failure.message().contains("no such socket"), "{}", failure.message());
        }
    }
}
