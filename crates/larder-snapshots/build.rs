//! Compiles the definition of containerd's snapshot service without a system `protoc`.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    #[allow(clippy::disallowed_macros, reason = "this is how a build script speaks to cargo")]
    {
        println!("cargo:rerun-if-changed=proto");
    }
    tonic_prost_build::configure()
        .build_transport(false) // the socket is that of the daemon
        .build_client(false)
        .btree_map(".")
        .compile_fds(protox::compile(["snapshots.proto"], ["proto"])?)?;
    Ok(())
}
