//! Connections, requests and answers.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::fault::{ResponseFault, choose};
use super::http::{PlannedResponse, RequestHead};
use super::{LoggedRequest, SharedContents};

/// How much is written at a time; the log counts in steps of it.
const STEP: usize = 16 * 1024;

/// Serves until `stopped`; what is under way then ends at once.
pub(super) async fn serve(
    listener: TcpListener,
    shared: Arc<SharedContents>,
    stopped: oneshot::Receiver<()>,
) {
    let own = listener.local_addr().map(|address| address.to_string()).unwrap_or_default();
    let mut connections = JoinSet::new();
    let accept = async {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            let open = ConnectionCount::new(shared.clone());
            let own = own.clone();
            connections.spawn(async move {
                let (from, to) = stream.into_split();
                let mut connection =
                    ServedConnection { from: BufReader::new(from), to, shared: open.0.clone(), own };
                while let Ok(true) = connection.request().await {}
                drop(open);
            });
            while connections.try_join_next().is_some() {}
        }
    };
    tokio::select! {
        () = accept => {}
        _ = stopped => {}
    }
}

/// Counts a connection while it is open.
struct ConnectionCount(Arc<SharedContents>);

impl ConnectionCount {
    fn new(shared: Arc<SharedContents>) -> ConnectionCount {
        {
            let mut state = shared.lock();
            state.open_now += 1;
            state.open_most = state.open_most.max(state.open_now);
        }
        ConnectionCount(shared)
    }
}

impl Drop for ConnectionCount {
    fn drop(&mut self) {
        self.0.lock().open_now -= 1;
    }
}

struct ServedConnection {
    from: BufReader<OwnedReadHalf>,
    to: OwnedWriteHalf,
    shared: Arc<SharedContents>,
    own: String,
}

impl ServedConnection {
    /// Answers one request. Whether the connection can take another one.
    async fn request(&mut self) -> io::Result<bool> {
        let Some(head) = RequestHead::read(&mut self.from).await? else { return Ok(false) };
        let body = head.body(&mut self.from).await?;
        let (entry, fault, answer) = {
            let mut state = self.shared.lock();
            let entry = state.log.len();
            state.log.push(logged(&head, &body));
            let fault = choose(&mut state.faults, &head.path, head.range().map(|(first, _)| first));
            let answer = state.answer(&head, &body, &self.own, fault.as_ref());
            (entry, fault, answer)
        };
        self.send(&head, answer, fault, entry).await
    }

    async fn send(
        &mut self,
        head: &RequestHead,
        mut answer: PlannedResponse,
        fault: Option<ResponseFault>,
        entry: usize,
    ) -> io::Result<bool> {
        let whole = answer.body().len() as u64;
        let mut length = Some(whole);
        let mut content = if head.method == "HEAD" { Vec::new() } else { answer.body().to_vec() };
        // What is done after how many bytes of the body.
        let mut ending: Option<(u64, ConnectionEnd)> = None;
        let mut step = (STEP as u64, Duration::ZERO);
        match fault {
            Some(ResponseFault::Hangup) => {
                self.reset();
                return Ok(false);
            }
            Some(ResponseFault::SlowHeaders(wait)) => tokio::time::sleep(wait).await,
            Some(ResponseFault::ResetAfter(bytes)) => ending = Some((bytes, ConnectionEnd::Reset)),
            Some(ResponseFault::CloseAfter(bytes)) => ending = Some((bytes, ConnectionEnd::Close)),
            Some(ResponseFault::StallAfter(bytes)) => ending = Some((bytes, ConnectionEnd::Stall)),
            Some(ResponseFault::Truncate(bytes)) => {
                length = Some(bytes.min(whole));
                content.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
            }
            Some(ResponseFault::Corrupt) => {
                if let Some(first) = content.first_mut() {
                    *first ^= 0xff;
                }
            }
            Some(ResponseFault::Overlong(more)) => {
                length = None;
                content.resize(content.len() + usize::try_from(more).unwrap_or(0), b'x');
            }
            Some(ResponseFault::Trickle(bytes, pause)) => step = (bytes.max(1), pause),
            Some(ResponseFault::ContentRange(text)) if answer.status == 206 => {
                answer.set("Content-Range", text);
            }
            _ => {}
        }
        self.note(entry, |request| request.status = answer.status);
        self.to.write_all(answer.head(length).as_bytes()).await?;

        let steps = usize::try_from(step.0).unwrap_or(STEP);
        let ending_at = ending.as_ref().map(|(at, _)| usize::try_from(*at).unwrap_or(usize::MAX));
        let mut sent = 0;
        loop {
            if ending_at == Some(sent) {
                return self.end(ending.map_or(ConnectionEnd::Close, |(_, ending)| ending)).await;
            }
            if sent == content.len() {
                return Ok(length.is_some());
            }
            let next = content.len().min(sent + steps).min(ending_at.unwrap_or(usize::MAX));
            // Counted first: the client may have the bytes, and look at the log, before the write returns.
            self.note(entry, |request| request.sent = next as u64);
            self.to.write_all(&content[sent..next]).await?;
            sent = next;
            if !step.1.is_zero() {
                tokio::time::sleep(step.1).await;
            }
        }
    }

    async fn end(&mut self, ending: ConnectionEnd) -> io::Result<bool> {
        match ending {
            ConnectionEnd::Close => {}
            ConnectionEnd::Reset => {
                // What was sent is to arrive: a reset overtakes bytes that still wait in the client's kernel.
                self.to.flush().await?;
                tokio::time::sleep(Duration::from_millis(20)).await;
                self.reset();
            }
            // Until the client gives up, or the registry is dropped.
            ConnectionEnd::Stall => while RequestHead::read(&mut self.from).await?.is_some() {},
        }
        Ok(false)
    }

    fn reset(&self) {
        let _ = self.to.as_ref().set_zero_linger();
    }

    fn note(&self, entry: usize, change: impl FnOnce(&mut LoggedRequest)) {
        if let Some(request) = self.shared.lock().log.get_mut(entry) {
            change(request);
        }
    }
}

enum ConnectionEnd {
    Close,
    Reset,
    Stall,
}

impl super::RegistryContents {
    fn answer(
        &mut self,
        head: &RequestHead,
        body: &str,
        own: &str,
        fault: Option<&ResponseFault>,
    ) -> PlannedResponse {
        match fault {
            Some(ResponseFault::Status(status, fields, body)) => {
                let mut answer = PlannedResponse::new(*status, body.clone().into_bytes());
                answer.fields.clone_from(fields);
                return answer;
            }
            Some(ResponseFault::RetryAfter(status, after)) => {
                return PlannedResponse::new(*status, Vec::new()).with("Retry-After", after.clone());
            }
            Some(ResponseFault::Redirect(to)) => {
                return PlannedResponse::new(307, Vec::new()).with("Location", to.clone());
            }
            _ => {}
        }
        if head.bare_path() == "/token" {
            return self.auth.token(head, body);
        }
        if let Some(refusal) = self.auth.check(head, own) {
            return refusal;
        }
        match head.parts() {
            Some((repository, "manifests", reference)) => {
                self.manifests.get(&format!("{repository}:{reference}")).map_or_else(
                    || refusal(404, "MANIFEST_UNKNOWN", "manifest unknown"),
                    |manifest| {
                        PlannedResponse::new(200, manifest.content.clone())
                            .with("Content-Type", manifest.media_type.clone())
                            .with("Docker-Content-Digest", manifest.digest.clone())
                    },
                )
            }
            Some((_, "blobs", digest)) => match (self.blobs.get(digest), head.range()) {
                (None, _) => refusal(404, "BLOB_UNKNOWN", "blob unknown to registry"),
                (Some(content), Some((first, last))) if fault != Some(&ResponseFault::IgnoreRange) => {
                    PlannedResponse::new(200, content.clone()).ranged(first, last)
                }
                (Some(content), _) => PlannedResponse::new(200, content.clone()),
            },
            Some((repository, "referrers", subject)) => self.list_referrers(head, repository, subject),
            Some((repository, "tags", "list")) => {
                let of_it = format!("{repository}:");
                let tags = self.manifests.keys().filter_map(|key| key.strip_prefix(&of_it));
                let tags: Vec<&str> = tags.filter(|tag| !tag.starts_with("sha256:")).collect();
                let body = serde_json::json!({"name": repository, "tags": tags}).to_string();
                PlannedResponse::new(200, body.into_bytes())
            }
            _ if head.bare_path() == "/v2/" => PlannedResponse::new(200, b"{}".to_vec()),
            _ => PlannedResponse::new(404, Vec::new()),
        }
    }
}

fn refusal(status: u16, code: &str, message: &str) -> PlannedResponse {
    let body = serde_json::json!({"errors": [{"code": code, "message": message}]}).to_string();
    PlannedResponse::new(status, body.into_bytes()).with("Content-Type", "application/json")
}

fn logged(head: &RequestHead, body: &str) -> LoggedRequest {
    let field = |name: &str| head.field(name).map(str::to_owned);
    LoggedRequest {
        method: head.method.clone(),
        path: head.path.clone(),
        host: field("host").unwrap_or_default(),
        authorization: field("authorization"),
        range: field("range"),
        headers: head.fields.clone(),
        body: body.to_owned(),
        status: 0,
        sent: 0,
    }
}
