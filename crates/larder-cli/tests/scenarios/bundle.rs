//! The archive for a bug report, of a daemon that answers and of one that hangs.

use std::process::Command;
use std::time::Duration;

use larder_testkit_peers::{ImageBuilder, RegistryOptions};
use rustix::process::Signal;
use tokio::time::Instant;

use crate::served::CriDaemon;
use crate::world::RuntimeFixture;

/// A file of an archive.
fn unpacked(archive: &str, name: &str) -> String {
    let tar = Command::new("tar").args(["-xzOf", archive, "--wildcards"]).arg(format!("*/{name}")).output();
    String::from_utf8(tar.unwrap().stdout).unwrap()
}

#[test]
fn a_bundle_has_the_state_of_a_daemon_and_ends_soon_if_it_hangs() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    let daemon = CriDaemon::of(&world);
    let image = world.registry.image("shop/web:1");
    daemon.pull(&image).unwrap();
    let socket = daemon.socket.to_string_lossy().into_owned();

    let (answers, hangs) = (world.path("answers.tar.gz"), world.path("hangs.tar.gz"));
    world.larder(&["--daemon", &socket, "bundle", "-o", &answers]).expect(0);
    for (file, content) in [
        ("status.json", "\"backendAvailable\": true"),
        ("metrics.txt", "larder_pulled_image_bytes_total "),
        ("images.json", "/shop/web\""),
        ("events.jsonl", "\"reason\":\"Pulled\""),
        ("gc-plan.json", "{"),
        ("mountinfo.txt", " / rw"),
    ] {
        let text = unpacked(&answers, file);
        assert!(text.contains(content), "{file}: {text}{}", unpacked(&answers, &format!("{file}.error")));
    }

    let piped = world.path("piped.tar.gz");
    let file = fs_err::File::create(&piped).unwrap().into_parts().0;
    let mut command = world.command(&["--daemon", &socket, "bundle", "-o", "-"]);
    assert!(command.current_dir(world.path("")).stdout(file).status().unwrap().success());
    assert!(unpacked(&piped, "status.json").contains("\"backendAvailable\": true"));
    assert!(!std::path::Path::new(&world.path("-")).exists());
    let directory = world.larder(&["bundle", "-o", &world.path("")]).expect(2);
    assert!(directory.stderr.contains("is a directory\nhint: name a file"), "{directory:?}");
    let unit = world.larder(&["bundle", "--since", "2"]).expect(2);
    assert!(unit.stderr.contains("no unit: write 2s, 2m, 2h or 2d"), "{unit:?}");

    daemon.running.signal(Signal::STOP);
    let started = Instant::now();
    world.larder(&["--daemon", &socket, "--timeout", "2s", "bundle", "-o", &hangs]).expect(0);
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    daemon.running.signal(Signal::CONT);
    assert!(unpacked(&hangs, "status.json.error").contains("did not end within 2s"));
    assert!(unpacked(&hangs, "images.json.error").contains("the daemon did not answer in time"));
    assert!(unpacked(&hangs, "settings.yaml").contains("imageGCHighThresholdPercent"));
    daemon.stop().expect(0);
}
