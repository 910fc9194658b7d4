//! What the daemon is made of: one backend, and everything that works on it. Building it starts nothing.

use std::collections::BTreeMap;
use std::future;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::Backend;
use larder::credentials::Sources;
use larder::events::{EventSink, LogSink, RingSink, Tee};
use larder::gc::{
    Collector, CollectorBuilder, FileStore, Gate, GcLoops, GcPolicy, HistoryFile, Hook, Periods,
};
use larder::pod::ObjectRef;
use larder::pull::{Manager, PullConfig};
use larder::records::{ImageRecords, PullRecords};
use larder_store::backend::StoreBackend;
use tokio::sync::watch;
use tokio::time::Instant;

use super::control::CallSink;
use super::event_log::EventLog;
use super::health::{self, Health};
use super::metrics::{Counted, Metrics};
use super::pods::prefetch::{self, Hands};
use super::pods::static_pods;
use super::pods::wishes::{FirstLook, Held, Wishes};
use super::reload::Settings;
use crate::collect::{self, EnsuredFile, Place};
use crate::commands::df::UsageSource;
use crate::config::Config;
use crate::connect::Chosen;
use crate::docker;

/// When the pulls of an earlier life are looked at again, if that failed: first, and at most.
const RECOVER_AGAIN: Duration = Duration::from_secs(1);
const RECOVER_SELDOM: Duration = Duration::from_secs(30);

/// What the node is built from.
pub(super) struct Parts {
    pub(super) chosen: Backed,
    /// Where the state of collection is; locked for as long as the daemon lives.
    pub(super) place: Place,
    /// With the keep rules of the place.
    pub(super) policy: GcPolicy,
    /// Who may use what; `None` keeps none.
    pub(super) records: Option<Arc<ImageRecords>>,
    pub(super) pull: PullConfig,
    /// The node's own, for what is ensured here; who pulls over CRI brings their own.
    pub(super) credentials: Sources,
    /// What is counted.
    pub(super) metrics: Arc<Metrics>,
    /// How long an image that was just ensured is left alone by collection.
    pub(super) spared: Duration,
    pub(super) periods: Periods,
    /// How many events are kept.
    pub(super) events: usize,
    /// The name of the node, which events are about.
    pub(super) name: String,
    /// What all this was made of.
    pub(super) settings: Settings,
}

/// The backend in all its roles.
pub(super) struct Backed {
    /// What it is, for people.
    pub(super) told: String,
    pub(super) backend: Arc<dyn Backend>,
    /// Larder's own store, which can do more than others.
    pub(super) store: Option<StoreBackend>,
    /// Who knows more of the room that images take.
    pub(super) usage: UsageSource,
    pub(super) collector: CollectorBuilder,
}

impl Backed {
    /// By what the user wants to work on. `prune_builder` says whether the cache of Docker's builder goes before images.
    pub(super) fn by(chosen: Chosen, prune_builder: bool) -> Backed {
        let told = chosen.told();
        let (store, usage) = (chosen.store().cloned(), UsageSource::of(&chosen));
        let cache = docker::builder_cache(&chosen).filter(|_| prune_builder);
        let (backend, mut collector) = collect::parts(chosen);
        if let Some(cache) = cache {
            collector = collector.reclaim_first(cache);
        }
        Backed { told, backend, store, usage, collector }
    }
}

/// Everything that serves requests works on this.
pub(crate) struct Node {
    /// What the backend is, for people.
    pub(super) told: String,
    /// Larder's own store, if that is the backend.
    pub(super) store: Option<StoreBackend>,
    /// Who knows more of the room that images take.
    pub(super) usage: UsageSource,
    /// The backend as it is; who removes or pulls goes through the manager and the collector.
    pub(super) backend: Arc<dyn Backend>,
    pub(super) manager: Arc<Manager>,
    pub(super) gate: Arc<Gate>,
    pub(super) collector: Arc<Collector>,
    pub(super) loops: GcLoops,
    pub(super) events: Arc<RingSink>,
    pub(super) health: watch::Sender<Health>,
    pub(super) started: Instant,
    pub(super) metrics: Arc<Metrics>,
    pub(super) sink: Arc<dyn EventSink>,
    pub(super) object: ObjectRef,
    /// What the node itself wants to be here.
    held: Held,
    pub(super) settings: Settings,
    pub(super) place: Place,
    /// Who may use what; `None` if none are kept.
    pub(super) records: Option<Arc<ImageRecords>>,
}

impl Node {
    /// Puts it together.
    pub(super) fn build(parts: Parts) -> Node {
        let Parts {
            chosen,
            place,
            policy,
            credentials,
            metrics,
            records,
            pull,
            spared,
            periods,
            events,
            name,
            settings,
        } = parts;
        let Backed { told, backend, store, usage, collector } = chosen;
        let events = Arc::new(RingSink::new(events));
        let sink: Arc<dyn EventSink> = Arc::new(Tee(vec![
            Arc::new(EventLog::new(LogSink)),
            events.clone(),
            metrics.clone(),
            Arc::new(CallSink),
        ]));
        let (gate, held) = (Arc::new(Gate::default()), Held::default());
        let mut manager = Manager::builder(Arc::clone(&backend))
            .config(pull)
            .credentials(credentials)
            .events(Arc::clone(&sink))
            .metrics(metrics.clone())
            .lease(Arc::clone(&gate), spared);
        let mut collector = collector;
        if let Some(records) = &records {
            records.settle_with(Arc::clone(&backend));
            records.await_recovery();
            manager = manager.records(Arc::clone(records) as Arc<dyn PullRecords>);
            collector = collector.hook(Arc::clone(records) as Arc<dyn Hook>);
        }
        let manager = manager.build();
        let history = HistoryFile::new(place.history());
        let collector = collector
            .policy(policy)
            .records(Arc::new(FileStore::new(place.records())))
            .history(Arc::new(Counted { history, metrics: metrics.clone() }))
            .gate(Arc::clone(&gate))
            .also_used_by(Arc::new(held.clone()))
            // What commands made present before this daemon ran.
            .also_used_by(Arc::new(EnsuredFile::at(&place)))
            .events(Arc::clone(&sink), name.clone())
            .build();
        let collector = Arc::new(collector);
        Node {
            loops: GcLoops::new(Arc::clone(&collector), periods),
            manager: Arc::new(manager),
            object: ObjectRef::node(name),
            health: watch::Sender::default(),
            started: Instant::now(),
            backend,
            gate,
            collector,
            events,
            sink,
            place,
            records,
            held,
            settings,
            metrics,
            told,
            store,
            usage,
        }
    }

    /// Runs what runs by itself, until dropped.
    pub(super) async fn run(&self) {
        // The first collection waits until it is known what has to stay.
        let first = self.held.first_look();
        tokio::join!(
            health::watch_over(&*self.backend, &self.health, &self.object, &*self.sink),
            self.loops.run(),
            self.watch_files(),
            self.recover(),
            self.want(first),
        );
    }

    /// Asks the backend whether it answers, and keeps that.
    pub(super) async fn look_now(&self) {
        health::look_now(&*self.backend, &self.health, &self.object, &*self.sink).await;
    }

    /// What the node itself wants.
    async fn want(&self, first: FirstLook) {
        tokio::join!(self.look_after_static_pods(first.clone()), self.prefetch(first));
    }

    /// Sorts out the pulls of an earlier life. A runtime may start later than larder; until it answers, nobody is
    /// granted what those pulls may have brought.
    async fn recover(&self) {
        let Some(records) = &self.records else { return };
        let mut wait = RECOVER_AGAIN;
        while !records.recover(&*self.backend).await {
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(RECOVER_SELDOM);
        }
    }

    /// Those at the path of the settings, whichever that is.
    async fn look_after_static_pods(&self, first: FirstLook) {
        let path = |config: &Config| config.static_pod_path.clone();
        let (manager, backend) = (Arc::clone(&self.manager), Arc::clone(&self.backend));
        let (mut wishes, mut first) = (Wishes::new(manager, backend, self.held.clone()), Some(first));
        self.for_each_setting(path, async |path| {
            let first = first.take();
            if let Some(path) = path {
                static_pods::look_after(path, &mut wishes, first).await;
            } else {
                drop(first);
                wishes.set(BTreeMap::new(), None);
                future::pending::<()>().await;
            }
        })
        .await;
    }

    async fn prefetch(&self, first: FirstLook) {
        let mut first = Some(first);
        let hands = Hands {
            manager: Arc::clone(&self.manager),
            backend: Arc::clone(&self.backend),
            gate: Arc::clone(&self.gate),
            held: self.held.clone(),
            node: self.object.clone(),
        };
        self.for_each_setting(
            |config| config.prefetch.clone(),
            async |list| prefetch::look_after(list, hands.clone(), first.take()).await,
        )
        .await;
    }

    /// Does this with a setting until it changes, and then with the new one.
    async fn for_each_setting<T: PartialEq + Clone>(
        &self,
        setting: impl Fn(&Config) -> T,
        mut work: impl AsyncFnMut(T),
    ) {
        let mut changes = self.settings.changes();
        loop {
            let now = setting(&changes.borrow_and_update());
            let news = async {
                // The sender lives as long as the node.
                let _ = changes.wait_for(|config| setting(config) != now).await;
            };
            tokio::select! {
                () = work(now.clone()) => return,
                () = news => {}
            }
        }
    }
}

#[cfg(test)]
mod tests;
