//! Checks image names before anything is asked of a backend, and suggests what may have been meant.

use larder::go_format::quote;
use larder::hint::Hint;
use larder::reference::{self, Reference, ReferenceErrorKind};
use larder::retention::nearest_names;

/// A name that no runtime can pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidImageName {
    /// The name in quotes, and what is wrong with it.
    pub message: String,
    /// Corrections to suggest.
    pub hints: Vec<Hint>,
}

/// How much of a name is shown: the longest good one is a little longer than 512.
const SHOWN: usize = 600;

/// Checks a name as the image manager will.
pub fn check(image: &str) -> Result<(), InvalidImageName> {
    let Err(error) = reference::apply_default_tag(image) else {
        return Ok(());
    };
    let mut shown = quote(&image.chars().take(SHOWN).collect::<String>());
    if image.chars().nth(SHOWN).is_some() {
        shown.push_str("...");
    }
    let cause = match error.kind() {
        _ if image.is_empty() => "an image name must not be empty".to_owned(),
        // The hub's `library/` that the text would show is not in the name that the user wrote.
        ReferenceErrorKind::UppercaseRepository(_) => ReferenceErrorKind::Uppercase.to_string(),
        kind => kind.to_string().chars().take(SHOWN).collect(),
    };
    if image.split_whitespace().nth(1).is_some() {
        let hint = "an image name has no spaces; give several images as separate arguments".to_owned();
        return Err(InvalidImageName { message: format!("{shown}: {cause}"), hints: vec![hint.into()] });
    }
    if image == "sha256:" {
        let hint = "write the digits of the ID after sha256:".into();
        return Err(InvalidImageName {
            message: format!("{shown}: an ID without digits"),
            hints: vec![hint],
        });
    }
    let hint = meant(image).map(|meant| Hint::from(format!("did you mean {meant}?")));
    Err(InvalidImageName {
        message: format!("{shown}: {cause}"),
        hints: hint.or_else(|| error.hint().map(Hint::from)).into_iter().collect(),
    })
}

/// Checks what may be a name or an id.
pub fn check_name_or_id(image: &str) -> Result<(), InvalidImageName> {
    match digits_of_id(image) {
        Some(_) => Ok(()),
        None => check(image),
    }
}

/// Present images that a name which is not present may mean: those whose name ends with it, else similar ones.
pub fn present_like(image: &str, names: &[String]) -> Vec<String> {
    let part = Reference::parse(image).ok();
    let part = part.as_ref().map_or(image, Reference::familiar);
    let ends = |name: &&String| {
        let repository = Reference::parse(name).map(|name| name.name().to_owned()).unwrap_or_default();
        repository.strip_suffix(part).is_some_and(|before| before.ends_with('/'))
    };
    let mut found: Vec<String> = names.iter().filter(ends).cloned().collect();
    found.truncate(3);
    if found.is_empty() { nearest_names(image, names) } else { found }
}

/// The digits of a text that may be an id or its start. `sha256:` may stand before them.
pub fn digits_of_id(text: &str) -> Option<&str> {
    let digits = text.strip_prefix("sha256:").unwrap_or(text);
    let are_digits = digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    (are_digits && (1..=64).contains(&digits.len())).then_some(digits)
}

/// A good name that differs from a bad one by a common slip.
fn meant(image: &str) -> Option<String> {
    let image = image.trim();
    let bare = image.split_once("://").map_or(image, |(_, rest)| rest);
    let trimmed = bare.trim_end_matches([':', '/', '@']);
    [bare.to_owned(), trimmed.to_owned(), lower_case_name(trimmed)]
        .into_iter()
        .find(|name| name.len() <= SHOWN && reference::apply_default_tag(name).is_ok())
}

/// The name with its repository in lower case; a tag keeps its case, since tags may differ by it.
fn lower_case_name(image: &str) -> String {
    let name_end = image.find('@').unwrap_or(image.len());
    let last_slash = image[..name_end].rfind('/').map_or(0, |slash| slash + 1);
    let repository_end = image[last_slash..name_end].find(':').map_or(name_end, |colon| last_slash + colon);
    format!("{}{}", image[..repository_end].to_lowercase(), &image[repository_end..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint_for(image: &str) -> String {
        let bad = check(image).expect_err("the name is bad");
        bad.hints.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn good_names_pass() {
        for image in ["busybox", "127.0.0.1:5000/team/api:v2", &format!("app@sha256:{}", "a".repeat(64))] {
            assert_eq!(check(image), Ok(()), "{image}");
        }
    }

    #[test]
    fn an_id_without_digits_is_not_taken_for_a_name() {
        let bad = check_name_or_id("sha256:").expect_err("it has no digits");
        assert_eq!(bad.message, "\"sha256:\": an ID without digits");
        assert_eq!(hint_for("sha256:"), "write the digits of the ID after sha256:");
    }

    #[test]
    fn misspelt_names_get_a_suggestion() {
        assert_eq!(hint_for("Busybox"), "did you mean busybox?");
        assert_eq!(hint_for("registry.example/Team/App:V2"), "did you mean registry.example/team/app:V2?");
        assert_eq!(hint_for("busybox "), "did you mean busybox?");
        assert_eq!(hint_for("https://registry.example/app:1"), "did you mean registry.example/app:1?");
        assert_eq!(hint_for("busybox:"), "did you mean busybox?");
    }

    #[test]
    fn other_errors_have_a_hint() {
        assert!(hint_for(&"a".repeat(64)).contains("image ID"));
        for blank in ["my image", "a b/c:1", "busybox nginx:1", "app :v1"] {
            assert!(hint_for(blank).contains("no spaces"), "what was meant is not known: {blank}");
        }
        assert!(hint_for("app@sha256:abc").contains("digest"));
        assert!(hint_for(&format!("app@md5:{}", "a".repeat(32))).contains("digest"));
    }

    #[test]
    fn names_and_ids_pass_and_blank_texts_do_not() {
        for image in ["busybox", "sha256:b5b7", "b5b73cbea0661", &"a".repeat(64)] {
            assert_eq!(check_name_or_id(image), Ok(()), "{image}");
        }
        assert_eq!(check_name_or_id("Busybox"), check("Busybox"));
        assert!(check_name_or_id(&"a".repeat(65)).is_ok(), "a name of that length is a name");
        for blank in ["", " ", "\t\n"] {
            assert!(check_name_or_id(blank).is_err(), "{blank:?}");
            assert!(check(blank).is_err(), "{blank:?}");
        }
    }

    #[test]
    fn a_present_image_with_the_end_of_a_name_is_found_before_similar_ones() {
        let names =
            ["r.example/shop/web:1", "r.example/wed:1", "docker.io/library/busybox:1"].map(String::from);
        for (image, expected) in [
            ("web:2", &["r.example/shop/web:1"][..]),
            ("shop/web", &["r.example/shop/web:1"]),
            ("other.example/web", &["r.example/shop/web:1", "r.example/wed:1"]),
            ("bussybox", &["docker.io/library/busybox:1"]),
            ("etcd", &[]),
        ] {
            assert_eq!(present_like(image, &names), expected, "{image}");
        }
    }

    #[test]
    fn the_message_names_the_input_once_and_bounds_it() {
        assert_eq!(
            check("Busybox").expect_err("upper case").message,
            "\"Busybox\": repository name must be lowercase"
        );
        assert_eq!(check("").expect_err("empty").message, "\"\": an image name must not be empty");
        let long = check(&"a/".repeat(100_000)).expect_err("too long").message;
        assert!(long.len() < 1000, "{}", long.len());
    }
}
