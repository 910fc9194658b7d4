//! The services of the fake: each call is noted, does what its script says, and else the usual.

use std::future;

use larder_cri::proto;
use larder_cri::proto::image_service_server::ImageService;
use larder_cri::proto::runtime_service_server::RuntimeService;
use tokio_stream::Iter;
use tonic::{Code, Request, Response, Status, async_trait};

use super::{CallCounts, ReceivedCall, Rpc, RuntimeContents, ScriptedReply, SharedRuntimeScript};

/// A call being served; dropped before it is done, it counts as canceled.
struct ActiveCall<'a> {
    shared: &'a SharedRuntimeScript,
    rpc: Rpc,
    done: bool,
}

impl<'a> ActiveCall<'a> {
    fn begin(shared: &'a SharedRuntimeScript, rpc: Rpc) -> ActiveCall<'a> {
        let serving = ActiveCall { shared, rpc, done: false };
        serving.count(|calls| {
            calls.started += 1;
            calls.running += 1;
        });
        serving
    }

    fn count(&self, change: impl FnOnce(&mut CallCounts)) {
        self.shared.calls.send_modify(|calls| change(calls.entry(self.rpc).or_default()));
    }
}

impl Drop for ActiveCall<'_> {
    fn drop(&mut self) {
        let done = self.done;
        self.count(|calls| {
            calls.running -= 1;
            calls.canceled += usize::from(!done);
        });
    }
}

impl SharedRuntimeScript {
    /// Notes a call, and does what its script says before the answer is made.
    async fn begin(&self, received: ReceivedCall) -> Result<ScriptedReply, Status> {
        let mut serving = ActiveCall::begin(self, received.rpc);
        let script = {
            let mut state = self.state();
            let rpc = received.rpc;
            state.log.push(received);
            match state.scripts.get_mut(&rpc).and_then(std::collections::VecDeque::pop_front) {
                Some(script) => Some(script),
                None => match state.refused.get(&rpc) {
                    Some((code, message)) => {
                        serving.done = true;
                        return Err(Status::new(*code, message.clone()));
                    }
                    None => None,
                },
            }
        };
        let then = match script {
            None => ScriptedReply::Usual,
            Some(script) => {
                if let Some(held) = script.held
                    && held.await.is_err()
                {
                    future::pending::<()>().await;
                }
                script.then
            }
        };
        serving.done = true;
        match then {
            ScriptedReply::Fail(status) => Err(status),
            then => Ok(then),
        }
    }

    /// Serves a call that carries nothing of note.
    async fn plain<T>(
        &self,
        rpc: Rpc,
        reply: impl FnOnce(&RuntimeContents) -> T,
    ) -> Result<Response<T>, Status> {
        self.begin(bare(rpc)).await?;
        Ok(Response::new(reply(&self.state().contents)))
    }

    /// Serves a streamed list, one item in each part.
    async fn streamed<T, P>(
        &self,
        rpc: Rpc,
        items: impl FnOnce(&RuntimeContents) -> Vec<T>,
        part: fn(Vec<T>) -> P,
    ) -> Result<Response<ResponseParts<P>>, Status> {
        self.begin(bare(rpc)).await?;
        let contents = &self.state().contents;
        streaming_known(contents, rpc)?;
        let all = items(contents).into_iter().map(|item| Ok(part(vec![item])));
        Ok(parts(all.chain(stream_error(contents, rpc)).collect()))
    }
}

fn bare(rpc: Rpc) -> ReceivedCall {
    ReceivedCall { rpc, image: None, auth: None, sandbox: None, verbose: false, traceparent: None }
}

fn streaming_known(contents: &RuntimeContents, rpc: Rpc) -> Result<(), Status> {
    if contents.streaming {
        return Ok(());
    }
    Err(Status::unimplemented(format!("unknown method {rpc:?}")))
}

/// Returns the error that ends a streamed list, if it is to break.
fn stream_error<P>(contents: &RuntimeContents, rpc: Rpc) -> Option<Result<P, Status>> {
    contents.stream_errors.get(&rpc).map(|(code, text)| Err(Status::new(*code, text)))
}

type ResponseParts<P> = Iter<std::vec::IntoIter<Result<P, Status>>>;

fn parts<P>(parts: Vec<Result<P, Status>>) -> Response<ResponseParts<P>> {
    Response::new(tokio_stream::iter(parts))
}

/// Finds an image as containerd does: by a name in full or as docker shortens it, else by the start of its id.
fn find<'a>(contents: &'a RuntimeContents, name: &str) -> Option<&'a proto::Image> {
    let tagged = larder::reference::apply_default_tag(name).ok();
    let full = tagged.as_deref().and_then(full_name);
    let named = |image: &&proto::Image| {
        let is_it = |known: &String| known == name || Some(known) == full.as_ref();
        image.repo_tags.iter().chain(&image.repo_digests).any(is_it)
    };
    let digits = name.strip_prefix("sha256:").unwrap_or(name);
    let begins = |image: &&proto::Image| image.id.trim_start_matches("sha256:").starts_with(digits);
    contents.images.iter().find(named).or_else(|| contents.images.iter().find(begins))
}

/// `docker.io/library/busybox:1` of `busybox:1`.
fn full_name(name: &str) -> Option<String> {
    let parsed = larder::reference::Reference::parse(name).ok()?;
    match parsed.digest() {
        Some(digest) => Some(format!("{}@{digest}", parsed.name())),
        None => Some(format!("{}:{}", parsed.name(), parsed.tag()?)),
    }
}

/// Makes an offered image present under this name.
fn pull(contents: &mut RuntimeContents, name: &str) -> Result<String, Status> {
    let Some(offered) = contents.offers.get(name).cloned() else {
        return Err(Status::not_found(format!("failed to resolve {name}: not found")));
    };
    let id = offered.id.clone();
    let at = contents.images.iter().position(|image| image.id == id).unwrap_or_else(|| {
        contents.images.push(offered);
        contents.images.len() - 1
    });
    let image = &mut contents.images[at];
    let names = if name.contains('@') { &mut image.repo_digests } else { &mut image.repo_tags };
    if !names.iter().any(|known| known == name) {
        names.push(name.to_owned());
    }
    Ok(id)
}

#[async_trait]
impl ImageService for SharedRuntimeScript {
    type StreamImagesStream = ResponseParts<proto::StreamImagesResponse>;

    async fn list_images(
        &self,
        _: Request<proto::ListImagesRequest>,
    ) -> Result<Response<proto::ListImagesResponse>, Status> {
        let reply =
            |contents: &RuntimeContents| proto::ListImagesResponse { images: contents.images.clone() };
        self.plain(Rpc::ListImages, reply).await
    }

    async fn stream_images(
        &self,
        _: Request<proto::StreamImagesRequest>,
    ) -> Result<Response<Self::StreamImagesStream>, Status> {
        self.begin(bare(Rpc::StreamImages)).await?;
        let contents = &self.state().contents;
        streaming_known(contents, Rpc::StreamImages)?;
        let single = || contents.images.iter().map(|image| vec![image.clone()]).collect();
        let lists = contents.image_parts.clone().unwrap_or_else(single);
        let all = lists.into_iter().map(|images| Ok(proto::StreamImagesResponse { images }));
        Ok(parts(all.chain(stream_error(contents, Rpc::StreamImages)).collect()))
    }

    async fn image_status(
        &self,
        request: Request<proto::ImageStatusRequest>,
    ) -> Result<Response<proto::ImageStatusResponse>, Status> {
        let proto::ImageStatusRequest { image, verbose } = request.into_inner();
        let name = image.as_ref().map(|spec| spec.image.clone()).unwrap_or_default();
        let image = match self.begin(ReceivedCall { image, verbose, ..bare(Rpc::ImageStatus) }).await? {
            ScriptedReply::Found(image) => image.map(|image| *image),
            _ => find(&self.state().contents, &name).cloned(),
        };
        let info = image
            .iter()
            .filter(|_| verbose)
            .map(|image| ("info".into(), format!("{{\"id\":{:?}}}", image.id)));
        Ok(Response::new(proto::ImageStatusResponse { info: info.collect(), image }))
    }

    async fn pull_image(
        &self,
        request: Request<proto::PullImageRequest>,
    ) -> Result<Response<proto::PullImageResponse>, Status> {
        let traceparent = request.metadata().get("traceparent").and_then(|value| value.to_str().ok());
        let traceparent = traceparent.map(str::to_owned);
        let proto::PullImageRequest { image, auth, sandbox_config } = request.into_inner();
        let name = image.as_ref().map(|spec| spec.image.clone()).unwrap_or_default();
        let sandbox = sandbox_config;
        let received = ReceivedCall { image, auth, sandbox, traceparent, ..bare(Rpc::PullImage) };
        let image_ref = match self.begin(received).await? {
            ScriptedReply::Pulled(image_ref) => image_ref,
            _ => pull(&mut self.state().contents, &name)?,
        };
        Ok(Response::new(proto::PullImageResponse { image_ref }))
    }

    async fn remove_image(
        &self,
        request: Request<proto::RemoveImageRequest>,
    ) -> Result<Response<proto::RemoveImageResponse>, Status> {
        let image = request.into_inner().image;
        let name = image.as_ref().map(|spec| spec.image.clone()).unwrap_or_default();
        self.begin(ReceivedCall { image, ..bare(Rpc::RemoveImage) }).await?;
        let contents = &mut self.state().contents;
        if let Some(id) = find(contents, &name).map(|image| image.id.clone()) {
            contents.images.retain(|image| image.id != id);
        }
        Ok(Response::new(proto::RemoveImageResponse {}))
    }

    async fn image_fs_info(
        &self,
        _: Request<proto::ImageFsInfoRequest>,
    ) -> Result<Response<proto::ImageFsInfoResponse>, Status> {
        self.plain(Rpc::ImageFsInfo, |contents| contents.filesystems.clone()).await
    }
}

#[async_trait]
impl RuntimeService for SharedRuntimeScript {
    type StreamPodSandboxesStream = ResponseParts<proto::StreamPodSandboxesResponse>;
    type StreamContainersStream = ResponseParts<proto::StreamContainersResponse>;

    async fn version(
        &self,
        _: Request<proto::VersionRequest>,
    ) -> Result<Response<proto::VersionResponse>, Status> {
        self.plain(Rpc::Version, |contents| contents.version.clone()).await
    }

    async fn status(
        &self,
        request: Request<proto::StatusRequest>,
    ) -> Result<Response<proto::StatusResponse>, Status> {
        let verbose = request.into_inner().verbose;
        let reply = |contents: &RuntimeContents| proto::StatusResponse {
            status: Some(proto::RuntimeStatus { conditions: contents.conditions.clone() }),
            info: contents.status_info.clone().into_iter().filter(|_| verbose).collect(),
        };
        self.plain(Rpc::Status, reply).await
    }

    async fn pod_sandbox_status(
        &self,
        request: Request<proto::PodSandboxStatusRequest>,
    ) -> Result<Response<proto::PodSandboxStatusResponse>, Status> {
        let id = request.into_inner().pod_sandbox_id;
        let reply = |contents: &RuntimeContents| {
            let image = contents.sandbox_images.get(&id);
            let info = image.map(|image| ("info".to_owned(), format!("{{\"image\":{image:?}}}")));
            proto::PodSandboxStatusResponse { info: info.into_iter().collect() }
        };
        self.plain(Rpc::PodSandboxStatus, reply).await
    }

    async fn list_pod_sandbox(
        &self,
        _: Request<proto::ListPodSandboxRequest>,
    ) -> Result<Response<proto::ListPodSandboxResponse>, Status> {
        let reply =
            |contents: &RuntimeContents| proto::ListPodSandboxResponse { items: contents.sandboxes.clone() };
        self.plain(Rpc::ListPodSandbox, reply).await
    }

    async fn stream_pod_sandboxes(
        &self,
        _: Request<proto::StreamPodSandboxesRequest>,
    ) -> Result<Response<Self::StreamPodSandboxesStream>, Status> {
        let part = |pod_sandboxes| proto::StreamPodSandboxesResponse { pod_sandboxes };
        self.streamed(Rpc::StreamPodSandboxes, |contents| contents.sandboxes.clone(), part).await
    }

    async fn list_containers(
        &self,
        _: Request<proto::ListContainersRequest>,
    ) -> Result<Response<proto::ListContainersResponse>, Status> {
        let reply = |contents: &RuntimeContents| proto::ListContainersResponse {
            containers: contents.containers.clone(),
        };
        self.plain(Rpc::ListContainers, reply).await
    }

    async fn remove_container(
        &self,
        request: Request<proto::RemoveContainerRequest>,
    ) -> Result<Response<proto::RemoveContainerResponse>, Status> {
        let id = request.into_inner().container_id;
        self.begin(bare(Rpc::RemoveContainer)).await?;
        self.state().contents.containers.retain(|container| container.id != id);
        Ok(Response::new(proto::RemoveContainerResponse {}))
    }

    async fn stream_containers(
        &self,
        _: Request<proto::StreamContainersRequest>,
    ) -> Result<Response<Self::StreamContainersStream>, Status> {
        let part = |containers| proto::StreamContainersResponse { containers };
        self.streamed(Rpc::StreamContainers, |contents| contents.containers.clone(), part).await
    }

    async fn container_status(
        &self,
        request: Request<proto::ContainerStatusRequest>,
    ) -> Result<Response<proto::ContainerStatusResponse>, Status> {
        let id = request.into_inner().container_id;
        self.begin(bare(Rpc::ContainerStatus)).await?;
        let contents = &self.state().contents;
        if !contents.containers.iter().any(|container| container.id == id) {
            return Err(Status::new(Code::NotFound, format!("container {id:?} not found")));
        }
        let mounts = contents.mounts.get(&id).cloned().unwrap_or_default();
        let finished_at = contents.finished.get(&id).copied().unwrap_or_default();
        let status = proto::ContainerStatus { id, mounts, finished_at, ..Default::default() };
        Ok(Response::new(proto::ContainerStatusResponse { status: Some(status) }))
    }
}
