//! Completion of command lines: commands and flags, and from the store images, keep rules and mounts.
//!
//! The script of a shell runs larder with [`VARIABLE`] set for each completion, and larder prints candidates instead of
//! running a command. A completion never waits long, prints no errors and creates nothing.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter as _};
use clap_complete::env::{Bash, Elvish, EnvCompleter, Fish, Powershell, Shells, Zsh};
use clap_complete::{CompleteEnv, Shell};
use larder::artifact_type::TYPE_WORDS;
use larder_agent::client::Client;
use larder_api::v1::keep_rule::Select;
use larder_api::v1::{KeepRequest, MountsRequest};

use crate::args::{Cli, GlobalFlags, command};
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

/// Set by the scripts to the name of the shell.
const VARIABLE: &str = "LARDER_COMPLETE";
/// Filters of images, with values where there are two.
const FILTERS: [&str; 9] = [
    "dangling=true",
    "dangling=false",
    "in-use=true",
    "in-use=false",
    "reference=",
    "type=",
    "before=",
    "since=",
    "label=",
];
/// A shell is blocked while it waits.
const WITHIN: Duration = Duration::from_millis(1500);
const SHELLS: Shells<'static> = Shells(&[&BashWithColons, &Elvish, &Fish, &Powershell, &Zsh]);

/// Prints candidates and ends the process, if a shell asks for them.
pub(crate) fn answer_shell() {
    CompleteEnv::with_factory(completed_command).var(VARIABLE).bin("larder").shells(SHELLS).complete();
}

/// The script for a shell.
pub(crate) fn script(shell: Shell) -> io::Result<Vec<u8>> {
    let mut script = Vec::new();
    let name = shell.to_string();
    if let Some(shell) = SHELLS.completer(&name) {
        shell.write_registration(VARIABLE, "larder", "larder", "larder", &mut script)?;
    }
    Ok(script)
}

/// The command line, in which arguments know their values.
fn completed_command() -> clap::Command {
    with_values(command())
}

/// The command, and those below it, with the values that arguments can have.
fn with_values(command: clap::Command) -> clap::Command {
    let name = command.get_name().to_owned();
    command.mut_args(|arg| completed_argument(&name, arg)).mut_subcommands(with_values)
}

fn completed_argument(command: &str, arg: clap::Arg) -> clap::Arg {
    let value = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    let completer = match (command, value.as_deref().unwrap_or_default()) {
        ("inspect" | "explain" | "history", "IMAGE") | (_, "PATTERN") => ArgValueCompleter::new(images),
        (_, "IMAGE") | ("keep", "RULE") => ArgValueCompleter::new(full_names),
        ("umount", "DIR") => ArgValueCompleter::new(mounts),
        (_, "RULE") => ArgValueCompleter::new(rules),
        (_, "KEY=VALUE") => ArgValueCompleter::new(filters),
        (_, "TYPE") => ArgValueCompleter::new(types),
        _ => return arg,
    };
    arg.add(completer)
}

/// Names of present images with tags.
fn names() -> Vec<String> {
    let listed = ask(&ImageAccess::read(), async |client| client.images().await.ok());
    listed.unwrap_or_default().into_iter().flat_map(|image| image.repo_tags).collect()
}

/// Names of present images that begin so: in full, or as docker shortens them.
fn full_names(current: &OsStr) -> Vec<CompletionCandidate> {
    matching(current, names().into_iter().flat_map(|name| [docker_name(&name), Some(name)]).flatten())
}

/// Completes names of images; where there is none, the ends of names that begin so, which these commands accept too.
fn images(current: &OsStr) -> Vec<CompletionCandidate> {
    let names = names();
    let docker = names.iter().filter_map(|name| docker_name(name));
    match matching(current, names.iter().cloned().chain(docker)) {
        none if none.is_empty() => matching(current, names.iter().flat_map(|name| ends(name))),
        found => found,
    }
}

/// The name as docker shortens it.
fn docker_name(name: &str) -> Option<String> {
    let rest = name.strip_prefix("docker.io/")?;
    Some(rest.strip_prefix("library/").unwrap_or(rest).to_owned())
}

/// Returns the parts of a name after each slash.
fn ends(name: &str) -> impl Iterator<Item = String> {
    name.match_indices('/').map(|(slash, _)| name[slash + 1..].to_owned())
}

/// Keys of filters, and their values.
fn filters(current: &OsStr) -> Vec<CompletionCandidate> {
    let text = current.to_string_lossy();
    match text.split_once('=') {
        Some((key @ ("before" | "since"), image)) => {
            images(OsStr::new(image)).into_iter().map(|found| found.add_prefix(format!("{key}="))).collect()
        }
        Some(("type", of)) => {
            types(OsStr::new(of)).into_iter().map(|found| found.add_prefix("type=")).collect()
        }
        _ => matching(current, FILTERS.iter().map(|&filter| filter.to_owned())),
    }
}

/// Types of images and artifacts that have a word.
fn types(current: &OsStr) -> Vec<CompletionCandidate> {
    matching(current, TYPE_WORDS.map(str::to_owned).into_iter())
}

/// Directories that images are mounted at; without one, any directory.
fn mounts(current: &OsStr) -> Vec<CompletionCandidate> {
    let request = MountsRequest {};
    let found = ask(&ImageAccess::read().of_store(), async |client| {
        client.ask(async |mut calls| calls.mounts(request).await).await.ok()
    });
    let targets = found.map(|found| found.mounts).unwrap_or_default();
    match matching(current, targets.into_iter().map(|mount| mount.target)) {
        none if none.is_empty() => PathCompleter::dir().complete(current),
        targets => targets,
    }
}

/// Keep rules by their name, digest or type.
fn rules(current: &OsStr) -> Vec<CompletionCandidate> {
    let request = KeepRequest::default();
    let found = ask(&ImageAccess::keep(), async |client| {
        client.ask(async |mut calls| calls.keep(request).await).await.ok()
    });
    let rules = found.map(|found| found.rules).unwrap_or_default();
    let name = |rule: larder_api::v1::KeepRule| match rule.select? {
        Select::Name(name) | Select::Digest(name) | Select::Type(name) => Some(name),
        Select::Newest(newest) => Some(newest.repository),
        Select::Label(_) => None,
    };
    matching(current, rules.into_iter().filter_map(name))
}

fn matching(current: &OsStr, values: impl Iterator<Item = String>) -> Vec<CompletionCandidate> {
    let Some(current) = current.to_str() else { return Vec::new() };
    let values: std::collections::BTreeSet<String> =
        values.filter(|value| value.starts_with(current)).collect();
    values.into_iter().map(CompletionCandidate::new).collect()
}

/// Asks the node of the command line that is being completed; `None` if it does not answer at once.
fn ask<T>(access: &ImageAccess, question: impl AsyncFnOnce(Client) -> Option<T>) -> Option<T> {
    let out = Arc::new(Printer::to(Box::new(io::sink()), Box::new(io::sink())));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let answer = async {
        let session = CommandSession::new(global_flags(std::env::args_os()), out);
        let client = Box::pin(session.open(access)).await.ok()?;
        let answer = question(client).await;
        session.close().await;
        answer
    };
    let answer = runtime.block_on(async { tokio::time::timeout(WITHIN, answer).await.ok().flatten() });
    runtime.shutdown_background();
    answer
}

/// The options of every command in a command line that is not complete.
fn global_flags(words: impl Iterator<Item = OsString>) -> GlobalFlags {
    let mut given = vec![OsString::from("larder")];
    let mut words = words.skip_while(|word| word != "--").skip(2);
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        let (name, has_value) = text.split_once('=').map_or((&*text, false), |(name, _)| (name, true));
        if !matches!(name, "--root" | "--backend" | "--state" | "--daemon") {
            continue;
        }
        given.push(word.clone());
        given.extend((!has_value).then(|| words.next()).flatten());
    }
    given.push("images".into());
    Cli::read(given).map(|cli| cli.connection).unwrap_or_default()
}

/// Bash splits words at colons, which names of images have. Its own script joins them again.
struct BashWithColons;

impl EnvCompleter for BashWithColons {
    fn name(&self) -> &'static str {
        Bash.name()
    }

    fn is(&self, name: &str) -> bool {
        Bash.is(name)
    }

    fn write_registration(
        &self,
        var: &str,
        _: &str,
        bin: &str,
        completer: &str,
        script: &mut dyn io::Write,
    ) -> io::Result<()> {
        let text = include_str!("completion.bash");
        let text = text.replace("VARIABLE", var).replace("PROGRAM", bin).replace("COMPLETER", completer);
        script.write_all(text.as_bytes())
    }

    fn write_complete(
        &self,
        command: &mut clap::Command,
        words: Vec<OsString>,
        dir: Option<&Path>,
        candidates: &mut dyn io::Write,
    ) -> io::Result<()> {
        Bash.write_complete(command, words, dir, candidates)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_store_of_an_unfinished_command_line_is_the_one_that_it_names() {
        let flags = |line: &str| {
            let words = format!("/usr/bin/larder -- {line}");
            global_flags(words.split(' ').map(OsString::from))
        };
        assert_eq!(flags("larder --root /r rm app").root.as_deref(), Some(Path::new("/r")));
        assert_eq!(flags("larder rm --backend=docker app:").backend.as_deref(), Some("docker"));
        assert_eq!(flags("larder rm --no-such").root, None);
    }

    #[test]
    fn names_are_shortened_as_docker_and_larder_do() {
        assert_eq!(docker_name("docker.io/library/busybox:1").as_deref(), Some("busybox:1"));
        assert_eq!(docker_name("r.example/app:1"), None);
        assert_eq!(ends("r.example/team/app:1").collect::<Vec<_>>(), ["team/app:1", "app:1"]);
    }

    #[test]
    fn the_filters_are_those_that_images_has() {
        for filter in FILTERS {
            let filter = if filter.ends_with('=') { format!("{filter}x") } else { filter.to_owned() };
            assert!(crate::args::ImageFilter::parse(&filter).is_ok(), "{filter}");
        }
    }

    #[test]
    fn each_shell_has_a_script() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish, Shell::PowerShell] {
            let script = String::from_utf8(script(shell).unwrap()).unwrap();
            assert!(script.contains(VARIABLE) && script.contains("larder"), "{shell}: {script}");
        }
    }
}
