//! A larder without Docker.

use std::sync::Arc;
use std::time::Duration;

use larder::gc::Reclaim;

use crate::connect::Chosen;
use crate::failure::Failure;

pub(crate) fn place(text: &str, by: &str) -> Result<String, Failure> {
    Err(refused(text, by))
}

pub(crate) fn open(
    text: &str,
    by: &str,
    _: Option<Duration>,
    _: Option<Duration>,
) -> Result<Chosen, Failure> {
    Err(refused(text, by))
}

pub(crate) fn builder_cache(_: &Chosen) -> Option<Arc<dyn Reclaim>> {
    None
}

pub(crate) fn check(_: &str) -> Result<(), String> {
    Err("this larder was built without Docker".into())
}

fn refused(text: &str, by: &str) -> Failure {
    Failure::bad_input(format!("{by} {text}: this larder was built without Docker"))
        .hint("build it with its feature docker, which is among the default ones")
}
