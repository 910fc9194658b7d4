//! Failed calls to the API server.

use kube::client::AuthError;
use kube::core::Status;

/// A failed call to the API server. The text has no token and no secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// The kubeconfig, or the files of a pod's service account, cannot be used.
    #[error("{place}: {problem}")]
    Unusable {
        /// The file.
        place: String,
        /// Reason why the file cannot be used.
        problem: String,
    },
    /// The object does not exist.
    #[error("{what} does not exist")]
    NotFound {
        /// Such as `secret default/registry`.
        what: String,
    },
    /// The cluster has no such kind of object.
    #[error(
        "custom resource {resource} is not installed: `kubectl apply -k packaging/kubernetes/base` installs it"
    )]
    NotInstalled {
        /// Such as `imagesets.images.larder.dev`.
        resource: String,
    },
    /// Each list is outdated as soon as it was read.
    #[error("the API server expires the resourceVersion of {what} immediately (410), listing repeatedly")]
    Relisting {
        /// Such as `the list of pods`.
        what: String,
    },
    /// The identity may not do this; the message of the server names verb, resource and API group.
    #[error("{message}")]
    Forbidden {
        /// As the server has it.
        message: String,
    },
    /// The identity is not known to the server, or its certificate or token has expired.
    #[error("the API server rejected the credentials (401): {message}")]
    Unauthorized {
        /// As the server has it.
        message: String,
    },
    /// The server cannot be reached, did not answer in time, or failed.
    #[error("the API server is unavailable: {message}")]
    Unavailable {
        /// Text of the failure.
        message: String,
    },
    /// The object has changed since it was read.
    #[error("{message}")]
    Conflict {
        /// As the server has it.
        message: String,
    },
    /// Any other answer.
    #[error("the API server refused: {message}")]
    Refused {
        /// As the server has it.
        message: String,
    },
}

impl ClusterError {
    /// Whether the same call may succeed later although nothing changes in the cluster: the server is unavailable, or
    /// the credentials are being renewed.
    pub fn is_temporary(&self) -> bool {
        use ClusterError::{Unauthorized, Unavailable, Unusable};
        matches!(self, Unavailable { .. } | Unauthorized { .. } | Unusable { .. })
    }

    /// Converts the failure of a call about `what`, such as `secret default/registry`.
    pub(crate) fn of_call(what: impl Into<String>, error: &kube::Error) -> ClusterError {
        match error {
            kube::Error::Api(status) => of_status(what.into(), status),
            // The files of the credentials could not be read.
            kube::Error::Service(error) if let Some(own) = error.downcast_ref::<ClusterError>() => {
                own.clone()
            }
            other => ClusterError::Unavailable { message: chain(other) },
        }
    }
}

pub(crate) fn of_status(what: String, status: &Status) -> ClusterError {
    let message = status.message.clone();
    match status.code {
        404 => ClusterError::NotFound { what },
        403 => ClusterError::Forbidden { message },
        401 => ClusterError::Unauthorized { message },
        409 => ClusterError::Conflict { message },
        429 | 500.. => ClusterError::Unavailable { message },
        _ => ClusterError::Refused { message },
    }
}

/// An error with its causes, each once; never with what an exec plugin prints, which has tokens.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    if let Some(text) = causes.find_map(of_exec_plugin) {
        return text;
    }
    let (mut text, mut source) = (error.to_string(), error.source());
    while let Some(cause) = source {
        // Most errors of kube contain their causes.
        let part = cause.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        source = cause.source();
    }
    text
}

fn of_exec_plugin(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    match error.downcast_ref()? {
        AuthError::AuthExecRun { out, .. } => {
            Some(format!("the exec plugin of the kubeconfig failed: {}", out.status))
        }
        AuthError::AuthExecParse(_) => {
            Some("the exec plugin of the kubeconfig did not print an ExecCredential".to_owned())
        }
        _ => None,
    }
}

impl ClusterError {
    /// Whether the observer of a cluster's responses reports it in each case. It does not for
    /// [`ClusterError::Unavailable`]: a list that cannot be decoded and a watch that ends with an error began with a
    /// success.
    fn is_observed(&self) -> bool {
        use ClusterError::{NotInstalled, Relisting, Unauthorized, Unusable};
        matches!(self, Unusable { .. } | Unauthorized { .. } | NotInstalled { .. } | Relisting { .. })
    }
}

/// Errors of a task that continues: each is logged when it begins, and once it has ended. Those that the observer of
/// the responses reports are logged there, once for all tasks.
#[derive(Debug, Default)]
pub(crate) struct ErrorLog {
    last: Option<ClusterError>,
}

impl ErrorLog {
    /// Notes the outcome of one more attempt at `what`.
    pub(crate) fn note(&mut self, what: &str, outcome: Result<(), ClusterError>) {
        match outcome {
            Ok(()) => match self.last.take() {
                Some(error) if error.is_observed() => tracing::debug!("{what}: API server available again"),
                Some(_) => tracing::info!("{what}: API server available again"),
                None => {}
            },
            Err(error) if self.last.as_ref() == Some(&error) => {}
            Err(error) => {
                if error.is_observed() {
                    tracing::debug!("{what}: {error}");
                } else {
                    tracing::warn!("{what}: {error}");
                }
                self.last = Some(error);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_task_warns_of_what_the_observer_may_not_report() {
        let status = |code| Status { code, ..Status::default() };
        for code in [429, 500, 503] {
            assert!(!of_status("pods".into(), &status(code)).is_observed(), "{code}");
        }
        assert!(of_status("pods".into(), &status(401)).is_observed());
        let undecodable = kube::Error::SerdeError(serde_json::from_str::<u8>("x").unwrap_err());
        assert!(!ClusterError::of_call("pods", &undecodable).is_observed());
    }
}
