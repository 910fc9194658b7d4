//! A pull with a secret that is interrupted at each of its stages, by a kill, by Ctrl-C, or because the daemon's client
//! disconnects: afterwards only callers with a valid credential have access to the image.

use std::time::Duration;

use larder_testkit_peers::process::pause;
use larder_testkit_peers::registry::{PASSWORD, USER};
use larder_testkit_peers::{ImageBuilder, RegistryAccess, RegistryOptions};
use serde_json::json;
use tokio::time::Instant;

use crate::served::CriDaemon;
use crate::world::{LarderProcess, RuntimeFixture, pod_with_secrets};

/// When a pull is cut off, as fractions of the duration of a whole pull: during it, and after it.
const MOMENTS: [f64; 15] = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0, 1.5, 4.0];
/// At least this many moments must find a pull to cut off.
const FEWEST: u32 = 7;
/// How often all moments may be tried for that.
const ROUNDS: usize = 4;

/// The moments of one test. The duration of a pull changes with the load of the machine: a pull that has ended before a
/// moment within its assumed duration shows that the duration is shorter, and the moments are tried again.
struct InterruptSchedule {
    duration: Duration,
    cut_off: u32,
    tried: usize,
}

impl InterruptSchedule {
    fn new(duration: Duration) -> Self {
        Self { duration, cut_off: 0, tried: 0 }
    }

    /// The next delay after which a pull is cut off, until all moments were tried and enough pulls were cut off.
    fn next(&mut self) -> Option<InterruptDelay> {
        let enough = self.cut_off >= FEWEST && self.tried >= MOMENTS.len();
        if enough || self.tried == ROUNDS * MOMENTS.len() {
            return None;
        }
        let moment = MOMENTS[self.tried % MOMENTS.len()];
        self.tried += 1;
        Some(InterruptDelay { moment, time: self.duration.mul_f64(moment).max(Duration::from_millis(1)) })
    }

    fn record(&mut self, delay: &InterruptDelay, was_cut_off: bool) {
        self.cut_off += u32::from(was_cut_off);
        if !was_cut_off && delay.moment <= 1.0 {
            self.duration = self.duration.min(delay.time);
        }
    }
}

struct InterruptDelay {
    moment: f64,
    time: Duration,
}

/// Manifests of two pods that want an image: with the right secret, and without any.
fn pods(world: &RuntimeFixture, image: &str) -> [String; 2] {
    let config = json!({"auths": {world.registry.address(): {"username": USER, "password": PASSWORD}}});
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"},
        "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": config.to_string()},
    });
    let pod = |name: &str, secrets: &[&str]| pod_with_secrets(name, "IfNotPresent", &[image], secrets);
    let with = format!("{}{secret}", pod("with", &["s"]));
    [world.file("with.yaml", &with), world.file("without.yaml", &pod("without", &[]))]
}

fn options() -> RegistryOptions {
    RegistryOptions { auth: RegistryAccess::Basic, ..RegistryOptions::default() }
}

/// Lets it run for this time, and then presses Ctrl-C; says whether that ended it.
fn interrupt_after(running: LarderProcess, time: Duration) -> bool {
    pause(time);
    running.interrupt();
    running.finish().code != 0
}

/// The shortest that three pulls took. Each is prepared before it is timed.
fn shortest_of_three<P>(prepare: impl Fn(usize) -> P, pull: impl Fn(P)) -> Duration {
    let timed = |number| {
        let prepared = prepare(number);
        let began = Instant::now();
        pull(prepared);
        began.elapsed()
    };
    timed(0).min(timed(1)).min(timed(2))
}

/// Cuts off pulls of a process of their own.
fn whenever_a_pull_is_cut_off_by(cut_off: fn(LarderProcess, Duration) -> bool) {
    for world in RuntimeFixture::of_each_backend(options()) {
        ImageBuilder::small(1, 500_000).push(&world.registry, "shop/web:1").unwrap();
        let [with, without] = pods(&world, &world.registry.image("shop/web:1"));
        let state = world.path("state");
        let ensure = |file: &str| world.larder(&["--state", &state, "ensure", "-f", file]);
        let forget = || {
            world.remove_images();
            let _ = fs_err::remove_dir_all(&state);
        };

        let mut schedule = InterruptSchedule::new(shortest_of_three(
            |_| forget(),
            |()| world.start_larder(&["--state", &state, "ensure", "-f", &with]).succeed(),
        ));
        let mut present = 0;
        while let Some(delay) = schedule.next() {
            forget();
            let running = world.start_larder(&["--state", &state, "ensure", "-f", &with]);
            schedule.record(&delay, cut_off(running, delay.time));
            present += u32::from(!world.images().is_empty());
            let run = ensure(&without).expect(1);
            assert!(!run.stdout.contains("can be accessed"), "cut off after {:?}: {run:?}", delay.time);
            ensure(&with).expect(0);
            ensure(&without).expect(1);
        }
        let InterruptSchedule { cut_off, tried, duration } = schedule;
        eprintln!("{cut_off} of {tried} pulls cut off within {duration:?}; image present after {present}");
        assert!(cut_off >= FEWEST && present > 0, "{cut_off} pulls cut off, image present after {present}");
    }
}

#[test]
fn an_image_of_a_killed_pull_requires_a_credential() {
    whenever_a_pull_is_cut_off_by(LarderProcess::kill_after);
}

#[test]
fn an_image_of_an_interrupted_pull_requires_a_credential() {
    whenever_a_pull_is_cut_off_by(interrupt_after);
}

#[test]
fn an_image_of_a_disconnected_client_requires_a_credential() {
    for world in RuntimeFixture::of_each_backend(options()) {
        let daemon = CriDaemon::of(&world);
        // Each of its own, as a record of another round would refuse as well.
        let publish = |number: usize| {
            let name = format!("shop/web:{number}");
            ImageBuilder::small(number as u64 + 1, 500_000).push(&world.registry, &name).unwrap();
            let named = world.registry.image(&name);
            (pods(&world, &named), named)
        };
        let mut schedule = InterruptSchedule::new(shortest_of_three(
            |number| publish(ROUNDS * MOMENTS.len() + 1 + number),
            |([with, _], _)| world.start_larder(&["ensure", "-f", &with]).succeed(),
        ));
        let mut present = 0;
        while let Some(delay) = schedule.next() {
            let ([with, without], named) = publish(schedule.tried);
            let running = world.start_larder(&["ensure", "-f", &with]);
            schedule.record(&delay, running.kill_after(delay.time));
            let refused = |when: &str| {
                let run = world.larder(&["ensure", "-f", &without]).expect(1);
                assert!(
                    !run.stdout.contains("can be accessed"),
                    "{when}, left after {:?}: {run:?}",
                    delay.time
                );
            };
            refused("at once");
            // The backend may finish the pull after the client left.
            pause(schedule.duration);
            refused("later");
            present += u32::from(daemon.list().iter().any(|image| image.repo_tags.contains(&named)));
            world.larder(&["ensure", "-f", &with]).expect(0);
            refused("after a pull");
        }
        let InterruptSchedule { cut_off, tried, duration } = schedule;
        eprintln!("{cut_off} of {tried} clients left within {duration:?}; image present after {present}");
        assert!(cut_off >= FEWEST, "{cut_off} clients left");
        daemon.stop().expect(0);
    }
}
