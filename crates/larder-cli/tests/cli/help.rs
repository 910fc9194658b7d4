//! Help, completions and the manual.

use crate::world::CliFixture;

const COMMANDS: [&str; 23] = [
    "demo",
    "ensure",
    "pull",
    "images",
    "inspect",
    "rm",
    "tag",
    "df",
    "runtime",
    "gc",
    "explain",
    "history",
    "prune",
    "image",
    "system",
    "version",
    "keep",
    "unkeep",
    "login",
    "logout",
    "config",
    "completions",
    "man",
];

#[test]
fn every_command_has_help_with_examples_and_needs_no_runtime_for_it() {
    let mut world = CliFixture::new();
    world.cri.stop();
    let run = world.larder(&["help"]).expect(0);
    for command in COMMANDS {
        assert!(run.stdout.contains(&format!("\n  {command} ")), "{command}: {}", run.stdout);
        let help = world.larder(&[command, "--help"]).expect(0).stdout;
        assert!(help.contains("Examples:\n  ") || help.contains(&format!("larder {command}")), "{help}");
        assert!(help.contains("Examples:"), "{command}: {help}");
    }
    assert!(run.stdout.contains("Exit codes:"), "{}", run.stdout);
}

#[test]
fn the_manual_has_a_page_for_each_command() {
    let world = CliFixture::new();
    let page = world.larder(&["man"]).expect(0).stdout;
    assert!(page.contains(".TH larder 1"), "{page}");
    let directory = world.home.path().join("man/man1");
    world.larder(&["man", "--dir", &directory.to_string_lossy()]).expect(0);
    assert!(directory.join("larder.1").exists());
    for command in COMMANDS {
        let page = fs_err::read_to_string(directory.join(format!("larder-{command}.1"))).unwrap();
        assert!(page.contains(&format!("larder\\-{command}")), "{command}: {page}");
    }
}

#[test]
fn the_version_is_printed() {
    let run = CliFixture::new().larder(&["--version"]).expect(0);
    assert_eq!(run.stdout, format!("larder {}\n", env!("CARGO_PKG_VERSION")));
}
