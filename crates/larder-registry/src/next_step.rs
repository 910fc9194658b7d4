//! The next step after a failed fetch. Pure.

use std::net::IpAddr;
use std::path::Path;

use larder::credentials::CredentialLocation;
use larder::hint::Hint;

use super::error::{FetchError, FetchErrorKind, FetchTarget, HANDSHAKE_CLOSED, is_refused};
use super::hosts::HostsConfig;
use super::tls::{CertificateProblem, TlsProblem};
use crate::manifest::ManifestError;

/// Keys of certificates that are supported.
const KEYS: &str = "RSA 2048 or more, P-256, P-384 or Ed25519";

/// Input of an error's text and next step beside the cause.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FetchContext {
    /// The failures of the other hosts.
    pub(crate) others: OtherFailures,
    /// Where the credential was found that the host received; `None` if it received none.
    pub(crate) credential: Option<CredentialLocation>,
    /// The configuration of the registry's hosts.
    pub(crate) hosts: Option<HostsConfig>,
    /// Whether the host is a mirror of the registry.
    pub(crate) is_mirror: bool,
    /// Whether the configuration of the host has CA certificates.
    pub(crate) has_authorities: bool,
    /// Whether clients that do not read `hosts.toml` have to be told to reach the registry without verified TLS.
    pub(crate) is_unverified: bool,
    /// Tags of the repository that are similar to one that does not exist.
    pub(crate) nearest_tags: Vec<String>,
}

/// Failures at other hosts than the one that an error is about, with their texts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OtherFailures {
    /// Hosts that were tried before.
    pub(crate) earlier: Vec<(String, String)>,
    /// Hosts that were tried after it.
    pub(crate) later: Vec<(String, String)>,
}

/// The next step for the user.
pub(crate) fn next_step(error: &FetchError) -> Option<Hint> {
    let FetchError { kind, context, repository, .. } = error;
    let registry = repository.split('/').next().unwrap_or_default().to_owned();
    Some(match &**kind {
        FetchErrorKind::Denied(_) => denied(registry, context.credential.as_ref()),
        FetchErrorKind::CredentialRejected(_) => rejected(registry, context.credential.as_ref()),
        FetchErrorKind::NotFound(_) if matches!(error.target, FetchTarget::Blob(_) | FetchTarget::Config(_)) => {
            "push the image again: its manifest is there, and the garbage collection of the registry or a failed push has \
             lost a part"
                .into()
        }
        FetchErrorKind::NotFound(_) if names_digest(&error.target) => {
            "the registry does not have this content, or no longer: push the image again, or pull one of its tags".into()
        }
        FetchErrorKind::NotFound(_) if !context.nearest_tags.is_empty() => {
            format!("the nearest tags of {repository} are {}", context.nearest_tags.join(", ")).into()
        }
        FetchErrorKind::NotFound(_) => {
            let list_tags =
                if context.is_unverified { "skopeo list-tags --tls-verify=false" } else { "skopeo list-tags" };
            format!(
                "check the name and the tag, and that it was pushed: {list_tags} docker://{repository} \
                 lists its tags"
            )
            .into()
        }
        FetchErrorKind::RateLimited { .. } => {
            "wait, log in (many registries have a higher limit for users), or configure a mirror".into()
        }
        FetchErrorKind::Unreachable(text) if is_refused(text) => with_mirrors(
            "nothing listens on this port: check the host and the port, and that the registry runs",
            context.hosts.as_ref(),
        ),
        FetchErrorKind::Unreachable(text) if text.contains("dns error") => with_mirrors(
            "host name not found: check the registry's name, and DNS on this machine (/etc/resolv.conf); to use a \
             proxy, set HTTPS_PROXY",
            context.hosts.as_ref(),
        ),
        FetchErrorKind::Unreachable(text) if text.contains(HANDSHAKE_CLOSED) => {
            format!("if it speaks plain HTTP: {}", of_tls(&TlsProblem::PlainHttp, error)).into()
        }
        FetchErrorKind::Unreachable(_) | FetchErrorKind::NoAnswer(_) => with_mirrors(
            "check the registry's name and the network; proxies are configured with HTTPS_PROXY",
            context.hosts.as_ref(),
        ),
        FetchErrorKind::Tls(problem) => {
            let hint = Hint::from(of_tls(problem, error));
            match problem {
                TlsProblem::Certificate(_) | TlsProblem::PlainHttp => {
                    hint.text("; for one call of a command, add ").setting("insecure", "")
                }
                _ => hint,
            }
        }
        FetchErrorKind::Manifest(ManifestError::NoPlatform { offered, .. }) if !offered.is_empty() => {
            let hint = Hint::from("build the image for this platform");
            match &error.target {
                // The callers without a command line have no such flag.
                FetchTarget::Manifest(digest) => hint.text(", or pull it for another one: ").command([
                    "pull".to_owned(),
                    "--platform".to_owned(),
                    offered[0].clone(),
                    format!("{repository}@{digest}"),
                ]),
                _ => hint,
            }
        }
        FetchErrorKind::Manifest(error) => return error.hint().map(Hint::from),
        FetchErrorKind::Hosts(error) => return error.hint().map(Hint::from),
        FetchErrorKind::NoHost => "give a host in hosts.toml capabilities = [\"pull\", \"resolve\"]".into(),
        FetchErrorKind::DigestMismatch { .. } => {
            "the registry or a proxy returned corrupt content; pull from another mirror".into()
        }
        FetchErrorKind::Failing(_) | FetchErrorKind::Stalled { .. } | FetchErrorKind::Truncated { .. } => {
            "retry: the pull resumes with the content already fetched".into()
        }
        FetchErrorKind::Refused(_)
        | FetchErrorKind::TooLarge { .. }
        | FetchErrorKind::BadReply(_)
        | FetchErrorKind::BadRange(_) => return None,
    })
}

/// The next step after a failed TLS connection, with an example where `hosts.toml` can help.
fn of_tls(problem: &TlsProblem, error: &FetchError) -> String {
    let hosts_toml = HostsTomlExample::of(error);
    match problem {
        TlsProblem::Redirected { problem, .. } => of_tls(problem, error),
        TlsProblem::Certificate(problem) => of_certificate(problem, error, &hosts_toml),
        TlsProblem::NotPlainHttp => format!(
            "write server = \"https://{}\" to {}, and do not list it in registry.plainHTTP",
            error.host, hosts_toml.file
        ),
        TlsProblem::PlainHttp => {
            format!("for plain HTTP, write server = \"http://{}\" to {}", error.host, hosts_toml.file)
        }
        TlsProblem::NoClientCertificate | TlsProblem::ClientCertificate(_) => format!(
            "{}, with files that the CA of the registry issued",
            hosts_toml.with("client = [[\"client.cert\", \"client.key\"]]")
        ),
        TlsProblem::Incompatible(_) => {
            format!("the registry must support TLS 1.2 or 1.3, with a key of {KEYS}")
        }
        TlsProblem::Other(_) => format!("check the port, and the TLS settings in {}", hosts_toml.file),
    }
}

fn of_certificate(problem: &CertificateProblem, error: &FetchError, hosts_toml: &HostsTomlExample) -> String {
    let host = &*error.host;
    match problem {
        CertificateProblem::Expired(_) => {
            format!("renew the certificate of {host}; if it is valid, set the clock of this machine (date)")
        }
        CertificateProblem::NotYetValid(_) => "set the clock of this machine (date shows it)".into(),
        CertificateProblem::IssuerExpired { .. } => {
            "renew the CA certificate, and replace it here (ca in hosts.toml, or the certificates of the system)".into()
        }
        CertificateProblem::WrongName { asked, names } => {
            let name = subject_alt_name(asked);
            format!("pull by a name of the certificate ({}), or issue it again with {name}", names.join(", "))
        }
        CertificateProblem::NoName => {
            let bare = host.rsplit_once(':').map_or(host, |(bare, _)| bare);
            format!("issue it again with {}", subject_alt_name(bare))
        }
        CertificateProblem::SelfSigned | CertificateProblem::UnknownIssuer(_) | CertificateProblem::OtherKey(_)
            if error.context.has_authorities =>
        {
            let directory = Path::new(&hosts_toml.file).parent().unwrap_or(Path::new("")).display();
            format!("the CA certificates that {directory} configures are not this one: replace or add it there")
        }
        CertificateProblem::SelfSigned => {
            hosts_toml.with("ca = \"ca.crt\"") + ", with this certificate of the registry as ca.crt beside it"
        }
        CertificateProblem::UnknownIssuer(_) | CertificateProblem::OtherKey(_) => {
            hosts_toml.with("ca = \"ca.crt\"") + ", with the certificate of this CA as ca.crt beside it"
        }
        CertificateProblem::UnsupportedSignature(_) | CertificateProblem::WeakKey => format!(
            "issue it again with a key of {KEYS}, by a CA with such a key and without SHA-1; to accept any until then, {}",
            hosts_toml.with("skip_verify = true")
        ),
        _ => format!("issue the certificate again; to accept any until then, {}", hosts_toml.with("skip_verify = true")),
    }
}

/// The extension of openssl for a name or an address.
fn subject_alt_name(name: &str) -> String {
    let kind = if name.parse::<IpAddr>().is_ok() { "IP" } else { "DNS" };
    format!("openssl's -addext subjectAltName={kind}:{name}")
}

/// The `hosts.toml` for a host, and the table of its settings.
struct HostsTomlExample {
    file: String,
    /// The line that the settings of the host follow.
    head: String,
}

impl HostsTomlExample {
    fn of(error: &FetchError) -> HostsTomlExample {
        let FetchError { context, host, .. } = error;
        let registry = error.repository.split('/').next().unwrap_or_default();
        let file = match &context.hosts {
            Some(HostsConfig::Found(dir) | HostsConfig::Missing(Some(dir))) => {
                dir.join("hosts.toml").display().to_string()
            }
            Some(HostsConfig::Missing(None)) | None => format!("certs.d/{registry}/hosts.toml"),
        };
        let head = if context.is_mirror {
            format!("[host.\"https://{host}\"]")
        } else {
            format!("server = \"https://{host}\"")
        };
        HostsTomlExample { file, head }
    }

    /// The step that gives the host a setting.
    fn with(&self, setting: &str) -> String {
        format!("write {}, then {setting}, to {}", self.head, self.file)
    }
}

/// Whether a request named its target by a digest, and not by a tag that could be wrong.
fn names_digest(target: &FetchTarget) -> bool {
    matches!(target, FetchTarget::Manifest(reference) if reference.contains(':'))
}

fn denied(registry: String, credential: Option<&CredentialLocation>) -> Hint {
    match credential {
        None => Hint::from("check the image name; no credential was sent: log in with ")
            .command(["login".to_owned(), registry])
            .text(", or give the pod a pull secret"),
        Some(origin) => Hint::from(format!(
            "check the image name; the credential of {} was sent and may have no access to this repository",
            found_in(origin)
        )),
    }
}

fn rejected(registry: String, credential: Option<&CredentialLocation>) -> Hint {
    let origin = credential.map_or_else(|| "this login".to_owned(), found_in);
    let hint = Hint::from(format!("check the user name and the password or token of {origin}"));
    match credential {
        Some(CredentialLocation::ConfigFile | CredentialLocation::Helper(_)) | None => {
            hint.text(", or log in again with ").command(["login".to_owned(), registry])
        }
        Some(_) => hint,
    }
}

/// Where a credential was found, for a sentence.
fn found_in(origin: &CredentialLocation) -> String {
    match origin {
        CredentialLocation::PullSecret => "the pod's pull secret".to_owned(),
        CredentialLocation::ConfigFile => "the Docker configuration".to_owned(),
        CredentialLocation::Helper(name) => format!("the credential helper docker-credential-{name}"),
        CredentialLocation::Provider(name) => format!("the credential provider {name}"),
        _ => "the caller".to_owned(),
    }
}

/// A hint about a host that cannot be reached, with the configuration in which a mirror can be given.
fn with_mirrors(text: &str, hosts: Option<&HostsConfig>) -> Hint {
    match hosts {
        Some(HostsConfig::Found(dir)) => {
            Hint::from(format!("{text}; the hosts of the registry are configured in {}", dir.display()))
        }
        Some(HostsConfig::Missing(Some(dir))) => Hint::from(format!(
            "{text}; no mirror is configured: [host.\"https://MIRROR\"] in {} adds one",
            dir.join("hosts.toml").display()
        )),
        Some(HostsConfig::Missing(None)) | None => Hint::from(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::error::ErrorResponse;
    use super::*;

    fn hint(kind: FetchErrorKind, context: FetchContext) -> String {
        hint_of(FetchTarget::Manifest("1".into()), kind, context)
    }

    fn hint_of(target: FetchTarget, kind: FetchErrorKind, context: FetchContext) -> String {
        let error = FetchError {
            repository: "registry.example:5000/team/app".into(),
            target,
            host: "registry.example:5000".into(),
            kind: Box::new(kind),
            context: Box::new(context),
        };
        next_step(&error).map(|hint| hint.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_denial_names_the_login_or_the_credential_that_was_sent() {
        let denied = || FetchErrorKind::Denied(ErrorResponse::new(401, "unauthorized"));
        let sent = |origin| FetchContext { credential: Some(origin), ..FetchContext::default() };
        let anonymous = hint(denied(), FetchContext::default());
        assert!(anonymous.contains("larder login registry.example:5000"), "{anonymous}");
        let secret = hint(denied(), sent(CredentialLocation::PullSecret));
        assert!(secret.contains("the pod's pull secret was sent") && !secret.contains("login"), "{secret}");
        let rejected = || FetchErrorKind::CredentialRejected(ErrorResponse::new(401, "bad password"));
        let helper = hint(rejected(), sent(CredentialLocation::Helper("pass".into())));
        assert!(helper.contains("docker-credential-pass"), "{helper}");
        assert!(helper.contains("larder login registry.example:5000"), "{helper}");
        let provider = hint(rejected(), sent(CredentialLocation::Provider("ecr".into())));
        assert!(provider.contains("credential provider ecr") && !provider.contains("login"), "{provider}");
    }

    #[test]
    fn a_missing_digest_is_not_taken_for_a_wrong_tag() {
        let digest = larder::reference::Digest::sha256(b"");
        for (target, expected) in [
            (FetchTarget::Manifest(digest.to_string()), "does not have this content"),
            (FetchTarget::Blob(digest.clone()), "push the image again: its manifest is there"),
            (FetchTarget::Config(digest), "push the image again: its manifest is there"),
        ] {
            let missing = FetchErrorKind::NotFound(ErrorResponse::new(404, "manifest unknown"));
            let text = hint_of(target, missing, FetchContext::default());
            assert!(text.contains(expected) && !text.contains("list-tags"), "{text}");
        }
    }

    #[test]
    fn an_unknown_tag_lists_the_nearest_ones() {
        let context =
            FetchContext { nearest_tags: vec!["1.36".into(), "1.37".into()], ..FetchContext::default() };
        let kind = FetchErrorKind::NotFound(ErrorResponse::new(404, "manifest unknown"));
        assert_eq!(hint(kind, context), "the nearest tags of registry.example:5000/team/app are 1.36, 1.37");
    }

    #[test]
    fn the_tags_of_a_registry_without_tls_are_listed_without_it() {
        for (is_unverified, command) in
            [(true, "skopeo list-tags --tls-verify=false docker://"), (false, "skopeo list-tags docker://")]
        {
            let kind = FetchErrorKind::NotFound(ErrorResponse::new(404, "manifest unknown"));
            let text = hint(kind, FetchContext { is_unverified, ..FetchContext::default() });
            assert!(text.contains(command), "{text}");
        }
    }

    #[test]
    fn a_tls_problem_has_an_example_of_hosts_toml_or_what_is_wrong_with_the_certificate() {
        let context = |is_mirror| FetchContext {
            hosts: Some(HostsConfig::Missing(Some("/etc/c/r".into()))),
            is_mirror,
            ..FetchContext::default()
        };
        let wrong_name = CertificateProblem::WrongName { asked: "10.0.0.1".into(), names: vec!["a".into()] };
        for (problem, is_mirror, expected) in [
            (
                CertificateProblem::SelfSigned.into(),
                false,
                "write server = \"https://registry.example:5000\", then ca = \"ca.crt\", to /etc/c/r/hosts.toml",
            ),
            (
                CertificateProblem::UnknownIssuer("CN=shop".into()).into(),
                true,
                "write [host.\"https://registry.example:5000\"], then ca = \"ca.crt\", to /etc/c/r/hosts.toml",
            ),
            (
                wrong_name.into(),
                false,
                "(a), or issue it again with openssl's -addext subjectAltName=IP:10.0.0.1",
            ),
            (CertificateProblem::NoName.into(), false, "subjectAltName=DNS:registry.example"),
            (
                CertificateProblem::Expired("x".into()).into(),
                false,
                "renew the certificate of registry.example:5000",
            ),
            (CertificateProblem::NotYetValid("x".into()).into(), false, "clock"),
            (CertificateProblem::WeakKey.into(), false, "issue it again with a key of RSA 2048 or more"),
            (CertificateProblem::WrongUsage.into(), false, "skip_verify = true, to /etc/c/r/hosts.toml"),
            (
                TlsProblem::PlainHttp,
                false,
                "write server = \"http://registry.example:5000\" to /etc/c/r/hosts.toml",
            ),
            (TlsProblem::NoClientCertificate, false, "client = [[\"client.cert\", \"client.key\"]]"),
        ] {
            let text = hint(FetchErrorKind::Tls(problem), context(is_mirror));
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn where_another_ca_is_configured_the_hint_says_so() {
        for problem in [CertificateProblem::SelfSigned, CertificateProblem::UnknownIssuer("CN=shop".into())] {
            let hosts = Some(HostsConfig::Found("/etc/c/r".into()));
            let context = FetchContext { hosts, has_authorities: true, ..FetchContext::default() };
            let text = hint(FetchErrorKind::Tls(problem.into()), context);
            let expected = "the CA certificates that /etc/c/r configures are not this one";
            assert!(text.starts_with(expected), "{text}");
        }
    }

    #[test]
    fn an_unreachable_host_names_the_mirror_configuration() {
        let refused = || FetchErrorKind::Unreachable("tcp connect error: Connection refused".into());
        for (hosts, expected) in [
            (HostsConfig::Found("/etc/c/r".into()), "are configured in /etc/c/r"),
            (
                HostsConfig::Missing(Some("/etc/c/r".into())),
                "no mirror is configured: [host.\"https://MIRROR\"] in /etc/c/r/hosts.toml adds one",
            ),
        ] {
            let context = FetchContext { hosts: Some(hosts), ..FetchContext::default() };
            let text = hint(refused(), context);
            assert!(text.ends_with(expected), "{text}");
        }
    }
}
