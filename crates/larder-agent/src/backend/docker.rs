//! Docker Engine as the backend: where it is, and what larder says where it was built without it.

#[cfg(not(feature = "docker"))]
mod disabled;
#[cfg(feature = "docker")]
mod enabled;

#[cfg(not(feature = "docker"))]
pub(crate) use disabled::{builder_cache, check, open, place};
#[cfg(feature = "docker")]
pub(crate) use enabled::{builder_cache, check, open, parts, place};

/// Names the engine for `docker` without an address, as for docker's own client.
pub const HOST: &str = "DOCKER_HOST";
/// Names the service for `podman`, as for podman's own client.
pub const PODMAN_HOST: &str = "CONTAINER_HOST";
/// Names the context of docker's client, where the engine is not named.
const CONTEXT: &str = "DOCKER_CONTEXT";

/// The variable that leads to the engine of `docker` without an address, if one does.
pub fn engine_variable(variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    if variable(HOST).is_some() {
        return Some(HOST.to_owned());
    }
    variable(CONTEXT).filter(|name| name != "default").map(|name| format!("{CONTEXT}={name}"))
}
