//! As much of HTTP/1.1 as a registry needs.

use std::fmt::Write as _;
use std::io;
use std::sync::Arc;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};

/// The head of a request.
#[derive(Debug, Clone)]
pub(super) struct RequestHead {
    pub(super) method: String,
    pub(super) path: String,
    /// Names in lower case.
    pub(super) fields: Vec<(String, String)>,
}

impl RequestHead {
    /// Reads the head of the next request; `None` when the client has nothing more to ask.
    pub(super) async fn read(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<RequestHead>> {
        let mut line = String::new();
        if from.read_line(&mut line).await? == 0 {
            return Ok(None);
        }
        let mut words = line.split_whitespace().map(str::to_owned);
        let (Some(method), Some(path)) = (words.next(), words.next()) else {
            return Err(io::Error::other(format!("no request line: {line:?}")));
        };
        let mut fields = Vec::new();
        loop {
            let mut line = String::new();
            if from.read_line(&mut line).await? == 0 || line.trim().is_empty() {
                return Ok(Some(RequestHead { method, path, fields }));
            }
            if let Some((name, value)) = line.split_once(':') {
                fields.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
            }
        }
    }

    /// Reads the body that belongs to it.
    pub(super) async fn body(&self, from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<String> {
        let length = self.field("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        let mut body = vec![0; usize::min(length, 1 << 20)];
        from.read_exact(&mut body).await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    pub(super) fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(field, _)| field == name).map(|(_, value)| value.as_str())
    }

    /// The path without its query.
    pub(super) fn bare_path(&self) -> &str {
        self.path.split('?').next().unwrap_or_default()
    }

    /// `/v2/REPOSITORY/KIND/REFERENCE` in its parts.
    pub(super) fn parts(&self) -> Option<(&str, &str, &str)> {
        let (rest, reference) = self.bare_path().strip_prefix("/v2/")?.rsplit_once('/')?;
        let (repository, kind) = rest.rsplit_once('/')?;
        Some((repository, kind, reference))
    }

    pub(super) fn repository(&self) -> Option<&str> {
        self.parts().map(|(repository, _, _)| repository)
    }

    /// The requested range: first byte, and last byte if given.
    pub(super) fn range(&self) -> Option<(u64, Option<u64>)> {
        let (first, last) = self.field("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse().ok()?, if last.is_empty() { None } else { Some(last.parse().ok()?) }))
    }
}

/// A response before its fault.
#[derive(Debug, Clone)]
pub(super) struct PlannedResponse {
    pub(super) status: u16,
    pub(super) fields: Vec<(String, String)>,
    content: Arc<[u8]>,
    /// The part of the content that is sent.
    pub(super) part: std::ops::Range<usize>,
}

impl PlannedResponse {
    pub(super) fn new(status: u16, content: impl Into<Arc<[u8]>>) -> PlannedResponse {
        let content = content.into();
        let part = 0..content.len();
        PlannedResponse { status, fields: Vec::new(), content, part }
    }

    pub(super) fn with(mut self, name: &str, value: impl Into<String>) -> PlannedResponse {
        self.set(name, value.into());
        self
    }

    pub(super) fn set(&mut self, name: &str, value: String) {
        self.fields.retain(|(field, _)| !field.eq_ignore_ascii_case(name));
        self.fields.push((name.to_owned(), value));
    }

    pub(super) fn body(&self) -> &[u8] {
        &self.content[self.part.clone()]
    }

    /// The requested part of the content, as 206 or 416.
    pub(super) fn ranged(mut self, first: u64, last: Option<u64>) -> PlannedResponse {
        let total = self.content.len() as u64;
        if first >= total {
            return PlannedResponse::new(416, Vec::new()).with("Content-Range", format!("bytes */{total}"));
        }
        let last = last.unwrap_or(total - 1).min(total - 1);
        let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        self.part = index(first)..index(last + 1);
        self.status = 206;
        self.with("Content-Range", format!("bytes {first}-{last}/{total}"))
    }

    /// Status line and header fields. Without a `length` the body lasts until the connection is closed.
    pub(super) fn head(&self, length: Option<u64>) -> String {
        let mut head = format!("HTTP/1.1 {} Test\r\n", self.status);
        for (name, value) in &self.fields {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        match length {
            Some(length) => {
                let _ = write!(head, "Content-Length: {length}\r\n\r\n");
            }
            None => head.push_str("Connection: close\r\n\r\n"),
        }
        head
    }
}
