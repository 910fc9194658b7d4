//! A node agent of one's own: it pulls an image into a store, as larder's settings say, and says what the store holds.
//! While it runs, commands such as `larder --root DIR images` work through it.
//!
//! `cargo run -p larder-agent --example embed -- DIR IMAGE`

use std::error::Error;
use std::io::Write as _;
use std::sync::Arc;

use larder::events::LogSink;
use larder::pod::Pod;
use larder::pull::{EnsureRequest, PullPolicy};
use larder_agent::backend::{OpenMode, RuntimeRequirement};
use larder_agent::client::EnsureSession;
use larder_agent::config::{self, SettingOrigin, SettingsSource, SettingsSources};
use larder_agent::environment::DefaultPaths;
use larder_agent::node::{Node, NodeOptions, StateDirAccess};
use larder_agent::serve::CommandServer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (value, image) = arguments.next().zip(arguments.next()).ok_or("DIR and IMAGE are required")?;
    let root = SettingsSource::Given { by: SettingOrigin::Default, key: "root", value };
    let sources = SettingsSources { places: DefaultPaths::current(), layers: vec![root] };
    let settings = config::load(&sources)?;
    let options = NodeOptions {
        store: OpenMode::Create,
        runtime: RuntimeRequirement::Require,
        state: StateDirAccess::Exclusive,
        logs_events: true,
        verbosity: tracing::Level::INFO,
    };
    let server = CommandServer::start(
        Node::open(sources, settings, None, options).map_err(larder_agent::Error::from)?,
    );
    let pulls = EnsureSession::new(server.client(), None, Arc::new(LogSink), false);
    let ensured = pulls.ensure(&EnsureRequest::new(image, PullPolicy::IfNotPresent, Pod::default())).await?;
    let images = server.client().images().await?.len();
    writeln!(std::io::stdout(), "{}, one of {images}", ensured.image_ref)?;
    server.close(|joined| tracing::info!("waiting for {joined} commands")).await;
    Ok(())
}
