//! The power is cut at random moments of a lazy pull, of reads, of the fill and of its end: the filesystem is shut down
//! with some of what was written on the disk and some not, in whatever order, and mounted again.
//!
//! `LARDER_LAZY_CUTS=NUMBER` and `LARDER_CUTS_SEED=NUMBER` cut more often, or at other moments.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use larder_testkit_peers::process::{WAIT_LIMIT, pause, poll};
use larder_testkit_peers::{CutDisk, LoopDisk, LoopFilesystem};
use rustix::fs::Advice;
use rustix::mount::{UnmountFlags, unmount};
use tokio::runtime::Runtime;

use super::*;

const CUTS: u64 = 10;
const READERS: u64 = 3;
/// Time from the start to the cut, at most, in milliseconds.
const LONGEST_RUN: u64 = 700;

/// A machine whose power is cut.
struct CutMachine {
    kind: LoopFilesystem,
    disk: LoopDisk,
    registry: FaultRegistry,
    state: u64,
    boots: u64,
    /// How much was there when the power was cut.
    moments: BTreeMap<&'static str, u64>,
    right: u64,
}

/// The machine while it runs.
struct Boot {
    runtime: Runtime,
    puller: StorePuller,
    keeper: Arc<KeepHere>,
    power: Arc<CutDisk>,
}

/// Counts of the reads of programs before the power is cut, and the wrong ones.
#[derive(Debug, Default)]
struct ReadsBeforeCut {
    is_cut: AtomicBool,
    right: AtomicU64,
    wrong: Mutex<Vec<String>>,
}

impl CutMachine {
    fn new(kind: LoopFilesystem, seed: u64) -> CutMachine {
        let disk = LoopDisk::new(kind, 128, &[]).unwrap();
        let registry = FaultRegistry::start();
        CutMachine { kind, disk, registry, state: seed, boots: 0, moments: BTreeMap::new(), right: 0 }
    }

    fn random(&mut self, below: u64) -> u64 {
        random(&mut self.state) % below
    }

    fn root(&self) -> PathBuf {
        self.disk.path().join("store")
    }

    /// `None` where layers cannot be read before they are complete.
    fn boot(&self, longest_wait: Duration) -> Option<Boot> {
        let (power, runtime) = (CutDisk::of(&self.disk), Runtime::new().unwrap());
        let config = StoreConfig { keep_remnants: true, ..StoreConfig::default() };
        let store = Store::open_on(power.clone(), &self.root(), config).unwrap();
        let (puller, keeper) = (puller_into(store, false), Arc::<KeepHere>::default());
        match runtime.block_on(puller.guard_reads(keeper.clone(), longest_wait)) {
            Ok(before) => assert!(before.lost.is_empty(), "no program survives a power cut"),
            Err(error) => {
                eprintln!("==== SKIPPED, NOT TESTED: {} ====", larder::error_chain(&error));
                return None;
            }
        }
        Some(Boot { runtime, puller, keeper, power })
    }

    /// A new image, which is sent at some speed: with a table of contents, or an ordinary one that was here before.
    /// `None` where layers cannot be read before they are complete.
    fn image(&mut self) -> Option<(Arc<Fixture>, Reference)> {
        let large = (0..4).map(|number| (format!("large{number}"), 250_000));
        let small = (0..40).map(|number| (format!("dir{}/small{number}", number % 5), 700));
        let entries: Vec<_> = large
            .chain(small)
            .map(|(name, size)| TarBuilderEntry::file(name, noise(size, random(&mut self.state))))
            .collect();
        let was_here = self.random(2) == 0;
        let fixture = if was_here {
            let first = TarBuilderEntry::file("first", noise(9_000_000, random(&mut self.state)));
            remnants::gzip_layer("app", &TarBuilder::new().with(first).extend(entries).finish())
        } else {
            Fixture::made("app", &TarBuilder::new().extend(entries).finish())
        };
        let name = fixture.put(&self.registry);
        if was_here {
            let Boot { runtime, puller, .. } = self.boot(LONGEST_WAIT)?;
            let pulled = runtime.block_on(puller.pull(&name, None, &ProgressReporter::unwatched())).unwrap();
            puller.store().remove(pulled.id.as_str(), &RemoveOptions::default()).unwrap().unwrap();
            drop(puller);
            runtime.shutdown_timeout(WAIT_LIMIT);
        }
        let slow = Duration::from_millis([1, 6, 25][usize::try_from(self.random(3)).unwrap()]);
        let blob = FaultTrigger::path(digest(&fixture.blob));
        self.registry.fault(blob, ResponseFault::Trickle(16 << 10, slow));
        Some((Arc::new(fixture), name))
    }

    /// Pulls the image and reads it until the power is cut, and mounts the disk again.
    fn cut(&mut self, boot: Boot, fixture: &Arc<Fixture>, name: &Reference) {
        self.boots += 1;
        let target = self.disk.dir().join(format!("mnt{}", self.boots));
        fs_err::create_dir(&target).unwrap();
        let run = Duration::from_millis(self.random(LONGEST_RUN));
        let Boot { runtime, puller, keeper, power } = boot;
        let reads = Arc::<ReadsBeforeCut>::default();
        let pulling = {
            let (puller, name, target) = (puller.clone(), name.clone(), target.clone());
            runtime.spawn(async move {
                let Ok(image) = puller.pull(&name, None, &ProgressReporter::unwatched()).await else {
                    return;
                };
                let store = puller.store().clone();
                let mount = move || {
                    store
                        .mount(image.id.as_str(), &target, MountOptions::default(), SystemTime::now())
                        .map(drop)
                };
                let _ = tokio::task::spawn_blocking(mount).await;
            })
        };
        let readers: Vec<_> = (0..READERS)
            .map(|_| {
                let (reads, fixture, target) = (Arc::clone(&reads), Arc::clone(fixture), target.clone());
                let mut state = random(&mut self.state);
                std::thread::spawn(move || reads.read(&fixture, &target, &mut state))
            })
            .collect();
        let began = Instant::now();
        while began.elapsed() < run {
            self.write_something_back();
            pause(Duration::from_millis(3));
        }
        *self.moments.entry(moment(&puller)).or_default() += 1;
        reads.is_cut.store(true, Ordering::SeqCst);
        power.cut();
        pulling.abort();
        drop((puller, power));
        runtime.shutdown_timeout(WAIT_LIMIT);
        *keeper.0.lock() = None; // the reads that wait end
        for reader in readers {
            reader.join().unwrap();
        }
        let wrong = reads.wrong.lock();
        assert!(wrong.is_empty(), "{}, boot {}: {wrong:?}", self.kind, self.boots);
        self.right += reads.right.load(Ordering::Relaxed);
        self.power_up();
    }

    /// Writes a part of a file to the disk, or all that the filesystem knows: the kernel does so at any time.
    fn write_something_back(&mut self) {
        if self.random(60) == 0 {
            let _ = self.disk.sync();
        }
        let mut files = Vec::new();
        let mut dirs = vec![self.root()];
        while let Some(dir) = dirs.pop() {
            for entry in fs_err::read_dir(dir).into_iter().flatten().flatten() {
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() && !entry.path().ends_with("lowers") => dirs.push(entry.path()),
                    Ok(kind) if kind.is_file() => files.push(entry.path()),
                    _ => {}
                }
            }
        }
        let Some(chosen) =
            self.random(files.len().max(1) as u64).try_into().ok().and_then(|at: usize| files.get(at))
        else {
            return;
        };
        let Ok(file) = fs_err::File::open(chosen) else { return };
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        let (start, end) = (self.random(length + 1), 1 + self.random(length + 1));
        // It begins to write the range.
        let _ = rustix::fs::fadvise(file.file(), start, std::num::NonZeroU64::new(end), Advice::DontNeed);
    }

    fn power_up(&self) {
        let mounts = fs_err::read_to_string("/proc/self/mountinfo").unwrap();
        let inside =
            |path: &&str| Path::new(path).starts_with(self.disk.dir()) && Path::new(path) != self.disk.path();
        let mounts: Vec<&str> =
            mounts.lines().filter_map(|line| line.split(' ').nth(4)).filter(inside).collect();
        for mount in mounts.into_iter().rev() {
            let _ = unmount(mount, UnmountFlags::DETACH);
        }
        // Another test may have copied the mounts.
        let mounted = poll(WAIT_LIMIT, || self.disk.remount().ok());
        mounted.unwrap_or_else(|| panic!("{}, boot {}: it stays in use", self.kind, self.boots));
        let marker = self.root().join("guard");
        if marker.exists() {
            fs_err::write(marker, "00000000-0000-0000-0000-000000000000 in-use\n").unwrap();
        }
    }

    /// Reads all that is there, with a registry or without, then all of the image, and removes it.
    fn check(&mut self, fixture: &Fixture, name: &Reference) {
        let has_registry = self.random(2) == 0;
        self.registry.clear_faults();
        if !has_registry {
            self.registry.fault(FaultTrigger::path("/"), ResponseFault::Hangup);
        }
        let what =
            format!("{}, boot {}, {}", self.kind, self.boots, if has_registry { "" } else { "no registry" });
        let wait = if has_registry { LONGEST_WAIT } else { Duration::from_millis(100) };
        let boot = self.boot(wait).unwrap();
        let store = boot.puller.store().clone();
        let assert_sound = || {
            let checked = store.fsck(&FsckOptions { contents: true, ..FsckOptions::default() }).unwrap();
            assert!(checked.problems.is_empty(), "{what}: {:?}", checked.problems);
        };
        assert_sound();
        let read_all = |image: &ImageRecord, at: &str| {
            let target = self.disk.dir().join(format!("{at}{}", self.boots));
            fs_err::create_dir_all(&target).unwrap();
            store.mount(image.id.as_str(), &target, MountOptions::default(), SystemTime::now())?;
            let mut outcome = Ok(());
            for (path, content) in fixture.files() {
                match fs_err::read(target.join(&path)) {
                    Ok(read) => assert!(read == content, "{what}: {}", path.display()),
                    Err(error) => {
                        outcome = Err(error);
                        break;
                    }
                }
            }
            store.umount(&target)?;
            outcome.map_err(MountError::Table)
        };
        if let Some(image) = store.image(name.to_string().as_str()).unwrap() {
            let read = || {
                let read = read_all(&image, "first");
                (read.is_ok() || !has_registry).then_some(())
            };
            // Until its table of contents is here again, it is not mounted.
            poll(LONGEST_WAIT, read).unwrap_or_else(|| panic!("{what}: it is not read"));
        }
        self.registry.clear_faults();
        let completed = async {
            loop {
                match boot.puller.completely().pull(name, None, &ProgressReporter::unwatched()).await {
                    Ok(image) => return image,
                    Err(error) if has_registry => panic!("{what}: {}", larder::error_chain(&error)),
                    Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                }
            }
        };
        let image = boot
            .runtime
            .block_on(async { tokio::time::timeout(LONGEST_WAIT, completed).await })
            .expect(&what);
        read_all(&image, "again").unwrap();
        assert_sound();
        store.remove(image.id.as_str(), &RemoveOptions::default()).unwrap();
        drop(store);
        drop(boot.puller);
        boot.runtime.shutdown_timeout(WAIT_LIMIT);
    }
}

impl ReadsBeforeCut {
    /// Reads parts of files, as soon as there are any, until the power is cut.
    fn read(&self, fixture: &Fixture, target: &Path, state: &mut u64) {
        let files = fixture.files();
        while !self.is_cut.load(Ordering::SeqCst) {
            let (path, content) = &files[usize::try_from(random(state)).unwrap() % files.len()];
            let start = usize::try_from(random(state)).unwrap() % content.len();
            let expected = &content[start..content.len().min(start + 4096)];
            let read = || -> io::Result<Vec<u8>> {
                let file = fs_err::File::open(target.join(path))?;
                rustix::fs::fadvise(file.file(), 0, None, Advice::Random)?;
                let mut bytes = vec![0; expected.len()];
                std::os::unix::fs::FileExt::read_exact_at(file.file(), &mut bytes, start as u64)?;
                Ok(bytes)
            };
            match read() {
                _ if self.is_cut.load(Ordering::SeqCst) => return,
                Ok(bytes) if bytes == expected => {
                    self.right.fetch_add(1, Ordering::Relaxed);
                }
                Ok(_) => self.wrong.lock().push(format!("{} from {start} on", path.display())),
                Err(error) if error.kind() == io::ErrorKind::NotFound => pause(Duration::from_millis(2)),
                Err(error) => self.wrong.lock().push(format!("{}: {error}", path.display())),
            }
        }
    }
}

/// How far a pull has come, in a word.
fn moment(puller: &StorePuller) -> &'static str {
    match (puller.store().images().unwrap().is_empty(), &puller.store().filling_layers()[..]) {
        (true, []) => "the metadata",
        (true, _) => "the commit",
        (false, []) => "all is complete",
        (false, [(_, fill), ..]) if fill.filled_bytes == fill.total_bytes => "the completion",
        (false, [(_, fill), ..]) if fill.filled_bytes == 0 => "nothing is filled",
        (false, _) => "the fill",
    }
}

#[test]
fn a_power_cut_lets_no_program_read_a_wrong_byte() {
    let number = |name, default| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (cuts, seed) = (number("LARDER_LAZY_CUTS", CUTS), number("LARDER_CUTS_SEED", 38));
    let mut kinds = vec![LoopFilesystem::Ext4, LoopFilesystem::Xfs];
    kinds.retain(|kind| kind.is_available() && LoopFilesystem::Xfs.is_available());
    for kind in kinds {
        let mut machine = CutMachine::new(kind, seed);
        let mut done = 0;
        while done < cuts / 2 {
            let Some((fixture, name)) = machine.image() else { return };
            // Some cuts come while a fill goes on that another cut has met.
            loop {
                let Some(boot) = machine.boot(LONGEST_WAIT) else { return };
                machine.cut(boot, &fixture, &name);
                done += 1;
                if machine.random(3) > 0 {
                    break;
                }
            }
            machine.check(&fixture, &name);
        }
        eprintln!("{kind}: {done} power cuts, {} reads were right: {:?}", machine.right, machine.moments);
    }
}
