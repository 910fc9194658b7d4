//! An archive that a client sends in pieces, into larder's own store. A client that goes away ends it; what the
//! archive's images need is checked by the store, as of a file; and the images are leased.

use std::io;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use larder::backend::ImageSpec;
use larder::error_chain;
use larder::events::{EventReason, EventType};
use larder::go_format;
use larder::hint::Hint;
use larder::pull::StatusIntent;
use larder::reference::{ImageId, PlatformError, Reference};
use larder_api::convert::millis;
use larder_api::v1 as api;
use larder_store::backend::StoreBackend;
use larder_store::pull::{FailedImage, LoadOptions, LoadOutcome, LoadedImage, PullError};
use larder_store::store::import::{ImportError, ImportSource, LeftOutManifest};
use larder_store::unpack::UnpackError;
use tokio::sync::{Semaphore, mpsc};
use tokio::time;
use tonic::Status;

use crate::backend::piece_reader::PieceReader;
use crate::error::Error;
use crate::image_name;
use crate::node::{Node, Storage};

/// How many archives are loaded at once. Each has a thread.
pub(super) const AT_ONCE: usize = 4;
/// Pieces that wait for the store.
const AHEAD: usize = 4;
/// The most that one piece may have, in bytes.
const MAX_PIECE: usize = 1 << 20;
/// Timeout of the next chunk; the program that writes the archive may start slowly.
const SILENCE: Duration = Duration::from_secs(600);

/// Loads the stream; `slots` limits concurrent loads to [`AT_ONCE`].
pub(super) async fn load(
    node: &Node,
    slots: &Semaphore,
    mut pieces: impl Stream<Item = Result<api::LoadRequest, Status>> + Unpin,
) -> Result<api::LoadResponse, Status> {
    let Node { storage, pulls, observability, .. } = node;
    let store = storage.require_store()?;
    let Ok(_slot) = slots.try_acquire() else {
        return Err(Status::resource_exhausted(format!(
            "limit of {AT_ONCE} concurrent archive loads reached"
        )));
    };
    let Some(first) = next(&mut pieces).await? else {
        return Err(Error::bad_input("no data received").hint("send an archive, in chunks").into());
    };
    let given = |text: String| Some(text).filter(|text| !text.is_empty());
    let base_name = given(first.name).as_deref().map(base_name).transpose();
    let platform = given(first.platform).as_deref().map(str::parse).transpose();
    let options = LoadOptions {
        base_name: base_name.map_err(|error| error.about("name"))?,
        platform: platform.map_err(|error: PlatformError| Error::bad_input(error.to_string()))?,
    };
    let (feed, arriving) = mpsc::channel(AHEAD);
    let arriving = PieceReader::new(first.piece, arriving);
    tokio::select! {
        loaded = import(store, ImportSource::Stream(Box::new(arriving)), &options) => {
            let mut loaded = loaded?;
            loaded.lease_milliseconds = millis(node.settings.now().ensured_lease);
            lease(node, &loaded.images).await?;
            for image in &loaded.images {
                observability.record(EventType::Normal, EventReason::Loaded, loaded_message(image));
                if !image.warnings.is_empty() {
                    let message = format!("Image {}: {}", image.id, image.warnings.join("; "));
                    observability.record(EventType::Warning, EventReason::ImageWarning, message);
                }
            }
            if let Some(hidden) = pulls.hidden() {
                for image in &loaded.images {
                    hidden.show(&image.id.as_str().into()).await;
                }
            }
            publish(storage, &loaded.images).await?;
            Ok(loaded)
        }
        status = forward(&mut pieces, feed) => Err(status),
    }
}

/// Leases the images, so that GC retains them until their containers start.
async fn lease(node: &Node, loaded: &[api::LoadedImage]) -> Result<(), Error> {
    for image in loaded {
        let found = node.pulls.manager().status(&ImageSpec::named(&*image.id), StatusIntent::Use).await?;
        if found.is_none() {
            return Err(Error::failed(format!("image {} was removed right after it was loaded", image.id))
                .hint("load it again"));
        }
    }
    node.collection.save_leases().await
}

/// Makes the images known to the containerd whose snapshots the store has. They stay in the store if that fails.
async fn publish(storage: &Storage, loaded: &[api::LoadedImage]) -> Result<(), Error> {
    let Some(publisher) = storage.publisher() else { return Ok(()) };
    for image in loaded {
        let outcome = publisher.publish(&ImageId::from(image.id.as_str())).await;
        outcome.map_err(|error| {
            Error::from(error)
                .about(format!("image {} is loaded, and not known to containerd", image.id))
                .hint("the daemon tries again; see its log")
        })?;
    }
    Ok(())
}

/// Hands the pieces on. Ends only if one does not come; what is there then is up to the store.
async fn forward(
    pieces: &mut (impl Stream<Item = Result<api::LoadRequest, Status>> + Unpin),
    feed: mpsc::Sender<io::Result<Vec<u8>>>,
) -> Status {
    loop {
        match next(pieces).await {
            Ok(Some(piece)) => {
                if feed.send(Ok(piece.piece)).await.is_err() {
                    break;
                }
            }
            Ok(None) => break,
            Err(status) => {
                // The store is not to take a part for the whole.
                let _ = feed.send(Err(io::ErrorKind::ConnectionReset.into())).await;
                return status;
            }
        }
    }
    drop(feed);
    std::future::pending().await
}

/// The event of one image.
fn loaded_message(image: &api::LoadedImage) -> String {
    match image.repo_tags.as_slice() {
        [] => format!("Loaded image {}", image.id),
        names => format!("Loaded image {}", names.join(", ")),
    }
}

async fn next(
    pieces: &mut (impl Stream<Item = Result<api::LoadRequest, Status>> + Unpin),
) -> Result<Option<api::LoadRequest>, Status> {
    let next = time::timeout(SILENCE, pieces.next()).await.map_err(|_| {
        let silence = go_format::duration(SILENCE);
        Error::unreachable(format!("no archive data received within {silence}"))
            .hint("check that the program that writes it still runs")
    })?;
    let piece = next.transpose()?;
    match piece.as_ref().map(|piece| piece.piece.len()) {
        Some(bytes) if bytes > MAX_PIECE => {
            Err(Error::bad_input(format!("chunk of {bytes} bytes exceeds the limit of {MAX_PIECE}")).into())
        }
        _ => Ok(piece),
    }
}

/// Loads the archive in `from`; messages do not name it.
async fn import(
    store: &StoreBackend,
    from: ImportSource,
    options: &LoadOptions,
) -> Result<api::LoadResponse, Error> {
    let LoadOutcome { images, left_out, failed: failed_image } =
        store.puller().load(from, options).await.map_err(|error| failed(&error))?;
    let left_out = left_out.into_iter().map(|LeftOutManifest { digest, reason }| api::LeftOutManifest {
        digest: digest.to_string(),
        reason,
    });
    Ok(api::LoadResponse {
        images: images.into_iter().map(loaded_image).collect(),
        left_out: left_out.collect(),
        lease_milliseconds: 0,
        error: failed_image.map(|failure| partial(&failure).into()),
    })
}

/// The repository, or the name, for images that have none. The error names the text, not where it was given.
pub fn base_name(text: &str) -> Result<Reference, Error> {
    image_name::check(text).map_err(|name| Error::bad_input(name.message).hints(name.hints))?;
    let name = Reference::parse(text).map_err(|error| Error::bad_input(error.to_string()))?;
    if name.platform().is_some() {
        return Err(Error::bad_input(format!("{text}: a name for images of an archive has no platform"))
            .hint(Hint::from("load the images for it: ").setting("platform", "OS/ARCHITECTURE")));
    }
    if name.digest().is_some() {
        return Err(Error::bad_input(format!("{text}: cannot assign a digest"))
            .hint("write REPOSITORY or REPOSITORY:TAG"));
    }
    Ok(name)
}

/// Converts the error: unreadable content is bad input; a full disk, say, is not.
fn failed(error: &PullError) -> Error {
    // What a registry would be asked about: here it is the file.
    if let PullError::Unpack { cause, .. } = error
        && is_damage(cause)
    {
        return Error::bad_input(error_chain(error))
            .hint("the file is damaged: copy it again, or save the image again");
    }
    let failure = match error {
        PullError::Import(ImportError::Store(_)) => Error::failed(error_chain(error)),
        PullError::Import(_) => Error::bad_input(error_chain(error)),
        _ => Error::failed(error_chain(error)),
    };
    failure.hints(error.hint())
}

/// Converts the error of an image after others that were loaded.
fn partial(failure: &FailedImage) -> Error {
    let error = failed(&failure.cause);
    match failure.names.first() {
        Some(name) => error.about(format!("image {name}")),
        None => error,
    }
}

/// Whether the bytes are not those of a layer.
fn is_damage(cause: &UnpackError) -> bool {
    matches!(
        cause,
        UnpackError::Digest { .. }
            | UnpackError::Size { .. }
            | UnpackError::Decompress { .. }
            | UnpackError::Archive { .. }
            | UnpackError::ForeignCompression(_)
    )
}

fn loaded_image(loaded: LoadedImage) -> api::LoadedImage {
    let LoadedImage { image, tags, digests, bare_tags, warnings } = loaded;
    api::LoadedImage { id: image.id.to_string(), repo_tags: tags, repo_digests: digests, bare_tags, warnings }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use larder_testkit::fake_backend::FakeBackend;
    use tonic::Code;

    use super::*;
    use crate::backend::{BackendHandle, OpenMode, RuntimeRequirement, open};
    use crate::node::{NodeDependencies, testing};

    fn piece(bytes: usize) -> api::LoadRequest {
        api::LoadRequest { piece: vec![0; bytes], ..api::LoadRequest::default() }
    }

    fn node(dir: &tempfile::TempDir) -> Node {
        let parts = testing::parts(&FakeBackend::new(), dir.path(), None, |_| ());
        let mut config = (*parts.settings.now()).clone();
        config.root = dir.path().join("store");
        let store = open(&config, OpenMode::Create, RuntimeRequirement::Require).unwrap();
        assert!(matches!(store, BackendHandle::Store(_)));
        Node::build(NodeDependencies { storage: parts.storage.with_handle(store), ..parts })
    }

    #[tokio::test(start_paused = true)]
    async fn a_broken_stream_is_reported_with_its_cause() {
        let dir = tempfile::tempdir().unwrap();
        let (node, slots) = (node(&dir), Semaphore::new(1));
        let then = |last| stream::iter([Ok(piece(100)), last]).chain(stream::pending());
        let busy = load(&node, &slots, then(Err(Status::resource_exhausted("busy")))).await.unwrap_err();
        assert_eq!((busy.code(), busy.message()), (Code::ResourceExhausted, "busy"));
        let large = load(&node, &slots, then(Ok(piece(MAX_PIECE + 1)))).await.unwrap_err();
        assert_eq!(large.code(), Code::InvalidArgument);
        let waiting = load(&node, &slots, then(Ok(piece(100))));
        let (silent, ()) = tokio::join!(waiting, time::advance(SILENCE));
        assert_eq!(silent.unwrap_err().message(), "no archive data received within 10m0s");
        let empty = load(&node, &slots, stream::empty()).await.unwrap_err();
        assert_eq!(empty.message(), "no data received");
    }

    #[tokio::test]
    async fn one_more_than_a_few_is_refused_and_not_kept_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let (node, slots) = (node(&dir), Semaphore::new(1));
        let first = load(&node, &slots, stream::pending());
        tokio::select! {
            biased;
            ended = first => panic!("{ended:?}"),
            second = load(&node, &slots, stream::pending()) => {
                assert_eq!(second.unwrap_err().code(), Code::ResourceExhausted);
            }
        }
        assert_eq!(slots.available_permits(), 1);
    }
}
