//! A larder without Docker.

use std::sync::Arc;
use std::time::Duration;

use larder::gc::SpaceReclaimer;

use crate::Error;
use crate::backend::handle::BackendHandle;

pub(crate) fn place(text: &str, by: &str) -> Result<String, Error> {
    Err(refused(text, by))
}

pub(crate) fn open(
    text: &str,
    by: &str,
    _: Option<Duration>,
    _: Option<Duration>,
) -> Result<BackendHandle, Error> {
    Err(refused(text, by))
}

pub(crate) fn builder_cache(_: &BackendHandle) -> Option<Arc<dyn SpaceReclaimer>> {
    None
}

pub(crate) fn check(_: &str) -> Result<(), String> {
    Err("this larder was built without Docker".into())
}

fn refused(text: &str, by: &str) -> Error {
    Error::bad_input(format!("{by} {text}: this larder was built without Docker"))
        .hint("build it with the feature docker, which is on by default")
}
