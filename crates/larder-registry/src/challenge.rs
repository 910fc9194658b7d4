//! `WWW-Authenticate`: the credentials that a server requests.
//!
//! One header may hold several challenges, separated by the same comma that separates the parameters of one. Real
//! servers also leave out quotes where the grammar wants them, so the parser takes whatever has one clear meaning.

/// One authentication scheme that a server offers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct AuthChallenge {
    /// `bearer`, `basic`, ... in lower case.
    pub(crate) scheme: String,
    /// Names in lower case; of equal names the first counts.
    params: Vec<(String, String)>,
}

impl AuthChallenge {
    /// A parameter; `name` in lower case.
    pub(crate) fn param(&self, name: &str) -> Option<&str> {
        self.params.iter().find(|(param, _)| param == name).map(|(_, value)| value.as_str())
    }
}

/// Longest header that is parsed, in bytes.
const MAX_LEN: usize = 8 * 1024;

/// The challenges of one header field, in its order. What cannot be parsed is skipped.
pub(crate) fn parse(header: &str) -> Vec<AuthChallenge> {
    let mut rest = header.get(..MAX_LEN).unwrap_or(if header.len() > MAX_LEN { "" } else { header });
    let mut challenges: Vec<AuthChallenge> = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        if rest.is_empty() {
            return challenges;
        }
        let (word, after) = split_word(rest);
        if word.is_empty() {
            // No word can start here: skip the character.
            let mut chars = rest.chars();
            chars.next();
            rest = chars.as_str();
            continue;
        }
        let value = after.trim_start_matches([' ', '\t']).strip_prefix('=');
        match (value, challenges.last_mut()) {
            // `name = value` belongs to the challenge before it.
            (Some(value), Some(challenge)) => {
                let (value, after) = split_value(value.trim_start_matches([' ', '\t']));
                let name = word.to_ascii_lowercase();
                if challenge.param(&name).is_none() {
                    challenge.params.push((name, value));
                }
                rest = after;
            }
            (Some(value), None) => rest = split_value(value).1,
            // A word alone begins the next challenge.
            (None, _) => {
                challenges.push(AuthChallenge { scheme: word.to_ascii_lowercase(), params: Vec::new() });
                rest = after;
            }
        }
    }
}

fn split_word(text: &str) -> (&str, &str) {
    let end = text
        .find(|c: char| !c.is_ascii_alphanumeric() && !"!#$%&'*+-.^_`|~/:".contains(c))
        .unwrap_or(text.len());
    text.split_at(end)
}

/// A quoted text with its escapes undone, or everything up to the next comma or space.
fn split_value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([',', ' ', '\t']).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut chars = quoted.chars();
    while let Some(c) = chars.next() {
        match c {
            '"' => break,
            '\\' => value.extend(chars.next()),
            c => value.push(c),
        }
    }
    (value, chars.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_token_challenge_names_realm_service_and_scope() {
        let header = r#"Bearer realm="https://auth.example/token",service="reg, \"one\"",scope="repository:a/b:pull,push""#;
        let challenges = parse(header);
        assert_eq!(challenges.len(), 1);
        assert_eq!(challenges[0].scheme, "bearer");
        assert_eq!(challenges[0].param("realm"), Some("https://auth.example/token"));
        assert_eq!(challenges[0].param("service"), Some("reg, \"one\""));
        assert_eq!(challenges[0].param("scope"), Some("repository:a/b:pull,push"));
    }

    #[test]
    fn several_challenges_in_one_header_are_separated() {
        let schemes = |header: &str| parse(header).into_iter().map(|c| c.scheme).collect::<Vec<_>>();
        assert_eq!(
            schemes(r#"Negotiate, Basic realm="x", Bearer realm="y",service=z"#),
            ["negotiate", "basic", "bearer"]
        );
        assert_eq!(schemes(r#"Basic realm="a, Bearer realm=b""#), ["basic"], "a comma within quotes");
        assert_eq!(schemes("basic"), ["basic"]);
        assert_eq!(schemes(""), Vec::<String>::new());
    }

    #[test]
    fn sloppy_servers_are_understood() {
        let challenges = parse("BEARER Realm = https://auth.example/token?a=b , service=reg");
        assert_eq!(challenges[0].param("realm"), Some("https://auth.example/token?a=b"));
        assert_eq!(challenges[0].param("service"), Some("reg"));
        assert_eq!(parse(r#"Basic realm="never closed"#)[0].param("realm"), Some("never closed"));
    }

    proptest! {
        #[test]
        fn no_header_panics(header in "\\PC{0,200}") {
            parse(&header);
        }

        #[test]
        fn nothing_near_the_grammar_panics_or_grows(header in "(Bearer|Basic|realm|=|\"|,| |\\\\|x|é){0,60}") {
            let challenges = parse(&header);
            let taken: usize = challenges.iter().flat_map(|c| &c.params).map(|(name, value)| name.len() + value.len()).sum();
            prop_assert!(taken <= header.len());
        }

        #[test]
        fn names_of_the_grammar_are_read_back(realm in "[^\\x00-\\x1f]{0,40}", service in "[a-z0-9.]{1,20}") {
            let quoted = realm.replace('\\', "\\\\").replace('"', "\\\"");
            let challenges = parse(&format!("Basic realm=\"r\", Bearer realm=\"{quoted}\",service=\"{service}\""));
            prop_assert_eq!(challenges.len(), 2);
            prop_assert_eq!(challenges[1].param("realm"), Some(realm.as_str()));
            prop_assert_eq!(challenges[1].param("service"), Some(service.as_str()));
        }
    }
}
