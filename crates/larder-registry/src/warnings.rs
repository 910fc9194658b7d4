//! Warnings that registries add to their responses, such as `Warning: 299 - "this repository moves to another host"`.

use std::collections::HashSet;

use parking_lot::Mutex;
use reqwest::header::{HeaderMap, WARNING};

use super::error::printable;

/// Warnings that are remembered. Registries beyond have none.
const MAX_KNOWN: usize = 256;

/// The warnings so far, so that each is shown once.
#[derive(Debug, Default)]
pub(crate) struct RegistryWarnings(Mutex<HashSet<(String, String)>>);

impl RegistryWarnings {
    /// The warnings of a response that this host has not sent before: printable, and not longer than an error message.
    pub(crate) fn new_ones(&self, host: &str, headers: &HeaderMap) -> Vec<String> {
        let values = headers.get_all(WARNING).iter().take(3).filter_map(|value| value.to_str().ok());
        let texts: Vec<String> = values.filter_map(text_of).collect();
        if texts.is_empty() {
            return texts;
        }
        let mut known = self.0.lock();
        let is_new = |text: &String| known.len() < MAX_KNOWN && known.insert((host.to_owned(), text.clone()));
        texts.into_iter().filter(is_new).collect()
    }
}

/// The text of a warning with the code 299 and without an agent, as the distribution protocol has them.
fn text_of(value: &str) -> Option<String> {
    let quoted = value.trim().strip_prefix("299 - \"")?;
    let quoted = quoted.split_once("\" \"").map_or(quoted, |(text, _date)| text);
    let text = printable(&quoted.trim_end_matches('"').replace("\\\"", "\""));
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_is_new_once_for_each_host() {
        let warnings = RegistryWarnings::default();
        let of = |host: &str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(WARNING, value.parse().unwrap());
            warnings.new_ones(host, &headers)
        };
        let moved = r#"299 - "moves to \"other.example\" soon""#;
        assert_eq!(of("a.example", moved), [r#"moves to "other.example" soon"#]);
        assert_eq!(of("a.example", moved), [""; 0]);
        assert_eq!(of("b.example", moved).len(), 1);
        assert_eq!(of("a.example", r#"299 - "text" "Wed, 21 Oct 2026 07:28:00 GMT""#), ["text"]);
        for other in ["110 - \"stale\"", "299 agent \"text\"", "299 - \"\"", "text"] {
            assert_eq!(of("a.example", other), [""; 0], "{other}");
        }
        assert!(of("a.example", &format!("299 - \"{}\"", "x".repeat(4000)))[0].len() < 400);
        for number in 0..2 * MAX_KNOWN {
            of("c.example", &format!("299 - \"{number}\""));
        }
        assert_eq!(warnings.0.lock().len(), MAX_KNOWN);
    }
}
