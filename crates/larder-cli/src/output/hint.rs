//! Commands in hints: they work on the images that this command line named.

use clap::CommandFactory as _;

use crate::args::{Cli, Connection};

/// What was given of where images are, as flags for a shell; empty if nothing was.
pub(crate) fn given(connection: &Connection) -> String {
    match (&connection.root, &connection.backend) {
        (Some(root), _) => format!("--root {}", quoted(&root.to_string_lossy())),
        (None, Some(backend)) => format!("--backend {}", quoted(backend)),
        (None, None) => String::new(),
    }
}

/// The hint, with these flags in the command that it begins with. One that says by itself where images are, or that
/// begins with no command, stays as it is.
pub(crate) fn carrying(given: &str, hint: &str) -> String {
    let says_where = hint.contains("--backend") || hint.contains("--root");
    match hint.strip_prefix("larder ") {
        Some(rest) if !given.is_empty() && !says_where && is_command(rest) => {
            format!("larder {given} {rest}")
        }
        _ => hint.to_owned(),
    }
}

/// Whether the text begins with a command of larder, and is not a sentence about larder.
fn is_command(text: &str) -> bool {
    let word = text.split(|c: char| !c.is_ascii_alphanumeric()).next();
    word.is_some_and(|word| Cli::command().find_subcommand(word).is_some())
}

fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-:@%+=,".contains(c);
    if text.chars().all(is_plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_in_hints_carry_what_was_given() {
        let docker = Connection { backend: Some("docker".into()), ..Connection::default() };
        let root = Connection { root: Some("/my images".into()), ..Connection::default() };
        for (connection, hint, told) in [
            (&docker, "larder images lists them", "larder --backend docker images lists them"),
            (&root, "larder gc --dry-run", "larder --root '/my images' gc --dry-run"),
            (&Connection::default(), "larder images lists them", "larder images lists them"),
            (
                &docker,
                "larder removes nothing that may be in use",
                "larder removes nothing that may be in use",
            ),
            (&docker, "larder serve --backend cri", "larder serve --backend cri"),
            (&docker, "see the log", "see the log"),
        ] {
            assert_eq!(carrying(&given(connection), hint), told);
        }
    }
}
