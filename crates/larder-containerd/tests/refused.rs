//! A real containerd that refuses parts of its own API, as a proxy in front of it may.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod common;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::{BodyExt as _, Either, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http2 as client;
use hyper::server::conn::http2 as server;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use larder::backend::{Backend as _, ImageSpec, ProgressReporter};
use larder::gc::{LayerSource as _, LayerUsageIndex};
use larder::retention::RetentionSource as _;
use larder_containerd::{ContainerdLayers, ContainerdUses};
use larder_cri::{CriBackend, CriConfig, Endpoint};
use larder_testkit_peers::ImageBuilder;
use tokio::net::{UnixListener, UnixStream};
use tonic::Code;

const LIMIT: Duration = Duration::from_secs(60);

/// A refused call: the start of its path, and the status that it gets.
type Refusal = Arc<Mutex<Option<(&'static str, Code)>>>;

/// Passes calls on to the server on a socket, except the refused ones.
fn proxy(dir: &Path, to: PathBuf) -> (PathBuf, Refusal) {
    let (socket, refusal) = (dir.join("proxy.sock"), Refusal::default());
    let listener = UnixListener::bind(&socket).unwrap();
    let refused = Arc::clone(&refusal);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let behind = TokioIo::new(UnixStream::connect(&to).await.unwrap());
            let (calls, connection) = client::handshake(TokioExecutor::new(), behind).await.unwrap();
            tokio::spawn(connection);
            let refused = Arc::clone(&refused);
            let answer = service_fn(move |request: Request<Incoming>| {
                let refused = *refused.lock().unwrap();
                let code = refused.filter(|(path, _)| request.uri().path().starts_with(path));
                let mut calls = calls.clone();
                async move {
                    let Some((_, code)) = code else {
                        return Ok(calls.send_request(request).await?.map(Either::Left));
                    };
                    let response = Response::builder().header("content-type", "application/grpc");
                    let response =
                        response.header("grpc-status", i32::from(code)).header("grpc-message", "no");
                    let body = Either::Right(Empty::<Bytes>::new().map_err(|never| match never {}));
                    Ok::<_, hyper::Error>(response.body(body).unwrap())
                }
            });
            let builder = server::Builder::new(TokioExecutor::new());
            tokio::spawn(builder.serve_connection(TokioIo::new(stream), answer));
        }
    });
    (socket, refusal)
}

fn is_estimated(layers: &LayerUsageIndex) -> bool {
    assert!(!layers.all().is_empty());
    layers.all().iter().any(|layer| layer.estimated)
}

#[tokio::test]
async fn refused_calls_make_sizes_estimates_and_uses_unknown() {
    let Some((containerd, registry)) = common::containerd_and_registry() else { return };
    ImageBuilder::small(1, 50_000).push(&registry, "shop/web:1").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (socket, refusal) = proxy(dir.path(), containerd.socket());
    let backend = CriBackend::new(Endpoint::at(socket), CriConfig::default());
    let spec = ImageSpec::named(registry.image("shop/web:1"));
    backend.pull(&spec, None, None, &ProgressReporter::unwatched()).await.unwrap();
    let images = backend.list().await.unwrap();
    let layers = ContainerdLayers::new(backend.image_channel(), LIMIT);
    let uses = ContainerdUses::new(backend.runtime_channel(), LIMIT);

    // Snapshots of `native` may share blocks.
    let at_first = !containerd.has_overlay();
    assert_eq!(is_estimated(&layers.layers(&images).await.unwrap()), at_first);
    assert_eq!(uses.retentions().await, Ok(Vec::new()));
    for service in ["leases.v1.Leases", "namespaces.v1.Namespaces", "images.v1.Images"] {
        let path: &'static str = format!("/containerd.services.{service}/").leak();
        for code in [Code::Unimplemented, Code::PermissionDenied] {
            *refusal.lock().unwrap() = Some((path, code));
            assert!(is_estimated(&layers.layers(&images).await.unwrap()), "{path} {code:?}");
        }
    }
    *refusal.lock().unwrap() = None;
    assert_eq!(is_estimated(&layers.layers(&images).await.unwrap()), at_first, "known again");

    let of_containers = "/containerd.services.containers.v1.Containers/";
    *refusal.lock().unwrap() = Some((of_containers, Code::PermissionDenied));
    let unknown = uses.retentions().await.unwrap_err().to_string();
    assert!(unknown.contains("PermissionDenied"), "{unknown}");
    *refusal.lock().unwrap() = Some((of_containers, Code::Unimplemented));
    assert_eq!(uses.retentions().await, Ok(Vec::new()), "a runtime that is not containerd");
}

#[tokio::test]
async fn a_container_uses_the_image_below_its_snapshot_whatever_its_name_means_now() {
    let Some((containerd, registry)) = common::containerd_and_registry() else { return };
    let backend = CriBackend::new(Endpoint::at(containerd.socket()), CriConfig::default());
    let uses = ContainerdUses::new(backend.runtime_channel(), LIMIT);
    let name = registry.image("shop/web:1");
    let spec = ImageSpec::named(&name);
    let mut ids = Vec::new();
    for seed in [1, 2] {
        ImageBuilder::small(seed, 50_000).push(&registry, "shop/web:1").unwrap();
        ids.push(backend.pull(&spec, None, None, &ProgressReporter::unwatched()).await.unwrap());
        if seed == 1 {
            containerd.ctr("k8s.io", &["containers", "create", &name, "demo"]).unwrap();
        }
    }
    let reported = uses.retentions().await.unwrap();
    let images: Vec<&str> = reported.iter().map(|reported| reported.image.as_str()).collect();
    assert_eq!(images, [name.as_str(), ids[0].as_str()]);
    let by = reported[1].purpose.to_string();
    assert_eq!(by, "container demo of containerd namespace k8s.io");
    // Another container with the same ID, name of image and snapshot, but with the image that the name means now.
    containerd.ctr("k8s.io", &["containers", "rm", "demo"]).unwrap();
    containerd.ctr("k8s.io", &["containers", "create", &name, "demo"]).unwrap();
    let reported = uses.retentions().await.unwrap();
    let images: Vec<&str> = reported.iter().map(|reported| reported.image.as_str()).collect();
    assert_eq!(images, [name.as_str(), ids[1].as_str()]);
    containerd.ctr("k8s.io", &["containers", "rm", "demo"]).unwrap();
    assert_eq!(uses.retentions().await, Ok(Vec::new()));
}
