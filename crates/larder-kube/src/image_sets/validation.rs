//! Rules of the schema: the API server refuses texts that larder, or Kubernetes, cannot use.

use kube::core::Rule;

// The API server bounds the cost of a rule by the length of its pattern: what stands between words is one alternative.
/// A registry: labels of a host or a bracketed address, and a port.
const REGISTRY: &str = r"([A-Za-z0-9]+((\.|-+)[A-Za-z0-9]+)*|\[[0-9A-Fa-f:]+\])(:[0-9]+)?/";
const PATH: &str = r"[a-z0-9]+((\.|__?|-+|/)[a-z0-9]+)*";
const TAG: &str = r":\w[-\w.]{0,127}";
const DIGEST: &str = "@sha(256:[0-9a-f]{64}|384:[0-9a-f]{96}|512:[0-9a-f]{128})";
const PLATFORM: &str = r"#[-\w.]+(/[-\w.]+){1,2}";
const SUBDOMAIN: &str = r"[a-z0-9]+((\.|-+)[a-z0-9]+)*";
const LABEL_NAME: &str = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?";

/// Of a text that is the name of an image.
pub(super) fn image() -> Rule {
    let pattern = image_pattern();
    Rule::new(format!("self.matches(r'{pattern}')")).message(
        "must be an image, such as registry.example/app:1 or registry.example/app@sha256:<64 digits>, with #linux/arm64 for another platform",
    )
}

/// Of a list of names of Secrets.
pub(super) fn secret_names() -> Rule {
    Rule::new(format!("self.all(name, name.matches(r'^{SUBDOMAIN}$'))"))
        .message("must be names of Secrets: lower-case letters, digits, '-' and '.'")
}

/// Of a text that is the key of a label.
pub(super) fn label_key() -> Rule {
    Rule::new(format!("self.matches(r'{}')", label_key_pattern())).message(
        "must be the key of a label: a name of at most 63 letters, digits, '-', '_' and '.', after a domain and '/' if any",
    )
}

/// Of a list of values of labels.
pub(super) fn label_values() -> Rule {
    Rule::new(format!("self.all(value, value.matches(r'^({LABEL_NAME})?$'))"))
        .message("must be values of labels: at most 63 letters, digits, '-', '_' and '.'")
}

/// Of a map of labels.
pub(super) fn labels() -> Rule {
    let (key, value) = (label_key_pattern(), format!("^({LABEL_NAME})?$"));
    Rule::new(format!("self.all(key, key.matches(r'{key}') && self[key].matches(r'{value}'))")).message(
        "must be labels: keys and values are at most 63 letters, digits, '-', '_' and '.', keys after a domain and '/' if any",
    )
}

/// Of the times between attempts.
pub(super) fn backoff() -> Rule {
    Rule::new("self.backoffSeconds <= self.maxBackoffSeconds")
        .message("backoffSeconds (10 by default) must not be greater than maxBackoffSeconds (300 by default)")
}

fn image_pattern() -> String {
    format!("^({REGISTRY})?{PATH}({TAG})?({DIGEST})?({PLATFORM})?$")
}

fn label_key_pattern() -> String {
    format!("^({SUBDOMAIN}/)?{LABEL_NAME}$")
}

#[cfg(test)]
mod tests {
    use larder::reference::Reference;
    use regex::{Regex, RegexBuilder};

    use super::*;

    /// As the API server reads it: classes are of ASCII.
    fn regex(pattern: &str) -> Regex {
        RegexBuilder::new(pattern).unicode(false).build().unwrap()
    }

    #[test]
    fn the_pattern_of_images_agrees_with_the_grammar() {
        let pattern = regex(&image_pattern());
        let digits = |count| "a".repeat(count);
        let names = [
            "a",
            "a:1",
            "a/b/c",
            "a.b_c__d---e",
            "r.example/a",
            "r.example:5000/a:1",
            "R.example/a",
            "[::1]:5000/a",
            "localhost/a",
            "my_reg/app:v1",
            "my-reg/app",
            "a:_x.Y-z",
            "",
            " ",
            "a b",
            "A",
            "a:",
            "a:-x",
            "a/",
            "/a",
            "a//b",
            "a..b",
            "a___b",
            "a_",
            "-a",
            "r.example/A",
            "r.example:x/a",
            "r.example:/a",
            "http://r.example/a",
            "a@sha256:0",
            "a@md5:00000000000000000000000000000000",
            "[::g]/a",
            "é",
            "a:é",
            "a\n",
            "a#linux/arm64",
            "r.example/a:1#linux/arm/v6",
            "a#linux",
            "a#linux/arm/v6/x",
            "a#",
            "a#linux/ arm64",
        ];
        let names = names.map(str::to_owned).into_iter().chain([
            format!("a@sha256:{}", digits(64)),
            format!("r.example/a:1@sha512:{}", digits(128)),
            format!("a@sha384:{}", digits(96)),
            format!("a@sha384:{}", digits(64)),
            format!("a@sha256:{}", digits(64).to_uppercase()),
            format!("a:{}", digits(128)),
            format!("a:{}", digits(129)),
        ]);
        for name in names {
            assert_eq!(pattern.is_match(&name), Reference::parse(&name).is_ok(), "{name:?}");
        }
    }

    #[test]
    fn keys_of_labels_are_names_with_or_without_a_domain() {
        let pattern = regex(&label_key_pattern());
        let long = |count| "a".repeat(count);
        for good in ["a", "kubernetes.io/os", "A_b.c-d", "a.b-c.d/E", &long(63)] {
            assert!(pattern.is_match(good), "{good}");
        }
        for bad in ["", "a b", "-a", "a-", "/a", "a/", "A.b/c", "a/b/c", &long(64), "ä"] {
            assert!(!pattern.is_match(bad), "{bad}");
        }
    }
}
