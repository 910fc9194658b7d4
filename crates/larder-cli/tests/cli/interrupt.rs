//! Ctrl-C.

use std::process::{Child, Stdio};

use larder_testkit::fake_cri::Rpc;
use rustix::process::{Pid, Signal, kill_process};

use crate::world::{Run, World};

/// Starts larder, and sends it a signal once the runtime is pulling.
fn interrupted(world: &World, arguments: &[&str], signal: Signal) -> Run {
    world.cri.hang_next(Rpc::PullImage);
    let child: Child = world
        .command(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(world.cri.until(Rpc::PullImage, |calls| calls.running == 1));
    kill_process(Pid::from_child(&child), signal).unwrap();
    let run = Run::of(child.wait_with_output().unwrap());
    runtime.block_on(world.cri.until(Rpc::PullImage, |calls| calls.cancelled == 1));
    run
}

#[test]
fn ctrl_c_cancels_the_pull_and_names_what_is_not_finished() {
    let world = World::new();
    let run = interrupted(&world, &["ensure", "busybox:1.36"], Signal::INT).expect(130);
    assert!(run.stdout.contains("0 present, 0 pulled, 0 failed, 1 unfinished"), "{run:?}");
    assert!(run.stderr.contains("error: interrupted; not finished: busybox:1.36"), "{run:?}");
}

#[test]
fn a_termination_is_as_good_as_ctrl_c() {
    let world = World::new();
    let run = interrupted(&world, &["pull", "busybox:1.36"], Signal::TERM).expect(130);
    assert!(run.stderr.contains("error: interrupted; not finished: busybox:1.36"), "{run:?}");
}
