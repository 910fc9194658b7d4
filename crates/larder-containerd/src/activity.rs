//! Uses of images that begin and end between two looks: the containers that containerd creates.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use larder::backend::{BackendError, Image};
use larder::gc::{ActivityFeed, ActivityKind, ImageActivity, UnixMillis};
use larder_cri::channel::CriChannel;
use parking_lot::Mutex;
use prost::Message as _;
use tonic::{Code, Status};

use crate::NAMESPACE;
use crate::client::ContainerdClient;
use crate::proto::events::{ContainerCreate, Envelope};

/// Time between the end of a stream of events and the next one.
const PAUSE: Duration = Duration::from_secs(1);

/// How long a use is retained whose image is not listed: the list may be older than the image.
const UNLISTED: Duration = Duration::from_secs(60);

/// Follows the containers that containerd creates in the namespace of CRI. Other runtimes report none.
pub struct ContainerdActivity {
    client: ContainerdClient,
    /// When a container was last created from an image, by the name that containerd has for it.
    used: Mutex<HashMap<String, UnixMillis>>,
}

impl ContainerdActivity {
    /// Over this connection; `timeout` limits the beginning of a stream.
    pub fn new(channel: CriChannel, timeout: Duration) -> ContainerdActivity {
        ContainerdActivity { client: ContainerdClient::new(channel, timeout), used: Mutex::default() }
    }

    async fn listen(&self) -> Result<(), Status> {
        let filter = format!("namespace==\"{NAMESPACE}\",topic==\"/containers/create\"");
        let mut events = self.client.within_limit(self.client.subscribe(filter)).await?;
        while let Some(event) = events.message().await? {
            self.used.lock().extend(created_from(&event));
        }
        Ok(())
    }
}

/// The image of a created container, and when it was created.
fn created_from(event: &Envelope) -> Option<(String, UnixMillis)> {
    let ContainerCreate { image } = ContainerCreate::decode(&*event.event.as_ref()?.value).ok()?;
    let at = SystemTime::try_from(event.timestamp?).ok()?;
    (!image.is_empty()).then(|| (image, at.into()))
}

#[async_trait]
impl ActivityFeed for ContainerdActivity {
    async fn take_activity(&self, images: &[Image]) -> Result<Vec<ImageActivity>, BackendError> {
        let mut used = self.used.lock();
        let mut activity = Vec::new();
        for image in images {
            let names = image.repo_tags.iter().chain(&image.repo_digests).map(String::as_str);
            for name in names.chain([image.id.as_str()]) {
                let found = used.remove(name);
                activity.extend(found.map(|at| ImageActivity {
                    image: image.id.clone(),
                    at,
                    what: ActivityKind::Used,
                }));
            }
        }
        let now = UnixMillis::from(SystemTime::now());
        used.retain(|_, at| now.since(*at) < UNLISTED);
        Ok(activity)
    }

    /// Follows containerd through its restarts.
    async fn follow(&self) {
        loop {
            match self.listen().await {
                Err(status) if status.code() == Code::Unimplemented => return,
                Err(status) => tracing::debug!("containerd's events: {}", self.client.error(&status)),
                Ok(()) => {}
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}
