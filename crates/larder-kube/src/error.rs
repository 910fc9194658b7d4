//! Failed calls to the API server.

use kube::core::Status;

/// A failed call to the API server. The text has no token and no secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// The kubeconfig, or the files of a pod's service account, cannot be used.
    #[error("{place}: {problem}")]
    Unusable {
        /// The file.
        place: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The object does not exist.
    #[error("{what} does not exist")]
    NotFound {
        /// Such as `secret default/registry`.
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
        /// What happened.
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
    /// What a call about `what` (such as `secret default/registry`) failed with.
    pub(crate) fn of_call(what: impl Into<String>, error: &kube::Error) -> ClusterError {
        match error {
            kube::Error::Api(status) => of_status(what.into(), status),
            other => ClusterError::Unavailable { message: chain(other) },
        }
    }
}

fn of_status(what: String, status: &Status) -> ClusterError {
    let message = status.message.clone();
    match status.code {
        404 => ClusterError::NotFound { what },
        403 => ClusterError::Forbidden { message },
        401 => ClusterError::Unauthorized { message },
        429 | 500.. => ClusterError::Unavailable { message },
        _ => ClusterError::Refused { message },
    }
}

/// An error with its causes, each once.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    larder::error_chain(error)
}
