//! Commands in hints: they work on the images that this command line named.

use larder::hint::{Hint, HintPart};

use crate::args::Connection;

/// What was given of where images are, as flags for a shell; empty if nothing was.
pub(crate) fn given(connection: &Connection) -> String {
    match (&connection.root, &connection.backend) {
        (Some(root), _) => format!("--root {}", quoted(&root.to_string_lossy())),
        (None, Some(backend)) => format!("--backend {}", quoted(backend)),
        (None, None) => String::new(),
    }
}

/// The hint in words, with these flags in the commands of a hint that does not say by itself where images are.
pub(crate) fn carrying(given: &str, hint: &Hint) -> String {
    let says_where = |part: &HintPart| match part {
        HintPart::Setting { name, .. } => matches!(name.as_ref(), "root" | "backend" | "daemon"),
        HintPart::Command(args) => {
            args.iter().any(|arg| matches!(arg.as_ref(), "--root" | "--backend" | "--daemon"))
        }
        _ => false,
    };
    if given.is_empty() || hint.parts().iter().any(says_where) {
        return hint.to_string();
    }
    let told = hint.parts().iter().map(|part| match part {
        HintPart::Command(args) => format!("larder {given} {}", args.join(" ")),
        part => part.to_string(),
    });
    told.collect()
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
        let images = || Hint::new().command(["images"]).text(" lists them");
        for (connection, hint, told) in [
            (&docker, images(), "larder --backend docker images lists them"),
            (&root, Hint::new().command(["gc", "--dry-run"]), "larder --root '/my images' gc --dry-run"),
            (&Connection::default(), images(), "larder images lists them"),
            (&docker, "larder images".into(), "larder images"),
            (
                &docker,
                Hint::new().command(["serve"]).text(" ").setting("backend", "cri"),
                "larder serve --backend cri",
            ),
        ] {
            assert_eq!(carrying(&given(connection), &hint), told);
        }
    }
}
