//! Background tasks of a node.

use std::sync::Arc;

use super::{Node, dead_containers};

impl Node {
    /// Runs the background tasks of all parts until dropped.
    pub(crate) async fn run(self: &Arc<Node>) {
        // The first collection waits until it is known what has to stay.
        let first = self.workloads.begin_first_scan();
        let on_runtime = async {
            self.storage.wait_for_runtime().await;
            tokio::join!(self.collection.run(), self.workloads.run(first));
        };
        tokio::join!(
            self.storage.run(),
            on_runtime,
            self.watch_files(),
            self.pulls.run(),
            dead_containers::run(&self.storage, &self.settings),
        );
    }
}
