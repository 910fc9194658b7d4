//! Ctrl-C, and the signal that asks a service to end.

use std::process::{Child, Stdio};
use std::time::Duration;

use larder_cri::proto;
use larder_testkit_peers::fake_cri::{CallCounts, Rpc};
use larder_testkit_peers::process::{WAIT_LIMIT, poll, wait_until};
use rustix::io::ioctl_fionread;
use rustix::process::{Pid, Signal, kill_process};

use tokio::time::Instant;

use crate::world::{CliFixture, CliOutput};

/// Waits until the runtime's calls of this kind are as wanted.
fn until(world: &CliFixture, rpc: Rpc, wanted: impl FnMut(CallCounts) -> bool) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(world.cri.until(rpc, wanted));
}

/// Starts larder, and sends it a signal once the runtime is pulling.
fn interrupted(world: &CliFixture, arguments: &[&str], signal: Signal) -> CliOutput {
    world.cri.hang_next(Rpc::PullImage);
    let child: Child = world
        .command(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until(world, Rpc::PullImage, |calls| calls.running == 1);
    kill_process(Pid::from_child(&child), signal).unwrap();
    let run = CliOutput::of(child.wait_with_output().unwrap());
    until(world, Rpc::PullImage, |calls| calls.canceled == 1);
    run
}

#[test]
fn ctrl_c_cancels_the_pull_and_names_what_is_not_finished() {
    let world = CliFixture::new();
    let run = interrupted(&world, &["ensure", "busybox:1.36"], Signal::INT).expect(130);
    assert!(run.stdout.contains("0 present, 0 pulled, 0 failed, 1 unfinished"), "{run:?}");
    assert!(run.stderr.contains("error: interrupted; not finished: busybox:1.36"), "{run:?}");
}

#[test]
fn a_termination_is_as_good_as_ctrl_c() {
    let world = CliFixture::new();
    let run = interrupted(&world, &["pull", "busybox:1.36"], Signal::TERM).expect(130);
    assert!(run.stderr.contains("error: interrupted; not finished: busybox:1.36"), "{run:?}");
}

/// A runtime with so many images, and a manifest that wants all of them, that telling of them fills a pipe.
fn crowded() -> CliFixture {
    let names: Vec<_> = (0..2000).map(|number| format!("registry.example/team/app:{number}")).collect();
    let world = CliFixture::offering(&names.iter().map(String::as_str).collect::<Vec<_>>());
    world.cri.change(|contents| {
        contents.images = contents
            .offers
            .iter()
            .map(|(name, image)| proto::Image { repo_tags: vec![name.clone()], ..image.clone() })
            .collect();
    });
    let containers = names.iter().map(|name| format!("{{name: c, image: '{name}'}}"));
    let containers: Vec<_> = containers.collect();
    world.file(
        "pod.yaml",
        &format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec: {{containers: [{}]}}\n",
            containers.join(", ")
        ),
    );
    world
}

/// larder, once it blocks on a full pipe.
fn blocked(world: &CliFixture, arguments: &[&str]) -> Child {
    let child = world.command(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let pipe = child.stdout.as_ref().unwrap();
    // A line that does not fit is not written in part.
    wait_until("the pipe is full", || ioctl_fionread(pipe).unwrap() > 60_000);
    child
}

#[test]
fn a_command_whose_output_is_not_read_can_be_interrupted() {
    let world = crowded();
    for signal in [Signal::INT, Signal::TERM] {
        let mut child = blocked(&world, &["images", "--no-trunc"]);
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130));
    }
}

#[test]
fn a_second_signal_ends_at_once_what_the_first_could_not() {
    let world = crowded();
    let mut child = blocked(&world, &["ensure", "-f", "pod.yaml"]);
    let began = Instant::now();
    let ended = poll(WAIT_LIMIT, || {
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        child.try_wait().unwrap()
    });
    assert_eq!(ended.unwrap().code(), Some(130));
    assert!(began.elapsed() < Duration::from_millis(2500), "within the time that one signal gives");
}

#[test]
fn one_signal_is_enough_when_output_is_not_read() {
    let world = crowded();
    let mut child = blocked(&world, &["ensure", "-f", "pod.yaml"]);
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let ended = poll(WAIT_LIMIT, || child.try_wait().unwrap());
    assert_eq!(ended.unwrap().code(), Some(130));
}

#[test]
fn the_check_of_a_failing_runtime_can_be_interrupted() {
    for command in ["ensure", "pull"] {
        let world = CliFixture::new();
        world.cri.hold_next(Rpc::Version).release(); // the first call of the connection
        world.cri.hold_next(Rpc::Version).release();
        world.cri.hang_next(Rpc::Version);
        let child = world
            .command(&[command, "busybox:1.36"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        until(&world, Rpc::Version, |calls| calls.started == 3 && calls.running == 1);
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        let run = CliOutput::of(child.wait_with_output().unwrap()).expect(130);
        assert!(
            format!("{run:?}").contains("failed to resolve busybox:1.36"),
            "the failure is printed: {run:?}"
        );
        assert!(!run.stderr.contains("interrupted"), "nothing is unfinished: {run:?}");
    }
}

#[test]
fn a_runtime_that_does_not_answer_can_be_left() {
    let world = CliFixture::new();
    world.cri.hang_next(Rpc::Version);
    let child = world
        .command(&["ensure", "-o", "json", "busybox:1.36"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until(&world, Rpc::Version, |calls| calls.running == 1);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let run = CliOutput::of(child.wait_with_output().unwrap()).expect(130);
    assert_eq!(run.json()["images"][0]["result"], "Unfinished");
    assert!(run.stderr.contains("error: interrupted; not finished: busybox:1.36"), "{run:?}");
}
