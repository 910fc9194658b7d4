//! A removal that hangs: the daemon answers everything else as quickly as before.

mod deletion_gate;
mod runtime_gate;

use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::{ImageBuilder, RegistryOptions};

use crate::served::CriDaemon;
use crate::timed::TimedCommand;
use crate::world::RuntimeFixture;
use deletion_gate::DeletionGate;
use runtime_gate::RuntimeGate;

/// Means that holds removals of images until it is released.
enum StalledRemoval {
    Runtime(RuntimeGate),
    Store(DeletionGate),
}

impl StalledRemoval {
    /// `None`, after a loud message, where deletion cannot be held.
    fn of(world: &RuntimeFixture) -> Option<StalledRemoval> {
        if world.endpoint().is_some() {
            let own = world.path("gate.sock").into();
            return Some(StalledRemoval::Runtime(RuntimeGate::before(world.socket().into(), own)));
        }
        DeletionGate::of(&world.place().join("trash")).map(StalledRemoval::Store)
    }

    /// The arguments that lead larder through it.
    fn arguments(&self, world: &RuntimeFixture) -> Vec<String> {
        match self {
            StalledRemoval::Runtime(gate) => {
                let scheme = if world.has_docker() { "docker" } else { "unix" };
                vec!["--backend".into(), format!("{scheme}://{}", gate.socket().display())]
            }
            StalledRemoval::Store(_) => Vec::new(),
        }
    }

    fn hold(&self) {
        match self {
            StalledRemoval::Runtime(gate) => gate.hold(),
            StalledRemoval::Store(gate) => gate.hold(),
        }
    }

    fn is_holding_a_removal(&self) -> bool {
        match self {
            StalledRemoval::Runtime(gate) => gate.held() == 1,
            StalledRemoval::Store(gate) => gate.has_held(),
        }
    }

    fn release(&self) {
        match self {
            StalledRemoval::Runtime(gate) => gate.release(),
            StalledRemoval::Store(gate) => gate.release(),
        }
    }
}

fn pull(world: &RuntimeFixture, name: &str, seed: u64) -> String {
    ImageBuilder::small(seed, 50_000).push(&world.registry, name).unwrap();
    let image = world.registry.image(name);
    world.larder(&["pull", "-q", &image]).expect(0);
    image
}

/// Whatever else is on the disk of the tests is not to start a collection.
fn serve(socket: &str) -> [&str; 7] {
    ["serve", "--socket", socket, "--metrics-address", "", "--image-gc-high-threshold", "100"]
}

#[test]
fn a_daemon_answers_a_removal_before_the_files_are_deleted() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    let image = pull(&world, "shop/web:1", 1);
    let trash = world.place().join("trash");
    let Some(gate) = DeletionGate::of(&trash) else { return };
    let socket = world.path("larder.sock");
    let daemon = CriDaemon::at(socket.clone().into(), world.start_larder(&serve(&socket)));
    wait_until("it is ready", || daemon.is_ready());
    gate.hold();
    let mut removal = world.start_larder(&["rm", &image]);
    wait_until("the removal is answered", || removal.is_finished());
    removal.succeed();
    wait_until("the deletion hangs", || gate.has_held());
    gate.release();
    wait_until("the files are deleted", || fs_err::read_dir(&trash).unwrap().count() == 0);
    daemon.stop().expect(0);
}

#[test]
fn every_other_command_answers_as_quickly_while_a_removal_hangs() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        let [_, api] = [("shop/web:1", 1), ("shop/api:1", 2)].map(|(name, seed)| pull(&world, name, seed));
        world.end_leases();
        let Some(gate) = StalledRemoval::of(&world) else { continue };
        let through = gate.arguments(&world);
        let larder = |arguments: &[&str]| -> Vec<String> {
            through.iter().cloned().chain(arguments.iter().map(|&argument| argument.to_owned())).collect()
        };
        let socket = world.path("larder.sock");
        let started = larder(&serve(&socket));
        let started: Vec<&str> = started.iter().map(String::as_str).collect();
        let daemon = CriDaemon::at(socket.clone().into(), world.start_larder(&started));
        wait_until("it is ready", || daemon.is_ready());
        let commands = [
            &["explain", &api][..],
            &["df"],
            &["gc", "--dry-run"],
            &["gc", "--dry-run", "--all-unused"],
            &["keep", &api],
            &["keep"],
            &["status"],
            &["images"],
        ];
        let commands = commands.map(larder);
        let timed = commands.map(|arguments| TimedCommand::new(&world, arguments));
        gate.hold();
        let all = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration", "0s", "-o", "json"];
        let round = larder(&all);
        let round: Vec<&str> = round.iter().map(String::as_str).collect();
        let mut round = world.start_larder(&round);
        wait_until("a removal hangs", || round.is_finished() || gate.is_holding_a_removal());
        assert!(!round.is_finished(), "{:?}", round.finish());
        timed.iter().for_each(TimedCommand::assert_as_quick);
        assert!(!round.is_finished() && gate.is_holding_a_removal(), "the removal still hangs");
        gate.release();
        let done = round.finish().expect(0).json();
        assert_eq!(done["removals"].as_array().map(Vec::len), Some(1), "{done}");
        let history = world.larder(&larder(&["gc", "log"]).iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(history.lines_with(&["shop/web:1"]), 1, "{history:?}");
        daemon.stop().expect(0);
        assert_eq!(world.images(), [api]);
    }
}
