//! Every step of a commit, a removal, a load and a recovery, with the power cut or the disk failing at each of them.

use std::error::Error;
use std::io::ErrorKind;

use larder_store::disk::FilesystemSync as _;
use larder_store::fsck::FsckOptions;
use larder_store::store::{RemoveOptions, Store};
use larder_testkit_peers::faulty_disk::{DiskFault, FaultyDisk, UnsyncedData};
use std::sync::Arc;

use crate::help::*;

type CrashResult = Result<(), Box<dyn Error>>;

/// Something that a store does, and how one sees that it did.
struct CrashScenario {
    what: &'static str,
    prepare: fn(&Store),
    run: fn(&FaultyDisk, &Store) -> CrashResult,
    /// Names that must be visible once it is done.
    after: &'static [&'static str],
    /// Names that must be visible as long as it is not.
    before: &'static [&'static str],
}

const KEPT: &str = "docker.io/library/kept:latest";
const APP: &str = "docker.io/library/app:latest";

const SCENARIOS: [CrashScenario; 4] = [
    CrashScenario {
        what: "a commit",
        prepare: |_| (),
        run: |disk, store| {
            let layers = [layer_on(disk, store, "base")?, layer_on(disk, store, "app")?];
            store.commit(&image(&["app"], &layers), noon())?;
            Ok(())
        },
        before: &[KEPT],
        after: &[APP, KEPT],
    },
    CrashScenario {
        what: "a commit that takes a tag from another image",
        prepare: |store| drop(commit(store, "app", &["base", "old"])),
        run: |disk, store| {
            let layers = [layer_on(disk, store, "base")?, layer_on(disk, store, "app")?];
            let new = store.commit(&image(&["app"], &layers), noon())?;
            assert_eq!(store.image("app")?.map(|image| image.id), Some(new.id));
            Ok(())
        },
        before: &[APP, KEPT],
        after: &[APP, KEPT],
    },
    CrashScenario {
        what: "a removal",
        prepare: |store| drop(commit(store, "app", &["base", "app"])),
        run: |_, store| {
            store.remove("app", &RemoveOptions::default())?;
            store.empty_trash()?;
            Ok(())
        },
        before: &[APP, KEPT],
        after: &[KEPT],
    },
    CrashScenario {
        what: "a load: fetched, unpacked and committed",
        prepare: |_| (),
        run: |disk, store| {
            let file = store.ingest(&blob_of("app", 3000))?;
            for at in 0..3 {
                file.write_at(&[7; 1000], at * 1000)?;
            }
            let mut read = Vec::new();
            std::io::Read::read_to_end(&mut file.reader(), &mut read)?;
            assert_eq!(read.len(), 3000);
            file.discard()?;
            let layers = [layer_on(disk, store, "base")?, layer_on(disk, store, "app")?];
            store.commit_layers(&layers, None)?;
            store.commit(&image(&["app"], &layers), noon())?;
            store.empty_trash()?;
            Ok(())
        },
        before: &[KEPT],
        after: &[APP, KEPT],
    },
];

fn open_on(disk: &FaultyDisk) -> Store {
    let store = Store::open_on(Arc::new(disk.clone()), &disk.root().join("store"), config());
    store.unwrap_or_else(|error| panic!("the store opens: {error:?}"))
}

/// Whether everything that is visible is whole.
fn assert_sound(store: &Store, what: &str) {
    let report = store.fsck(&FsckOptions::default()).unwrap();
    assert!(report.is_sound() && report.problems.is_empty(), "{what}: {report:?}");
    for image in store.images().unwrap() {
        for layer in &image.layers {
            assert!(store.layer(&layer.key).unwrap().is_some(), "{what}: {} lacks {}", image.id, layer.key);
        }
    }
}

/// A disk with a store that has one image.
fn prepared(scenario: &CrashScenario) -> FaultyDisk {
    let disk = FaultyDisk::new();
    let store = open_on(&disk);
    commit(&store, "kept", &["base", "kept"]);
    (scenario.prepare)(&store);
    drop(store);
    disk
}

/// A disk like this one, and its store.
fn copy_of(disk: &FaultyDisk) -> (FaultyDisk, Store) {
    let copy = disk.restarted(UnsyncedData::Everything);
    let store = open_on(&copy);
    (copy, store)
}

fn lose_power_everywhere(scenario: &CrashScenario) {
    let prepared = prepared(scenario);
    for survives in
        [UnsyncedData::Nothing, UnsyncedData::Everything, UnsyncedData::Some(1), UnsyncedData::Some(2)]
    {
        for step in 0.. {
            let what = format!("{}, power lost at step {step}, {survives:?} survives", scenario.what);
            let (disk, store) = copy_of(&prepared);
            disk.arm(DiskFault::LosesPowerAt(step));
            let done = (scenario.run)(&disk, &store).is_ok();
            let met = disk.has_failed();
            drop(store);
            let disk = disk.restarted(survives);
            let store = open_on(&disk);
            assert_sound(&store, &what);
            let visible = tags(&store);
            if done {
                assert_eq!(visible, scenario.after, "{what}: it said that it was done");
            } else {
                assert!(visible == scenario.after || visible == scenario.before, "{what}: {visible:?}");
                (scenario.run)(&disk, &store).unwrap_or_else(|error| panic!("{what}: trying again: {error}"));
            }
            drop(store);
            let store = open_on(&disk);
            assert_eq!(tags(&store), scenario.after, "{what}: after trying again");
            assert_sound(&store, &what);
            if !met {
                assert!(step > 3, "{what}: something was done");
                break; // every shorter scenario has been tried
            }
        }
    }
}

fn fail_everywhere(scenario: &CrashScenario, kind: ErrorKind) {
    let prepared = prepared(scenario);
    for step in 0.. {
        let what = format!("{}, {kind:?} at step {step}", scenario.what);
        let (disk, store) = copy_of(&prepared);
        disk.arm(DiskFault::FailsAt(step, kind));
        let done = (scenario.run)(&disk, &store);
        let met = disk.has_failed();
        disk.arm(DiskFault::None);
        // The store continues after the failure, without being reopened.
        let visible = tags(&store);
        if done.is_ok() {
            assert_eq!(visible, scenario.after, "{what}");
        } else {
            assert!(visible == scenario.after || visible == scenario.before, "{what}: {visible:?}");
            (scenario.run)(&disk, &store).unwrap_or_else(|error| panic!("{what}: trying again: {error}"));
        }
        assert_eq!(tags(&store), scenario.after, "{what}: after trying again");
        drop(store);
        let store = open_on(&disk.restarted(UnsyncedData::Everything));
        assert_eq!(tags(&store), scenario.after, "{what}: after a restart");
        assert_sound(&store, &what);
        if !met {
            break;
        }
    }
}

#[test]
fn a_commit_survives_power_loss_at_any_step() {
    lose_power_everywhere(&SCENARIOS[0]);
}

#[test]
fn moving_a_tag_survives_power_loss_at_any_step() {
    lose_power_everywhere(&SCENARIOS[1]);
}

#[test]
fn a_removal_survives_power_loss_at_any_step() {
    lose_power_everywhere(&SCENARIOS[2]);
}

#[test]
fn a_load_survives_power_loss_at_any_step() {
    lose_power_everywhere(&SCENARIOS[3]);
}

/// A disk on which a process died in the middle of everything.
fn debris() -> FaultyDisk {
    let (disk, store) = copy_of(&prepared(&SCENARIOS[0]));
    let left = [layer(&store, "lonely"), layer(&store, "other")];
    let staging = store.begin_layer().unwrap();
    commit(&store, "gone", &["gone"]);
    store.remove("gone", &RemoveOptions::default()).unwrap();
    fs_err::write(store.root().join("blobs/sha256").join(digest("x").hex()), "x").unwrap();
    disk.sync().unwrap();
    let killed = disk.restarted(UnsyncedData::Everything);
    drop((left, staging));
    killed
}

#[test]
fn a_recovery_survives_power_loss_at_any_step() {
    let debris = debris();
    for survives in
        [UnsyncedData::Nothing, UnsyncedData::Everything, UnsyncedData::Some(1), UnsyncedData::Some(2)]
    {
        for step in 0.. {
            let what = format!("a start after a crash, power lost at step {step}, {survives:?} survives");
            let disk = debris.restarted(UnsyncedData::Everything);
            disk.arm(DiskFault::LosesPowerAt(step));
            let opened = Store::open_on(Arc::new(disk.clone()), &disk.root().join("store"), config());
            let emptied = opened.as_ref().is_ok_and(|store| store.empty_trash().is_ok());
            drop(opened);
            let met = disk.has_failed();
            assert!(emptied || met, "{what}");
            let store = open_on(&disk.restarted(survives));
            assert_eq!(tags(&store), [KEPT], "{what}");
            assert_sound(&store, &what);
            store.empty_trash().unwrap();
            assert_eq!(entries(&store.root().join("layers")).len(), 2, "{what}");
            if !met {
                assert!(step > 10, "{what}: something was done");
                break;
            }
        }
    }
}

#[test]
fn any_step_may_fail_without_space_and_be_retried() {
    for scenario in &SCENARIOS {
        fail_everywhere(scenario, ErrorKind::StorageFull);
    }
}

#[test]
fn any_step_may_fail_for_an_error_of_the_disk_and_be_tried_again() {
    for scenario in &SCENARIOS {
        fail_everywhere(scenario, ErrorKind::Other);
    }
}

#[test]
fn making_a_store_survives_power_loss_at_any_step() {
    for survives in
        [UnsyncedData::Nothing, UnsyncedData::Everything, UnsyncedData::Some(1), UnsyncedData::Some(2)]
    {
        for step in 0.. {
            let disk = FaultyDisk::new();
            disk.arm(DiskFault::LosesPowerAt(step));
            let done = Store::open_on(Arc::new(disk.clone()), &disk.root().join("store"), config()).is_ok();
            let met = disk.has_failed();
            let disk = disk.restarted(survives);
            let store = open_on(&disk);
            commit(&store, "app", &["a"]);
            assert_sound(&store, &format!("made, power lost at step {step}"));
            assert!(done || met);
            if !met {
                break;
            }
        }
    }
}

#[test]
fn a_full_disk_is_named_as_such() {
    let mut named = 0;
    let prepared = prepared(&SCENARIOS[0]);
    for step in 0..200 {
        let (disk, store) = copy_of(&prepared);
        let layers = [layer(&store, "base"), layer(&store, "app")];
        disk.arm(DiskFault::FailsAt(step, ErrorKind::StorageFull));
        match store.commit(&image(&["app"], &layers), noon()) {
            Err(error) => {
                assert!(error.is_no_space(), "{error:?}");
                assert!(error.hint().is_some_and(|hint| hint.to_string().contains("larder df")), "{error:?}");
                named += 1;
            }
            Ok(_) if disk.has_failed() => {} // a step that does not matter
            Ok(_) => break,
        }
    }
    assert!(named > 3, "{named}");
}

#[test]
fn a_fetch_resumes_from_what_was_synced_before_the_power_cut() {
    let config = larder_store::store::StoreConfig { ingest_sync: std::time::Duration::ZERO, ..config() };
    let disk = FaultyDisk::new();
    let root = disk.root().join("store");
    let store = Store::open_on(Arc::new(disk.clone()), &root, config).unwrap();
    let file = store.ingest(&blob_of("blob", 8 << 20)).unwrap();
    for at in 0..4 {
        file.write_at(&vec![7; 1 << 20], at << 20).unwrap();
    }
    file.write_at(b"just now", 5 << 20).unwrap();
    drop((file, store));
    for (survives, at_least) in [(UnsyncedData::Nothing, 4 << 20), (UnsyncedData::Everything, (4 << 20) + 8)]
    {
        let store = open_on(&disk.restarted(survives));
        let file = store.ingest(&blob_of("blob", 8 << 20)).unwrap();
        assert!(file.done() >= at_least, "{survives:?}: {}", file.done());
        let mut read = vec![0; 4 << 20];
        std::io::Read::read_exact(&mut file.reader(), &mut read).unwrap();
        assert!(read.iter().all(|byte| *byte == 7), "{survives:?}: what is said to be there is there");
    }
}
