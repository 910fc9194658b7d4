//! The request log.

/// A request and its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoggedRequest {
    /// `GET`, `POST`, ...
    pub method: String,
    /// Path and query.
    pub path: String,
    /// The `Host` that the client meant.
    pub host: String,
    /// The `Authorization` field, if there was one.
    pub authorization: Option<String>,
    /// The `Range` field, if there was one.
    pub range: Option<String>,
    /// All header fields, names in lower case.
    pub headers: Vec<(String, String)>,
    /// The request's body, as text.
    pub body: String,
    /// HTTP status of the answer; 0 while there is none.
    pub status: u16,
    /// Bytes of the answer's body that were handed to the network.
    pub sent: u64,
}

impl LoggedRequest {
    /// A header field of the request; `name` in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(field, _)| field == name).map(|(_, value)| value.as_str())
    }
}
