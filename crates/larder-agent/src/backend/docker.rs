//! Docker Engine as the backend: where it is, and what larder says where it was built without it.

#[cfg(feature = "docker")]
mod found;
#[cfg(not(feature = "docker"))]
mod left_out;

#[cfg(feature = "docker")]
pub(crate) use found::{builder_cache, check, open, parts, place};
#[cfg(not(feature = "docker"))]
pub(crate) use left_out::{builder_cache, check, open, place};

/// Names the engine for `docker` without an address, as for docker's own client.
pub const HOST: &str = "DOCKER_HOST";
/// Names the context of docker's client, where the engine is not named.
const CONTEXT: &str = "DOCKER_CONTEXT";

/// The variable that leads to the engine of `docker` without an address, if one does.
pub fn named_by(variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    if variable(HOST).is_some() {
        return Some(HOST.to_owned());
    }
    variable(CONTEXT).filter(|name| name != "default").map(|name| format!("{CONTEXT}={name}"))
}
