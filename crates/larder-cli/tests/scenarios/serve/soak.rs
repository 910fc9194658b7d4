//! A node's life at random: pulls, removals, callers that vanish, collections, reloads, and restarts of the registry
//! and of the runtime. What must hold is checked all along, and in the end nothing has leaked.
//!
//! `LARDER_SOAK=SECONDS` runs for longer; with `CI` set it takes three minutes, else 15 seconds.
//! `LARDER_SOAK_SEED=NUMBER` does other things; when they meet is the machine's affair.

use std::env;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use larder::backend::{Backend as _, ImageSpec, ProgressReporter, RemoveOptions};
use larder::reference::ImageId;
use larder_testkit_peers::process::{WAIT_LIMIT, pause, poll, wait_until};
use larder_testkit_peers::{ImageBuilder, LayerFiles, RegistryOptions};
use rustix::process::Signal;
use tokio::time::Instant;

use crate::served::{CriDaemon, client_of};
use crate::world::{RuntimeFixture, pod};

const WORKERS: usize = 3;
const IMAGES_EACH: usize = 3;
/// The longest that a worker rests between two deeds, in milliseconds.
const REST: u64 = 100;
/// Who sees an error so soon after something was down is not to blame.
const AFTERMATH: Duration = Duration::from_secs(5);
/// How much more memory the daemon may have in the end than after its first pulls.
const GROWTH: u64 = 12 << 20;
/// How many open files more may be left: a few connections.
const IDLE_FILES: usize = 2;
/// How many more threads may remain: an idle blocking thread ends after a second.
const IDLE_THREADS: u64 = 2;

fn number(variable: &str) -> Option<u64> {
    env::var(variable).ok().map(|text| text.parse().expect(variable))
}

fn length() -> Duration {
    let usual = if env::var_os("CI").is_some() { 180 } else { 15 };
    Duration::from_secs(number("LARDER_SOAK").unwrap_or(usual))
}

/// A number below `bound` (xorshift64*).
fn below(state: &mut u64, bound: u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
}

/// An image's name and id.
type NamedImage = (String, ImageId);

/// State that all threads share.
#[derive(Default)]
struct SoakState {
    stop: AtomicBool,
    /// When something was down last; now, while it is.
    down: Mutex<Option<Instant>>,
    deeds: AtomicU64,
    excused: AtomicU64,
}

impl SoakState {
    fn disturb(&self, what: impl FnOnce()) {
        let mark = || *self.down.lock().unwrap() = Some(Instant::now() + AFTERMATH);
        // However long it takes.
        *self.down.lock().unwrap() = Some(Instant::now() + WAIT_LIMIT * 4);
        what();
        mark();
    }

    /// Fails the test unless an error since `start` has an excuse.
    fn excuse(&self, error: &dyn std::fmt::Display, start: Instant) {
        let excused = self.down.lock().unwrap().is_some_and(|until| start < until);
        assert!(excused, "nothing was down: {error}");
        self.excused.fetch_add(1, Ordering::Relaxed);
    }
}

/// Prints all threads to stop, also when the test fails.
struct StopOnDrop<'a>(&'a SoakState);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

#[test]
fn random_operations_keep_the_guarantees_on_larders_own_store() {
    if let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) {
        live(world);
    }
}

#[test]
fn random_operations_keep_the_guarantees_on_containerd() {
    if let Some(world) = RuntimeFixture::plain() {
        live(world);
    }
}

fn live(mut world: RuntimeFixture) {
    let seed = number("LARDER_SOAK_SEED").unwrap_or(20_261_121).max(1);
    let known: Vec<NamedImage> = (0..=WORKERS * IMAGES_EACH).map(|number| publish(&world, number)).collect();
    let pods = world.path("pods");
    fs_err::create_dir(&pods).unwrap();
    fs_err::write(format!("{pods}/always.yaml"), pod("always", "IfNotPresent", &[&known[0].0])).unwrap();
    let settings = |rate: u64| {
        format!(
            "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\nstaticPodPath: {pods}\n\
             registryPullQPS: {rate}\nregistryBurst: 1000\npull: {{ensuredLease: 60s}}\nevents: {{ringSize: 100}}\n"
        )
    };
    let config = world.file("config.yaml", &settings(0));
    let daemon = CriDaemon::with(&world, &["--config", &config, "--metrics-address", ""]);
    wait_until("the static pod has its image", || daemon.status(&known[0].0).is_some());
    // Twice, so that one-time allocations are made.
    for (name, id) in known.iter().chain(&known) {
        assert_eq!(daemon.pull(name).as_ref(), Ok(id));
    }
    let before = ResourceUsage::settled(&daemon);

    let one_by_one = world.has_containerd();
    let (shared, end, mut random) = (SoakState::default(), Instant::now() + length(), seed);
    thread::scope(|scope| {
        let _stop = StopOnDrop(&shared);
        let workers: Vec<_> = (0..WORKERS)
            .map(|worker| {
                let (shared, known, socket) = (&shared, &known, daemon.socket.as_path());
                scope.spawn(move || work(worker, seed + worker as u64, shared, known, socket, one_by_one))
            })
            .collect();
        let mut round = 0;
        while Instant::now() < end && workers.iter().all(|worker| !worker.is_finished()) {
            round += 1;
            match below(&mut random, 6) {
                0 => shared.disturb(|| {
                    world.registry.stop();
                    pause(Duration::from_millis(below(&mut random, 1500)));
                    world.registry.start_again().unwrap();
                }),
                1 if world.has_containerd() => shared.disturb(|| {
                    world.containerd_mut().stop();
                    pause(Duration::from_millis(below(&mut random, 1500)));
                    world.containerd_mut().start_again().unwrap();
                    wait_until("the runtime is back", || daemon.is_ready());
                }),
                2 => {
                    let new =
                        if below(&mut random, 3) == 0 { "a: [".to_owned() } else { settings(1000 + round) };
                    fs_err::write(&config, new).unwrap();
                    daemon.running.signal(Signal::HUP);
                }
                _ => {
                    let start = Instant::now();
                    let at = ["--daemon", &daemon.socket.to_string_lossy()];
                    let gc = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration", "0"];
                    let run = world.larder(&[&at[..], &gc].concat());
                    if run.code != 0 {
                        shared.excuse(&format!("{run:?}"), start);
                    }
                }
            }
            let start = Instant::now();
            match daemon.runtime.block_on(daemon.client.status(&ImageSpec::named(&known[0].0))) {
                Ok(image) => assert!(image.is_some(), "what a pod wants went"),
                Err(error) => shared.excuse(&error, start),
            }
            assert!(daemon.get("/healthz").starts_with("HTTP/1.1 200"));
            assert!(daemon.metrics().contains("larder_backend_up "));
            pause(Duration::from_millis(200 + below(&mut random, 1500)));
        }
    });

    fs_err::write(&config, settings(0)).unwrap();
    daemon.running.signal(Signal::HUP);
    wait_until("all is up", || daemon.is_ready());
    for (name, id) in &known {
        assert_eq!(daemon.pull(name).as_ref(), Ok(id));
    }
    let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
    let after = before.unless_grown(&daemon);
    eprintln!("{} deeds, {} errors with an excuse", count(&shared.deeds), count(&shared.excused));
    eprintln!("before {before:?}, after {after:?}");
    let run = daemon.stop().expect(0);
    assert!(!run.stderr.contains("panicked"), "{run:?}");
    if !world.has_containerd() {
        world.larder(&["fsck"]).expect(0);
    }
}

/// Pushes one of a family of images with a layer in common.
fn publish(world: &RuntimeFixture, number: usize) -> NamedImage {
    let seed = number as u64;
    let image = ImageBuilder::new()
        .layer(LayerFiles::new().noise("srv/common", 300_000, 1000))
        .layer(LayerFiles::new().noise("srv/own", 50_000 + 40_000 * number, seed));
    let name = format!("shop/app-{number}:1");
    let layout = image.push(&world.registry, &name).unwrap();
    (world.registry.image(&name), layout.image_id.into())
}

/// Does things to images that only this worker touches, until the end.
fn work(worker: usize, seed: u64, shared: &SoakState, known: &[NamedImage], socket: &Path, one_by_one: bool) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = client_of(socket.to_owned());
    let own = &known[1 + worker * IMAGES_EACH..][..IMAGES_EACH];
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    // Until when the image of an abandoned pull may still become present.
    let mut abandoned = [Instant::now(); IMAGES_EACH];
    while !shared.stop.load(Ordering::Relaxed) {
        shared.deeds.fetch_add(1, Ordering::Relaxed);
        let which = usize::try_from(below(&mut random, IMAGES_EACH as u64)).unwrap();
        let ((name, id), abandoned) = (&own[which], &mut abandoned[which]);
        let spec = ImageSpec::named(name);
        let start = Instant::now();
        let outcome = match below(&mut random, 8) {
            0..=2 => runtime.block_on(async {
                let pulled = client.pull(&spec, None, None, &ProgressReporter::unwatched()).await?;
                assert_eq!(&pulled, id);
                let found = client.status(&spec).await?;
                assert_eq!(found.map(|image| image.id).as_ref(), Some(id), "just pulled");
                Ok(())
            }),
            3 => runtime.block_on(async {
                let most = Duration::from_millis(below(&mut random, 60));
                let progress = ProgressReporter::unwatched();
                let pull = client.pull(&spec, None, None, &progress);
                let ended = tokio::time::timeout(most, pull).await;
                // The pull has no caller any more.
                *abandoned = Instant::now() + AFTERMATH;
                ended.unwrap_or(Ok(ImageId::new(""))).map(drop)
            }),
            4 | 5 => runtime.block_on(async {
                client.remove(&spec, &RemoveOptions::default()).await?;
                let found = client.status(&spec).await?.map(|image| image.id);
                assert!(found.is_none() || start < *abandoned, "just removed: {found:?}");
                Ok(())
            }),
            _ => runtime.block_on(async {
                for image in client.list().await? {
                    let named = |name: &String| match image.repo_tags.as_slice() {
                        // A runtime takes the names of an image away one by one.
                        [] => one_by_one,
                        tags => tags == [name.as_str()],
                    };
                    let whole = known.iter().any(|(name, id)| *id == image.id && named(name));
                    assert!(whole, "{image:?}");
                }
                Ok(())
            }),
        };
        if let Err(error) = outcome {
            let error: larder::backend::BackendError = error;
            shared.excuse(&error, start);
        }
        pause(Duration::from_millis(below(&mut random, REST)));
    }
}

/// Resources of the machine that the daemon uses.
#[derive(Debug, Clone, Copy)]
struct ResourceUsage {
    files: usize,
    threads: u64,
    /// Resident bytes of its own: pages of the program come with each path that it runs for the first time.
    memory: u64,
}

impl ResourceUsage {
    fn of(daemon: &CriDaemon) -> ResourceUsage {
        let proc = format!("/proc/{}", daemon.running.pid());
        let status = fs_err::read_to_string(format!("{proc}/status")).unwrap();
        let value = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
            line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
        };
        let files = fs_err::read_dir(format!("{proc}/fd")).unwrap().count();
        ResourceUsage { files, threads: value("Threads:"), memory: value("RssAnon:") << 10 }
    }

    /// Returns the resources in use once idle threads and connections are closed.
    fn settled(daemon: &CriDaemon) -> ResourceUsage {
        pause(Duration::from_secs(3));
        ResourceUsage::of(daemon)
    }

    /// Waits until the daemon is as small again; fails the test if it does not become so.
    fn unless_grown(&self, daemon: &CriDaemon) -> ResourceUsage {
        let small = |now: &ResourceUsage| {
            now.files <= self.files + IDLE_FILES
                && now.threads <= self.threads + IDLE_THREADS
                && now.memory <= self.memory + GROWTH
        };
        let settled = poll(WAIT_LIMIT * 2, || Some(ResourceUsage::of(daemon)).filter(small));
        settled.unwrap_or_else(|| panic!("it had {self:?}, and keeps {:?}", ResourceUsage::of(daemon)))
    }
}
