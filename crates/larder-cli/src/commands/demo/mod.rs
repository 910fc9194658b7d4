//! `larder demo`: the tool shows itself, in a temporary directory, without root or network.
//!
//! ```text
//! images (generated) -> registry (loopback, notes what it serves) -> steps (real commands, each checked) -> clean-up
//! ```
//!
//! Promises: each command is run as a user's would be; what is said of it was measured; a step that does not hold ends
//! the demo with an error that names it; the directory is gone in the end, also after a failure and an interrupt. After
//! a second interrupt, or when the demo is killed, the next one removes it.

mod images;
mod registry;
mod runner;
mod scratch_dir;
mod steps;

use std::env;
use std::path::Path;
use std::sync::Arc;

use tokio::time::Instant;

use crate::args::{DemoArgs, GlobalFlags};
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output::size;
use crate::printer::Printer;
use runner::DemoRunner;
use scratch_dir::ScratchDir;

/// Commands to type after the demo.
const NEXT: [(&str, &str); 3] = [
    ("larder pull docker.io/library/busybox:1.36", "pull an image into a store of your own"),
    ("larder images", "list it: age, last use, size"),
    ("larder prune -a", "remove what nothing uses; it asks first"),
];

pub(super) fn run(
    args: &DemoArgs,
    connection: &GlobalFlags,
    out: &Arc<Printer>,
) -> Result<CommandOutcome, Failure> {
    if connection.backend.is_some() || (connection.root.is_some() && !connection.root_is_of_variable) {
        return Err(Failure::bad_input("--backend and --root conflict with the demo's own store"));
    }
    let started = Instant::now();
    let cannot = |verb, error| Failure::failed(format!("cannot {verb} a temporary directory: {error}"));
    let dead = scratch_dir::remove_dead(&env::temp_dir());
    if dead > 0 {
        out.info(format_args!("note: removed the directories of {dead} killed demos"));
    }
    let dir =
        ScratchDir::new().map_err(|error| cannot("create", error).hint("set TMPDIR to another directory"))?;
    let home = env::current_dir();
    // So that the commands shown are those that are run.
    env::set_current_dir(dir.path()).map_err(|error| cannot("enter", error))?;
    // Its threads work in the directory; they have ended when this returns.
    let played =
        super::block_on(async |interrupt| play(dir.path(), out, DemoRunner::new(out, interrupt)).await);
    if let Ok(home) = home {
        let _ = env::set_current_dir(home); // nothing is left to do there
    }
    let place = dir.path().display().to_string();
    if args.keep {
        let kept = dir.keep().map_err(|error| cannot("keep", error))?;
        out.line(format_args!("\nkept {}; try larder --root {0}/store images", kept.display()));
    } else {
        dir.close().map_err(|error| cannot("remove", error))?;
        if played.is_ok() {
            out.line(format_args!("\nremoved {place}"));
        } else {
            out.info(format_args!("removed {place}"));
        }
    }
    played?;
    out.line(format_args!("all steps passed in {}", size::duration(started.elapsed())));
    out.line("");
    out.heading("Next, with images of your own:");
    for (command, purpose) in NEXT {
        out.line(format_args!("  {command:<45}{purpose}"));
    }
    Ok(CommandOutcome::Done)
}

async fn play(dir: &Path, out: &Printer, mut stage: DemoRunner) -> Result<CommandOutcome, Failure> {
    out.line(format_args!("All commands run in {} with --root store.", dir.display()));
    steps::all(&mut stage).await?;
    Ok(CommandOutcome::Done)
}
