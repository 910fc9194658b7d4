//! Where traces go and which are sampled: the settings `tracing`, else the environment variables of OpenTelemetry.
//!
//! The exporter itself reads the variables that only it needs: headers and timeout.

use std::path::PathBuf;
use std::time::Duration;

use crate::config::{TraceProtocol, TracingSettings};
use crate::error::Error;

/// The collector of kubelet's default, on this node.
const KUBELET_ENDPOINT: &str = "localhost:4317";

/// Endpoint, sampling and limits of the export.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TraceOptions {
    /// The URL; `None` where the exporter reads it from the environment.
    pub(super) endpoint: Option<String>,
    /// The endpoint for messages: scheme, host and port only.
    pub(super) shown_endpoint: String,
    pub(super) protocol: TraceProtocol,
    /// Of the traces that begin here; `None` where the SDK reads the sampler from the environment.
    pub(super) sampled_per_million: Option<u32>,
    pub(super) tls: TlsFiles,
    pub(super) batch: BatchLimits,
}

/// The files of a connection with TLS, each with the variable that names it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct TlsFiles {
    /// CA certificates of the endpoint.
    pub(super) authority: Option<NamedFile>,
    /// The certificate of larder, and its private key.
    pub(super) client: Option<(NamedFile, NamedFile)>,
}

pub(super) type NamedFile = (&'static str, PathBuf);

/// How spans are queued and sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatchLimits {
    pub(super) queue: usize,
    pub(super) batch: usize,
    pub(super) delay: Duration,
    pub(super) timeout: Duration,
}

impl TraceOptions {
    /// `None` where traces are off.
    pub(super) fn of(
        settings: &TracingSettings,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<TraceOptions>, Error> {
        if variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let endpoint = named(variable, ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"]);
        // Variables that are for other programs do not keep a daemon without traces from starting.
        if !settings.is_set() && endpoint.is_none() {
            return Ok(None);
        }
        match variable("OTEL_TRACES_EXPORTER").as_deref() {
            None | Some("otlp") => {}
            Some("none") => return Ok(None),
            Some(other) => {
                return Err(Error::bad_input(format!("OTEL_TRACES_EXPORTER={other:?}: unknown exporter"))
                    .hint("use otlp or none"));
            }
        }
        let batch = BatchLimits::of(variable)?;
        check_exporter(variable)?;
        let tls = TlsFiles::of(&|names| named(variable, names))?;
        let options = if settings.is_set() {
            TraceOptions::from_settings(settings, tls, batch)
        } else {
            let (name, value) = endpoint.unwrap_or_default();
            TraceOptions::from_environment(variable, name, &value, tls, batch)
        };
        options.map(Some)
    }

    fn from_settings(
        settings: &TracingSettings,
        tls: TlsFiles,
        batch: BatchLimits,
    ) -> Result<TraceOptions, Error> {
        let endpoint = settings.endpoint.as_deref().unwrap_or(KUBELET_ENDPOINT);
        if endpoint.starts_with("unix:") && settings.protocol != TraceProtocol::Grpc {
            let what = format!("tracing.endpoint {endpoint:?}: a Unix socket requires the protocol grpc");
            return Err(Error::bad_input(what).hint("set tracing.protocol to grpc, or name host and port"));
        }
        let endpoint = endpoint_url(endpoint, settings.protocol);
        Ok(TraceOptions {
            shown_endpoint: without_path(&endpoint),
            endpoint: Some(endpoint),
            protocol: settings.protocol,
            sampled_per_million: Some(settings.sampled_per_million),
            tls,
            batch,
        })
    }

    /// `name` is the variable that has the endpoint.
    fn from_environment(
        variable: &dyn Fn(&str) -> Option<String>,
        name: &str,
        endpoint: &str,
        tls: TlsFiles,
        batch: BatchLimits,
    ) -> Result<TraceOptions, Error> {
        let protocol = named(variable, ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"]);
        let protocol =
            protocol.map_or(Ok(TraceProtocol::HttpProtobuf), |(name, text)| protocol_of(name, &text))?;
        check_sampler(variable)?;
        check_scheme(name, endpoint)?;
        Ok(TraceOptions {
            endpoint: None,
            shown_endpoint: without_path(endpoint),
            protocol,
            sampled_per_million: None,
            tls,
            batch,
        })
    }
}

/// The first of these variables that is set.
fn named(
    variable: &dyn Fn(&str) -> Option<String>,
    names: [&'static str; 2],
) -> Option<(&'static str, String)> {
    names.into_iter().find_map(|name| Some((name, variable(name)?)))
}

/// Checks the variables that the exporter reads itself.
fn check_exporter(variable: &dyn Fn(&str) -> Option<String>) -> Result<(), Error> {
    let timeout = named(variable, ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"]);
    if let Some((name, text)) = timeout
        && text.trim().parse::<u64>().is_err()
    {
        return Err(Error::bad_input(format!("{name}={text:?}: not a number of milliseconds"))
            .hint("write a number such as 10000, or unset it"));
    }
    let compression = ["OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION"];
    if let Some((_, kind)) = named(variable, compression).filter(|(_, kind)| kind != "none") {
        tracing::warn!("{}={kind:?} has no effect: traces are sent uncompressed", compression[1]);
    }
    check_pairs(variable)
}

/// Headers and attributes are lists of pairs. A value may be a token: the error does not have it.
fn check_pairs(variable: &dyn Fn(&str) -> Option<String>) -> Result<(), Error> {
    for name in
        ["OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES"]
    {
        let value = variable(name).unwrap_or_default();
        let mut pairs = value.split(',').filter(|pair| !pair.trim().is_empty());
        if pairs.any(|pair| pair.split_once('=').is_none_or(|(key, _)| key.trim().is_empty())) {
            return Err(Error::bad_input(format!("{name}: not a list of KEY=VALUE"))
                .hint("separate several with commas, and write a comma within a value as %2C"));
        }
    }
    Ok(())
}

impl TlsFiles {
    fn of(named: &dyn Fn([&'static str; 2]) -> Option<(&'static str, String)>) -> Result<TlsFiles, Error> {
        let file = |names| named(names).map(|(name, path)| (name, PathBuf::from(path)));
        let certificates =
            ["OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"];
        let keys = ["OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", "OTEL_EXPORTER_OTLP_CLIENT_KEY"];
        let client = match (file(certificates), file(keys)) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            (Some((set, _)), None) => return Err(half_an_identity(set, keys[1])),
            (None, Some((set, _))) => return Err(half_an_identity(set, certificates[1])),
        };
        let authority = file(["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"]);
        Ok(TlsFiles { authority, client })
    }
}

fn half_an_identity(set: &str, missing: &str) -> Error {
    Error::bad_input(format!("{set} is set, and {missing} is not"))
        .hint(format!("set {missing} as well, or unset {set}"))
}

impl BatchLimits {
    fn of(variable: &dyn Fn(&str) -> Option<String>) -> Result<BatchLimits, Error> {
        let number = |name: &str, default: u64| match variable(name) {
            None => Ok(default),
            Some(text) => text.trim().parse().map_err(|_| {
                Error::bad_input(format!("{name}={text:?}: not a number")).hint("write a number, or unset it")
            }),
        };
        let size = |name, default| {
            number(name, default).map(|size| usize::try_from(size).unwrap_or(usize::MAX).clamp(1, 1 << 20))
        };
        let queue = size("OTEL_BSP_MAX_QUEUE_SIZE", 2048)?;
        Ok(BatchLimits {
            queue,
            batch: size("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)?.min(queue),
            delay: Duration::from_millis(number("OTEL_BSP_SCHEDULE_DELAY", 5000)?),
            timeout: Duration::from_millis(number("OTEL_BSP_EXPORT_TIMEOUT", 30_000)?.max(1)),
        })
    }
}

/// Checks what the SDK would replace by its default, with a message in the log at most.
fn check_sampler(variable: &dyn Fn(&str) -> Option<String>) -> Result<(), Error> {
    const NAMES: [&str; 6] = [
        "always_on",
        "always_off",
        "traceidratio",
        "parentbased_always_on",
        "parentbased_always_off",
        "parentbased_traceidratio",
    ];
    let Some(name) = variable("OTEL_TRACES_SAMPLER") else { return Ok(()) };
    if !NAMES.contains(&name.as_str()) {
        return Err(Error::bad_input(format!("OTEL_TRACES_SAMPLER={name:?}: unknown sampler"))
            .hint(format!("use one of {}", NAMES.join(", "))));
    }
    let ratio = variable("OTEL_TRACES_SAMPLER_ARG").filter(|_| name.ends_with("traceidratio"));
    match ratio {
        Some(text) if !text.parse().is_ok_and(|ratio: f64| (0.0..=1.0).contains(&ratio)) => {
            Err(Error::bad_input(format!("OTEL_TRACES_SAMPLER_ARG={text:?}: not a ratio from 0 to 1"))
                .hint("write a number such as 0.01, or unset it for all traces"))
        }
        _ => Ok(()),
    }
}

/// An endpoint of a variable is a URL. It may have a password, which is not shown.
fn check_scheme(name: &str, endpoint: &str) -> Result<(), Error> {
    let shown = without_path(endpoint);
    match endpoint.split_once("://") {
        Some(("http" | "https" | "unix", host)) if !host.is_empty() => Ok(()),
        Some((_, host)) if !host.is_empty() => {
            Err(Error::bad_input(format!("{name}={shown:?}: unsupported scheme")).hint("use http or https"))
        }
        _ => {
            let host = endpoint.rsplit('@').next().unwrap_or_default().trim_end_matches("://");
            Err(Error::bad_input(format!("{name}={host:?}: no URL with a scheme and a host"))
                .hint("write it like http://localhost:4318"))
        }
    }
}

fn protocol_of(name: &str, text: &str) -> Result<TraceProtocol, Error> {
    match text {
        "grpc" => Ok(TraceProtocol::Grpc),
        "http/protobuf" => Ok(TraceProtocol::HttpProtobuf),
        "http/json" => Ok(TraceProtocol::HttpJson),
        other => Err(Error::bad_input(format!("{name}={other:?}: unknown protocol"))
            .hint("use grpc, http/protobuf or http/json")),
    }
}

/// Kubelet's endpoints have no scheme, or one of gRPC's, and no TLS. A URL names its own.
fn endpoint_url(endpoint: &str, protocol: TraceProtocol) -> String {
    let bare = endpoint.strip_prefix("dns://").map_or(endpoint, |name| name.trim_start_matches('/'));
    let url = match bare.split_once("://") {
        Some(_) => bare.to_owned(),
        None if bare.starts_with("unix:") => bare.to_owned(),
        None => format!("http://{bare}"),
    };
    let has_path = url.split_once("://").is_some_and(|(_, rest)| rest.trim_end_matches('/').contains('/'));
    match protocol {
        TraceProtocol::Grpc => url,
        TraceProtocol::HttpProtobuf | TraceProtocol::HttpJson if has_path => url,
        TraceProtocol::HttpProtobuf | TraceProtocol::HttpJson => {
            format!("{}/v1/traces", url.trim_end_matches('/'))
        }
    }
}

/// Scheme, host and port: the rest may have a token.
fn without_path(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    if scheme == "unix" {
        return url.to_owned();
    }
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    format!("{scheme}://{}", authority.rsplit('@').next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(settings: &TracingSettings, variables: &[(&str, &str)]) -> Result<Option<TraceOptions>, Error> {
        TraceOptions::of(settings, &|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn headers_and_attributes_are_pairs_and_are_not_shown_if_they_are_not() {
        let off = TracingSettings::default();
        let with = |name, value| of(&off, &[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318"), (name, value)]);
        for name in
            ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_RESOURCE_ATTRIBUTES"]
        {
            for valid in ["", "a=b", "a=b,c=d=e", "a=", " a = b , "] {
                assert!(with(name, valid).is_ok(), "{name} {valid:?}");
            }
            for invalid in ["sekret", "=sekret", "a=b,sekret"] {
                let error = with(name, invalid).unwrap_err().to_string();
                assert!(error.contains(name) && !error.contains("sekret"), "{error}");
            }
        }
    }

    #[test]
    fn nothing_is_exported_unless_an_endpoint_or_a_rate_is_set() {
        let off = TracingSettings::default();
        assert_eq!(of(&off, &[]).unwrap(), None);
        for other in [
            ("OTEL_SERVICE_NAME", "x"),
            ("OTEL_TRACES_EXPORTER", "console"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ] {
            assert_eq!(of(&off, &[other]).unwrap(), None, "{other:?}");
        }
        let on = [("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:secret@c:4318/token")];
        let options = of(&off, &on).unwrap().unwrap();
        assert_eq!(options.shown_endpoint, "http://c:4318");
        assert_eq!((options.endpoint, options.protocol), (None, TraceProtocol::HttpProtobuf));
        assert_eq!(options.sampled_per_million, None);
        for disabled in [("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_TRACES_EXPORTER", "none")] {
            assert_eq!(of(&off, &[on[0], disabled]).unwrap(), None, "{disabled:?}");
        }
        let kubelets = TracingSettings { in_kubelet_file: true, ..off.clone() };
        let options = of(&kubelets, &[]).unwrap().unwrap();
        assert_eq!(options.endpoint.as_deref(), Some("http://localhost:4317"));
        assert_eq!(options.sampled_per_million, Some(0), "only what kubelet samples");
        let rate = TracingSettings { sampled_per_million: 5, ..off };
        let options = of(&rate, &[]).unwrap().unwrap();
        assert_eq!(options.endpoint.as_deref(), Some("http://localhost:4317"));
        assert_eq!((options.protocol, options.sampled_per_million), (TraceProtocol::Grpc, Some(5)));
    }

    #[test]
    fn endpoints_are_written_as_kubelet_does_or_as_urls() {
        use TraceProtocol::{Grpc, HttpJson, HttpProtobuf};
        for (endpoint, protocol, url) in [
            ("c:4317", Grpc, "http://c:4317"),
            ("dns:///c:4317", Grpc, "http://c:4317"),
            ("unix:///run/c.sock", Grpc, "unix:///run/c.sock"),
            ("https://c:4317", Grpc, "https://c:4317"),
            ("c:4318", HttpProtobuf, "http://c:4318/v1/traces"),
            ("https://c/", HttpJson, "https://c/v1/traces"),
            ("https://c/in/traces", HttpProtobuf, "https://c/in/traces"),
        ] {
            assert_eq!(endpoint_url(endpoint, protocol), url, "{endpoint} {protocol:?}");
        }
    }

    #[test]
    fn values_that_cannot_be_used_are_named() {
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c");
        for (name, value) in [
            ("OTEL_TRACES_EXPORTER", "zipkin"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "thrift"),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "thrift"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
            ("OTEL_TRACES_SAMPLER", "sometimes"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "-1"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "c:4318"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "localhost"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "ftp://c"),
        ] {
            let error = of(&TracingSettings::default(), &[endpoint, (name, value)]).unwrap_err();
            assert!(error.message().starts_with(&format!("{name}={value:?}: ")), "{error:?}");
            assert!(!error.next_steps().is_empty(), "{error:?}");
        }
        for (arg, is_good) in [("0.5", true), ("1", true), ("2", false), ("half", false), ("NaN", false)] {
            let sampler =
                [("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", arg)];
            let options = of(&TracingSettings::default(), &[endpoint, sampler[0], sampler[1]]);
            assert_eq!(options.is_ok(), is_good, "{arg}");
        }
        let secret = [("OTEL_EXPORTER_OTLP_ENDPOINT", "bob:hunter2@c:4318")];
        let error = of(&TracingSettings::default(), &secret).unwrap_err();
        assert!(!error.message().contains("hunter2"), "{error:?}");
    }

    #[test]
    fn a_client_certificate_needs_its_key() {
        let set = |names: &[&'static str]| {
            let files = names.iter().map(|name| (*name, "/f.pem"));
            let variables: Vec<_> =
                [("OTEL_EXPORTER_OTLP_ENDPOINT", "https://c")].into_iter().chain(files).collect();
            of(&TracingSettings::default(), &variables)
        };
        let (certificate, key) = ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_KEY");
        let own = "OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE";
        let client = set(&[certificate, key, own]).unwrap().unwrap().tls.client.unwrap();
        assert_eq!((client.0.0, client.1.0), (own, key), "that of traces counts");
        for (one, other) in [(certificate, key), (key, certificate)] {
            let error = set(&[one]).unwrap_err();
            assert_eq!(error.message(), format!("{one} is set, and {other} is not"));
            assert!(!error.next_steps().is_empty(), "{error:?}");
        }
    }

    #[test]
    fn a_socket_without_a_port_takes_grpc_only() {
        let endpoint = Some("unix:///run/c.sock".to_owned());
        let settings = TracingSettings { endpoint, ..TracingSettings::default() };
        assert!(of(&settings, &[]).is_ok());
        let http = TracingSettings { protocol: TraceProtocol::HttpProtobuf, ..settings };
        let error = of(&http, &[]).unwrap_err();
        assert!(error.message().contains("requires the protocol grpc"), "{error:?}");
    }

    #[test]
    fn a_batch_is_no_larger_than_the_queue() {
        let limits = of(
            &TracingSettings::default(),
            &[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c"), ("OTEL_BSP_MAX_QUEUE_SIZE", "10")],
        );
        let BatchLimits { queue, batch, delay, .. } = limits.unwrap().unwrap().batch;
        assert_eq!((queue, batch, delay), (10, 10, Duration::from_secs(5)));
    }
}
