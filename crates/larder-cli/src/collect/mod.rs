//! Wires collection: the backend, where its state is, and the collector for both.
//!
//! State is a folder with the records of use, the journal of removals, the keep rules, and what was just ensured. One
//! process at a time has all but the last: the store is locked anyway, and for a runtime the folder is. What was ensured
//! is written by who does not wait for that lock.

mod ensured;
mod keep;
mod limits;
mod notes;
mod place;
mod spares;

use std::sync::Arc;
use std::time::Duration;

use larder::backend::Backend;
use larder::events::{Event, EventSink, LogSink, Reason};
use larder::gc::{
    Collector, CollectorBuilder, FileStore, GcError, GcPolicy, HistoryFile, InspectedLayers, Patience, Scene,
};
use larder::image_service::FilesystemError;
use larder::records::{ImageRecords, Verification};
use larder_control::v1alpha1::CollectRequest;
use larder_store::collection::{Labelled, StoreDisk};

use crate::access;
use crate::args::Connection;
use crate::connect::{self, Chosen};
use crate::failure::{Failure, is_gone};
use crate::out::Out;

pub(crate) use ensured::EnsuredFile;
pub(crate) use keep::{KeepFile, Listed, RuleDocument, ShownRule};
pub(crate) use limits::{goal, policy};
pub(crate) use notes::Notes;
pub(crate) use place::Place;
pub(crate) use spares::Spares;

/// A collector, and what it was made of.
pub(crate) struct Collecting {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) collector: Collector,
    /// Who may use what, where that is on record.
    pub(crate) records: Option<Arc<ImageRecords>>,
    /// Kept for its lock.
    _place: Place,
}

/// The collector for the backend that the user wants, with the policy that the request and keep rules make.
pub(crate) fn collecting(
    connection: &Connection,
    request: &CollectRequest,
    out: &Out,
) -> Result<Collecting, Failure> {
    let policy = policy(&GcPolicy::default(), request)?;
    collecting_from(connect::chosen(connection)?, connection, policy, out)
}

/// The same for a backend that was chosen already.
pub(crate) fn collecting_from(
    chosen: Chosen,
    connection: &Connection,
    mut policy: GcPolicy,
    out: &Out,
) -> Result<Collecting, Failure> {
    let place = Place::of(connection, &chosen)?.locked()?;
    policy.keep = KeepFile::at(&place).read()?;
    let (backend, mut builder) = parts(chosen);
    let mut records = None;
    if place.pull_records().is_dir() {
        // They go with their images. What they are checked by is of no concern here.
        let opened = access::records(&place, Verification::default())?;
        builder = builder.hook(opened.clone());
        records = Some(opened);
    }
    let collector = builder
        .events(Arc::new(CommandLog), "")
        .policy(policy)
        .also_used_by(Arc::new(EnsuredFile::at(&place)))
        .records(Arc::new(FileStore::new(place.records())))
        .history(Arc::new(HistoryFile::new(place.history())))
        .build();
    if let Some(notice) = collector.notice() {
        out.warning(notice);
    }
    Ok(Collecting { backend, collector, records, _place: place })
}

/// Events of a round that a command runs. What the command itself ends with is not told twice.
struct CommandLog;

impl EventSink for CommandLog {
    fn record(&self, event: Event) {
        if !matches!(event.reason, Reason::FreeDiskSpaceFailed | Reason::InvalidDiskCapacity) {
            LogSink.record(event);
        }
    }
}

/// A collector that only looks: it writes nothing, and every image that may go sooner or later counts as unused.
pub(crate) fn looking(connection: &Connection, chosen: Chosen) -> Result<Collecting, Failure> {
    let place = Place::of(connection, &chosen)?.alone()?;
    let keep = KeepFile::at(&place).read()?;
    let policy = looking_policy(&GcPolicy { keep, ..GcPolicy::default() });
    let (backend, builder) = parts(chosen);
    let collector = builder.policy(policy).also_used_by(Arc::new(EnsuredFile::at(&place))).build();
    Ok(Collecting { backend, collector, records: None, _place: place })
}

/// The policy for looking: every image that may go sooner or later counts as unused.
pub(crate) fn looking_policy(policy: &GcPolicy) -> GcPolicy {
    GcPolicy { minimum_age: Duration::ZERO, ..policy.clone() }
}

/// The backend, and a builder that knows how to ask it.
pub(crate) fn parts(chosen: Chosen) -> (Arc<dyn Backend>, CollectorBuilder) {
    match chosen {
        Chosen::Store(store) => {
            let backend: Arc<dyn Backend> = Arc::new(store.clone());
            let builder = Collector::builder(backend.clone())
                .also_used_by(Arc::new(store.clone()))
                .disk(Arc::new(StoreDisk(store.store().clone())))
                // What was removed is deleted when the disk is measured: there is nothing to wait for.
                .patience(Patience { quiet: Duration::ZERO, ..Patience::default() })
                .layers(Arc::new(Labelled::new(store)));
            (backend, builder)
        }
        Chosen::Runtime(runtime) => {
            let told = Arc::new(runtime.containerd_layers());
            let backend: Arc<dyn Backend> = runtime;
            let layers = InspectedLayers::new(backend.clone()).told_by(told);
            (backend.clone(), Collector::builder(backend).layers(Arc::new(layers)))
        }
        #[cfg(feature = "docker")]
        Chosen::Docker(engine) => crate::docker::parts(&engine),
    }
}

/// Everything that a plan depends on; a file system that cannot be read is left out.
pub(crate) async fn scene(collector: &Collector) -> Result<Scene, Failure> {
    let scene = match collector.scene_with_disk().await {
        Err(GcError::Disk(error)) => {
            tracing::warn!("how full the disk is is not known: {error}");
            collector.scene().await
        }
        scene => scene,
    };
    match scene {
        Ok(scene) => Ok(scene),
        Err(error) => Err(failure_of(collector, error).await),
    }
}

/// Why a round did not do all that it should: where the backend is gone by now, that is why.
pub(crate) async fn failure_of(collector: &Collector, error: GcError) -> Failure {
    if matches!(error, GcError::Uses(_) | GcError::Age { .. } | GcError::Space { .. })
        && let Err(gone) = collector.backend_answers().await
        && is_gone(&gone)
    {
        return gone.into();
    }
    failure(error)
}

/// Why a round did not do all that it should, as a failure with its exit code.
fn failure(error: GcError) -> Failure {
    match error {
        GcError::List(error) | GcError::Layers(error) | GcError::Disk(FilesystemError::Backend(error)) => {
            error.into()
        }
        GcError::Uses(error) => Failure::failed(format!(
            "nothing was removed, because who uses what is not known: {error}"
        ))
        .hint("larder removes nothing that may be in use: mend what the error names, and collect again"),
        // Kubelet's text is for events; beside what the command has told, it says little, and that in other units.
        GcError::Insufficient(_) => Failure::failed("all that may go is gone, and that is not enough"),
        // Kubelet's number for all that there is.
        GcError::Space { wanted: i64::MAX, errors, .. } => {
            Failure::failed(format!("not all that nothing uses could be removed: {errors}"))
        }
        other => Failure::failed(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use larder::backend::{BackendError, Unreachable};
    use larder_testkit::fake_backend::FakeBackend;

    use super::*;
    use crate::exit::Outcome;

    #[tokio::test]
    async fn a_round_whose_backend_went_says_so_and_another_that_not_all_could_be_removed() {
        let backend = FakeBackend::new();
        let collector = Collector::builder(Arc::new(backend.clone())).build();
        let failed = || GcError::Space { wanted: i64::MAX, freed: 0, errors: "in use".into() };
        let failure = failure_of(&collector, failed()).await;
        assert_eq!(failure.outcome(), Outcome::Failed);
        assert_eq!(failure.message(), "not all that nothing uses could be removed: in use");
        let problem = Unreachable::Told { problem: "no such socket".into(), hint: "start it" };
        backend.set_down(Some(BackendError::Unreachable { endpoint: "unix:///d.sock".into(), problem }));
        for error in [failed(), GcError::Uses(larder::gc::UseError("closed".into()))] {
            let failure = failure_of(&collector, error).await;
            assert_eq!(failure.outcome(), Outcome::Unreachable);
            assert!(failure.message().contains("no such socket"), "{}", failure.message());
        }
    }
}
