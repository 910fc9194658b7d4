//! Help that fits a screen, and answers to what users of docker, podman, crictl and kubectl type.

use std::process::Stdio;

use crate::world::{CliFixture, CliOutput};

/// The commands that `larder --help` lists.
fn commands(world: &CliFixture) -> Vec<String> {
    let help = world.larder(&["--help"]).expect(0).stdout;
    let list = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let names = list.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names
        .map(|line| line.split_whitespace().next().unwrap().to_owned())
        .filter(|name| name != "help")
        .collect()
}

fn help(world: &CliFixture, command: &str, flag: &str) -> String {
    let mut run = world.command(&[command, flag]);
    CliOutput::of(run.env("COLUMNS", "80").stdin(Stdio::null()).output().unwrap()).expect(0).stdout
}

#[test]
fn the_help_of_each_command_fits_a_screen_and_has_three_examples() {
    let world = CliFixture::new();
    let commands = commands(&world);
    assert!(commands.len() >= 28, "{commands:?}");
    for command in &commands {
        let text = help(&world, command, "--help");
        assert_eq!(text, help(&world, command, "-h"), "{command}");
        let lines = text.lines().count();
        assert!(lines <= 40, "{command} has {lines} lines:\n{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{command}:\n{text}");
        let examples = text.split("Examples:\n").nth(1).unwrap_or_else(|| panic!("{command}: no examples"));
        let examples = examples.lines().take_while(|line| line.starts_with("  ")).count();
        assert_eq!(examples, 3, "{command}:\n{text}");
        assert!(!text.contains("--root <DIR>"), "{command} repeats global options:\n{text}");
    }
}

#[test]
fn global_options_are_printed_once() {
    let world = CliFixture::new();
    for arguments in [&["help", "global"][..], &["global"]] {
        let text = world.larder(arguments).expect(0).stdout;
        for flag in
            ["--backend", "--root", "--certs-d", "--state", "--daemon", "--timeout", "--color", "--verbose"]
        {
            assert!(text.contains(flag), "{flag}: {text}");
        }
    }
    let text = world.larder(&["--help"]).expect(0).stdout;
    assert!(text.contains("larder help global") && !text.contains("--root <DIR>"), "{text}");
    let full = world.larder(&["help", "pull"]).expect(0).stdout;
    assert!(full.contains("--max-parallel-image-pulls"), "all options: {full}");
    world.larder(&["images", "--root", "/nowhere", "-v"]).expect(3);
}

#[test]
fn swapped_arguments_and_names_of_files_get_the_command_that_was_meant() {
    let world = CliFixture::new();
    let file = world.file("dir/file", "").display().to_string();
    let dir = file.trim_end_matches("/file");
    for (arguments, error, hint) in [
        (&["mount", dir, "app:1"][..], "is a path", format!("larder mount app:1 {dir}")),
        (&["mount", "./mnt", "app:1"], "is a path", "larder mount app:1 ./mnt".into()),
        (&["export", dir, "app:1"], "is a path", format!("larder export app:1 {dir}")),
        (&["export", "app:1", "out.tar"], "the name of a file", "larder export app:1 -o out.tar".into()),
        (&["export", "app:1", "out.tgz"], "the name of a file", "larder export app:1 -o - writes".into()),
        (
            &["export", "app:1", "out.erofs"],
            "the name of a file",
            "larder export app:1 -o out.erofs --format erofs".into(),
        ),
        (&["export", "app:1", "-o", "out.erofs"], "the name says EROFS", "--format erofs".into()),
    ] {
        let run = world.larder(arguments).expect(2);
        assert!(run.stderr.contains(error) && run.stderr.contains(&hint), "{arguments:?}: {}", run.stderr);
    }
    assert!(!world.home.path().join("out.tar").exists());
}

#[test]
fn habits_are_answered_with_larders_way() {
    let world = CliFixture::new();
    for (arguments, part) in [
        (&["run", "-it", "busybox"][..], "hint: larder manages images, not containers"),
        (&["push", "app:1"], "hint: larder pushes no images"),
        (&["build", "."], "hint: larder builds no images"),
        (&["search", "nginx"], "hint: larder does not search registries"),
        (&["pull", "--arch", "arm64", "app:1"], "hint: use --platform OS/ARCH"),
        (&["diff", "app:1"], "hint: use larder inspect --layers IMAGE"),
        (&["cp", "app:1", "x"], "hint: use larder export IMAGE DIR"),
        (&["exists", "app:1"], "hint: use larder image exists IMAGE: its exit code is 1"),
        (&["umount", "-l", "/mnt"], "hint: larder umount DIR; a mount that is busy"),
        (&["manifest", "inspect", "app:1"], "hint: use larder inspect IMAGE; skopeo"),
        (&["import", "app.tar"], "hint: larder imports images, not file trees"),
        (&["history", "-q", "app:1"], "hint: use -o json"),
        (&["rm", "--no-prune", "app:1"], "hint: larder removes the layers that no other image has"),
        (&["logs"], "hint: the daemon's events: larder events"),
        (&["rm", "--dry-run", "app:1"], "hint: use larder explain IMAGE, which shows what"),
        (&["rm", "-a"], "hint: use larder prune -a"),
        (&["images", "--format", "{{.Repository}}"], "hint: Go templates are not supported; use -o json"),
    ] {
        let run = world.larder(arguments).expect(2);
        assert!(run.stderr.contains(part), "{arguments:?}: {}", run.stderr);
        assert_eq!(run.stderr.lines().count(), 2, "{}", run.stderr);
        assert_eq!(run.stdout, "");
    }
    world.larder(&["images", "--no-trunc", "-a"]).expect(0);
    let number = world.larder(&["gc", "--image-gc-high-threshold", "x"]).expect(2);
    assert!(number.stderr.contains("not a whole number"), "{number:?}");
    let missing = world.larder(&["mount", "a", "b", "--daemon"]).expect(2);
    assert!(missing.stderr.contains("SOCKET"), "{missing:?}");
    let typing_error = world.larder(&["imagse"]).expect(2);
    assert!(typing_error.stderr.contains("similar subcommand"), "{}", typing_error.stderr);
}
