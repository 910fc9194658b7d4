//! Removes secrets from texts. Pure but for the secrets that variables of this process hold.
//!
//! Rather too much than too little: a value whose key sounds like a secret is removed whatever it is, unless it is a switch.

use std::borrow::Cow;
use std::env;
use std::sync::LazyLock;

use regex::{Captures, Regex};

use crate::BundleFile;

/// What stands for a secret.
const HIDDEN: &str = "****";

/// Shorter values of variables are not looked for in texts.
const SHORTEST_SECRET: usize = 6;

/// The end of a key whose value is a secret.
const SECRET_KEY: &str = r"(?i-u:password|passwd|passphrase|secrets?|tokens?|api[_-]?key|access[_-]?key|private[_-]?key|auth|authorization|cookie|headers|credentials?|dockerconfigjson|dockercfg|signature|sig|hmac|\.data)";

fn regex(pattern: &str) -> Regex {
    let pattern = pattern.replace("%KEY%", SECRET_KEY);
    Regex::new(&pattern).expect("the pattern is valid")
}

/// `"key": "value"`, `"key": ["value"]`, `"key": {"value": "x"}`, the same in a string of JSON, `key=value`, as whole lines
/// `key: value`, a header in a line of a log, `--key value`, and `name: key` with its `value: x`.
static VALUES: LazyLock<[Regex; 6]> = LazyLock::new(|| {
    const QUOTED: &str = r#"\\"(?:[^"\\]|\\[^"])*\\"|"(?:[^"\\]|\\.)*"|'[^']*'"#;
    let of_quoted = |pattern: &str| regex(&pattern.replace("%QUOTED%", QUOTED));
    [
        of_quoted(r#"(\\?["'][\w.-]*%KEY%\\?["']\s*:\s*)(%QUOTED%|\[[^\]]*\]|\{[^{}]*\}|[^\s,}\]]+)"#),
        of_quoted(r#"(\b[\w.-]*%KEY%=)(%QUOTED%|[^\s,;&"']+)"#),
        regex(r"(?m)(^[\s#-]*[\w.-]*%KEY%:[ \t]+)(\S.*)$"),
        regex(
            r"(?m)(\b(?i-u:(?:proxy-)?authorization|x-registry-auth|(?:set-)?cookie|[\w-]+-token):[ \t]*)(\S.*)$",
        ),
        regex(r"(?m)(--?[\w-]*%KEY%[ ]+)([^\s-]\S*)"),
        of_quoted(
            r#"(["']?name["']?\s*:\s*["']?[\w.-]*%KEY%["']?\s*,?\s*["']?value["']?\s*:\s*)(%QUOTED%|[^\s,}\]]+)"#,
        ),
    ]
});

/// A key of YAML whose value is the indented lines below it.
static BLOCK: LazyLock<Regex> = LazyLock::new(|| regex(r"^([\s-]*)[\w.-]*%KEY%:[ \t]*[|>][+-]?\d*[ \t]*$"));

/// `Bearer x`, `Basic x`.
static SCHEMES: LazyLock<Regex> = LazyLock::new(|| regex(r"\b((?i-u:bearer|basic)\s+)([\w+/=.~-]{6,})"));

/// A JSON web token.
static JWT: LazyLock<Regex> = LazyLock::new(|| regex(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"));

/// A secret key in PEM.
static PEM: LazyLock<Regex> =
    LazyLock::new(|| regex(r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)"));

/// A file without secrets in content and error.
pub(crate) fn redacted_file(file: BundleFile) -> BundleFile {
    let secrets =
        secrets_of(env::vars_os().map(|(name, value)| {
            (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
        }));
    let clean = |text: &str| redacted(text, &secrets);
    BundleFile { text: clean(&file.text), error: file.error.as_deref().map(clean), ..file }
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
        if NAME.is_match(&name) {
            secrets.push(value);
        }
    }
    secrets.retain(|secret| secret.len() >= SHORTEST_SECRET && !is_switch(secret));
    secrets
}

/// The text without these secrets, and without what looks like one.
pub fn redacted(text: &str, secrets: &[String]) -> String {
    let mut text = without_url_users(text);
    for secret in secrets {
        text = text.replace(secret.as_str(), HIDDEN);
    }
    let mut text = without_blocks(&PEM.replace_all(&text, HIDDEN));
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

/// The text without the indented lines below keys of secrets.
fn without_blocks(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut key_indent = None;
    for line in text.split_inclusive('\n') {
        let content = line.trim_end();
        let indent = line.len() - line.trim_start().len();
        if key_indent.is_some_and(|key| content.is_empty() || indent > key) {
            continue;
        }
        clean.push_str(line);
        key_indent = BLOCK.captures(content).map(|found| found[1].len());
        if let Some(key) = key_indent {
            clean.extend([" ".repeat(key).as_str(), "  ", HIDDEN, "\n"]);
        }
    }
    clean
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
        Some('{') => format!("{key}\"{HIDDEN}\""),
        Some(quote @ ('"' | '\'')) => format!("{key}{quote}{HIDDEN}{quote}"),
        Some('[') => format!("{key}[\"{HIDDEN}\"]"),
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

/// What follows the scheme of a URL, without its user.
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
    fn secrets_in_variables_are_removed_wherever_they_are() {
        let variables = [
            ("HTTP_PROXY", "http://bob:hunter2@proxy:3128"),
            ("https_proxy", "alice:hunter3@proxy:3128"),
            ("REGISTRY_PASSWORD", "correct horse"),
            ("LARDER_LOG", "debug,info"),
            ("USE_TOKEN", "true"),
        ];
        let secrets = secrets_of(variables.into_iter().map(|(name, value)| (name.into(), value.into())));
        assert_eq!(secrets, ["bob:hunter2", "hunter2", "alice:hunter3", "hunter3", "correct horse"]);
        assert_eq!(without_proxy_user("b:x@proxy:3128"), "****@proxy:3128", "however short it is");
        assert_eq!(redacted("tried hunter2, then correct horse", &secrets), "tried ****, then ****");
    }
}
