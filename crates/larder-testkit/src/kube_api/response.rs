//! Errors as an API server words them.

use serde_json::{Value, json};

use super::resources::Resource;

/// An error, as `Status` has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ApiError {
    pub(super) code: u16,
    pub(super) reason: &'static str,
    pub(super) message: String,
    /// Seconds of `Retry-After`.
    pub(super) retry_after: Option<u32>,
}

impl ApiError {
    pub(super) fn new(code: u16, reason: &'static str, message: String) -> ApiError {
        ApiError { code, reason, message, retry_after: None }
    }

    pub(super) fn unknown_path(path: &str) -> ApiError {
        ApiError::new(404, "NotFound", format!("the server could not find the requested resource: {path}"))
    }

    pub(super) fn not_found(resource: &Resource, name: &str) -> ApiError {
        ApiError::new(404, "NotFound", format!("{} \"{name}\" not found", resource.qualified()))
    }

    pub(super) fn already_exists(resource: &Resource, name: &str) -> ApiError {
        ApiError::new(409, "AlreadyExists", format!("{} \"{name}\" already exists", resource.qualified()))
    }

    pub(super) fn conflict(resource: &Resource, name: &str) -> ApiError {
        let resource = resource.qualified();
        let why =
            "the object has been modified; please apply your changes to the latest version and try again";
        ApiError::new(
            409,
            "Conflict",
            format!("Operation cannot be fulfilled on {resource} \"{name}\": {why}"),
        )
    }

    pub(super) fn expired(version: u64, now: u64) -> ApiError {
        ApiError::new(410, "Expired", format!("too old resource version: {version} ({now})"))
    }

    pub(super) fn bad_request(message: impl Into<String>) -> ApiError {
        ApiError::new(400, "BadRequest", message.into())
    }

    pub(super) fn unauthorized() -> ApiError {
        ApiError::new(401, "Unauthorized", "Unauthorized".to_owned())
    }

    pub(super) fn to_status(&self) -> Value {
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        })
    }
}
