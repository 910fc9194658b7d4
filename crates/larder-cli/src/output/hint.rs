//! Commands in hints: they work on the images that this command line named.

use larder::hint::{Hint, HintPart};

/// The hint in words. These flags, which say where images are, are added to each command that does not say so itself
/// and works on images: a login does not.
pub(crate) fn carrying(given: &str, hint: &Hint) -> String {
    let parts = hint.parts().iter().enumerate();
    parts
        .map(|(index, part)| match part {
            HintPart::Command(args) => {
                let says_where = args.first().is_some_and(|command| command == "login")
                    || args.iter().any(|arg| names_images(arg.trim_start_matches('-')))
                    || options_of(&hint.parts()[index + 1..]).any(names_images);
                let given = Some(given).filter(|given| !given.is_empty() && !says_where);
                let args = args.iter().map(|arg| quoted(arg));
                let words = ["larder".to_owned()].into_iter().chain(given.map(str::to_owned)).chain(args);
                words.collect::<Vec<_>>().join(" ")
            }
            part => part.to_string(),
        })
        .collect()
}

/// Whether an option says where images are.
fn names_images(option: &str) -> bool {
    matches!(option, "root" | "backend" | "daemon")
}

/// The options that directly follow a command.
fn options_of(parts: &[HintPart]) -> impl Iterator<Item = &str> {
    parts.chunks_exact(2).map_while(|pair| match pair {
        [HintPart::Text(space), HintPart::Setting { name, .. }] if space == " " => Some(name.as_ref()),
        _ => None,
    })
}

/// The text as one word of a shell.
pub(crate) fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-:@%+=,".contains(c);
    if text.chars().all(is_plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_in_hints_carry_what_was_given() {
        let images = || Hint::new().command(["images"]).text(" lists them");
        for (given, hint, printed) in [
            ("--backend docker", images(), "larder --backend docker images lists them"),
            ("", images(), "larder images lists them"),
            ("--backend docker", "larder images".into(), "larder images"),
            (
                "--backend docker",
                Hint::new().command(["serve"]).text(" ").setting("backend", "cri"),
                "larder serve --backend cri",
            ),
            (
                "--root /r",
                Hint::new().command(["serve"]).text(", or ").setting("daemon", "none"),
                "larder --root /r serve, or --daemon none",
            ),
            ("--root /r", Hint::new().command(["umount", "/my dir"]), "larder --root /r umount '/my dir'"),
            (
                "--root /r",
                Hint::new().command(["status", "--daemon", "/d.sock"]),
                "larder status --daemon /d.sock",
            ),
        ] {
            assert_eq!(carrying(given, &hint), printed);
        }
    }
}
