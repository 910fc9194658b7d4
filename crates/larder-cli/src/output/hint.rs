//! Commands in hints: they work on the images that this command line named.

use larder::hint::{Hint, HintPart};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_in_hints_carry_what_was_given() {
        let images = || Hint::new().command(["images"]).text(" lists them");
        for (given, hint, told) in [
            ("--backend docker", images(), "larder --backend docker images lists them"),
            ("", images(), "larder images lists them"),
            ("--backend docker", "larder images".into(), "larder images"),
            (
                "--backend docker",
                Hint::new().command(["serve"]).text(" ").setting("backend", "cri"),
                "larder serve --backend cri",
            ),
        ] {
            assert_eq!(carrying(given, &hint), told);
        }
    }
}
