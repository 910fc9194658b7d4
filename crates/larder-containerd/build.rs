//! Compiles the definitions of containerd's API without a system `protoc`.

use std::error::Error;

const DEFINITIONS: [&str; 9] = [
    "containers.proto",
    "content.proto",
    "events.proto",
    "images.proto",
    "introspection.proto",
    "leases.proto",
    "namespaces.proto",
    "snapshots.proto",
    "version.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    #[allow(clippy::disallowed_macros, reason = "this is how a build script speaks to cargo")]
    {
        println!("cargo:rerun-if-changed=proto");
    }
    tonic_prost_build::configure()
        .build_transport(false) // clients share the connection of the CRI client
        .build_server(false)
        .btree_map(".")
        .compile_fds(protox::compile(DEFINITIONS, ["proto"])?)?;
    Ok(())
}
