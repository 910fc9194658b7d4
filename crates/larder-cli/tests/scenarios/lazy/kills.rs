//! Processes of larder, and readers, are killed at random moments while programs read layers that are not complete.
//!
//! `LARDER_LAZY_KILLS=NUMBER` and `LARDER_KILLS_SEED=NUMBER` kill more, or others.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::chunked_layer::{ChunkedFormat, ChunkedLayer};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault, digest};
use larder_testkit_peers::process::{pause, poll};
use parking_lot::Mutex;
use rustix::fs::Advice;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::time::Instant;

use super::{WAIT_LIMIT, is_ready, larder, put_image, serve, start, start_daemon, write_config};
use crate::kills::{number, random};
use crate::store::may_mount;
use crate::world::LarderProcess;

const KILLS: u64 = 25;
const SEED: u64 = 38;

const FILES: u64 = 12;
const FILE_BYTES: usize = 300_000;
const BLOCK: usize = 4096;
const READERS: u64 = 6;
/// Kills while one image is filled, at least, and those that may follow.
const KILLS_OF_IMAGE: (u64, u64) = (4, 6);
/// Time from one kill to the next, at most.
const LONGEST_PAUSE: u64 = 400;

/// Process that is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    Daemon,
    /// The process that holds the group and answers larder.
    Holder,
    /// The daemon and the holder at once.
    Both,
    /// The daemon, the holder and the holder's twin at once: nothing guards the reads then.
    All,
    /// A pull of another image, which the daemon runs.
    Pull,
    /// A program that reads.
    Reader,
}

impl Victim {
    fn choose(state: &mut u64) -> Victim {
        match random(state) % 40 {
            0 => Victim::All,
            1..=4 => Victim::Both,
            5..=8 => Victim::Holder,
            9..=12 => Victim::Pull,
            13..=16 => Victim::Reader,
            _ => Victim::Daemon,
        }
    }
}

/// An image whose files are known.
struct KnownImage {
    name: String,
    files: Vec<Vec<u8>>,
}

impl KnownImage {
    /// Puts an image into the registry that is sent slowly.
    fn put(registry: &FaultRegistry, tag: u64) -> KnownImage {
        let noise = |file: u64| {
            let mut state = tag << 8 | file | 1 << 40;
            let words = std::iter::repeat_with(|| random(&mut state).to_le_bytes());
            words.flatten().take(FILE_BYTES).collect::<Vec<u8>>()
        };
        let files: Vec<Vec<u8>> = (0..FILES).map(noise).collect();
        let entries = files
            .iter()
            .enumerate()
            .map(|(number, content)| TarBuilderEntry::file(format!("file{number}"), content.clone()));
        let archive = TarBuilder::new().extend(entries).finish();
        let layer = ChunkedLayer::new(&archive, ChunkedFormat::ZstdChunked, 32 << 10);
        let slow = ResponseFault::Trickle(16 << 10, Duration::from_millis(40));
        registry.fault(FaultTrigger::path(digest(&layer.blob)), slow);
        KnownImage { name: put_image(registry, &layer, &tag.to_string()), files }
    }
}

/// Reads of one mount.
#[derive(Debug, Default)]
struct Reads {
    stop: AtomicBool,
    right: AtomicU64,
    failed: Mutex<Vec<String>>,
    /// When each ended.
    wrong: Mutex<Vec<(Instant, String)>>,
}

/// A mounted image, and the threads that read it.
struct ReadMount {
    target: PathBuf,
    reads: Arc<Reads>,
    readers: Vec<JoinHandle<()>>,
}

impl ReadMount {
    fn begin(trial: &KillTrial, image: &Arc<KnownImage>, state: &mut u64) -> ReadMount {
        let target = trial.path(&format!("mnt{}", random(state)));
        fs_err::create_dir(&target).unwrap();
        trial.larder(&["mount", &image.name, &target.display().to_string()]);
        let reads = Arc::<Reads>::default();
        let reader = |_| {
            let (target, image, reads) = (target.clone(), Arc::clone(image), Arc::clone(&reads));
            let mut state = random(state);
            std::thread::spawn(move || {
                while !reads.stop.load(Ordering::Relaxed) {
                    read_somewhere(&target, &image, &reads, &mut state);
                    pause(Duration::from_millis(1));
                }
            })
        };
        let readers = (0..READERS).map(reader).collect();
        ReadMount { target, reads, readers }
    }

    /// Waits until no thread reads any more.
    fn stop(&mut self) {
        self.reads.stop.store(true, Ordering::Relaxed);
        let ended = || self.readers.iter().all(JoinHandle::is_finished).then_some(());
        poll(WAIT_LIMIT, ended).expect("a read hangs");
        self.readers.drain(..).for_each(|reader| reader.join().unwrap());
    }

    fn read_all(&self, image: &KnownImage) {
        for (number, content) in image.files.iter().enumerate() {
            let read = fs_err::read(self.target.join(format!("file{number}")));
            assert!(read.unwrap() == *content, "{}: file{number} is wrong", image.name);
        }
    }
}

fn read_somewhere(target: &Path, image: &KnownImage, reads: &Reads, state: &mut u64) {
    let index = |below: usize, state: &mut u64| usize::try_from(random(state)).unwrap_or(0) % below;
    let number = index(image.files.len(), state);
    let content = &image.files[number];
    let (start, length) = if random(state).is_multiple_of(16) {
        (0, content.len())
    } else {
        let start = index(content.len() / BLOCK, state) * BLOCK;
        (start, BLOCK.min(content.len() - start))
    };
    let read = || -> std::io::Result<Vec<u8>> {
        let file = fs_err::File::open(target.join(format!("file{number}")))?.into_parts().0;
        rustix::fs::fadvise(&file, 0, None, Advice::Random)?;
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, start as u64)?;
        // So that it is asked for again.
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
        Ok(bytes)
    };
    let place = format!("{} file{number} from {start} on, {length} bytes", image.name);
    match read() {
        Ok(bytes) if bytes == content[start..start + length] => {
            reads.right.fetch_add(1, Ordering::Relaxed);
        }
        Ok(_) => reads.wrong.lock().push((Instant::now(), place)),
        Err(error) => reads.failed.lock().push(format!("{place}: {error}")),
    }
}

/// Processes that this one has started and that have not ended.
fn children(of: Pid) -> Vec<Pid> {
    let path = format!("/proc/{0}/task/{0}/children", of.as_raw_pid());
    let list = fs_err::read_to_string(path).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

struct KillTrial {
    home: TempDir,
    registry: FaultRegistry,
    daemon: LarderProcess,
    kills: BTreeMap<Victim, u64>,
    lost: u64,
    read: u64,
    failed: Vec<String>,
    /// Wrong reads of mounts that larder has then named.
    named: usize,
}

impl KillTrial {
    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn larder(&self, arguments: &[&str]) -> String {
        larder(self.home.path(), arguments).expect(0).stdout
    }

    fn start_daemon(&mut self) {
        self.daemon = start_daemon(self.home.path());
    }

    fn wait_for_daemon(&self) {
        let serves = || (larder(self.home.path(), &["status"]).code == 0).then_some(());
        poll(WAIT_LIMIT, serves).unwrap_or_else(|| panic!("it does not serve: {}", self.daemon.stderr()));
    }

    fn kill_daemon(&mut self) {
        self.daemon.signal(Signal::KILL);
        self.start_daemon();
    }

    /// The process that holds the group and answers larder.
    fn holder(&self) -> Option<Pid> {
        let stream = UnixStream::connect(self.path("store/group.sock")).ok()?;
        Some(socket_peercred(&stream).ok()?.pid)
    }

    fn is_incomplete(&self) -> bool {
        let status: serde_json::Value =
            serde_json::from_str(&self.larder(&["status", "-o", "json"])).unwrap();
        status["lazyPulls"]["incompleteLayers"].as_u64().unwrap_or(0) > 0
    }

    /// Kills, and waits until reads are safe again.
    fn kill(&mut self, victim: Victim, image: &KnownImage, mount: &ReadMount, state: &mut u64) {
        let moment = Duration::from_millis(random(state) % 100);
        match victim {
            Victim::Daemon => self.kill_daemon(),
            Victim::Holder => {
                self.wait_for_daemon();
                let Some(holder) = self.holder() else { return };
                kill_process(holder, Signal::KILL).unwrap();
                let is_kept = || self.holder().is_some_and(|other| other != holder) || !self.is_incomplete();
                poll(WAIT_LIMIT, || is_kept().then_some(())).expect("another holder");
            }
            Victim::Both | Victim::All => {
                let Some(holder) = self.holder() else { return };
                let mut processes = vec![holder];
                if victim == Victim::All {
                    // It starts no other twin.
                    kill_process(holder, Signal::STOP).unwrap();
                    processes.extend(children(holder));
                }
                for process in processes.iter().rev() {
                    kill_process(*process, Signal::KILL).unwrap();
                }
                self.kill_daemon();
                *self.kills.entry(victim).or_default() += processes.len() as u64;
            }
            Victim::Pull => {
                start(self.home.path(), &["pull", &image.name]).kill_after(moment);
            }
            Victim::Reader => {
                let file = mount.target.join(format!("file{}", random(state) % FILES));
                let mut reader = Command::new("cat").arg(file).stdout(Stdio::null()).spawn().unwrap();
                pause(moment);
                reader.kill().unwrap();
                reader.wait().unwrap();
            }
        }
        *self.kills.entry(victim).or_default() += 1;
    }

    /// Compares what was read. After `lost`, nothing guarded the reads for a while: larder then has to name the mount.
    fn end(&mut self, mount: &mut ReadMount, lost: Option<Instant>) {
        mount.stop();
        let wrong = std::mem::take(&mut *mount.reads.wrong.lock());
        let early: Vec<_> = wrong.iter().filter(|(at, _)| lost.is_none_or(|lost| *at < lost)).collect();
        assert!(early.is_empty(), "wrong bytes after {:?}: {early:?}", self.kills);
        let target = mount.target.display().to_string();
        if !wrong.is_empty() {
            let warnings = self.larder(&["status"]);
            assert!(warnings.contains(&target), "{target} is not named: {wrong:?}\n{warnings}");
        }
        self.named += wrong.len();
        self.read += mount.reads.right.load(Ordering::Relaxed);
        self.failed.append(&mut mount.reads.failed.lock());
        // The record stays if another test has copied the mount.
        larder(self.home.path(), &["umount", &target]);
        let mounts = fs_err::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(&target), "{target} stays mounted");
    }

    fn kill_while_an_image_is_read(&mut self, tag: u64, state: &mut u64) {
        let image = Arc::new(KnownImage::put(&self.registry, tag));
        self.larder(&["pull", &image.name]);
        let mut mount = ReadMount::begin(self, &image, state);
        for _ in 0..KILLS_OF_IMAGE.0 + random(state) % KILLS_OF_IMAGE.1 {
            pause(Duration::from_millis(random(state) % LONGEST_PAUSE));
            let (victim, began) = (Victim::choose(state), Instant::now());
            self.kill(victim, &image, &mount, state);
            if victim == Victim::All {
                self.lost += 1;
                self.wait_for_daemon();
                self.end(&mut mount, Some(began));
                mount = ReadMount::begin(self, &image, state);
            }
        }
        self.registry.clear_faults();
        self.wait_for_daemon();
        self.larder(&["complete", &image.name]);
        mount.read_all(&image);
        self.end(&mut mount, None);
        // It is removed unless a record of a mount has stayed.
        larder(self.home.path(), &["rm", "--force", &image.name]);
    }
}

/// Each byte that a program reads is right, or larder names its mount.
#[test]
fn kills_let_no_program_read_a_wrong_byte() {
    if !may_mount() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    write_config(home.path());
    let daemon = serve(home.path());
    if !is_ready(home.path()) {
        return;
    }
    let (kills, mut state) = (number("LARDER_LAZY_KILLS", KILLS), number("LARDER_KILLS_SEED", SEED));
    let mut trial = KillTrial {
        home,
        registry: FaultRegistry::start(),
        daemon,
        kills: BTreeMap::new(),
        lost: 0,
        read: 0,
        failed: Vec::new(),
        named: 0,
    };
    let mut tag = 0;
    while trial.kills.values().sum::<u64>() < kills {
        tag += 1;
        trial.kill_while_an_image_is_read(tag, &mut state);
    }
    trial.daemon.signal(Signal::TERM);
    let KillTrial { home, daemon, kills, lost, read, failed, named, .. } = trial;
    daemon.finish().expect(0);
    larder(home.path(), &["fsck"]).expect(0);
    eprintln!(
        "{kills:?}, {tag} images: {read} reads were right, {} failed, {named} were wrong while nothing guarded \
         them ({lost} times)",
        failed.len()
    );
    assert!(failed.is_empty() && read > 0, "{failed:?}");
}
