//! The calls of the view to the control API, and their answers.

use async_trait::async_trait;
use larder_api::Error;
use larder_api::v1 as api;

/// The control API as the view needs it.
#[async_trait(?Send)]
pub trait NodeCalls {
    /// The status, without a check of the backend.
    async fn status(&self) -> Result<api::StatusResponse, Error>;
    /// All images with their use, without what only their configs have.
    async fn images(&self) -> Result<api::ImagesResponse, Error>;
    /// So many of the newest removals.
    async fn history(&self, newest: u32) -> Result<api::HistoryResponse, Error>;
    /// Returns the lines that `larder explain` prints about an image.
    async fn explain(&self, image: &str) -> Result<Vec<String>, Error>;
    /// Removes the image with this ID under these names; nothing if another image has one of them now.
    async fn remove(&self, id: &str, images: Vec<String>) -> Result<api::RemoveResponse, Error>;
    /// Changes and lists keep rules.
    async fn keep(&self, request: api::KeepRequest) -> Result<api::KeepResponse, Error>;
    /// The next steps of an error, as they are printed and typed here.
    fn hints(&self, error: &Error) -> Vec<String>;
}

/// A call that the view wants to be made.
#[derive(Debug, Clone, PartialEq)]
pub enum Call {
    /// [`NodeCalls::status`].
    Status,
    /// [`NodeCalls::images`].
    Images,
    /// [`NodeCalls::history`].
    History,
    /// [`NodeCalls::explain`] for the image of this ID; the name is for the title.
    Explain {
        /// The ID.
        id: String,
        /// The name.
        name: String,
    },
    /// [`NodeCalls::remove`].
    Remove {
        /// The ID.
        id: String,
        /// The name, as the view shows it.
        name: String,
        /// The names, or the ID of an image without any.
        images: Vec<String>,
    },
    /// Keeps an image from garbage collection, or ends that.
    ToggleKeep {
        /// Its ID.
        id: String,
    },
}

/// The answer to a [`Call`].
#[derive(Debug)]
pub enum Answer {
    /// To [`Call::Status`].
    Status(Box<api::StatusResponse>),
    /// To [`Call::Images`].
    Images(api::ImagesResponse),
    /// To [`Call::History`].
    History(api::HistoryResponse),
    /// To [`Call::Explain`].
    Explained {
        /// The name of the image.
        name: String,
        /// The lines.
        lines: Vec<String>,
    },
    /// To [`Call::Remove`].
    Removed {
        /// The ID of the image.
        id: String,
        /// The result.
        answer: api::RemoveResponse,
    },
    /// To [`Call::ToggleKeep`]: what was done.
    Kept(String),
    /// The call failed: the message and the next steps.
    Failed {
        /// The call.
        call: Call,
        /// The message.
        message: String,
        /// The next steps.
        hints: Vec<String>,
    },
}

/// How many removals the view shows.
const REMOVALS: u32 = 200;

/// Makes a call.
pub(crate) async fn perform(node: &dyn NodeCalls, call: Call) -> Answer {
    let answer = match &call {
        Call::Status => node.status().await.map(|status| Answer::Status(Box::new(status))),
        Call::Images => node.images().await.map(Answer::Images),
        Call::History => node.history(REMOVALS).await.map(Answer::History),
        Call::Explain { id, name } => {
            node.explain(id).await.map(|lines| Answer::Explained { name: name.clone(), lines })
        }
        Call::Remove { id, images, .. } => {
            node.remove(id, images.clone()).await.map(|answer| Answer::Removed { id: id.clone(), answer })
        }
        Call::ToggleKeep { id } => toggle_keep(node, id).await.map(Answer::Kept),
    };
    answer.unwrap_or_else(|error| Answer::Failed {
        call,
        message: error.message().to_owned(),
        hints: node.hints(&error),
    })
}

/// Adds a rule with the first name of the image, or its ID; where rules with a name of it exist, removes them.
async fn toggle_keep(node: &dyn NodeCalls, id: &str) -> Result<String, Error> {
    // As they are now: since the view has listed images, a tag may have moved to another one.
    let listed = node.images().await?.images.into_iter().find(|image| image.id == id);
    let image = listed.ok_or_else(|| Error::failed(format!("{id} is no longer present")))?;
    let names = if image.repo_tags.is_empty() { image.repo_digests } else { image.repo_tags };
    let known = node.keep(api::KeepRequest::default()).await?;
    let is_of_image = |rule: &api::KeepRule| match &rule.select {
        Some(api::keep_rule::Select::Name(name)) => names.contains(name),
        Some(api::keep_rule::Select::Digest(digest)) => digest == id,
        _ => false,
    };
    let name = names.first().map_or(id, String::as_str);
    let configured = known.configured.iter().find(|known| known.rule.as_ref().is_some_and(is_of_image));
    if let Some(configured) = configured {
        let place = &configured.place;
        return Err(Error::failed(format!("{name} is kept by a rule in {place}"))
            .hint("remove it from gc.keep there; a running daemon reloads the file"));
    }
    let remove: Vec<_> = known.rules.into_iter().filter(is_of_image).collect();
    if !remove.is_empty() {
        node.keep(api::KeepRequest { remove, ..api::KeepRequest::default() }).await?;
        return Ok(format!("removed the keep rule of {name}"));
    }
    let select = match names.first() {
        Some(name) => api::keep_rule::Select::Name(name.clone()),
        None => api::keep_rule::Select::Digest(id.to_owned()),
    };
    let add = vec![api::KeepRule { select: Some(select), ..api::KeepRule::default() }];
    node.keep(api::KeepRequest { add, ..api::KeepRequest::default() }).await?;
    Ok(format!("GC keeps {name}"))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A node with one image, which keeps what it is asked to keep.
    struct OneImage {
        names: Vec<String>,
        kept: RefCell<Vec<api::KeepRule>>,
    }

    #[async_trait(?Send)]
    impl NodeCalls for OneImage {
        async fn images(&self) -> Result<api::ImagesResponse, Error> {
            let (id, repo_tags) = ("sha256:1".to_owned(), self.names.clone());
            let images = vec![api::Image { id, repo_tags, ..api::Image::default() }];
            Ok(api::ImagesResponse { images, ..api::ImagesResponse::default() })
        }

        async fn keep(&self, request: api::KeepRequest) -> Result<api::KeepResponse, Error> {
            self.kept.borrow_mut().extend(request.add);
            Ok(api::KeepResponse::default())
        }

        async fn status(&self) -> Result<api::StatusResponse, Error> {
            Err(Error::failed("not asked"))
        }

        async fn history(&self, _: u32) -> Result<api::HistoryResponse, Error> {
            Err(Error::failed("not asked"))
        }

        async fn explain(&self, _: &str) -> Result<Vec<String>, Error> {
            Err(Error::failed("not asked"))
        }

        async fn remove(&self, _: &str, _: Vec<String>) -> Result<api::RemoveResponse, Error> {
            Err(Error::failed("not asked"))
        }

        fn hints(&self, _: &Error) -> Vec<String> {
            Vec::new()
        }
    }

    #[tokio::test]
    async fn a_keep_rule_has_the_present_name_of_the_image() {
        let node = OneImage { names: vec!["shop/web:2".into()], kept: RefCell::default() };
        let answer = perform(&node, Call::ToggleKeep { id: "sha256:1".into() }).await;
        assert!(matches!(answer, Answer::Kept(text) if text == "GC keeps shop/web:2"));
        let select = Some(api::keep_rule::Select::Name("shop/web:2".into()));
        assert_eq!(node.kept.take(), [api::KeepRule { select, ..api::KeepRule::default() }]);

        let answer = perform(&node, Call::ToggleKeep { id: "sha256:0".into() }).await;
        assert!(
            matches!(answer, Answer::Failed { message, .. } if message == "sha256:0 is no longer present")
        );
        assert_eq!(node.kept.take(), []);
    }
}
