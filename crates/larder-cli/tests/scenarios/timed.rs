//! Commands that must not wait for something else, by the time that they take.

use std::time::Duration;

use larder_testkit_peers::process::{WAIT_LIMIT, poll};
use tokio::time::Instant;

use crate::world::RuntimeFixture;

/// So much longer than on an idle machine a command may take that waits for nothing.
const AT_MOST: Duration = Duration::from_millis(100);
/// How often a command is timed first: the quickest run counts.
const TIMES: usize = 5;

/// A command, and the time that it takes when nothing is in its way.
pub(crate) struct TimedCommand<'a> {
    world: &'a RuntimeFixture,
    arguments: Vec<String>,
    undisturbed: Duration,
}

impl<'a> TimedCommand<'a> {
    pub(crate) fn new(world: &'a RuntimeFixture, arguments: Vec<String>) -> TimedCommand<'a> {
        let mut command = TimedCommand { world, arguments, undisturbed: Duration::MAX };
        command.undisturbed = [(); TIMES].map(|()| command.run()).into_iter().min().expect("it was run");
        command
    }

    fn run(&self) -> Duration {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        let begin = Instant::now();
        self.world.start_larder(&arguments).succeed();
        begin.elapsed()
    }

    /// Fails unless it still takes as long, and a little. What waits is late each time; one slow run may be the
    /// machine's.
    #[track_caller]
    pub(crate) fn assert_as_quick(&self) {
        let mut quickest = Duration::MAX;
        let quick = poll(WAIT_LIMIT, || {
            quickest = quickest.min(self.run());
            (quickest <= self.undisturbed + AT_MOST).then_some(())
        });
        eprintln!("{:?}: {:?} undisturbed, then {quickest:?}", self.arguments, self.undisturbed);
        assert!(
            quick.is_some(),
            "{:?}: {:?} undisturbed, then {quickest:?}",
            self.arguments,
            self.undisturbed
        );
    }
}
