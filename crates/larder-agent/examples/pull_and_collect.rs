//! Pulls an image into a store, lists what the store has, and frees space if less than a tenth of the disk is free.
//! While it runs, commands such as `larder --root DIR images` work through it.
//!
//! `cargo run -p larder-agent --example pull_and_collect -- DIR IMAGE`

use std::error::Error;
use std::io::{Write as _, stdout};

use larder::gc::{GcGoal, GcPolicy};
use larder_agent::LocalNode;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (root, image) = arguments.next().zip(arguments.next()).ok_or("DIR and IMAGE are required")?;
    let node = LocalNode::open(root).await?;
    let ensured = node.ensure(&image).await?;
    writeln!(stdout(), "{image} is {}", ensured.image_ref)?;
    for image in node.images().await? {
        writeln!(stdout(), "{:>12} bytes  {}", image.size, image.id)?;
    }
    let policy = GcPolicy { high_threshold_percent: 90, low_threshold_percent: 80, ..GcPolicy::default() };
    let report = node.collect(&policy, GcGoal::Thresholds).await?;
    writeln!(stdout(), "removed {} images", report.removed().count())?;
    node.close().await;
    Ok(())
}
