//! Answers to commands and flags of docker, podman, crictl, ctr and kubectl that larder does not have.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Commands, separated by spaces, and larder's way.
const COMMANDS: [(&str, &str); 25] = [
    (
        "run create start stop restart kill exec ps attach stats container pod volume network compose",
        "larder manages images, not containers; run them with your runtime, or mount an image: larder mount IMAGE DIR",
    ),
    (
        "build buildx bake commit",
        "larder builds no images; build with docker, podman or buildah, then: larder load FILE",
    ),
    ("push", "larder pushes no images; use docker push, podman push, or skopeo copy"),
    (
        "search",
        "larder does not search registries; larder explain access IMAGE tests one image and its credentials",
    ),
    ("inspecti", "use larder inspect IMAGE"),
    ("why", "use larder explain IMAGE, which shows why GC retains or removes it, and what uses it"),
    ("imagefsinfo du", "use larder df"),
    ("img imgs", "use larder images"),
    ("get list", "use larder images, larder mounts, or larder keep to list the rules"),
    ("describe", "use larder inspect IMAGE, or larder explain IMAGE for what GC does with it"),
    (
        "clean cleanup clear purge",
        "use larder prune -a to remove all unused images, or larder gc to remove as many as the thresholds require",
    ),
    ("delete remove del", "use larder rm IMAGE"),
    ("apply", "use larder ensure -f FILE, which pulls the images of a manifest"),
    ("fetch ensure-image", "use larder pull IMAGE, or larder ensure IMAGE if it may be present already"),
    ("unmount", "use larder umount DIR"),
    ("diff", "use larder inspect --layers IMAGE, which shows what each layer adds"),
    ("cp", "use larder export IMAGE DIR, which writes all files, or larder mount IMAGE DIR, and then cp"),
    (
        "manifest",
        "use larder inspect IMAGE; skopeo inspect --raw docker://IMAGE prints a manifest in a registry",
    ),
    ("import", "larder imports images, not file trees: larder load FILE"),
    ("exists", "use larder image exists IMAGE: its exit code is 1 if the image is not present"),
    ("logs log", "the daemon's events: larder events; its log: journalctl -u larder"),
    ("untag", "use larder rm NAME, which removes the image with its last name"),
    // Under `system`; it is a command elsewhere.
    ("prune", "use larder prune for dangling images, or larder prune -a for all unused images"),
    ("pin protect", "use larder keep NAME, or larder lease IMAGE 2h for a limited time"),
    ("unpin unprotect unlease", "use larder lease rm IMAGE, or larder unkeep NUMBER for a keep rule"),
];

/// Commands of larder (`*` is any), flags, and larder's way.
const FLAGS: &[(&str, &str, &str)] = &[
    (
        "pull ensure",
        "--os --arch --variant --override-arch --override-os",
        "use --platform OS/ARCH[/VARIANT], such as linux/arm64",
    ),
    ("pull", "--all-tags -a", "name each tag: larder pull app:1 app:2"),
    ("pull", "--policy --pull", "use larder ensure --policy IfNotPresent IMAGE"),
    (
        "pull ensure",
        "--creds --auth --password -p",
        "use --username USER --password-stdin, or larder login REGISTRY once",
    ),
    (
        "login",
        "--password -p",
        "use --username USER --password-stdin: other users can read a password on the command line",
    ),
    (
        "pull ensure login",
        "--insecure-registry --plain-http --skip-verify -k",
        "use --tls-verify=false for this call, or describe the registry in hosts.toml",
    ),
    ("pull ensure login", "--cert-dir", "describe the registry in hosts.toml; --certs-d names its directory"),
    ("pull", "--disable-content-trust", "larder verifies digests, not signatures; leave the flag out"),
    (
        "pull",
        "--all-platforms",
        "larder pulls one platform at a time: larder pull --platform linux/arm64 IMAGE",
    ),
    ("pull", "--snapshotter --local", "larder pulls into one store; leave the flag out"),
    ("pull", "--retry --retry-delay", "use larder ensure --retry-for 5m IMAGE"),
    ("images", "--noheading -n", "use -q for IDs, or -o json"),
    ("history", "-q --quiet -H --human", "use -o json, and jq for single fields"),
    ("images", "--history", "use larder inspect --layers IMAGE"),
    ("images ls", "-l --long --size", "larder images lists all images in full lines; -o wide adds columns"),
    ("images ls", "-r --reverse", "use --sort created, used, size, unique, tag or id"),
    ("lease", "--for --ttl --duration -t", "write the duration after the image: larder lease IMAGE 2h"),
    (
        "keep",
        "--for -t --duration",
        "use --ttl 168h, counted from the last use; or larder lease IMAGE 168h, counted from now",
    ),
    ("df explain gc lease keep mounts inspect", "--no-trunc", "use -o wide, or -o json for whole values"),
    ("rm rmi", "--all -a --prune", "use larder prune -a, which retains images in use"),
    (
        "rm rmi",
        "-q --quiet",
        "larder rm prints what it removed, which > /dev/null discards; for rmi -q of crictl use larder prune -a",
    ),
    ("rm", "--dry-run -n", "use larder explain IMAGE, which shows what its removal frees"),
    ("rm", "--no-prune", "larder removes the layers that no other image has; leave the flag out"),
    ("inspect", "--type", "larder inspect is about images only; leave the flag out"),
    ("inspect", "--size -s", "larder inspect prints images with their sizes; leave the flag out"),
    ("inspect", "-f", "use -o json, and jq for single fields"),
    (
        "gc",
        "--all -a",
        "use larder gc --all-unused, or larder prune -a, which also removes what was pulled just now",
    ),
    ("gc prune", "--filter", "use keep rules for what GC retains: larder keep --label KEY=VALUE"),
    ("mount", "--rw", "use --writable"),
    ("load", "-q --quiet", "larder load prints names only; leave the flag out"),
    (
        "serve",
        "--host -H --listen --addr --address --bind --port -p",
        "use --socket PATH, or --metrics-address ADDRESS:PORT for metrics and the dashboard",
    ),
    ("umount", "-l --lazy", "larder umount DIR; a mount that is busy: end what uses it (fuser -m DIR)"),
    (
        "*",
        "--runtime-endpoint -r --image-endpoint -i --address --host -H --url --connection -c",
        "use --backend unix:///path/to.sock, or --backend cri, docker or podman",
    ),
    ("*", "--namespace -n", "larder uses containerd's namespace k8s.io: --backend cri"),
    ("*", "--debug -D --log-level -l", "use -v, or -vv for debug logs"),
    ("*", "--json", "use -o json"),
    ("*", "--context", "set DOCKER_CONTEXT, or use --backend docker://ADDRESS"),
];

const TEMPLATES: &str = "Go templates are not supported; use -o json, and jq for single fields";

/// Larder's way to do what a command line tries that larder does not have; `words` are those after the program.
pub(crate) fn advice(usage: &clap::Error, words: &[String]) -> Option<&'static str> {
    let text = |kind| match usage.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match usage.kind() {
        ErrorKind::InvalidSubcommand => {
            let verb = text(ContextKind::InvalidSubcommand)?;
            COMMANDS.iter().find(|(verbs, _)| has(verbs, verb)).map(|(_, advice)| *advice)
        }
        ErrorKind::UnknownArgument => {
            let flag = text(ContextKind::InvalidArg)?;
            // What follows is no command: larder -r SOCKET images.
            let before: Vec<&String> = words.iter().take_while(|word| !word.starts_with(flag)).collect();
            let of = |(commands, flags, _): &&(&str, &str, &str)| {
                has(flags, flag) && (*commands == "*" || before.iter().any(|word| has(commands, word)))
            };
            FLAGS.iter().find(of).map(|(_, _, advice)| *advice)
        }
        ErrorKind::InvalidValue => {
            text(ContextKind::InvalidValue).filter(|value| value.contains("{{")).map(|_| TEMPLATES)
        }
        _ => None,
    }
}

fn has(list: &str, word: &str) -> bool {
    list.split(' ').any(|known| known == word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, command};

    fn answered(line: &str) -> Option<&'static str> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let usage = Cli::read(&words).expect_err(line);
        advice(&usage, &words[1..])
    }

    #[test]
    fn habits_are_answered_and_typing_errors_are_left_to_clap() {
        for (line, part) in [
            ("larder run -it busybox", "not containers"),
            ("larder push app:1", "skopeo copy"),
            ("larder clean", "larder prune -a"),
            ("larder serve --listen x", "--socket PATH"),
            ("larder build .", "larder load"),
            ("larder pull --arch arm64 app:1", "--platform OS/ARCH"),
            ("larder --root /x pull -a app", "each tag"),
            ("larder rm -a", "larder prune -a"),
            ("larder rmi -a", "larder prune -a"),
            ("larder images --format {{.ID}}", "Go templates"),
            ("larder images -n", "-o json"),
            ("larder images --json", "-o json"),
            ("larder images -r", "--sort created"),
            ("larder ls -la", "-o wide"),
            ("larder inspect --type image app:1", "images only"),
            ("larder lease --for 2h app:1", "larder lease IMAGE 2h"),
            ("larder keep --for 2h app:1", "--ttl"),
            ("larder df --no-trunc", "-o wide"),
            ("larder untag app:1", "larder rm"),
            ("larder volume ls", "not containers"),
            ("larder prune -a --filter until=24h", "keep rules"),
            ("larder system prune -a", "larder prune -a"),
            ("larder protect app:1", "larder keep"),
            ("larder unpin app:1", "larder unkeep"),
            ("larder unlease app:1", "larder lease rm"),
            ("larder login -u me -p secret r.example", "--password-stdin"),
            ("larder -r unix:///x images", "--backend unix://"),
        ] {
            assert!(
                answered(line).is_some_and(|advice| advice.contains(part)),
                "{line}: {:?}",
                answered(line)
            );
        }
        for line in ["larder imagess", "larder images --sotr name", "larder images -o jsno"] {
            assert_eq!(answered(line), None, "{line}");
        }
    }

    #[test]
    fn no_answer_is_about_something_that_larder_has() {
        let mut command = command();
        command.build();
        let sub = |name: &str| {
            command
                .get_subcommands()
                .find(|sub| sub.get_name() == name || sub.get_all_aliases().any(|alias| alias == name))
        };
        for (verbs, _) in COMMANDS {
            for verb in verbs.split(' ') {
                assert!(sub(verb).is_none() || verb == "prune", "{verb}");
            }
        }
        for (commands, flags, _) in FLAGS {
            for name in commands.split(' ').filter(|name| *name != "*") {
                let of = sub(name).unwrap_or_else(|| panic!("{name}: no such command"));
                for flag in flags.split(' ') {
                    let has = |arg: &clap::Arg| {
                        arg.get_long().is_some_and(|long| flag == format!("--{long}"))
                            || arg.get_short().is_some_and(|short| flag == format!("-{short}"))
                    };
                    assert!(!of.get_arguments().any(has), "larder {name} has {flag}");
                }
            }
        }
    }
}
