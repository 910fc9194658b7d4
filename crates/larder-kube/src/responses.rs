//! Outcomes of requests, for whether the API server answers.

use http::{Method, Request, Response, StatusCode, Uri};
use kube::Client;
use kube::client::Body;
use kube::core::{Resource as _, Status};

use crate::error::{ClusterError, of_status};
use crate::image_sets::ImageSet;

/// Receives the outcome of each request.
pub trait ResponseObserver: Send + Sync + 'static {
    /// A request for an action, such as `list pods`, was answered or failed. [`ClusterError::Forbidden`] is reported
    /// only where a rule is missing: a refused secret or token concerns the pod that names it.
    fn observe(&self, action: &str, outcome: Result<(), ClusterError>);

    /// No such request is sent any more: its problem is no longer one, and nothing else is known by that.
    fn forget(&self, _action: &str) {}

    /// A part of a watch arrived: the server can be reached. It says nothing of the credentials, which it checked
    /// earlier.
    fn observe_watch(&self) {}
}

/// Sends a request and reports its outcome.
pub(crate) async fn send_observed(
    client: &Client,
    observer: &dyn ResponseObserver,
    request: Request<Body>,
) -> kube::Result<Response<Body>> {
    let action = RequestAction::of(request.method(), request.uri());
    match client.send(request).await {
        Ok(response) => {
            let (response, outcome) = with_outcome(&action, response).await?;
            observer.observe(&action.text, outcome);
            Ok(response)
        }
        Err(error) => {
            observer.observe(&action.text, Err(ClusterError::of_call(&action.text, &error)));
            Err(error)
        }
    }
}

/// Only the body of a refusal is read.
async fn with_outcome(
    action: &RequestAction,
    response: Response<Body>,
) -> kube::Result<(Response<Body>, Result<(), ClusterError>)> {
    let code = response.status();
    let is_missing_rule = code == StatusCode::FORBIDDEN && !action.is_of_one_object;
    if let (StatusCode::NOT_FOUND, Some(resource)) = (code, &action.custom_resource) {
        let resource = resource.clone();
        return Ok((response, Err(ClusterError::NotInstalled { resource })));
    }
    if !is_missing_rule && code != StatusCode::UNAUTHORIZED && !code.is_server_error() {
        return Ok((response, Ok(())));
    }
    let (parts, body) = response.into_parts();
    let bytes = body.collect_bytes().await?;
    let status = serde_json::from_slice(&bytes).ok();
    let status = status.unwrap_or_else(|| Status { message: code.to_string(), ..Status::default() });
    let error = of_status(action.text.clone(), &Status { code: code.as_u16(), ..status });
    Ok((Response::from_parts(parts, Body::from(bytes)), Err(error)))
}

/// Kind of a request.
#[derive(Debug, PartialEq, Eq)]
struct RequestAction {
    /// Verb and resource.
    text: String,
    /// True if the request reads one object or requests a token.
    is_of_one_object: bool,
    /// The resource, such as `imagesets.images.larder.dev`, of a request for all objects of one of larder's own.
    custom_resource: Option<String>,
}

impl RequestAction {
    fn of(method: &Method, uri: &Uri) -> RequestAction {
        // `/api/VERSION/...` or `/apis/GROUP/VERSION/...`
        let prefix = if uri.path().starts_with("/apis/") { 3 } else { 2 };
        let segments: Vec<&str> =
            uri.path().split('/').filter(|part| !part.is_empty()).skip(prefix).collect();
        let (resource, object) = match segments[..] {
            ["namespaces", _, resource, ref object @ ..] | [resource, ref object @ ..] => (resource, object),
            [] => ("", &[][..]),
        };
        let subresource = object.get(1).map(|name| format!("/{name}")).unwrap_or_default();
        let is_watch = uri.query().is_some_and(|query| query.contains("watch=true"));
        let verb = match *method {
            Method::GET if is_watch => "watch".to_owned(),
            Method::GET if object.is_empty() => "list".to_owned(),
            _ => method.as_str().to_lowercase(),
        };
        let is_of_one_object = !object.is_empty() && (method == Method::GET || subresource == "/token");
        let group = uri.path().strip_prefix("/apis/").and_then(|path| path.split('/').next());
        let own_group = ImageSet::group(&());
        let custom_resource =
            (segments == [resource] && group == Some(&*own_group)).then(|| format!("{resource}.{own_group}"));
        RequestAction { text: format!("{verb} {resource}{subresource}"), is_of_one_object, custom_resource }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_is_verb_and_resource_whatever_the_object_is() {
        let cases = [
            ("GET", "/api/v1/pods?&fieldSelector=spec.nodeName%3Dn1", "list pods", false, ""),
            ("GET", "/api/v1/pods?&watch=true&resourceVersion=7", "watch pods", false, ""),
            ("GET", "/api/v1/namespaces/shop/secrets/s", "get secrets", true, ""),
            (
                "POST",
                "/api/v1/namespaces/shop/serviceaccounts/a/token?",
                "post serviceaccounts/token",
                true,
                "",
            ),
            ("POST", "/apis/events.k8s.io/v1/namespaces/default/events?", "post events", false, ""),
            ("GET", "/apis/a.example/v1/things", "list things", false, ""),
            (
                "GET",
                "/apis/images.larder.dev/v1alpha1/imagesets?&limit=500",
                "list imagesets",
                false,
                "imagesets.images.larder.dev",
            ),
            (
                "PATCH",
                "/apis/images.larder.dev/v1alpha1/imagesets/web/status",
                "patch imagesets/status",
                false,
                "",
            ),
            ("GET", "/version", "list ", false, ""),
        ];
        for (method, uri, text, is_of_one_object, custom_resource) in cases {
            let found = RequestAction::of(&method.parse().unwrap(), &uri.parse().unwrap());
            let custom_resource = Some(custom_resource.to_owned()).filter(|resource| !resource.is_empty());
            let expected = RequestAction { text: text.into(), is_of_one_object, custom_resource };
            assert_eq!(found, expected, "{method} {uri}");
        }
    }
}
