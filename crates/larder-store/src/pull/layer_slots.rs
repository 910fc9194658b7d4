//! Slots of layers that are fetched and unpacked at the same time, shared fairly among registries and repositories.
//!
//! One registry cannot use all slots. If others wait, the next free slot is for the registry, then the repository, with the
//! fewest layers in work. A fetch below the minimum rate is recalled while another repository waits for its slot: it
//! stops, keeps its bytes, and waits behind the others.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use larder::reference::Digest;
use tokio::sync::{Notify, oneshot};
use tokio::time::{self, Instant};

use crate::store::fetch_progress::{FetchProgress, FetchSource};

/// Interval at which waiting layers look for slow ones.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// All slots. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct LayerSlots(Arc<Mutex<SlotState>>);

/// Limits of layers in work.
#[derive(Debug, Clone, Copy)]
struct SlotLimits {
    /// Of one registry.
    registry: usize,
    total: usize,
}

#[derive(Debug)]
struct SlotState {
    limits: SlotLimits,
    next_id: u64,
    running: Vec<RunningLayer>,
    waiting: Vec<WaitingLayer>,
}

/// A layer that wants a slot or has one.
#[derive(Debug, Clone)]
pub(super) struct SlotRequest {
    pub(super) source: FetchSource,
    pub(super) blob: Digest,
    pub(super) progress: Arc<FetchProgress>,
    /// How often its slot was recalled.
    pub(super) recalls: u32,
}

#[derive(Debug)]
struct RunningLayer {
    id: u64,
    request: SlotRequest,
    recall: Arc<Notify>,
    is_recalled: bool,
}

#[derive(Debug)]
struct WaitingLayer {
    /// In the order of arrival.
    id: u64,
    request: SlotRequest,
    recall: Arc<Notify>,
    granted: oneshot::Sender<()>,
}

/// A slot, or a place in the queue, until dropped.
#[derive(Debug)]
#[must_use]
pub(super) struct LayerSlot {
    id: u64,
    slots: LayerSlots,
    recall: Arc<Notify>,
}

impl LayerSlots {
    /// `per_registry` layers of one registry at once, and twice as many of all.
    pub(super) fn new(per_registry: usize) -> LayerSlots {
        let registry = per_registry.max(1);
        let limits = SlotLimits { registry, total: 2 * registry };
        let (running, waiting) = Default::default();
        LayerSlots(Arc::new(Mutex::new(SlotState { limits, next_id: 0, running, waiting })))
    }

    /// Waits for a slot.
    pub(super) async fn acquire(&self, request: &SlotRequest) -> LayerSlot {
        let (slot, mut granted) = self.enqueue(request);
        request.progress.set_queued(true, Instant::now());
        while time::timeout(CHECK_INTERVAL, &mut granted).await.is_err() {
            self.lock().recall_slow(Instant::now());
        }
        request.progress.set_queued(false, Instant::now());
        slot
    }

    fn enqueue(&self, request: &SlotRequest) -> (LayerSlot, oneshot::Receiver<()>) {
        let (granted, receiver) = oneshot::channel();
        let recall = Arc::new(Notify::new());
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        let waiting = WaitingLayer { id, request: request.clone(), recall: Arc::clone(&recall), granted };
        state.waiting.push(waiting);
        state.grant();
        (LayerSlot { id, slots: self.clone(), recall }, receiver)
    }

    /// Recalls a slow fetch of this blob by another repository: one blob has one download at a time.
    pub(super) fn recall_blob(&self, blob: &Digest, source: &FetchSource, now: Instant) {
        let mut state = self.lock();
        let holder = state.running.iter_mut().find(|running| running.request.blob == *blob);
        if let Some(holder) = holder.filter(|holder| holder.request.progress.is_stuck_for(source, now)) {
            holder.recall();
        }
    }

    fn lock(&self) -> MutexGuard<'_, SlotState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LayerSlot {
    /// Ends when another layer needs the slot more.
    pub(super) async fn recalled(&self) {
        self.recall.notified().await;
    }
}

impl Drop for LayerSlot {
    fn drop(&mut self) {
        let mut state = self.slots.lock();
        state.running.retain(|running| running.id != self.id);
        state.waiting.retain(|waiting| waiting.id != self.id);
        state.grant();
    }
}

impl RunningLayer {
    fn recall(&mut self) {
        self.is_recalled = true;
        self.recall.notify_one();
    }
}

impl SlotState {
    fn count(&self, of: impl Fn(&FetchSource) -> bool) -> usize {
        self.running.iter().filter(|running| of(&running.request.source)).count()
    }

    fn of_registry(&self, source: &FetchSource) -> usize {
        self.count(|running| running.registry == source.registry)
    }

    fn of_repository(&self, source: &FetchSource) -> usize {
        self.count(|running| running.repository == source.repository)
    }

    /// Gives free slots to the layers that are next.
    fn grant(&mut self) {
        while let Some(at) = self.next() {
            let WaitingLayer { id, request, recall, granted } = self.waiting.remove(at);
            // If the receiver is gone, its slot is dropped next.
            let _ = granted.send(());
            self.running.push(RunningLayer { id, request, recall, is_recalled: false });
        }
    }

    /// The index of the waiting layer that gets a slot now.
    fn next(&self) -> Option<usize> {
        if self.running.len() >= self.limits.total {
            return None;
        }
        let waiting = self.waiting.iter().enumerate();
        let allowed =
            waiting.filter(|(_, layer)| self.of_registry(&layer.request.source) < self.limits.registry);
        let first = allowed.min_by_key(|(_, layer)| {
            let SlotRequest { source, recalls, .. } = &layer.request;
            (*recalls, self.of_registry(source), self.of_repository(source), layer.id)
        });
        first.map(|(at, _)| at)
    }

    /// Recalls slow fetches, at most one for each repository that waits for a slot.
    fn recall_slow(&mut self, now: Instant) {
        let slow: Vec<bool> =
            self.running.iter().map(|running| running.request.progress.is_slow(now)).collect();
        let mut waiting: Vec<&SlotRequest> = Vec::new();
        for layer in &self.waiting {
            if waiting.iter().all(|request| request.source.repository != layer.request.source.repository) {
                waiting.push(&layer.request);
            }
        }
        let pending = self.running.iter().filter(|running| running.is_recalled).count();
        let mut chosen: Vec<usize> = Vec::new();
        for request in waiting.into_iter().skip(pending) {
            let blocked_by_registry = self.of_registry(&request.source) >= self.limits.registry;
            let gives_way = |at: &usize| {
                let running = &self.running[*at];
                let SlotRequest { source, recalls, .. } = &running.request;
                slow[*at]
                    && !running.is_recalled
                    && !chosen.contains(at)
                    && source.repository != request.source.repository
                    && request.recalls <= *recalls
                    && (!blocked_by_registry || source.registry == request.source.registry)
            };
            chosen.extend((0..self.running.len()).find(gives_way));
        }
        for at in chosen {
            self.running[at].recall();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use larder::backend::MinimumRate;

    fn request(repository: &str) -> SlotRequest {
        let registry = repository.split('/').next().unwrap().to_owned();
        let source = FetchSource { registry, repository: repository.to_owned(), authorizers: vec![1] };
        let progress = Arc::new(FetchProgress::new(source.clone(), MinimumRate::default(), Instant::now()));
        SlotRequest { source, blob: Digest::sha256(repository), progress, recalls: 0 }
    }

    fn now_or_never(slots: &LayerSlots, repository: &str) -> Option<LayerSlot> {
        slots.acquire(&request(repository)).now_or_never()
    }

    #[tokio::test(start_paused = true)]
    async fn one_registry_does_not_get_all_slots() {
        let slots = LayerSlots::new(4);
        let slow: Vec<_> = (0..10).filter_map(|_| now_or_never(&slots, "slow.example/app")).collect();
        assert_eq!(slow.len(), 4);
        let others: Vec<_> = (0..10).filter_map(|_| now_or_never(&slots, "fast.example/app")).collect();
        assert_eq!(others.len(), 4);
        assert!(now_or_never(&slots, "third.example/app").is_none(), "memory is bounded");
    }

    #[tokio::test(start_paused = true)]
    async fn a_free_slot_is_for_the_repository_with_the_fewest_layers_in_work() {
        let slots = LayerSlots::new(2);
        let first = slots.acquire(&request("a.example/large")).await;
        let _second = slots.acquire(&request("a.example/large")).await;
        let (large, small) = (request("a.example/large"), request("a.example/small"));
        let (third, fourth) = (slots.acquire(&large), slots.acquire(&small));
        tokio::pin!(third, fourth);
        assert!((&mut third).now_or_never().is_none() && (&mut fourth).now_or_never().is_none());
        drop(first);
        assert!((&mut third).now_or_never().is_none());
        assert!(fourth.now_or_never().is_some(), "the image with many layers has one in work");
    }

    #[tokio::test(start_paused = true)]
    async fn slow_fetches_give_way_to_other_repositories_and_fast_ones_do_not() {
        let slots = LayerSlots::new(1);
        let (slow, fast) = (request("slow.example/app"), request("fast.example/app"));
        let held = [slots.acquire(&slow).await, slots.acquire(&fast).await];
        let start = Instant::now();
        let waiting = request("other.example/app");
        let work = async {
            loop {
                fast.progress.add_received(1 << 20, Instant::now());
                time::sleep(Duration::from_secs(1)).await;
            }
        };
        let [slow_slot, fast_slot] = held;
        let (slots_again, slow_again) = (slots.clone(), SlotRequest { recalls: 1, ..slow.clone() });
        let give_way = async {
            tokio::select! {
                () = slow_slot.recalled() => drop(slow_slot),
                () = fast_slot.recalled() => panic!("it is fast"),
            }
            slots_again.acquire(&slow_again).await
        };
        tokio::select! {
            _never = give_way => panic!("the slot is in use by the other layer"),
            () = work => {}
            granted = async {
                let granted = slots.acquire(&waiting).await;
                time::sleep(Duration::from_millis(1)).await;
                granted
            } => drop(granted),
        }
        let waited = start.elapsed();
        assert!(waited >= Duration::from_secs(10) && waited < Duration::from_secs(13), "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_layer_does_not_recall_layers_of_its_own_repository() {
        let slots = LayerSlots::new(1);
        let slot = slots.acquire(&request("slow.example/app")).await;
        let next = request("slow.example/app");
        let waiting = time::timeout(Duration::from_secs(60), slots.acquire(&next));
        tokio::select! {
            outcome = waiting => assert!(outcome.is_err()),
            () = slot.recalled() => panic!("it would be as slow"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_request_leaves_the_queue() {
        let slots = LayerSlots::new(1);
        let slot = slots.acquire(&request("a.example/app")).await;
        assert!(now_or_never(&slots, "a.example/app").is_none());
        drop(slot);
        assert!(now_or_never(&slots, "a.example/app").is_some());
        assert!(slots.lock().running.is_empty() && slots.lock().waiting.is_empty());
    }
}
