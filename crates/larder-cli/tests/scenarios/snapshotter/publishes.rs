//! Pulls and restarts change in containerd what it lacks, and nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use larder_containerd::ContainerdImages;
use larder_cri::Endpoint;
use larder_cri::channel::CriChannel;
use larder_testkit_peers::LayerFiles;
use larder_testkit_peers::containerd::pods::pause_image;
use larder_testkit_peers::process::{WAIT_LIMIT, pause, wait_until};
use tokio::runtime::{self, Runtime};
use tokio::task::JoinHandle;

use super::SnapshotterFixture;

/// How long no further change may come.
const QUIET: Duration = Duration::from_millis(700);

/// Counts the changes of containerd's images.
struct ChangeCounter {
    _runtime: Runtime,
    /// Ends if the changes are not, or no longer, received.
    receiver: JoinHandle<()>,
    count: Arc<AtomicUsize>,
}

impl ChangeCounter {
    fn of(fixture: &SnapshotterFixture) -> ChangeCounter {
        let runtime = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let channel = CriChannel::new(Endpoint::at(fixture.containerd.socket()), WAIT_LIMIT);
        // The limit of other calls: a subscription has none.
        let images = ContainerdImages::new(channel, QUIET / 2);
        let count = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&count);
        let receiver = runtime.spawn(async move {
            let mut changes = images.changes();
            while changes.next().await {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        pause(QUIET);
        ChangeCounter { _runtime: runtime, receiver, count }
    }

    /// The changes since the last call, once no further one follows.
    fn take(&self) -> usize {
        loop {
            let before = self.count.load(Ordering::Relaxed);
            pause(QUIET);
            if self.count.load(Ordering::Relaxed) == before {
                assert!(!self.receiver.is_finished(), "containerd's changes are not received");
                return self.count.swap(0, Ordering::Relaxed);
            }
        }
    }
}

#[test]
fn a_pull_publishes_the_name_that_containerd_lacks_and_no_other() {
    let Some(fixture) = SnapshotterFixture::new("k8s.io") else { return };
    let names: Vec<_> = (1..=6).map(|tag| format!("shop/web:{tag}")).collect();
    let pull = |name: &str| {
        pause_image().push(&fixture.world.registry, name).unwrap();
        fixture.daemon().pull(&fixture.world.registry.image(name)).unwrap();
    };
    names[..5].iter().for_each(|name| pull(name));
    let changes = ChangeCounter::of(&fixture);
    pull(&names[5]);
    assert_eq!(changes.take(), 1, "the new name");
    pull(&names[5]);
    pull(&names[0]);
    assert_eq!(changes.take(), 0, "containerd has all of it");

    // A pull of a name that another program has moved or removed.
    let other = pause_image().layer(LayerFiles::new().noise("srv/other", 1000, 1));
    other.push(&fixture.world.registry, "shop/other:1").unwrap();
    let [web, other] = ["shop/web:1", "shop/other:1"].map(|name| fixture.world.registry.image(name));
    fixture.daemon().pull(&other).unwrap();
    let target = |name: &str| {
        let listed = fixture.ctr(&["images", "ls", &format!("name=={name}")]);
        listed.lines().nth(1).and_then(|line| line.split_whitespace().nth(2)).map(str::to_owned)
    };
    let before = target(&web);
    assert!(before.is_some());
    fixture.ctr(&["images", "tag", "--force", &other, &web]);
    assert_ne!(target(&web), before);
    pull("shop/web:1");
    assert_eq!(target(&web), before);
    fixture.ctr(&["images", "rm", &web]);
    pull("shop/web:1");
    assert_eq!(target(&web), before);
}

#[test]
fn the_first_list_after_a_restart_has_all_images_and_none_is_published_again() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    for number in 0..8 {
        let name = format!("shop/app{number}:1");
        let image = pause_image().layer(LayerFiles::new().noise("srv/data", 1000, number));
        image.push(&fixture.world.registry, &name).unwrap();
        fixture.daemon().pull(&fixture.world.registry.image(&name)).unwrap();
    }
    let changes = ChangeCounter::of(&fixture);
    fixture.kill_larder();
    fixture.start_larder();
    assert_eq!(fixture.daemon().list().len(), 8);
    assert_eq!(changes.take(), 0);
}

#[test]
fn a_pull_whose_containerd_is_being_restarted_publishes_once_it_is_back() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    let web = fixture.world.registry.image("shop/web:1");
    pause_image().push(&fixture.world.registry, "shop/web:1").unwrap();
    fixture.daemon().list();
    fixture.containerd.stop();
    let records = fixture.world.place().join("images");
    let daemon = fixture.daemon.as_ref().expect("larder runs");
    thread::scope(|scope| {
        let pull = scope.spawn(|| daemon.pull(&web));
        wait_until("the image is committed", || {
            fs_err::read_dir(&records).is_ok_and(|found| found.count() > 0)
        });
        pause(QUIET);
        assert!(!pull.is_finished(), "it waits");
        fixture.containerd.start_again().unwrap();
        pull.join().expect("no panic").unwrap();
    });
    assert!(fixture.ctr(&["images", "ls", "-q"]).lines().any(|name| name == web));
}
