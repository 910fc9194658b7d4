//! A real docker-registry: plain, with a password, with TLS of a private authority.

use larder_registry::manifest::PlatformMatcher;
use larder_registry::{ByteRanges, LoginResult, RegistryClient, RegistryConfig, fetch_blob};
use larder_testkit::fault_registry::digest;
use larder_testkit_peers::registry::{PASSWORD, USER};
use larder_testkit_peers::{
    Availability, ImageBuilder, LayerFiles, Package, RegistryAccess, RegistryOptions, RegistryProcess,
    TlsMode, require,
};

use crate::support::*;

/// Fetches an image and checks every byte of it.
async fn pull(config: RegistryConfig, name: &str, credential: bool) -> Result<Vec<String>, String> {
    let credential = credential.then(|| login(USER, PASSWORD));
    let session = RegistryClient::new(config)
        .session(&reference(name), credential.as_ref())
        .map_err(|error| error.to_string())?;
    let documents = session.documents(&PlatformMatcher::host()).await.map_err(|error| error.to_string())?;
    let mut blobs = vec![digest(&documents.config_raw)];
    for layer in &documents.layers.layers {
        let sink = MemorySink::new();
        fetch_blob(&session, layer, &ByteRanges::new(), sink.clone())
            .await
            .map_err(|error| error.to_string())?;
        assert_eq!(digest(&sink.content()), layer.digest.as_str());
        blobs.push(layer.digest.to_string());
    }
    Ok(blobs)
}

fn image() -> ImageBuilder {
    ImageBuilder::small(3, 900_000).layer(LayerFiles::new().file("etc/motd", "hello\n"))
}

/// In its own runtime: the servers of `peers` block.
fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

#[test]
fn an_image_is_fetched_from_a_plain_registry_in_ranges() {
    if let Availability::Skip(_) = require(&[Package::DockerRegistry, Package::Skopeo]) {
        return;
    }
    let registry = RegistryProcess::start(RegistryOptions::default()).unwrap();
    let pushed = image().push(&registry, "shop/web:1").unwrap();
    registry.forget_requests();
    for name in ["shop/web:1".to_owned(), format!("shop/web@{}", pushed.manifest_digest)] {
        let blobs = run(pull(quick(), &registry.image(&name), false)).unwrap();
        assert_eq!(blobs, pushed.blobs);
    }
    let partial = registry.requests().iter().filter(|request| request.status == 206).count();
    assert!(partial >= 18, "{partial} ranges");
    let error = run(pull(quick(), &registry.image("shop/web:2"), false)).unwrap_err();
    assert!(error.contains("not found: 404 Not Found (MANIFEST_UNKNOWN: manifest unknown)"), "{error}");
}

#[test]
fn a_password_opens_a_registry_that_wants_one() {
    if let Availability::Skip(_) = require(&[Package::DockerRegistry, Package::Skopeo]) {
        return;
    }
    let registry =
        RegistryProcess::start(RegistryOptions { auth: RegistryAccess::Basic, ..RegistryOptions::default() })
            .unwrap();
    let pushed = image().push(&registry, "shop/web:1").unwrap();
    let name = registry.image("shop/web:1");
    assert_eq!(run(pull(quick(), &name, true)).unwrap(), pushed.blobs);
    let error = run(pull(quick(), &name, false)).unwrap_err();
    assert!(error.contains("pull access denied"), "{error}");
}

#[test]
fn a_private_authority_is_trusted_in_each_of_the_ways_to_name_it() {
    if let Availability::Skip(_) = require(&[Package::DockerRegistry, Package::Skopeo, Package::Openssl]) {
        return;
    }
    let options = RegistryOptions {
        auth: RegistryAccess::Basic,
        tls: TlsMode::PrivateCa,
        ..RegistryOptions::default()
    };
    let registry = RegistryProcess::start(options).unwrap();
    let pushed = image().push(&registry, "shop/web:1").unwrap();
    let name = registry.image("shop/web:1");
    let ca = registry.ca().unwrap();
    let server = format!("server = \"https://{}\"\n", registry.address());
    for more in [format!("ca = {ca:?}"), format!("ca = [{ca:?}]"), "skip_verify = true".to_owned()] {
        let (_root, config) = with_hosts(&registry.address(), &format!("{server}{more}"));
        assert_eq!(run(pull(config, &name, true)).unwrap(), pushed.blobs, "{more}");
    }
    // Docker's way: the certificate alone, in the registry's directory.
    let (root, config) = with_hosts(&registry.address(), &server);
    let dir = root.path().join(registry.address());
    let error = run(pull(config.clone(), &name, true)).unwrap_err();
    assert!(
        error.contains("TLS: ") && error.contains("issued by CN=larder test authority, which is not trusted"),
        "{error}"
    );
    fs_err::remove_file(dir.join("hosts.toml")).unwrap();
    fs_err::copy(ca, dir.join("ca.crt")).unwrap();
    assert_eq!(run(pull(config, &name, true)).unwrap(), pushed.blobs);
}

#[test]
fn a_self_signed_registry_is_trusted_for_pulls_and_logins() {
    if let Availability::Skip(_) = require(&[Package::DockerRegistry, Package::Skopeo, Package::Openssl]) {
        return;
    }
    let options = RegistryOptions {
        auth: RegistryAccess::Basic,
        tls: TlsMode::SelfSigned,
        ..RegistryOptions::default()
    };
    let registry = RegistryProcess::start(options).unwrap();
    let pushed = image().push(&registry, "shop/web:1").unwrap();
    let (name, host, ca) = (registry.image("shop/web:1"), registry.address(), registry.ca().unwrap());
    let of_host = format!("server = \"https://{host}\"\n[host.\"https://{host}\"]\n");
    for (hosts_toml, works) in [
        (format!("server = \"https://{host}\"\nca = {ca:?}"), true),
        (format!("{of_host}ca = {ca:?}"), true),
        (format!("{of_host}skip_verify = true"), true),
        (format!("server = \"https://{host}\""), false),
    ] {
        let (_root, config) = with_hosts(&host, &hosts_toml);
        let blobs = run(pull(config.clone(), &name, true));
        let client = RegistryClient::new(config);
        let logged_in = run(async { client.log_in(&host, &login(USER, PASSWORD)).await });
        if works {
            assert_eq!(blobs.unwrap(), pushed.blobs, "{hosts_toml}");
            assert_eq!(logged_in.unwrap(), LoginResult::Accepted, "{hosts_toml}");
        } else {
            for error in [blobs.unwrap_err(), logged_in.unwrap_err().to_string()] {
                assert!(error.contains("certificate is self-signed and not trusted"), "{error}");
            }
        }
    }
}
