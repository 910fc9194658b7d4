//! Compiles the definitions of CRI, and of containerd's extensions, without a system `protoc`.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    #[allow(clippy::disallowed_macros, reason = "this is how a build script speaks to cargo")]
    {
        println!("cargo:rerun-if-changed=proto");
    }
    let definitions =
        ["runtime/v1/api.proto", "containerd/v1/content.proto", "containerd/v1/snapshots.proto"];
    let definitions = protox::compile(definitions, ["proto"])?;
    tonic_prost_build::configure()
        .build_transport(false) // the client brings its own connection, the server is started by its user
        .btree_map(".") // sorted annotations, and requests that are equal byte by byte
        .skip_debug(["runtime.v1.AuthConfig"]) // it holds secrets; `proto` has one that hides them
        .compile_fds(definitions)?;
    Ok(())
}
