//! Suggests the known word that is most similar to a misspelt one. Pure.

/// The nearest of `words`: the same but for case, or else within two slips (one, in short words). A slip is a letter
/// that is wrong, missing, too much, or swapped with the next.
pub fn nearest<'a>(text: &str, words: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // What is longer is no slip, and the comparison costs the square of the length.
    if text.len() > 64 {
        return None;
    }
    let allowed = if text.chars().count() < 5 { 1 } else { 2 };
    let ranked = words.into_iter().filter(|word| *word != text).map(|word| {
        let slips = if word.eq_ignore_ascii_case(text) { 0 } else { strsim::osa_distance(text, word) };
        (slips, word)
    });
    ranked.filter(|(slips, _)| *slips <= allowed).min_by_key(|(slips, _)| *slips).map(|(_, word)| word)
}

/// The words most similar to `text`, at most `count`, the most similar first.
pub fn most_similar<'a>(text: &str, words: impl IntoIterator<Item = &'a str>, count: usize) -> Vec<&'a str> {
    let mut ranked: Vec<_> = words.into_iter().map(|word| (strsim::osa_distance(text, word), word)).collect();
    ranked.sort_unstable();
    ranked.truncate(count);
    ranked.into_iter().map(|(_, word)| word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_similar_words_come_first() {
        let tags = ["latest", "3.12-slim", "3.12", "3.11"];
        assert_eq!(most_similar("3.13", tags, 2), ["3.11", "3.12"]);
        assert_eq!(most_similar("3.13", [], 2), [""; 0]);
    }

    #[test]
    fn misspelt_words_get_a_suggestion() {
        let words = ["containers", "initContainers", "image", "name"];
        for (text, meant) in [
            ("containrs", Some("containers")),
            ("Containers", Some("containers")),
            ("contianers", Some("containers")),
            ("imgae", Some("image")),
            ("nam", Some("name")),
            ("port", None),
            ("", None),
        ] {
            assert_eq!(nearest(text, words), meant, "{text}");
        }
        assert_eq!(nearest("image", words), None, "a word is not a slip of itself");
        assert_eq!(nearest(&"containers".repeat(1000), words), None);
    }
}
