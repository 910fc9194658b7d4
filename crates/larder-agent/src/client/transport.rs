//! Carries calls of the control API: over a socket, or to the service in this process.

use std::error::Error;
use std::pin::Pin;
use std::task::{Context, Poll};

use larder_api::v1::control_server::ControlServer;
use larder_cri::channel::CriChannel;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{Request, Response};

use crate::control;

/// Where calls go.
#[derive(Clone)]
pub enum ControlTransport {
    /// To another process.
    Socket(CriChannel),
    /// To the service in this process, with no socket in between.
    Local(ControlServer<control::ControlApi>),
}

impl Service<Request<Body>> for ControlTransport {
    type Response = Response<Body>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(())) // both accept calls at any time
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        match self {
            ControlTransport::Socket(channel) => {
                let answer = channel.call(request);
                Box::pin(async move { Ok(answer.await?.map(Body::new)) })
            }
            ControlTransport::Local(service) => {
                let answer = service.call(request);
                Box::pin(async move { Ok(answer.await?) })
            }
        }
    }
}
