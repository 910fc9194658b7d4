//! The user of a kubeconfig. Reads files.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kube::config::{AuthInfo, Kubeconfig, KubeconfigError};

use crate::error::chain;

/// The user of the current context.
pub(crate) fn current_user(kubeconfig: &Path) -> Option<AuthInfo> {
    let Kubeconfig { current_context, contexts, auth_infos, .. } = Kubeconfig::read_from(kubeconfig).ok()?;
    let context = contexts.into_iter().find(|named| Some(&named.name) == current_context.as_ref())?.context?;
    auth_infos.into_iter().find(|named| Some(&named.name) == context.user.as_ref())?.auth_info
}

/// Kind of identity in a kubeconfig, for the step after an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KubeconfigState {
    /// It is not read: larder runs in a pod.
    Absent,
    /// There is no such file.
    Missing,
    /// The user of this process may not read it.
    Unreadable,
    /// It has no context.
    Empty,
    /// Its current-context is none of these.
    NoContext(Vec<String>),
    /// Its user has a client certificate.
    Certificate,
    /// Its user has a token, in this file or in itself.
    Token(Option<PathBuf>),
    /// Anything else.
    Other,
}

/// Reads the kind of identity in a kubeconfig.
pub(crate) fn state(kubeconfig: Option<&Path>) -> KubeconfigState {
    let Some(path) = kubeconfig else { return KubeconfigState::Absent };
    let parsed = match Kubeconfig::read_from(path) {
        Ok(parsed) => parsed,
        Err(KubeconfigError::ReadConfig(error, _)) if error.kind() == ErrorKind::NotFound => {
            return KubeconfigState::Missing;
        }
        Err(KubeconfigError::ReadConfig(error, _)) if error.kind() == ErrorKind::PermissionDenied => {
            return KubeconfigState::Unreadable;
        }
        Err(_) => return KubeconfigState::Other,
    };
    let names: Vec<_> = parsed.contexts.into_iter().map(|named| named.name).collect();
    match (parsed.current_context, names.is_empty()) {
        (_, true) => return KubeconfigState::Empty,
        (Some(current), false) if names.contains(&current) => {}
        _ => return KubeconfigState::NoContext(names),
    }
    match current_user(path) {
        Some(user) if user.client_certificate.is_some() || user.client_certificate_data.is_some() => {
            KubeconfigState::Certificate
        }
        Some(user) if user.token.is_some() || user.token_file.is_some() => {
            KubeconfigState::Token(user.token_file.map(PathBuf::from))
        }
        _ => KubeconfigState::Other,
    }
}

/// Why a kubeconfig cannot be used. Of a parser's text only the first line: the others show the file, and so its
/// tokens.
pub(crate) fn problem(error: &KubeconfigError) -> String {
    match error {
        KubeconfigError::ReadConfig(error, _) => format!("cannot be read: {error}"),
        KubeconfigError::Parse(error) => {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default();
            format!("not a kubeconfig: {}", line.trim_start_matches("error: "))
        }
        KubeconfigError::CurrentContextNotSet => "not a kubeconfig: it has no current-context".to_owned(),
        KubeconfigError::LoadContext(name) => format!("has no context {name:?}, its current-context"),
        KubeconfigError::LoadClusterOfContext(name) => {
            format!("has no cluster {name:?}, that of its current-context")
        }
        other => chain(other),
    }
}

/// Returns the text of an error in a kubeconfig's certificates and keys.
pub(crate) fn tls_problem(error: &kube::Error) -> String {
    let text = chain(error);
    // As rustls names it.
    if text.contains("UnsupportedCertVersion") {
        "client certificate of X.509 version 1: version 3 is required; `openssl x509 -req` needs -extfile for it"
            .to_owned()
    } else {
        text
    }
}

/// The client certificate, as PEM.
pub(crate) fn certificate(user: &AuthInfo) -> Option<String> {
    if let Some(data) = &user.client_certificate_data {
        return String::from_utf8(STANDARD.decode(data).ok()?).ok();
    }
    fs_err::read_to_string(user.client_certificate.as_ref()?).ok()
}
