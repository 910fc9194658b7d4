//! Values that only one setting has.

use larder::credentials::TokenPolicy;
use larder::gc::{GcStrategy, WhenUnreachable};
use larder::go_format::quote;
use larder::pull::{DuplicatePullPolicy, NewCredentialsPolicy, RateLimitAction};
use larder::reference::Reference;
use larder_cri::Endpoint;
use larder_registry::Proxy;
use serde_json::{Value, json};
use tracing::Level;

use crate::backend::docker;
use crate::backend::target::{is_docker, nearest_backend};
use crate::config::codecs::{ByteSizeCodec, EnumWords, SettingCodec, StringCodec};
use crate::config::{BackendSetting, DashboardServing, KubeletImageService, LogFormat, TraceProtocol};
use crate::manifest::InputProblem;
use crate::manifest::tree::NodeCursor;

pub(super) struct BackendCodec;

impl SettingCodec for BackendCodec {
    type Value = BackendSetting;

    fn name() -> String {
        "`store`, `cri`, `docker`, `podman` or a socket".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<BackendSetting, InputProblem> {
        match at.text()? {
            "store" => Ok(BackendSetting::Store),
            "cri" => Ok(BackendSetting::Cri),
            text if is_docker(text) => match docker::check(text) {
                Ok(()) => Ok(BackendSetting::Docker(text.to_owned())),
                Err(problem) => Err(at.problem(problem)),
            },
            text => Endpoint::parse(text)
                .ok()
                .filter(|endpoint| endpoint.path().is_absolute())
                .map(BackendSetting::Runtime)
                .ok_or_else(|| {
                    at.problem(format!("{}: not store, cri, docker, podman or a socket", quote(text)))
                        .hint(hint(text))
                }),
        }
    }

    fn print(value: &BackendSetting) -> Value {
        match value {
            BackendSetting::Store => json!("store"),
            BackendSetting::Cri => json!("cri"),
            BackendSetting::Docker(text) => json!(text),
            BackendSetting::Runtime(endpoint) => json!(endpoint.to_string()),
        }
    }
}

fn hint(text: &str) -> String {
    match nearest_backend(text) {
        Some(meant) => format!("did you mean {meant}?"),
        None => "write a socket as unix:///path/to.sock".to_owned(),
    }
}

pub(super) struct CacheSizeCodec;

impl SettingCodec for CacheSizeCodec {
    type Value = usize;

    fn name() -> String {
        ByteSizeCodec::<65536>::name()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<usize, InputProblem> {
        let bytes = ByteSizeCodec::<65536>::parse(at)?;
        usize::try_from(bytes).map_err(|_| at.problem("more than this machine can address"))
    }

    fn print(value: &usize) -> Value {
        ByteSizeCodec::<65536>::print(&u64::try_from(*value).unwrap_or(u64::MAX))
    }
}

pub(super) struct ProxyUrlCodec;

impl SettingCodec for ProxyUrlCodec {
    type Value = Proxy;

    fn name() -> String {
        "`environment`, `none` or a URL".into()
    }

    /// Credentials are refused, and not shown: the file may be readable for all, and is printed.
    fn parse(at: &NodeCursor<'_>) -> Result<Proxy, InputProblem> {
        let text = at.text()?;
        match text {
            "environment" => return Ok(Proxy::FromEnvironment),
            "none" => return Ok(Proxy::None),
            _ => {}
        }
        if text.contains('@') {
            return Err(at
                .problem("must not hold credentials")
                .hint("use environment, and set HTTPS_PROXY in larder's environment"));
        }
        let host = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
        let plain = |c: char| c.is_ascii_graphic();
        if host.is_some_and(|host| !host.trim_matches('/').is_empty() && host.chars().all(plain)) {
            return Ok(Proxy::Fixed { url: text.to_owned(), except: String::new() });
        }
        Err(at
            .problem(format!("{}: not environment, none or a URL", quote(text)))
            .hint("write it like http://proxy.example:3128"))
    }

    fn print(value: &Proxy) -> Value {
        match value {
            Proxy::FromEnvironment => json!("environment"),
            Proxy::None => json!("none"),
            Proxy::Fixed { url, .. } => json!(url),
        }
    }
}

/// A registry, as the names of images have it.
pub(super) struct RegistryCodec;

impl SettingCodec for RegistryCodec {
    type Value = String;

    fn name() -> String {
        StringCodec::name()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<String, InputProblem> {
        let text = at.text()?;
        let named = Reference::parse(&format!("{text}/image"));
        if named.is_ok_and(|named| named.registry() == text) {
            return Ok(text.to_owned());
        }
        Err(at.problem(format!("{}: not a registry as in an image name", quote(text))).hint(
            "write HOST or HOST:PORT, such as registry.example:5000, without http:// and without a path",
        ))
    }

    fn print(value: &String) -> Value {
        StringCodec::print(value)
    }
}

impl EnumWords for Level {
    const WORDS: &'static [(&'static str, Level)] = &[
        ("error", Level::ERROR),
        ("warn", Level::WARN),
        ("info", Level::INFO),
        ("debug", Level::DEBUG),
        ("trace", Level::TRACE),
    ];
}

impl EnumWords for LogFormat {
    const WORDS: &'static [(&'static str, LogFormat)] =
        &[("text", LogFormat::Text), ("json", LogFormat::Json)];
}

impl EnumWords for KubeletImageService {
    const WORDS: &'static [(&'static str, KubeletImageService)] = &[
        ("larder", KubeletImageService::Larder),
        ("runtime", KubeletImageService::Runtime),
        ("none", KubeletImageService::None),
    ];
}

impl EnumWords for DashboardServing {
    const WORDS: &'static [(&'static str, DashboardServing)] = &[
        ("loopback", DashboardServing::Loopback),
        ("always", DashboardServing::Always),
        ("never", DashboardServing::Never),
    ];
}

impl EnumWords for TraceProtocol {
    const WORDS: &'static [(&'static str, TraceProtocol)] = &[
        ("grpc", TraceProtocol::Grpc),
        ("http/protobuf", TraceProtocol::HttpProtobuf),
        ("http/json", TraceProtocol::HttpJson),
    ];
}

/// An endpoint of OTLP, as kubelet's or as a URL.
pub(super) struct TraceEndpointCodec;

impl SettingCodec for TraceEndpointCodec {
    type Value = String;

    fn name() -> String {
        "`host:port`, a socket or a URL".into()
    }

    /// Credentials are refused, and not shown: the file may be readable for all, and is printed.
    fn parse(at: &NodeCursor<'_>) -> Result<String, InputProblem> {
        let text = at.text()?;
        if text.contains(['@', '?']) {
            return Err(at
                .problem("must not hold credentials")
                .hint("set OTEL_EXPORTER_OTLP_HEADERS in larder's environment"));
        }
        let (scheme, rest) = text.split_once("://").unwrap_or(("dns", text));
        if scheme == "unix" || text.starts_with("unix:") {
            return Ok(text.to_owned());
        }
        // The path may be a token.
        let rest = if scheme == "dns" { rest.trim_start_matches('/') } else { rest };
        let authority = rest.split(['/', '#']).next().unwrap_or_default();
        let shown = quote(&text[..text.len() - rest.len() + authority.len()]);
        if !["dns", "http", "https"].contains(&scheme) || !text.chars().all(|c| c.is_ascii_graphic()) {
            return Err(at.problem(format!("{shown}: not an endpoint")).hint(
                "write it like localhost:4317, unix:///run/collector.sock or https://collector.example:4317",
            ));
        }
        let (host, port) = host_and_port(authority);
        let problem = match port.map(str::parse::<u16>) {
            _ if host.is_empty() => "no host",
            Some(Err(_)) => "invalid port",
            None if scheme == "dns" => "no port",
            Some(Ok(_)) if scheme == "dns" && rest != authority => "a path requires http:// or https://",
            _ => return Ok(text.to_owned()),
        };
        let host = if host.is_empty() { "localhost" } else { host };
        Err(at.problem(format!("{shown}: {problem}")).hint(format!("write it like {host}:4317")))
    }

    fn print(value: &String) -> Value {
        StringCodec::print(value)
    }
}

/// Splits `host:port`; an IPv6 address is in brackets.
fn host_and_port(authority: &str) -> (&str, Option<&str>) {
    let after_address = authority.rfind(']').map_or(0, |at| at + 1);
    match authority[after_address..].split_once(':') {
        Some((before, port)) => (&authority[..after_address + before.len()], Some(port)),
        None => (authority, None),
    }
}

impl EnumWords for RateLimitAction {
    const WORDS: &'static [(&'static str, RateLimitAction)] =
        &[("wait", RateLimitAction::Wait), ("refuse", RateLimitAction::Refuse)];
}

impl EnumWords for DuplicatePullPolicy {
    const WORDS: &'static [(&'static str, DuplicatePullPolicy)] =
        &[("share", DuplicatePullPolicy::Coalesce), ("eachRequest", DuplicatePullPolicy::EachRequest)];
}

impl EnumWords for NewCredentialsPolicy {
    const WORDS: &'static [(&'static str, NewCredentialsPolicy)] =
        &[("pullAtOnce", NewCredentialsPolicy::PullAtOnce), ("wait", NewCredentialsPolicy::Wait)];
}

impl EnumWords for TokenPolicy {
    const WORDS: &'static [(&'static str, TokenPolicy)] =
        &[("keep", TokenPolicy::Keep), ("ignore", TokenPolicy::Ignore)];
}

impl EnumWords for WhenUnreachable {
    const WORDS: &'static [(&'static str, WhenUnreachable)] = &[
        (WhenUnreachable::All.as_str(), WhenUnreachable::All),
        (WhenUnreachable::Worthwhile.as_str(), WhenUnreachable::Worthwhile),
        (WhenUnreachable::Nothing.as_str(), WhenUnreachable::Nothing),
    ];
}

impl EnumWords for GcStrategy {
    const WORDS: &'static [(&'static str, GcStrategy)] =
        &[("larder", GcStrategy::Larder), ("kubelet", GcStrategy::Kubelet)];
}
