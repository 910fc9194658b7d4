//! Compiles the API without a system `protoc`.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    #[allow(clippy::disallowed_macros, reason = "this is how a build script speaks to cargo")]
    {
        println!("cargo:rerun-if-changed=proto");
    }
    let definitions = protox::compile(["larder/control/v1alpha1/control.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .btree_map(".")
        .skip_debug(["larder.control.v1alpha1.PullSecret"]) // it holds secrets; `lib.rs` has one that hides them
        .compile_fds(definitions)?;
    Ok(())
}
