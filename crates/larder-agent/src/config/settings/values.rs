//! Values that only one setting has.

use larder::credentials::Tokens;
use larder::gc::{Accounting, AgeRule, ClockRule, HookRule, UseRule};
use larder::gotext::quote;
use larder::pull::{NewCredentials, OverRate, SameImage};
use larder::reference::Reference;
use larder_cri::Endpoint;
use larder_registry::Proxy;
use serde_json::{Value, json};
use tracing::Level;

use crate::backend::docker;
use crate::backend::target::{is_docker, nearest_backend};
use crate::config::forms::{Bytes, Form, Kind, Texts, Words};
use crate::config::{BackendAt, LogFormat};
use crate::manifest::Problem;
use crate::manifest::tree::At;

pub(super) struct Backend;

impl Form for Backend {
    type Value = BackendAt;

    fn name() -> String {
        "`store`, `cri`, `docker` or a socket".into()
    }

    fn read(at: &At<'_>) -> Result<BackendAt, Problem> {
        match at.text()? {
            "store" => Ok(BackendAt::Store),
            "cri" => Ok(BackendAt::Cri),
            text if is_docker(text) => match docker::check(text) {
                Ok(()) => Ok(BackendAt::Docker(text.to_owned())),
                Err(problem) => Err(at.problem(problem)),
            },
            text => Endpoint::parse(text)
                .ok()
                .filter(|endpoint| endpoint.path().is_absolute())
                .map(BackendAt::Runtime)
                .ok_or_else(|| {
                    at.problem(format!("{}: neither store nor cri nor docker nor a socket", quote(text)))
                        .hint(hint(text))
                }),
        }
    }

    fn show(value: &BackendAt) -> Value {
        match value {
            BackendAt::Store => json!("store"),
            BackendAt::Cri => json!("cri"),
            BackendAt::Docker(text) => json!(text),
            BackendAt::Runtime(endpoint) => json!(endpoint.to_string()),
        }
    }
}

fn hint(text: &str) -> String {
    match nearest_backend(text) {
        Some(meant) => format!("did you mean {meant}?"),
        None => "write a socket as unix:///path/to.sock".to_owned(),
    }
}

pub(super) struct CacheBytes;

impl Form for CacheBytes {
    type Value = usize;

    fn name() -> String {
        Bytes::<65536>::name()
    }

    fn read(at: &At<'_>) -> Result<usize, Problem> {
        let bytes = Bytes::<65536>::read(at)?;
        usize::try_from(bytes).map_err(|_| at.problem("more than this machine can address"))
    }

    fn show(value: &usize) -> Value {
        Bytes::<65536>::show(&u64::try_from(*value).unwrap_or(u64::MAX))
    }
}

pub(super) struct ProxyUrl;

impl Form for ProxyUrl {
    type Value = Proxy;

    fn name() -> String {
        "`environment`, `none` or a URL".into()
    }

    /// Credentials are refused, and not shown: the file may be readable for all, and is printed.
    fn read(at: &At<'_>) -> Result<Proxy, Problem> {
        let text = at.text()?;
        match text {
            "environment" => return Ok(Proxy::FromEnvironment),
            "none" => return Ok(Proxy::None),
            _ => {}
        }
        if text.contains('@') {
            return Err(at
                .problem("must not hold credentials")
                .hint("leave it at environment, and set HTTPS_PROXY where larder is started"));
        }
        let host = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
        let plain = |c: char| c.is_ascii_graphic();
        if host.is_some_and(|host| !host.trim_matches('/').is_empty() && host.chars().all(plain)) {
            return Ok(Proxy::Fixed { url: text.to_owned(), except: String::new() });
        }
        Err(at
            .problem(format!("{}: neither environment nor none nor a URL", quote(text)))
            .hint("write it like http://proxy.example:3128"))
    }

    fn show(value: &Proxy) -> Value {
        match value {
            Proxy::FromEnvironment => json!("environment"),
            Proxy::None => json!("none"),
            Proxy::Fixed { url, .. } => json!(url),
        }
    }
}

/// Registries, as the names of images have them.
pub(super) struct Registries;

impl Form for Registries {
    type Value = Vec<String>;
    const KIND: Kind = Texts::KIND;

    fn name() -> String {
        Texts::name()
    }

    fn read(at: &At<'_>) -> Result<Vec<String>, Problem> {
        let registry = |item: At<'_>| {
            let text = item.text()?;
            let named = Reference::parse(&format!("{text}/image"));
            if named.is_ok_and(|named| named.registry() == text) {
                return Ok(text.to_owned());
            }
            Err(item.problem(format!("{}: no registry that an image's name can have", quote(text))).hint(
                "write HOST or HOST:PORT, such as registry.example:5000, without http:// and without a path",
            ))
        };
        at.items()?.into_iter().map(registry).collect()
    }

    fn show(value: &Vec<String>) -> Value {
        Texts::show(value)
    }
}

impl Words for Level {
    const WORDS: &'static [(&'static str, Level)] = &[
        ("error", Level::ERROR),
        ("warn", Level::WARN),
        ("info", Level::INFO),
        ("debug", Level::DEBUG),
        ("trace", Level::TRACE),
    ];
}

impl Words for LogFormat {
    const WORDS: &'static [(&'static str, LogFormat)] =
        &[("text", LogFormat::Text), ("json", LogFormat::Json)];
}

impl Words for OverRate {
    const WORDS: &'static [(&'static str, OverRate)] =
        &[("wait", OverRate::Wait), ("refuse", OverRate::Refuse)];
}

impl Words for SameImage {
    const WORDS: &'static [(&'static str, SameImage)] =
        &[("once", SameImage::Once), ("eachRequest", SameImage::EachRequest)];
}

impl Words for NewCredentials {
    const WORDS: &'static [(&'static str, NewCredentials)] =
        &[("pullAtOnce", NewCredentials::PullAtOnce), ("wait", NewCredentials::Wait)];
}

impl Words for Tokens {
    const WORDS: &'static [(&'static str, Tokens)] = &[("keep", Tokens::Keep), ("ignore", Tokens::Ignore)];
}

impl Words for Accounting {
    const WORDS: &'static [(&'static str, Accounting)] =
        &[("exact", Accounting::Exact), ("nominal", Accounting::Nominal)];
}

impl Words for AgeRule {
    const WORDS: &'static [(&'static str, AgeRule)] =
        &[("fromFirstSeen", AgeRule::FromFirstSeen), ("infinitelyOld", AgeRule::Kubelet)];
}

impl Words for UseRule {
    const WORDS: &'static [(&'static str, UseRule)] =
        &[("idsAndNames", UseRule::IdsAndNames), ("ids", UseRule::Ids)];
}

impl Words for ClockRule {
    const WORDS: &'static [(&'static str, ClockRule)] =
        &[("keepAges", ClockRule::KeepAges), ("believe", ClockRule::Believe)];
}

impl Words for HookRule {
    const WORDS: &'static [(&'static str, HookRule)] =
        &[("allPresent", HookRule::AllPresent), ("examined", HookRule::Examined)];
}
