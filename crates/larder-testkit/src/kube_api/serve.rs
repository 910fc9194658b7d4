//! Requests and answers over HTTP.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::fault::{self, ApiFault};
use super::objects::{Change, ObjectKey, ObjectPart, merge};
use super::resources::{self, Target};
use super::response::ApiError;
use super::selectors::Selectors;
use super::state::{ApiState, SharedState};
use super::{ApiRequest, reviews, tokens};

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Serves until dropped; connections end with it.
pub(super) async fn serve(listener: TcpListener, shared: &Arc<SharedState>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(shared);
        connections.spawn(async move {
            let service = service_fn(|request| answer(request, &shared));
            _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

/// An error closes the connection without an answer.
async fn answer(request: Request<Incoming>, shared: &Arc<SharedState>) -> Result<Response<Body>, HungUp> {
    let (head, body) = request.into_parts();
    let path = head.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
    let token = head.headers.get("authorization").and_then(|value| value.to_str().ok());
    let token = token.and_then(|value| value.strip_prefix("Bearer ")).map(str::to_owned);
    let (entry, fault) = {
        let mut state = shared.lock();
        let fault = fault::choose(&mut state.faults, &format!("{} {path}", head.method));
        let token = token.clone().unwrap_or_default();
        state.log.push(ApiRequest { method: head.method.to_string(), path, token, status: 0 });
        (state.log.len() - 1, fault)
    };
    let failed = match fault {
        Some(ApiFault::Hangup) => return Err(HungUp),
        Some(ApiFault::Status(code, reason)) => Some(ApiError::new(code, reason, "injected".to_owned())),
        Some(ApiFault::Throttle(seconds)) => {
            let error =
                ApiError::new(429, "TooManyRequests", "too many requests, please try again later".to_owned());
            Some(ApiError { retry_after: Some(seconds), ..error })
        }
        Some(ApiFault::Delay(time)) => {
            tokio::time::sleep(time).await;
            None
        }
        None => None,
    };
    let body = body.collect().await.map_err(|_| HungUp)?.to_bytes();
    let request = ParsedRequest { method: head.method, uri: &head.uri, token, body };
    let answer = match failed {
        Some(error) => Err(error),
        None => request.answer(shared),
    };
    let response = answer.unwrap_or_else(|error| failure(&error));
    shared.lock().log[entry].status = response.status().as_u16();
    shared.notify();
    Ok(response)
}

/// A call of the test itself.
pub(super) fn administer(
    shared: &SharedState,
    method: &str,
    path: &str,
    body: &Value,
) -> Result<Value, ApiError> {
    let bad = |what: &str| ApiError::bad_request(format!("{what} is invalid"));
    let uri: hyper::Uri = path.parse().map_err(|_| bad("the path"))?;
    let method = method.parse().map_err(|_| bad("the method"))?;
    let request = ParsedRequest { method, uri: &uri, token: None, body: Bytes::from(body.to_string()) };
    let mut state = shared.lock();
    let target = resources::target(uri.path(), &state.resources)?;
    let verb = request.verb(&target)?;
    Ok(request.call(verb, &target, &mut state)?.1)
}

/// The connection was closed on purpose, or by the client.
#[derive(Debug)]
struct HungUp;

impl std::fmt::Display for HungUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("hung up")
    }
}

impl std::error::Error for HungUp {}

struct ParsedRequest<'a> {
    method: Method,
    uri: &'a hyper::Uri,
    token: Option<String>,
    body: Bytes,
}

impl ParsedRequest<'_> {
    fn answer(&self, shared: &Arc<SharedState>) -> Result<Response<Body>, ApiError> {
        if !shared.lock().authorization.is_known(self.token.as_deref()) {
            return Err(ApiError::unauthorized());
        }
        if self.uri.path() == "/version" {
            return Ok(json_response(
                StatusCode::OK,
                &json!({ "major": "1", "minor": "36", "gitVersion": "v1.36.2" }),
            ));
        }
        let mut state = shared.lock();
        if let Some(answer) = reviews::answer(self.uri.path(), self.token.as_deref(), &self.body, &state) {
            return Ok(json_response(StatusCode::OK, &answer?));
        }
        let target = resources::target(self.uri.path(), &state.resources)?;
        let verb = self.verb(&target)?;
        state.authorization.check(self.token.as_deref(), verb, &target)?;
        if verb == "watch" {
            return self.watch(&target, &state, shared);
        }
        let (code, object) = self.call(verb, &target, &mut state)?;
        Ok(json_response(code, &object))
    }

    fn call(
        &self,
        verb: &str,
        target: &Target,
        state: &mut ApiState,
    ) -> Result<(StatusCode, Value), ApiError> {
        let Some(name) = target.name.clone() else {
            return match verb {
                "list" => Ok((StatusCode::OK, self.list(target, state))),
                "create" => Ok((StatusCode::CREATED, self.create(target, state)?)),
                _ => Err(ApiError::bad_request(format!("{verb} of a collection is not served"))),
            };
        };
        let namespace = target.namespace.clone().unwrap_or_default();
        let key = ObjectKey { resource: target.resource.clone(), namespace, name };
        let part = match target.subresource.as_deref() {
            None => ObjectPart::Object,
            Some("status") => ObjectPart::Status,
            Some("token") => return Ok((StatusCode::CREATED, tokens::issue(self.object()?, &key, state)?)),
            Some(other) => return Err(ApiError::bad_request(format!("{other} is not served"))),
        };
        let object = match verb {
            "get" => state.objects.get(&key)?.clone(),
            "update" => state.objects.update(&key, self.object()?, part)?,
            "patch" => {
                let mut object = state.objects.get(&key)?.clone();
                merge(&mut object, &self.object()?);
                state.objects.update(&key, object, part)?
            }
            "delete" => state.objects.delete(&key)?,
            _ => return Err(ApiError::bad_request(format!("{verb} of an object is not served"))),
        };
        Ok((StatusCode::OK, object))
    }

    fn verb(&self, target: &Target) -> Result<&'static str, ApiError> {
        Ok(match (&self.method, &target.name) {
            (&Method::GET, _) if self.query("watch").is_some_and(|watch| watch != "false") => "watch",
            (&Method::GET, Some(_)) => "get",
            (&Method::GET, None) => "list",
            (&Method::POST, _) => "create",
            (&Method::PUT, _) => "update",
            (&Method::PATCH, _) => "patch",
            (&Method::DELETE, _) => "delete",
            (method, _) => {
                return Err(ApiError::new(405, "MethodNotAllowed", format!("{method} is not served")));
            }
        })
    }

    fn query(&self, name: &str) -> Option<String> {
        let mut pairs = form_urlencoded::parse(self.uri.query().unwrap_or_default().as_bytes());
        pairs.find(|(key, _)| key == name).map(|(_, value)| value.into_owned())
    }

    fn selectors(&self) -> Selectors {
        let text = |name| self.query(name).unwrap_or_default();
        Selectors::parse(&text("fieldSelector"), &text("labelSelector"))
    }

    fn object(&self) -> Result<Value, ApiError> {
        serde_json::from_slice(&self.body)
            .map_err(|error| ApiError::bad_request(format!("the body is no JSON: {error}")))
    }

    fn list(&self, target: &Target, state: &ApiState) -> Value {
        let items = state.objects.list(&target.resource, target.namespace.as_deref(), &self.selectors());
        json!({
            "kind": format!("{}List", target.resource.kind), "apiVersion": target.resource.api_version(),
            "metadata": { "resourceVersion": state.objects.version().to_string() }, "items": items,
        })
    }

    fn create(&self, target: &Target, state: &mut ApiState) -> Result<Value, ApiError> {
        let mut object = self.object()?;
        let metadata = &object["metadata"];
        let name = match (metadata["name"].as_str(), metadata["generateName"].as_str()) {
            (Some(name), _) => name.to_owned(),
            (None, Some(prefix)) => format!("{prefix}{:05x}", state.objects.version()),
            (None, None) => return Err(ApiError::bad_request("name or generateName is required")),
        };
        object["kind"] = json!(target.resource.kind);
        object["apiVersion"] = json!(target.resource.api_version());
        if target.resource.has_status && target.resource.kind != "Pod" {
            object.as_object_mut().map(|object| object.remove("status"));
        }
        if target.resource.plural == "customresourcedefinitions" {
            state.resources.extend(resources::defined(&object));
            object["status"] = json!({ "conditions": [{ "type": "Established", "status": "True" }] });
        }
        let namespace = target.namespace.clone().unwrap_or_default();
        if !namespace.is_empty() && !state.objects.has_namespace(&namespace) {
            return Err(ApiError::new(404, "NotFound", format!("namespaces \"{namespace}\" not found")));
        }
        let key = ObjectKey { resource: target.resource.clone(), namespace, name };
        if self.query("dryRun").is_some() {
            let known = state.objects.get(&key).is_ok();
            return if known { Err(ApiError::already_exists(&key.resource, &key.name)) } else { Ok(object) };
        }
        state.objects.create(&key, object, &Timestamp::now().to_string())
    }

    fn watch(
        &self,
        target: &Target,
        state: &ApiState,
        shared: &Arc<SharedState>,
    ) -> Result<Response<Body>, ApiError> {
        let selectors = self.selectors();
        let mut first = Vec::new();
        let version = self.query("resourceVersion").filter(|version| !version.is_empty() && version != "0");
        let from = match version.map(|version| version.parse::<u64>()) {
            Some(Ok(version)) => version,
            Some(Err(_)) => return Err(ApiError::bad_request("resourceVersion is no number")),
            None => {
                let items = state.objects.list(&target.resource, target.namespace.as_deref(), &selectors);
                first.extend(items.iter().map(|object| event("ADDED", object)));
                state.objects.version()
            }
        };
        if self.query("sendInitialEvents").as_deref() == Some("true") {
            first.push(bookmark(target, from, true));
        }
        let watcher = Watcher {
            target: target.clone(),
            selectors,
            from,
            allows_bookmarks: self.query("allowWatchBookmarks").as_deref() == Some("true"),
            bookmarks: shared.changed.borrow().1,
            is_over: false,
            changed: shared.changed.subscribe(),
            shared: Arc::clone(shared),
        };
        let seconds = self.query("timeoutSeconds").and_then(|seconds| seconds.parse().ok()).unwrap_or(1800);
        let ends = tokio::time::sleep(Duration::from_secs(seconds));
        let later = stream::unfold(watcher, |mut watcher| async {
            let events = watcher.next().await?;
            Some((stream::iter(events), watcher))
        });
        let events = stream::iter(first).chain(later.flatten()).take_until(ends);
        let body = StreamBody::new(events.map(|line| Ok(Frame::data(Bytes::from(line)))));
        let mut response = Response::new(body.boxed_unsync());
        response.headers_mut().insert(CONTENT_TYPE, JSON);
        Ok(response)
    }
}

/// One watch.
struct Watcher {
    target: Target,
    selectors: Selectors,
    /// Changes up to this version were reported.
    from: u64,
    allows_bookmarks: bool,
    bookmarks: u64,
    /// The last event was an error.
    is_over: bool,
    changed: watch::Receiver<(u64, u64)>,
    shared: Arc<SharedState>,
}

impl Watcher {
    /// The next events; `None` ends the watch.
    async fn next(&mut self) -> Option<Vec<String>> {
        loop {
            let (version, bookmarks) = *self.changed.borrow_and_update();
            let mut events = match self.events_until(version) {
                Ok(events) => events,
                // A server words this as an event, not as the status of the answer, and ends the watch.
                Err(error) if !std::mem::replace(&mut self.is_over, true) => {
                    return Some(vec![event("ERROR", &error.to_status())]);
                }
                Err(_) => return None,
            };
            if std::mem::replace(&mut self.bookmarks, bookmarks) != bookmarks && self.allows_bookmarks {
                events.push(bookmark(&self.target, self.from, false));
            }
            if !events.is_empty() {
                return Some(events);
            }
            self.changed.changed().await.ok()?;
        }
    }

    fn events_until(&mut self, version: u64) -> Result<Vec<String>, ApiError> {
        let state = self.shared.lock();
        let changes = state.objects.changes_after(self.from)?;
        let events =
            changes.filter(|change| change.version <= version).filter_map(|change| self.event_of(change));
        let events = events.collect();
        self.from = self.from.max(version);
        Ok(events)
    }

    /// As seen through the selectors: an object that no longer matches is deleted for this watch.
    fn event_of(&self, change: &Change) -> Option<String> {
        let is_here = change.key.resource == self.target.resource
            && self.target.namespace.as_ref().is_none_or(|namespace| *namespace == change.key.namespace);
        let was_seen = change.before.as_ref().is_some_and(|before| self.selectors.match_object(before));
        let is_seen = !change.is_deletion && self.selectors.match_object(&change.object);
        let kind = match (is_here, was_seen, is_seen) {
            (false, ..) | (true, false, false) => return None,
            (true, false, true) => "ADDED",
            (true, true, true) => "MODIFIED",
            (true, true, false) => "DELETED",
        };
        Some(event(kind, &change.object))
    }
}

const JSON: HeaderValue = HeaderValue::from_static("application/json");

fn event(kind: &str, object: &Value) -> String {
    format!("{}\n", json!({ "type": kind, "object": object }))
}

fn bookmark(target: &Target, version: u64, ends_initial: bool) -> String {
    let annotations = if ends_initial { json!({ "k8s.io/initial-events-end": "true" }) } else { json!({}) };
    let metadata = json!({ "resourceVersion": version.to_string(), "annotations": annotations });
    let (kind, api_version) = (&target.resource.kind, target.resource.api_version());
    event("BOOKMARK", &json!({ "kind": kind, "apiVersion": api_version, "metadata": metadata }))
}

fn json_response(code: StatusCode, object: &Value) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from(object.to_string())).boxed_unsync());
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response
}

fn failure(error: &ApiError) -> Response<Body> {
    let code = StatusCode::from_u16(error.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json_response(code, &error.to_status());
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}
