//! Peers of the tests of this crate.

use larder_testkit_peers::{Containerd, Package, RegistryOptions, RegistryProcess, require};

/// A containerd that knows an empty registry; `None` where a program is missing.
pub(crate) fn containerd_and_registry() -> Option<(Containerd, RegistryProcess)> {
    let needed = [Package::Containerd, Package::Runc, Package::DockerRegistry, Package::Skopeo];
    if !require(&needed).is_available() {
        return None;
    }
    let (containerd, registry) =
        (Containerd::start().unwrap(), RegistryProcess::start(RegistryOptions::default()).unwrap());
    containerd.add_registry(&registry).unwrap();
    Some((containerd, registry))
}
