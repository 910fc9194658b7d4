//! Completion of what a store has, in real shells.

use std::path::Path;
use std::process::Command;

use larder_testkit_peers::{Package, require};

use crate::lists::LoadedStore;
use crate::store::may_mount;

/// Runs a script of a shell, with larder in the path.
fn run(store: &LoadedStore, shell: &str, script: &str) -> String {
    let larder = Path::new(env!("CARGO_BIN_EXE_larder")).parent().unwrap();
    let mut command = Command::new("timeout");
    command.args(["60", shell, "-c", script]).env_clear().env("HOME", store.home.path()).env("TERM", "dumb");
    command.env("PATH", format!("{}:/usr/bin:/bin", larder.display())).current_dir(store.home.path());
    let output = command.output().unwrap();
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Completes the line in bash, whose words are separated by spaces and at the characters of `COMP_WORDBREAKS`.
fn bash(store: &LoadedStore, line: &str) -> String {
    let words = line.replace('=', " = ").replace(':', " : ");
    let script = format!(
        "source <(larder completions bash); COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9; \
         COMP_WORDS=({words}); [[ $COMP_LINE == *' ' ]] && COMP_WORDS+=(''); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
         _complete_larder larder; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    );
    run(store, "bash", &script)
}

fn fish(store: &LoadedStore, line: &str) -> String {
    run(store, "fish", &format!("larder completions fish | source; complete -C '{line}'"))
}

/// Types the line and a tab into a zsh on a terminal of its own, until `expected` is there.
fn zsh(store: &LoadedStore, line: &str, expected: &str) -> String {
    let script = format!(
        r#"
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PS1=; autoload -U compinit; compinit -u -D; source <(larder completions zsh); stty columns 200; echo rea''dy'
zpty -r shell output '*ready*'
zpty -n -w shell $'{line}\t'
zpty -r -m shell output '*{expected}*' ; print -r -- "$output"
zpty -d shell
"#
    );
    run(store, "zsh", &script)
}

#[test]
fn images_rules_filters_and_orders_of_a_store_are_completed_in_each_shell() {
    if !require(&[Package::Fish, Package::Zsh]).is_available() {
        return;
    }
    let store = LoadedStore::new();
    store.larder(&["keep", "r.example/base:1"]).expect(0);
    let root = store.root().display().to_string();
    for (line, typed, expected) in [
        ("image inspect too", "", "tool:1"),
        ("image rm r.example/too", "r.example/", "tool:1"),
        ("lease r.example/too", "r.example/", "tool:1"),
        ("images --filter dan", "", "dangling=true"),
        ("images --filter before=too", "before=", "tool:1"),
        ("images --filter type=mod", "type=", "model"),
        ("keep --type mod", "", "model"),
        ("images --sort uni", "", "unique"),
        ("unkeep r.example/b", "r.example/", "base:1"),
        ("keep rm r.example/b", "r.example/", "base:1"),
        ("gc l", "", "log"),
    ] {
        let line = format!("larder --root {root} {line}");
        let found = bash(&store, &line);
        assert!(found.lines().any(|found| found.ends_with(expected)), "bash: {line}: {found}");
        let found = fish(&store, &line);
        assert!(found.contains(&format!("{typed}{expected}")), "fish: {line}: {found}");
        // Of several candidates, it shows what they have in common.
        let start = expected.split([':', '=']).next().unwrap();
        let found = zsh(&store, &line, start);
        assert!(found.contains(start), "zsh: {line}: {found}");
    }
    // A pull takes no part of a name.
    assert_eq!(bash(&store, &format!("larder --root {root} pull too")).trim(), "");
}

#[test]
fn mountpoints_are_completed_in_each_shell() {
    if !may_mount() || !require(&[Package::Fish, Package::Zsh]).is_available() {
        return;
    }
    let store = LoadedStore::new();
    let target = store.home.path().join("target-of-tool");
    fs_err::create_dir(&target).unwrap();
    let target = target.to_string_lossy().into_owned();
    store.larder(&["mount", "r.example/tool:1", &target]).expect(0);
    let line = format!("larder --root {} umount {}", store.root().display(), &target[..target.len() - 3]);
    let found = [bash(&store, &line), fish(&store, &line), zsh(&store, &line, "target-of-tool")];
    store.larder(&["umount", &target]).expect(0);
    assert!(found.iter().all(|found| found.contains(&target)), "{found:?}");
}
