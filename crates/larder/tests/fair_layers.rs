//! A caller's pull proceeds whatever layers other callers fetch: how many, from which registries, and at which rate.
//! Time is simulated.

use std::time::Duration;

use larder::backend::{MinimumRate, RateWindow};
use larder::scheduler::{Callers, ScheduledWork, Scheduler, WorkRate};
use tokio::task::JoinSet;
use tokio::time::{self, Instant};

/// Attacks that are tried.
const SEEDS: u64 = 200;
/// Slots of one registry; all together have twice as many.
const OF_REGISTRY: usize = 4;
/// Hostile callers: with the honest one, each has at least two slots, half of what one registry may have.
const MAX_HOSTILE: u64 = 3;

/// The rate of a registry in good order.
const FAST: u64 = 10 << 20;

/// A small deterministic random number generator.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn choose<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::try_from(self.roll(of.len() as u64)).expect("an index")]
    }
}

/// A fetch of one layer.
struct Layer {
    work: ScheduledWork,
    bytes_per_second: u64,
    /// Time in a slot until it is complete.
    left: Duration,
}

impl Layer {
    /// Fetches the layer as the store does: it continues where it stopped.
    async fn fetch(mut self, scheduler: Scheduler) {
        let minimum = MinimumRate::default();
        loop {
            let slot = scheduler.acquire(&self.work).await;
            let (start, mut window) = (Instant::now(), RateWindow::new(minimum.window));
            let rate = |now: Instant| {
                let received = (now - start).as_secs() * self.bytes_per_second;
                WorkRate::of(window.observe(now, received), minimum.bytes_per_second, WorkRate::Fast)
            };
            tokio::select! {
                () = time::sleep(self.left) => return,
                () = slot.gives_way(minimum, rate) => self.left -= start.elapsed(),
            }
        }
    }
}

/// The name of a registry: one of the caller's own, or the one that all callers use.
fn registry(dice: &mut Dice, caller: &str) -> String {
    match dice.roll(6) {
        0 => "shared.example".to_owned(),
        1 => format!("{caller}.example"),
        _ => format!("{}.{caller}.example", dice.roll(1000)),
    }
}

/// Fetches layers of random registries at random rates for ever; some end and are replaced.
async fn attack(scheduler: Scheduler, caller: String, seed: u64) {
    let mut dice = Dice(seed);
    let minimum = MinimumRate::default().bytes_per_second;
    let bytes_per_second = dice.choose(&[0, minimum / 2, minimum, minimum * 3 / 2, minimum * 100]);
    let forever = dice.roll(3) > 0;
    loop {
        let registry = registry(&mut dice, &caller);
        let repository = dice.choose(&["app", "base", "tools", "web"]);
        let work =
            ScheduledWork::layer(&Callers::new(&caller), &registry, &format!("{registry}/{repository}"));
        let left = Duration::from_secs(if forever { 1_000_000 } else { 1 + dice.roll(40) });
        Layer { work, bytes_per_second, left }.fetch(scheduler.clone()).await;
    }
}

/// The time of a pull of these layers.
async fn pull(scheduler: &Scheduler, registry: &str, bytes_per_second: u64, layers: &[Duration]) -> Duration {
    let (start, mut fetches) = (Instant::now(), JoinSet::new());
    for left in layers {
        let work = ScheduledWork::layer(&Callers::new("honest"), registry, &format!("{registry}/app"));
        fetches.spawn(Layer { work, bytes_per_second, left: *left }.fetch(scheduler.clone()));
    }
    fetches.join_all().await;
    start.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_pull_takes_at_most_three_times_as_long_beside_hostile_callers() {
    // A slice of the slots that other callers have, until this one has its share.
    let slices = 2 * (MinimumRate::default().window + Duration::from_secs(1));
    for seed in 0..SEEDS {
        let mut dice = Dice(seed);
        let layers: Vec<_> = (0..=dice.roll(12)).map(|_| Duration::from_secs(1 + dice.roll(60))).collect();
        let registry = dice.choose(&["honest.example", "shared.example"]);
        let alone = pull(&Scheduler::for_layers(OF_REGISTRY), registry, FAST, &layers).await;

        let (scheduler, mut hostile) = (Scheduler::for_layers(OF_REGISTRY), JoinSet::new());
        for caller in 0..=dice.roll(MAX_HOSTILE) {
            for _ in 0..8 + dice.roll(8) {
                let seed = dice.roll(u64::from(u32::MAX));
                hostile.spawn(attack(scheduler.clone(), format!("hostile{caller}"), seed));
            }
        }
        time::sleep(Duration::from_millis(dice.roll(60_000))).await;
        let limit = 3 * alone + slices;
        let attacked = time::timeout(limit, pull(&scheduler, registry, FAST, &layers)).await;
        assert!(attacked.is_ok(), "seed {seed}: {} layers of {alone:?} not within {limit:?}", layers.len());
        hostile.shutdown().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_pull_from_a_slow_registry_keeps_a_slot_beside_faster_callers() {
    let window = MinimumRate::default().window + Duration::from_secs(1);
    let (scheduler, mut hostile) = (Scheduler::for_layers(OF_REGISTRY), JoinSet::new());
    for number in 0..24 {
        let (scheduler, caller) = (scheduler.clone(), format!("fast{}", number % 2));
        hostile.spawn(async move {
            loop {
                let registry = format!("{number}.{caller}.example");
                let work =
                    ScheduledWork::layer(&Callers::new(&caller), &registry, &format!("{registry}/app"));
                let left = Duration::from_secs(7);
                Layer { work, bytes_per_second: FAST, left }.fetch(scheduler.clone()).await;
            }
        });
    }
    time::sleep(window).await;
    let layers = [20, 30, 40].map(Duration::from_secs);
    let limit = layers.iter().sum::<Duration>() + 2 * window;
    let slow = MinimumRate::default().bytes_per_second / 2;
    let pulled = time::timeout(limit, pull(&scheduler, "slow.example", slow, &layers)).await;
    assert!(pulled.is_ok(), "not within {limit:?}");
    hostile.shutdown().await;
}
