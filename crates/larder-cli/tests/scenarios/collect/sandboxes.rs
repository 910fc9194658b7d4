//! The image of pod sandboxes in a real containerd, of a version that does not report it as pinned.

use larder_testkit_peers::containerd::pods::pause_image;
use larder_testkit_peers::{
    Containerd, ContainerdOptions, ImageBuilder, Package, RegistryOptions, RegistryProcess, require,
};

use super::MountedDisk;
use super::containerd::{larder_on, on};
use crate::world::{LarderProcess, end_leases};

const GC_ALL: [&str; 6] = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0", "-o", "json"];

#[test]
fn the_image_of_a_running_sandbox_and_the_configured_one_survive_gc_all_unused() {
    if !require(&[Package::Containerd, Package::Runc, Package::DockerRegistry, Package::Skopeo])
        .is_available()
    {
        return;
    }
    let Some(disk) = MountedDisk::new(192) else { return };
    let home = disk.home();
    let registry = RegistryProcess::start(RegistryOptions::default()).unwrap();
    let [pause, other] = ["infra/pause:1", "shop/other:1"].map(|name| registry.image(name));
    pause_image().push(&registry, "infra/pause:1").unwrap();
    ImageBuilder::small(1, 50_000).push(&registry, "shop/other:1").unwrap();
    let options = ContainerdOptions {
        below: Some(disk.path()),
        sandbox_image: Some(pause.clone()),
        ..ContainerdOptions::default()
    };
    let containerd = Containerd::start_with(options).unwrap();
    containerd.add_registry(&registry).unwrap();
    for name in [&pause, &other] {
        on(&containerd, home, &["pull", name]).expect(0);
    }
    let file = home.join("unpinned.yaml");
    let settings =
        "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\nruntime: {sandboxImages: []}\n";
    fs_err::write(&file, settings).unwrap();
    let unpinned = |arguments: &[&str]| {
        let mut command = larder_on(&containerd, home, arguments);
        command.env("LARDER_CONFIG", &file);
        LarderProcess::start(command).finish()
    };
    let pod = containerd.run_pod("web").unwrap_or_else(|error| panic!("{error}\n{}", containerd.log()));
    end_leases(&home.join("state"));

    // No setting protects it: its use does.
    let used = unpinned(&["explain", &pause]).expect(0);
    assert!(used.stdout.contains("in use by sandbox of pod default/web"), "{}", used.stdout);
    let refused = unpinned(&["rm", &pause]).expect(1);
    assert!(refused.stderr.contains("in use by sandbox of pod default/web"), "{refused:?}");
    let done = unpinned(&GC_ALL).expect(0).json();
    let removed: Vec<_> =
        done["removals"].as_array().unwrap().iter().map(|removal| &removal["names"][0]).collect();
    assert_eq!(removed, [other.as_str()], "{done}");

    // Without any sandbox, the runtime's configuration names it.
    drop(pod);
    let done = on(&containerd, home, &GC_ALL).expect(0).json();
    assert_eq!(done["removals"].as_array().map(Vec::len), Some(0), "{done}");
    let refused = on(&containerd, home, &["rm", &pause]).expect(1);
    assert!(refused.stderr.contains("pinned by the runtime"), "{refused:?}");
    on(&containerd, home, &["rm", "--force", &pause]).expect(0);
}
