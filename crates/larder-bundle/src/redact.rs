//! Removes secrets from texts. Pure but for the secrets that variables of this process hold.
//!
//! Rather too much than too little: a value whose key sounds like a secret is removed whatever it is, unless it is a
//! switch.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::env;
use std::sync::LazyLock;

use regex::{Captures, Regex};

use crate::BundleFile;

/// Placeholder for a secret.
const HIDDEN: &str = "****";

/// Shorter values of variables are not looked for in texts.
const SHORTEST_SECRET: usize = 6;

/// The end of a key whose value is a secret.
const SECRET_KEY: &str = r"(?i-u:(?:password|passwd|passphrase|\bpass|[_.-]pass|[_.-]pwd|secrets?|tokens?|api[_-]?key|access[_-]?key|private[_-]?key|auth|authorization|cookie|headers|credentials?|dockerconfigjson|dockercfg|signature|sig|hmac|\.data)(?:[_-]?value)?)";

/// A value in quotes, also in those of a string of JSON.
const QUOTED: &str = r#"\\"(?:[^"\\]|\\[^"])*\\"|"(?:[^"\\]|\\.)*"|'[^']*'"#;

fn regex(pattern: &str) -> Regex {
    let pattern = pattern.replace("%KEY%", SECRET_KEY).replace("%QUOTED%", QUOTED);
    Regex::new(&pattern).expect("the pattern is valid")
}

/// Each notation as a key and its value.
static VALUES: LazyLock<[Regex; 9]> = LazyLock::new(|| {
    [
        // `"key": "value"`, the same in a string of JSON
        regex(r#"(\\?["'][\w.-]*%KEY%\\?["']\s*:\s*)(%QUOTED%|[^\s,}\]\[{][^\s,}\]]*)"#),
        // `key=value`, `key = value`
        regex(r#"(\b[\w.-]*%KEY%[ \t]*=[ \t]*)(%QUOTED%|[^\s,;&"']+)"#),
        // `key: value` as a whole line, after the prefix of a line of a log, and in a list of pairs
        regex(r"(?m)(^[\s#-]*[\w.-]*%KEY%:[ \t]+)(\S.*)$"),
        regex(r#"((?:[:\]] |["'`(])[ \t]*[\w.-]*%KEY%:[ \t]+)(%QUOTED%|[^\s"'][^"'\n]*)"#),
        regex(r#"([{,][ \t]*[\w.-]*%KEY%:[ \t]+)(%QUOTED%|[^\s,}\]"'][^,}\]"'\n]*)"#),
        // a header in a line of a log
        regex(
            r"(?m)(\b(?i-u:(?:proxy-)?authorization|x-registry-auth|(?:set-)?cookie|[\w-]+-token):[ \t]*)(\S.*)$",
        ),
        // `--key value`
        regex(r"(?m)(--?[\w-]*%KEY%[ ]+)([^\s-]\S*)"),
        // `name: key` with its `value: x`
        regex(
            r#"(["']?name["']?\s*:\s*["']?[\w.-]*%KEY%["']?\s*,?\s*["']?value["']?\s*:\s*)(%QUOTED%|[^\s,}\]]+)"#,
        ),
        // `?key=x` in a URL
        regex(r#"([?&][\w.-]*(?i-u:key)=)([^\s&"'<>]+)"#),
    ]
});

/// A key before a list or an object. In prose, an answer of a registry may follow a word such as "credentials:".
static COLLECTION: LazyLock<Regex> = LazyLock::new(|| {
    regex(
        r#"(?m)(?:\\?["'][\w.-]*%KEY%\\?["']\s*:|(?:^[\s#-]*|[{,:\]][ \t]*)[\w.-]*%KEY%:|\b[\w.-]*%KEY%[ \t]*=)\s*([\[{])"#,
    )
});

/// A key of YAML whose value is on the lines below it: its indent, its name, and the sign of a block of text.
static BLOCK: LazyLock<Regex> =
    LazyLock::new(|| regex(r"^([\s-]*)[\w.-]*(%KEY%):[ \t]*([|>][+-]?\d*[ \t]*)?$"));

/// A key of YAML with its value, which may be on the lines below.
static PAIR: LazyLock<Regex> = LazyLock::new(|| regex(r#"^([\s-]*["']?[\w./-]+["']?:)(?:[ \t]+(\S.*))?$"#));

/// A URL, or an endpoint without a scheme: what is before its path, and the path with the query.
static URL_PATH: LazyLock<Regex> =
    LazyLock::new(|| regex(r#"((?:\bendpoint:[ ]*["']?(?:\w+://)?|\bhttps?://)[^\s/?#"']+)([/?#][^\s"']+)"#));

/// The endpoint of traces in the settings.
static ENDPOINT: LazyLock<Regex> = LazyLock::new(|| regex(r#"(?m)^\s*endpoint:\s*["']?([^\s"']+)"#));

/// `Bearer x`, `Basic x`.
static SCHEMES: LazyLock<Regex> = LazyLock::new(|| regex(r"\b((?i-u:bearer|basic)\s+)([\w+/=.~-]{6,})"));

/// A JSON web token.
static JWT: LazyLock<Regex> = LazyLock::new(|| regex(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"));

/// A secret key in PEM.
static PEM: LazyLock<Regex> =
    LazyLock::new(|| regex(r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)"));

/// The files without secrets in contents and errors.
pub(crate) fn redacted_files(files: Vec<BundleFile>) -> Vec<BundleFile> {
    let mut secrets =
        secrets_of(env::vars_os().map(|(name, value)| {
            (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
        }));
    for file in files.iter().filter(|file| is_of_settings(file)) {
        secrets.extend(ENDPOINT.captures_iter(&file.text).flat_map(|found| endpoint_secrets(&found[1])));
    }
    let redact = |file: BundleFile| {
        let clean = |text: &str| {
            let text = if is_of_settings(&file) { without_url_paths(text) } else { text.to_owned() };
            redacted(&text, &secrets)
        };
        BundleFile { text: clean(&file.text), error: file.error.as_deref().map(clean), ..file }
    };
    files.into_iter().map(redact).collect()
}

fn is_of_settings(file: &BundleFile) -> bool {
    file.name.starts_with("settings")
}

/// The secrets in variables: values of names that sound like one, and user names and passwords in URLs.
pub fn secrets_of(variables: impl Iterator<Item = (String, String)>) -> Vec<String> {
    static NAME: LazyLock<Regex> = LazyLock::new(|| regex(r"%KEY%$"));
    let mut secrets = Vec::new();
    for (name, value) in variables {
        let after_scheme = value.split_once("://").map(|(_, rest)| rest);
        let is_proxy = name.to_ascii_lowercase().ends_with("_proxy");
        let url = after_scheme.or_else(|| is_proxy.then_some(value.as_str()));
        if let Some((user, _)) = url.and_then(|rest| rest.rsplit_once('@')) {
            secrets.push(user.to_owned());
            secrets.extend(user.split_once(':').map(|(_, password)| password.to_owned()));
        }
        if name.starts_with("OTEL_") && name.ends_with("_ENDPOINT") {
            secrets.extend(endpoint_secrets(&value));
        }
        if NAME.is_match(&name) {
            secrets.push(value);
        }
    }
    secrets.retain(|secret| secret.len() >= SHORTEST_SECRET && !is_switch(secret));
    secrets
}

/// Finds possible tokens in the endpoint of traces: its path with the query, and their parts unless they are plain
/// words.
fn endpoint_secrets(endpoint: &str) -> Vec<String> {
    let rest = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
    let path = rest.find(['/', '?', '#']).map_or("", |at| &rest[at..]);
    if endpoint.starts_with("unix:") || path.trim_matches('/') == "v1/traces" {
        return Vec::new();
    }
    let is_word = |part: &str| part.len() < 16 && part.chars().all(|c| c.is_ascii_lowercase() || c == '-');
    let parts = path.split(['/', '?', '#', '&', '=']).filter(|part| !is_word(part));
    parts.chain([path]).filter(|part| part.len() >= SHORTEST_SECRET).map(str::to_owned).collect()
}

/// The text without these secrets, and without what looks like one.
pub fn redacted(text: &str, secrets: &[String]) -> String {
    let mut text = without_url_users(text);
    // A secret may be the beginning of a longer one.
    let mut secrets: Vec<&str> = secrets.iter().map(String::as_str).collect();
    secrets.sort_by_key(|secret| Reverse(secret.len()));
    for secret in secrets {
        text = text.replace(secret, HIDDEN);
    }
    let mut text = without_collections(&without_blocks(&PEM.replace_all(&text, HIDDEN)));
    for pattern in VALUES.iter() {
        text = pattern.replace_all(&text, hide_value).into_owned();
    }
    let text = SCHEMES.replace_all(&text, |found: &Captures| match &found[2] {
        // "basic authentication"
        word if word.chars().all(|c| c.is_ascii_lowercase()) => found[0].to_owned(),
        _ => format!("{}{HIDDEN}", &found[1]),
    });
    JWT.replace_all(&text, HIDDEN).into_owned()
}

/// The text without the lists and objects that are values of keys of secrets.
fn without_collections(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut at = 0;
    while let Some(found) = COLLECTION.captures_at(text, at) {
        let open = found.get(1).expect("the group is not optional").start();
        let end = open + collection_length(&text[open..]);
        clean.push_str(&text[at..open]);
        let value = &text[open..end];
        if value.len() == 2 {
            clean.push_str(value);
        } else {
            let is_escaped = value.split_once('"').is_some_and(|(before, _)| before.ends_with('\\'));
            let quote = if is_escaped { "\\\"" } else { "\"" };
            let (open, close) = if value.starts_with('[') { ("[", "]") } else { ("", "") };
            clean.extend([open, quote, HIDDEN, quote, close]);
        }
        at = end;
    }
    clean.push_str(&text[at..]);
    clean
}

/// The length of the list or object at the beginning of a text. One that begins with text on its line, as in a log,
/// ends there at the latest; one that does not end is as long as the text: rather too much is hidden than too little.
fn collection_length(text: &str) -> usize {
    let line = text.find('\n').unwrap_or(text.len());
    let text = if text[1..line].trim().is_empty() { text } else { &text[..line] };
    let mut depth = 0_usize;
    let mut quote = None;
    let mut is_escaped = false;
    for (at, c) in text.char_indices() {
        match (c, quote) {
            ('\\', _) if !is_escaped => {
                is_escaped = true;
                continue;
            }
            // In a string of JSON all quotes are escaped: the first shows with how many signs.
            ('"' | '\'', None) => quote = Some((c, is_escaped)),
            (_, Some(open)) if open == (c, is_escaped) => quote = None,
            ('[' | '{', None) => depth += 1,
            (']' | '}', None) => depth -= 1,
            _ => {}
        }
        is_escaped = false;
        if depth == 0 {
            return at + c.len_utf8();
        }
    }
    text.len()
}

/// The text without the values on the lines below keys of secrets. Settings of credentials are no secrets: of those,
/// pairs remain.
fn without_blocks(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut block: Option<YamlBlock> = None;
    for line in text.split_inclusive('\n') {
        let content = line.trim_end();
        let indent = line.len() - line.trim_start().len();
        let is_item = content.trim_start().starts_with("- ");
        let inside = block.as_mut().filter(|block| {
            content.is_empty() || indent > block.indent || (indent == block.indent && is_item)
        });
        if let Some(block) = inside {
            let pair = PAIR.captures(content).filter(|_| !block.is_text);
            match pair {
                Some(_) if block.keeps_pairs => {}
                Some(pair) => {
                    let value = if pair.get(2).is_some() { HIDDEN } else { "" };
                    clean.extend([&pair[1], " ", value, "\n"]);
                    continue;
                }
                None => {
                    if !block.is_hidden {
                        clean.extend([" ".repeat(block.indent).as_str(), "  ", HIDDEN, "\n"]);
                        block.is_hidden = true;
                    }
                    continue;
                }
            }
        }
        clean.push_str(line);
        block = BLOCK.captures(content).map(|found| YamlBlock {
            indent: found[1].len(),
            is_text: found.get(3).is_some(),
            keeps_pairs: found[2].to_ascii_lowercase().starts_with("credential"),
            is_hidden: false,
        });
    }
    clean
}

/// Kind of the lines below a key.
struct YamlBlock {
    /// Columns before the key.
    indent: usize,
    is_text: bool,
    keeps_pairs: bool,
    /// Whether a line stands for the hidden ones already.
    is_hidden: bool,
}

/// The text with scheme, host and port of its URLs only: the rest may be a token.
fn without_url_paths(text: &str) -> String {
    let hide = |found: &Captures| {
        if found[1].ends_with("unix:") { found[0].to_owned() } else { format!("{}/{HIDDEN}", &found[1]) }
    };
    URL_PATH.replace_all(text, hide).into_owned()
}

/// The value of a proxy's variable, without its user.
pub(crate) fn without_proxy_user(value: &str) -> String {
    match value.split_once("://") {
        Some((scheme, rest)) => format!("{scheme}://{}", without_user(rest)),
        None => without_user(value).into_owned(),
    }
}

/// The key with its value hidden, in the value's quotes.
fn hide_value(found: &Captures) -> String {
    let (key, value) = (&found[1], &found[2]);
    let plain = value.trim_matches(['\\', '"', '\'']);
    if is_switch(plain) || plain.starts_with(HIDDEN) {
        return found[0].to_owned();
    }
    match value.chars().next() {
        Some('\\') => format!("{key}\\\"{HIDDEN}\\\""),
        Some(quote @ ('"' | '\'')) => format!("{key}{quote}{HIDDEN}{quote}"),
        _ => format!("{key}{HIDDEN}"),
    }
}

/// Whether a value says only whether something is on, or begins a list or an object.
fn is_switch(value: &str) -> bool {
    matches!(value, "" | "true" | "false" | "null" | "~" | "{}" | "[]" | "{" | "[" | "|" | ">" | "(set)")
}

/// The text without user names and passwords in URLs. A digest after the last `@` is no host.
fn without_url_users(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        clean.push_str(before);
        let end = after
            .find(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '<' | '>'))
            .unwrap_or(after.len());
        let (url, next) = after.split_at(end);
        clean.push_str(&without_user(url));
        rest = next;
    }
    clean.push_str(rest);
    clean
}

/// Returns the rest of a URL after its scheme, without its user.
fn without_user(url: &str) -> Cow<'_, str> {
    let mut users = url.match_indices('@').map(|(at, _)| at);
    let is_digest = |rest: &str| rest.starts_with("sha256:") || rest.starts_with("sha512:");
    match users.rfind(|at| !is_digest(&url[at + 1..])) {
        Some(at) => Cow::Owned(format!("{HIDDEN}{}", &url[at..])),
        None => Cow::Borrowed(url),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_removed_in_each_notation() {
        for text in [
            "https://bob:hunter2@registry.example/v2/",
            "proxy http://bob:hun@ter/hunter2@proxy:3128 failed",
            "backend: docker://bob:hunter2@10.0.0.5:2376",
            r#"{"auth": "hunter2", "username": "bob"}"#,
            r#"{"identitytoken":"hunter2"}"#,
            r#"{"auths": {"r.example": {"password": "a \" hunter2"}}}"#,
            r#"{"headers": {"Authorization": ["Basic Ym9iOmh1bnRlcjI="]}, "password" : 'hunter2'}"#,
            "  password: hunter2 with words",
            "- registryToken: 'hunter2'",
            "X-Registry-Auth: hunter2",
            "Authorization: Bearer Hunter2hunter2",
            "AWS_SECRET_ACCESS_KEY=hunter2",
            "mount -o username=bob,password=hunter2,rw",
            r#"level=info msg="{\"password\":\"hunter2\",\"user\":\"bob\"}""#,
            r#""password": {"value": "hunter2"}"#,
            "GET https://blobs.example/a?X-Amz-Signature=hunter2&X-Amz-Date=1",
            "location: https://blobs.example/a?sv=1&sig=hunter2",
            "2026-11-23T10:00:00 host larder[1]: > X-Registry-Auth: hunter2",
            "2026-11-23T10:00:00 host larder[1]: > Authorization: hunter2",
            "token: |\n  hunter2\n  hunter2\nnext: 1",
            "  - password: >-\n\n      hunter2\n  - next: 1",
            "env: [{name: CLOUD_TOKEN, value: hunter2}]",
            "env:\n- name: CLOUD_TOKEN\n  value: hunter2\n",
            r#"{"name":"CLOUD_TOKEN","value":"hunter2"}"#,
            "GET /token?service=r&token=hunter2&scope=x",
            "ExecStart=/usr/bin/provider --token hunter2 --password=hunter2",
            "sent Bearer hunter2hunter2 to r.example",
            "sent eyJhbGciOiJIUzI1NiJ9.hunter2.signature",
            ".dockerconfigjson: hunter2",
            "2026-11-26T10:00:00+0000 host larder[1]: password: hunter2",
            "2026-11-26T10:00:00+0000 host larder[1]: api_key: hunter2 with words",
            "2026-11-26T10:00:00+0000 host larder[1]: INFO larder::pull: token: hunter2",
            r#"2026-11-26T10:00:00+0000 host larder[1]: password = "hunter2""#,
            "msg='secret: hunter2'",
            "env: [{CLOUD_TOKEN: hunter2, a: b}, {a: b, password: hunter2 x}]",
            "tokens:\n- hunter2\n- hunter2\nnext: 1",
            "  password:\n\n    hunter2\n  next: 1",
            "headers:\n  X-Meta: hunter2\n  X-Other:\n  - hunter2\nnext: 1",
            "credentials:\n  name: a\n  password:\n    hunter2\n",
            r#"{"auth": {"a": {"b": "hunter2"}, "c": "}"}, "d": 1}"#,
            r#"{"tokens": [["}"], "hunter2"]}"#,
            r#"msg="{\"auth\": {\"a\": {\"b\": \"hunter2\"}}}""#,
            "tokens = ['a', 'hunter2']",
            "larder[1]: tokens: [a, hunter2]",
            r#"cut off: "auth": {"a": {"b": "hunter2"#,
            "DB_PASS=hunter2",
            "db_pwd: hunter2",
            "token_value: hunter2",
            "https://collector.example/v1/traces?key=hunter2",
            "GET /v1/traces?a=b&apiKey=hunter2: 403",
            "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
        ] {
            let clean = redacted(text, &[]);
            assert!(!clean.to_lowercase().contains("hunter2") && !clean.contains("Ym9i"), "{text}: {clean}");
            assert!(clean.contains(HIDDEN), "{text}: {clean}");
        }
    }

    #[test]
    fn what_a_report_needs_remains() {
        for text in [
            "https://registry.example:5000/v2/a@sha256:0123",
            "image: r.example/app@sha256:0123",
            "credentials:\n  tokens: true\n  tokenFile: /run/token\n",
            "unable to retrieve auth token: invalid username/password: unauthorized",
            "the registry asks for basic authentication",
            r#"{"secrets": [], "auth": null, "pulls": 3}"#,
            "imagePullCredentialsVerificationPolicy: NeverVerify",
            "registries:\n  r.example: {mirrors: []}\nname: web\nvalue: 3\n",
            "credentials:\n  a: b\n  c:\n  - d\n",
            "larder[1]: r.example/team/token:1.0: the token expires in 57m",
            "larder[1]: failed to fetch anonymous token: unexpected status 403 Forbidden",
            r#"larder[1]: r.example rejected the credentials: {"errors":[{"code":"DENIED"}]}"#,
            "larder[1]: pulled docker.io/library/secret:latest, bypass=true",
            r#"{"tokens": [], "auth": {}, "name": "secret", "next": ["a"]}"#,
            "https://r.example/v2/?n=100&last=monkey",
        ] {
            assert_eq!(redacted(text, &[]), text);
        }
        assert_eq!(
            redacted("https://bob:x@r.example/v2/a@sha256:0", &[]),
            "https://****@r.example/v2/a@sha256:0",
            "the host remains"
        );
    }

    #[test]
    fn what_follows_a_hidden_collection_remains() {
        assert_eq!(
            redacted(r#"{"auth": {"a": {"b": "x}"}}, "tokens": [[1]], "d": 1}"#, &[]),
            r#"{"auth": "****", "tokens": ["****"], "d": 1}"#
        );
        assert_eq!(redacted("\"auth\": {\"a\": \nnext", &[]), "\"auth\": \"****\"\nnext");
        assert_eq!(redacted("tokens:\n- x\n- y\nnext: 1", &[]), "tokens:\n  ****\nnext: 1");
    }

    #[test]
    fn the_endpoint_of_traces_has_no_path_in_settings_and_its_token_is_nowhere() {
        let file = |name: &str, text: &str| BundleFile {
            name: name.to_owned(),
            about: "",
            text: text.to_owned(),
            error: None,
        };
        let settings = "tracing:\n  endpoint: c.example:4318/hunter2-trace/v1/traces?a=Hunter2\nmirror: https://m.example:5000/x/y\n";
        let log = "failed: http://c.example:4318/hunter2-trace/v1/traces?a=Hunter2; hunter2-trace/v2 Hunter2";
        let files = redacted_files(vec![file("settings.yaml", settings), file("log.txt", log)]);
        assert_eq!(
            files[0].text,
            "tracing:\n  endpoint: c.example:4318/****\nmirror: https://m.example:5000/****\n"
        );
        assert_eq!(files[1].text, "failed: http://c.example:4318****; ****/v2 ****");
        for endpoint in
            ["http://c.example:4318/v1/traces", "unix:///run/otel/Collector1.sock", "c.example:4317"]
        {
            assert_eq!(endpoint_secrets(endpoint), Vec::<String>::new(), "{endpoint}");
            let settings = format!("containerRuntimeEndpoint: unix:///run/c.sock\nendpoint: {endpoint}\n");
            let hidden = settings.replace("/v1/traces", "/****");
            assert_eq!(redacted_files(vec![file("settings.yaml", &settings)])[0].text, hidden);
        }
    }

    #[test]
    fn secrets_in_variables_are_removed_wherever_they_are() {
        let variables = [
            ("HTTP_PROXY", "http://bob:hunter2@proxy:3128"),
            ("https_proxy", "alice:hunter3@proxy:3128"),
            ("REGISTRY_PASSWORD", "correct horse"),
            ("LARDER_LOG", "debug,info"),
            ("USE_TOKEN", "true"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://c.example/v1/0123-key"),
        ];
        let secrets = secrets_of(variables.into_iter().map(|(name, value)| (name.into(), value.into())));
        assert_eq!(
            secrets,
            [
                "bob:hunter2",
                "hunter2",
                "alice:hunter3",
                "hunter3",
                "correct horse",
                "0123-key",
                "/v1/0123-key"
            ]
        );
        assert_eq!(
            redacted("abcdefgh", &["abcdef".to_owned(), "abcdefgh".to_owned()]),
            "****",
            "longest first"
        );
        assert_eq!(without_proxy_user("b:x@proxy:3128"), "****@proxy:3128", "however short it is");
        assert_eq!(redacted("tried hunter2, then correct horse", &secrets), "tried ****, then ****");
    }
}
