//! Pulls one image into a store: `pull_bench NAME ROOT`. Prints wall time, CPU and peak memory of this process.

use std::time::Instant;

use larder::backend::ProgressReporter;
use larder::reference::Reference;
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::{Store, StoreConfig};

fn main() {
    let mut args = std::env::args().skip(1);
    let (Some(name), Some(root)) = (args.next(), args.next()) else {
        eprintln!("usage: pull_bench NAME ROOT");
        std::process::exit(2);
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    #[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
    let start = Instant::now();
    let pulled = runtime.block_on(async {
        let store = Store::open(std::path::Path::new(&root), StoreConfig::default()).expect("a store");
        let puller = StorePuller::new(
            store,
            RegistryClient::new(RegistryConfig::default()),
            StorePullConfig::default(),
        );
        let name = Reference::parse(&name).expect("an image name");
        puller.pull(&name, None, &ProgressReporter::unwatched()).await
    });
    match pulled {
        Ok(image) => eprintln!("{} in {:.2} s", image.id, start.elapsed().as_secs_f64()),
        Err(error) => {
            eprintln!("{error}: {:?}", std::error::Error::source(&error));
            std::process::exit(1);
        }
    }
}
