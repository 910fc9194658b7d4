//! The names of an image in a table.

/// The first name, and how many others there are; with `wide` all of them. An image without a name has its id.
pub(crate) fn image_names(names: &[String], id: &str, wide: bool) -> String {
    let Some((first, others)) = names.split_first() else { return id.to_owned() };
    if wide {
        return names.join(", ");
    }
    match others.iter().filter(|name| is_additional_name(name, names)).count() {
        0 => first.clone(),
        1 => format!("{first} (+1 name)"),
        more => format!("{first} (+{more} names)"),
    }
}

/// A digest beside a tag of the same repository is what was pulled by that tag.
fn is_additional_name(name: &str, names: &[String]) -> bool {
    let Some((repository, _)) = name.split_once('@') else { return true };
    let is_tag = |rest: &str| rest.starts_with(':') && !rest.contains('@');
    !names.iter().any(|other| other.strip_prefix(repository).is_some_and(is_tag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_removed_name_is_reported_and_the_digest_of_a_tag_is_no_other_name() {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        for (all, short, wide) in [
            (names(&[]), "id", "id"),
            (names(&["api:2"]), "api:2", "api:2"),
            (names(&["api:2", "keepme:1"]), "api:2 (+1 name)", "api:2, keepme:1"),
            (names(&["a:2", "b:1", "c:1"]), "a:2 (+2 names)", "a:2, b:1, c:1"),
            (names(&["a:2", "a@sha256:1"]), "a:2", "a:2, a@sha256:1"),
            (names(&["a:2", "b@sha256:1"]), "a:2 (+1 name)", "a:2, b@sha256:1"),
        ] {
            assert_eq!(
                (image_names(&all, "id", false), image_names(&all, "id", true)),
                (short.into(), wide.into())
            );
        }
    }
}
