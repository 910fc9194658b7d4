//! The calls of the control API: requests over a socket, or methods of the service in this process.
//!
//! Both take and return the same messages. In this process nothing is encoded.

use std::pin::Pin;

use futures_util::{Stream, StreamExt as _};
use larder_api::MAX_MESSAGE_BYTES;
use larder_api::v1 as api;
use larder_api::v1::control_client::ControlClient;
use larder_api::v1::control_server::Control as _;
use larder_cri::channel::CriChannel;
use tonic::codegen::http::Uri;
use tonic::{Request, Response, Status};

use crate::control::ControlApi;

/// HTTP/2 requires an origin; to a Unix socket it means nothing.
const ORIGIN: &str = "http://localhost";

/// Messages of a streamed response, as they arrive.
pub type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

type CallResult<T> = Result<Response<T>, Status>;

/// The control service of another process, or of this one.
#[derive(Clone)]
pub enum ControlCalls {
    /// Another process, over its socket.
    Socket(ControlClient<CriChannel>),
    /// The service in this process.
    InProcess(ControlApi),
}

/// Calls that have one request, with the kind of their response.
macro_rules! calls {
    ($($name:ident($request:ident) -> $response:ident,)*) => {
        impl ControlCalls {
            $(
                #[doc = concat!("The call `", stringify!($name), "` of the control API.")]
                pub async fn $name(&mut self, request: api::$request) -> CallResult<api::$response> {
                    match self {
                        ControlCalls::Socket(client) => client.$name(request).await,
                        ControlCalls::InProcess(service) => service.$name(Request::new(request)).await,
                    }
                }
            )*
        }
    };
    (stream: $($name:ident($request:ident) -> $response:ident,)*) => {
        impl ControlCalls {
            $(
                #[doc = concat!("The call `", stringify!($name), "` of the control API.")]
                pub async fn $name(
                    &mut self,
                    request: api::$request,
                ) -> CallResult<ResponseStream<api::$response>> {
                    match self {
                        ControlCalls::Socket(client) => Ok(client.$name(request).await?.map(boxed)),
                        ControlCalls::InProcess(service) => {
                            Ok(service.$name(Request::new(request)).await?.map(boxed))
                        }
                    }
                }
            )*
        }
    };
}

calls! {
    plan_ensure(EnsureRequest) -> PlanEnsureResponse,
    inspect(InspectRequest) -> InspectResponse,
    remove(RemoveRequest) -> RemoveResponse,
    tag(TagRequest) -> TagResponse,
    plan(CollectRequest) -> Collection,
    collect(CollectRequest) -> Collection,
    explain(ExplainRequest) -> Explanation,
    history(HistoryRequest) -> HistoryResponse,
    usage(UsageRequest) -> UsageResponse,
    runtime(RuntimeRequest) -> RuntimeResponse,
    status(StatusRequest) -> StatusResponse,
    keep(KeepRequest) -> KeepResponse,
    lease(LeaseRequest) -> LeaseResponse,
    leases(LeasesRequest) -> LeasesResponse,
    mount(MountRequest) -> MountResponse,
    unmount(UnmountRequest) -> UnmountResponse,
    mounts(MountsRequest) -> MountsResponse,
    reload(ReloadRequest) -> ReloadResponse,
    join(JoinRequest) -> JoinResponse,
}

calls! { stream:
    ensure(EnsureRequest) -> EnsureUpdate,
    events(EventsRequest) -> EventsResponse,
    export(ExportRequest) -> ExportResponse,
}

impl ControlCalls {
    /// The calls of a process that is reached over this channel.
    pub(super) fn over(channel: CriChannel) -> ControlCalls {
        let client = ControlClient::with_origin(channel, Uri::from_static(ORIGIN))
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        ControlCalls::Socket(client)
    }

    /// The call `images` of the control API, with all parts of the list joined.
    pub async fn images(&mut self, request: api::ImagesRequest) -> CallResult<api::ImagesResponse> {
        let client = match self {
            ControlCalls::Socket(client) => client,
            ControlCalls::InProcess(service) => {
                return service.list_images(&request).await.map(Response::new);
            }
        };
        let mut parts = client.images(request).await?.into_inner();
        let mut list = api::ImagesResponse::default();
        while let Some(part) = parts.message().await? {
            list.join(part);
        }
        Ok(Response::new(list))
    }

    /// The call `load` of the control API, which sends an archive in pieces.
    pub async fn load(
        &mut self,
        pieces: impl Stream<Item = api::LoadRequest> + Send + Unpin + 'static,
    ) -> CallResult<api::LoadResponse> {
        match self {
            ControlCalls::Socket(client) => client.load(pieces).await,
            ControlCalls::InProcess(service) => service.load_pieces(pieces.map(Ok)).await.map(Response::new),
        }
    }
}

fn boxed<T>(stream: impl Stream<Item = Result<T, Status>> + Send + 'static) -> ResponseStream<T> {
    Box::pin(stream)
}
