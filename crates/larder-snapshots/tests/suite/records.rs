//! Cases about kinds, parents, labels, lists and errors.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use larder_snapshots::proto::{Info, Kind};
use tonic::Code;

use crate::world::{MountedSnapshot, SuiteWorld};

fn time(at: Option<prost_types::Timestamp>) -> SystemTime {
    let at = at.unwrap();
    UNIX_EPOCH + Duration::new(at.seconds.try_into().unwrap(), at.nanos.try_into().unwrap())
}

/// Committed `c1` and `c2` on it, active `a1` on that and `a2`, views `v1` on it and `v2`.
fn base_snapshots(world: &SuiteWorld) {
    world.prepare("c1-a", "").unwrap();
    world.commit("c1", "c1-a").unwrap();
    world.prepare("c2-a", "c1").unwrap();
    world.commit("c2", "c2-a").unwrap();
    world.prepare("a1", "c2").unwrap();
    world.prepare("a2", "").unwrap();
    world.view("v1", "c2").unwrap();
    world.view("v2", "").unwrap();
}

const BASE: [(&str, Kind, &str); 6] = [
    ("c1", Kind::Committed, ""),
    ("c2", Kind::Committed, "c1"),
    ("a1", Kind::Active, "c2"),
    ("a2", Kind::Active, ""),
    ("v1", Kind::View, "c2"),
    ("v2", Kind::View, ""),
];

#[test]
fn stat_active_and_committed() {
    let Some(world) = SuiteWorld::new() else { return };
    world.prepare("active", "").unwrap();
    let active = world.stat("active").unwrap();
    assert_eq!((active.name.as_str(), active.parent.as_str(), active.kind()), ("active", "", Kind::Active));
    world.commit("committed", "active").unwrap();
    let committed = world.stat("committed").unwrap();
    assert_eq!((committed.name.as_str(), committed.kind()), ("committed", Kind::Committed));
    assert_eq!(world.stat("active").unwrap_err().code(), Code::NotFound);
}

#[test]
fn transitivity() {
    let Some(world) = SuiteWorld::new() else { return };
    world.layer("a", "", |_| ());
    world.layer("b", "a", |_| ());
    assert_eq!(world.stat("b").unwrap().parent, "a");
    assert_eq!(world.stat("a").unwrap().parent, "");
}

#[test]
fn prepare_and_view_of_a_key_in_use_fail() {
    let Some(world) = SuiteWorld::new() else { return };
    world.layer("base", "", |_| ());
    world.prepare("key", "base").unwrap();
    assert_eq!(world.view("key", "base").unwrap_err().code(), Code::AlreadyExists);
    assert_eq!(world.prepare("key", "base").unwrap_err().code(), Code::AlreadyExists);
    world.view("view", "base").unwrap();
    assert_eq!(world.view("view", "base").unwrap_err().code(), Code::AlreadyExists);
}

#[test]
fn errors_have_containerds_codes() {
    let Some(world) = SuiteWorld::new() else { return };
    base_snapshots(&world);
    let code = |answer: Result<(), tonic::Status>| answer.unwrap_err().code();
    assert_eq!(code(world.prepare("x", "none").map(drop)), Code::NotFound, "unknown parent");
    assert_eq!(code(world.prepare("x", "a1").map(drop)), Code::InvalidArgument, "parent is not committed");
    assert_eq!(code(world.prepare("", "").map(drop)), Code::InvalidArgument, "no key");
    assert_eq!(code(world.mounts("none").map(drop)), Code::NotFound);
    assert_eq!(
        code(world.mounts("c1").map(drop)),
        Code::FailedPrecondition,
        "committed ones are not mounted"
    );
    assert_eq!(code(world.commit("x", "none")), Code::NotFound);
    assert_eq!(code(world.commit("x", "v1")), Code::FailedPrecondition, "not active");
    assert_eq!(code(world.commit("c1", "a1")), Code::AlreadyExists);
    assert_eq!(code(world.remove("none")), Code::NotFound);
    assert_eq!(code(world.usage("none").map(drop)), Code::NotFound);
    assert_eq!(code(world.list(&["=="]).map(drop)), Code::InvalidArgument);
    let long = "x".repeat(4096);
    assert_eq!(code(world.prepare_with("x", "", &[("l", &long)]).map(drop)), Code::InvalidArgument);
    let odd = "k8s.io/7/ä ö\n\"../..,:=\\";
    world.prepare(odd, "c2").unwrap();
    assert_eq!(world.stat(odd).unwrap().parent, "c2");
    world.commit("odd", odd).unwrap();
}

#[test]
fn update() {
    let Some(world) = SuiteWorld::new() else { return };
    let before = SystemTime::now();
    base_snapshots(&world);
    for (name, kind, parent) in BASE {
        let info = world.stat(name).unwrap();
        assert!(time(info.created_at) >= before && time(info.created_at) <= SystemTime::now());
        assert_eq!(info.created_at, info.updated_at, "{name}");
        assert_eq!((info.kind(), info.parent.as_str()), (kind, parent), "{name}");
        let labels = |labels: &[(&str, &str)]| {
            labels.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
        };
        let wanted = Info {
            parent: "doesnotexist".into(),
            labels: labels(&[("l1", "v1"), ("l2", "v2"), ("l3", "v3")]),
            ..info.clone()
        };
        let changed = world.update(wanted.clone(), &[]).unwrap();
        assert_eq!((changed.created_at, &changed.parent), (info.created_at, &info.parent), "{name}");
        assert!(time(changed.updated_at) > time(info.updated_at));
        assert_eq!(changed.labels, wanted.labels);
        let some = Info { labels: labels(&[("l1", "updated"), ("l4", "v4")]), ..changed.clone() };
        let changed = world.update(some, &["labels.l1", "labels.l2"]).unwrap();
        assert_eq!(changed.labels, labels(&[("l1", "updated"), ("l3", "v3")]));
        let all = Info { labels: labels(&[("l4", "v4")]), ..changed };
        let changed = world.update(all, &["labels"]).unwrap();
        assert_eq!(changed.labels, labels(&[("l4", "v4")]));
        let refused = world.update(Info { parent: "doesnotexist".into(), ..changed.clone() }, &["parent"]);
        assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(world.stat(name).unwrap(), changed);
    }
}

#[test]
fn remove() {
    let Some(world) = SuiteWorld::new() else { return };
    world.prepare("committed-a", "").unwrap();
    world.commit("committed-1", "committed-a").unwrap();
    world.prepare("reuse-1", "committed-1").unwrap();
    world.remove("reuse-1").unwrap();
    world.view("reuse-1", "committed-1").unwrap();
    world.remove("reuse-1").unwrap();
    world.prepare("reuse-1", "").unwrap();
    world.remove("committed-1").unwrap();
    world.commit("committed-1", "reuse-1").unwrap();
    world.remove("committed-1").unwrap();
    assert_eq!(fs_err::read_dir(world.root().join("snapshots")).unwrap().count(), 0);
}

#[test]
fn remove_intermediate_snapshot() {
    let Some(world) = SuiteWorld::new() else { return };
    world.layer("base", "", |_| ());
    world.layer("inter", "base", |_| ());
    world.prepare("top", "inter").unwrap();
    for parent in ["base", "inter"] {
        let refused = world.remove(parent).unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().contains("remove"), "{refused}");
    }
    for name in ["top", "inter", "base"] {
        world.remove(name).unwrap();
    }
}

#[test]
fn walk() {
    let Some(world) = SuiteWorld::new() else { return };
    let root = ("containerd.io/gc.root", "check-walk");
    world.prepare_with("a-np", "", &[root]).unwrap();
    world.prepare("p-tmp", "").unwrap();
    world.commit_with("p", "p-tmp", &[root]).unwrap();
    world.prepare_with("a", "p", &[root]).unwrap();
    world.view_with("v", "p", &[root]).unwrap();
    world.prepare("p-wl-tmp", "").unwrap();
    world.commit_with("p-wl", "p-wl-tmp", &[("l", "1"), root]).unwrap();
    world.prepare_with("a-wl", "p-wl", &[("l", "2"), root]).unwrap();
    world.view_with("v-wl", "p-wl", &[("l", "3"), root]).unwrap();
    world.prepare_with("a-np-wl", "", &[("l", "2"), root]).unwrap();
    let of_root = r#"labels."containerd.io/gc.root"==check-walk"#;
    let and_root = |selector: &str| format!("{selector},{of_root}");
    for (filters, names) in [
        (vec![of_root.to_owned()], "a a-np a-np-wl a-wl p p-wl v v-wl"),
        (vec![and_root("kind==active")], "a a-np a-np-wl a-wl"),
        (vec![and_root("kind==view")], "v v-wl"),
        (vec![and_root("kind==committed")], "p p-wl"),
        (vec!["name==p".to_owned(), "name==a-np-wl".to_owned()], "a-np-wl p"),
        (vec!["name==a-wl,labels.l".to_owned()], "a-wl"),
        (vec!["parent==p".to_owned()], "a v"),
        (vec![and_root("parent!=\"\"")], "a a-wl v v-wl"),
        (vec!["labels.l".to_owned()], "a-np-wl a-wl p-wl v-wl"),
        (vec!["labels.l==2".to_owned()], "a-np-wl a-wl"),
    ] {
        let filters: Vec<&str> = filters.iter().map(String::as_str).collect();
        let mut found: Vec<String> =
            world.list(&filters).unwrap().into_iter().map(|info| info.name).collect();
        found.sort();
        assert_eq!(found.join(" "), names, "{filters:?}");
    }
}

#[test]
fn stat_in_walk() {
    let Some(world) = SuiteWorld::new() else { return };
    base_snapshots(&world);
    let listed = world.list(&[]).unwrap();
    assert_eq!(listed.len(), BASE.len());
    for info in listed {
        assert_eq!(world.stat(&info.name).unwrap(), info);
    }
}

#[test]
fn all_snapshots_are_known_after_a_restart() {
    let Some(mut world) = SuiteWorld::new() else { return };
    world.layer("base", "", |root| fs_err::write(root.join("file"), "1").unwrap());
    base_snapshots(&world);
    let before = world.list(&[]).unwrap();
    // A crash may take the directories of a snapshot that was just made.
    let mounts = world.prepare("lost", "base").unwrap();
    let upper = mounts[0].options.iter().find_map(|option| option.strip_prefix("upperdir=")).unwrap();
    fs_err::remove_dir_all(std::path::Path::new(upper).parent().unwrap()).unwrap();
    world.reopen();
    assert_eq!(world.mounts("lost").unwrap(), mounts);
    let mounted = MountedSnapshot::of(&mounts, world.work("lost"));
    assert_eq!(fs_err::read_to_string(mounted.path().join("file")).unwrap(), "1");
    drop(mounted);
    world.remove("lost").unwrap();
    assert_eq!(world.list(&[]).unwrap(), before);
}

#[test]
fn snapshots_outlive_the_loss_of_the_index() {
    let Some(mut world) = SuiteWorld::new() else { return };
    world.layer("base", "", |root| fs_err::write(root.join("file"), "1").unwrap());
    base_snapshots(&world);
    let before = world.list(&[]).unwrap();
    fs_err::write(world.root().join("larder.db"), "damage").unwrap();
    world.reopen();
    assert_eq!(world.list(&[]).unwrap(), before);
    assert_eq!(world.remove("c1").unwrap_err().code(), Code::FailedPrecondition, "children are known");
    world.prepare("new", "base").unwrap();
    assert_eq!(world.list(&[]).unwrap().len(), before.len() + 1, "it takes the place of none");
}
