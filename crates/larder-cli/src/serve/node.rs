//! What the daemon is made of: one backend, and everything that works on it. Building it starts nothing.

use std::sync::Arc;
use std::time::Duration;

use larder::backend::Backend;
use larder::events::{EventSink, LogSink, RingSink, Tee};
use larder::gc::{Collector, FileStore, Gate, GcLoops, GcPolicy, HistoryFile, Periods};
use larder::pod::ObjectRef;
use larder::pull::{Manager, PullConfig};
use tokio::sync::watch;
use tokio::time::Instant;

use super::health::{self, Health};
use crate::collect::{self, KeepFile, Place};
use crate::connect::Chosen;
use crate::failure::Failure;

/// How long an image that was just ensured is left alone by collection.
const SPARED: Duration = Duration::from_secs(600);

/// What the node is built from.
pub(super) struct Parts {
    pub(super) chosen: Chosen,
    /// Where the state of collection is; locked for as long as the daemon lives.
    pub(super) place: Place,
    pub(super) pull: PullConfig,
    /// Without keep rules; those come from the place.
    pub(super) policy: GcPolicy,
    /// How many events are kept.
    pub(super) events: usize,
    /// The name of the node, which events are about.
    pub(super) name: String,
}

/// Everything that serves requests works on this.
#[allow(dead_code, reason = "read by the control API, which comes next")]
pub(crate) struct Node {
    pub(super) chosen: Chosen,
    /// The backend as it is; who removes or pulls goes through the manager and the collector.
    pub(super) backend: Arc<dyn Backend>,
    pub(super) manager: Arc<Manager>,
    pub(super) gate: Arc<Gate>,
    pub(super) collector: Arc<Collector>,
    pub(super) loops: GcLoops,
    pub(super) events: Arc<RingSink>,
    pub(super) health: watch::Sender<Health>,
    pub(super) started: Instant,
    sink: Arc<dyn EventSink>,
    object: ObjectRef,
    pub(super) place: Place,
}

impl Node {
    /// Puts it together.
    pub(super) fn build(parts: Parts) -> Result<Node, Failure> {
        let Parts { chosen, place, pull, mut policy, events, name } = parts;
        policy.keep = KeepFile::at(&place).read()?;
        let events = Arc::new(RingSink::new(events));
        let sink: Arc<dyn EventSink> = Arc::new(Tee(vec![Arc::new(LogSink), events.clone()]));
        let gate = Arc::new(Gate::default());
        let (backend, builder) = collect::parts(chosen.clone(), &policy, true);
        let manager = Manager::builder(Arc::clone(&backend))
            .config(pull)
            .events(Arc::clone(&sink))
            .lease(Arc::clone(&gate), SPARED)
            .build();
        let collector = builder
            .policy(policy)
            .records(Arc::new(FileStore::new(place.records())))
            .history(Arc::new(HistoryFile::new(place.history())))
            .gate(Arc::clone(&gate))
            .events(Arc::clone(&sink), name.clone())
            .build();
        let collector = Arc::new(collector);
        Ok(Node {
            loops: GcLoops::new(Arc::clone(&collector), Periods::default()),
            manager: Arc::new(manager),
            object: ObjectRef::node(name),
            health: watch::Sender::default(),
            started: Instant::now(),
            chosen,
            backend,
            gate,
            collector,
            events,
            sink,
            place,
        })
    }

    /// Runs what runs by itself, until dropped.
    pub(super) async fn run(&self) {
        tokio::join!(
            health::watch_over(&*self.backend, &self.health, &self.object, &*self.sink),
            self.loops.run(),
        );
    }
}
