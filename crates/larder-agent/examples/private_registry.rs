//! Pulls an image from a registry with a private CA and a login, with a progress bar.
//!
//! `cargo run -p larder-agent --example private_registry -- DIR IMAGE CERTS_D REGISTRY USER < PASSWORD_FILE`

use std::error::Error;
use std::io::{Write as _, read_to_string, stderr, stdin, stdout};

use larder::pod::Pod;
use larder::pull::{EnsureRequest, PullPolicy};
use larder_agent::{LocalNode, LocalNodeOptions};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [root, image, certs, registry, user] = &arguments[..] else {
        return Err("five arguments".into());
    };
    // Not an argument: every user of the machine can read those.
    let password = read_to_string(stdin())?.trim_end().to_owned();
    // CERTS_D/REGISTRY/hosts.toml names the CA: server = "https://REGISTRY" and ca = "/path/to/ca.crt".
    let options = LocalNodeOptions {
        certs_dirs: vec![certs.into()],
        logins: [(registry.clone(), (user.clone(), password))].into(),
        ..LocalNodeOptions::default()
    };
    let node = LocalNode::open_with(root, options).await?;
    let request = EnsureRequest::new(image.as_str(), PullPolicy::IfNotPresent, Pod::default());
    let ensured = node.ensure_with_progress(&request, |pulls| {
        for bytes in pulls.iter().filter_map(|pull| pull.bytes) {
            let width =
                usize::try_from(bytes.done * 40 / bytes.total.unwrap_or(bytes.done).max(1)).unwrap_or(0);
            let _ = write!(stderr(), "\r[{:<40}]", "#".repeat(width.min(40)));
        }
    });
    writeln!(stdout(), "{image} is {}", ensured.await?.image_ref)?;
    node.close().await;
    Ok(())
}
