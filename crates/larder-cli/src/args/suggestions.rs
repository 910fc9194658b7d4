//! The commands and flags that clap suggests for an unknown one.

use clap::error::{ContextKind, ContextValue};
use larder::suggestions::nearest;

const SUGGESTED: [ContextKind; 3] =
    [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg, ContextKind::SuggestedValue];

/// Leaves out suggestions that are not similar to the word: clap compares the letters that two words have in common,
/// and offers `lease` for `clean`.
pub(super) fn retain_similar(mut usage: clap::Error) -> clap::Error {
    let text = |kind| match usage.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    // A wrong value comes with its argument.
    let word = text(ContextKind::InvalidSubcommand)
        .or_else(|| text(ContextKind::InvalidValue))
        .or_else(|| text(ContextKind::InvalidArg));
    let Some(word) = word else { return usage };
    for kind in SUGGESTED {
        let suggested = match usage.remove(kind) {
            Some(ContextValue::String(text)) => vec![text],
            Some(ContextValue::Strings(texts)) => texts,
            _ => continue,
        };
        let similar: Vec<String> = suggested.into_iter().filter(|known| is_similar(&word, known)).collect();
        let value = match (kind, similar.first()) {
            (_, None) => continue,
            (ContextKind::SuggestedArg, Some(first)) => ContextValue::String(first.clone()),
            _ => ContextValue::Strings(similar),
        };
        usage.insert(kind, value);
    }
    usage
}

/// Whether `known` begins with `word`, or is what a slip made `word` of.
fn is_similar(word: &str, known: &str) -> bool {
    known.starts_with(word) || nearest(word, [known]).is_some()
}

#[cfg(test)]
mod tests {
    use crate::args::Cli;

    #[test]
    fn only_similar_words_are_suggested() {
        for (line, suggested) in [
            ("larder clena", ""),
            ("larder claer", ""),
            ("larder serve --listne", ""),
            ("larder imagse", "similar subcommands exist: 'images'"),
            ("larder images --sotr name", "similar argument exists: '--sort'"),
            ("larder serve --metrics x", "similar argument exists: '--metrics-address'"),
            ("larder images -o jsno", "similar value exists: 'json'"),
        ] {
            let text = Cli::read(line.split(' ')).expect_err(line).to_string();
            assert_eq!(text.contains("similar"), !suggested.is_empty(), "{text}");
            assert!(text.contains(suggested), "{text}");
        }
    }
}
