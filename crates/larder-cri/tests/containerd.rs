//! The client against a real containerd with a real registry.

use larder::backend::{Backend as _, BackendError, EndpointFailure};
use larder_cri::{CriBackend, CriConfig, Endpoint, proto};
use larder_testkit::backend_suite::check;
use larder_testkit_peers::fixtures::ContainerdFixture;
use larder_testkit_peers::wire::RawConnection;
use larder_testkit_peers::{Availability, Containerd, Package, RegistryOptions, RegistryProcess, require};
use tonic::Code;

fn client(containerd: &Containerd, config: CriConfig) -> CriBackend {
    CriBackend::new(Endpoint::at(containerd.socket()), config)
}

#[tokio::test]
async fn containerd_keeps_the_contract() {
    let needed = [Package::Containerd, Package::Runc, Package::DockerRegistry, Package::Skopeo];
    if let Availability::Skip(_) = require(&needed) {
        return;
    }
    let containerd = Containerd::start().unwrap();
    let registry = RegistryProcess::start(RegistryOptions::default()).unwrap();
    let config = CriConfig { list_streaming: true, ..CriConfig::default() }; // this one does not know streams
    check(&ContainerdFixture::new(&containerd, &registry, config).unwrap()).await;
}

#[tokio::test]
async fn a_containerd_that_restarts_is_found_again() {
    if let Availability::Skip(_) = require(&[Package::Containerd, Package::Runc]) {
        return;
    }
    let mut containerd = Containerd::start().unwrap();
    let client = client(&containerd, CriConfig::default());
    assert_eq!(client.info().await.unwrap().name, "containerd");
    containerd.stop();
    let gone = client.list().await.unwrap_err();
    let BackendError::Unreachable { problem: EndpointFailure::Refused | EndpointFailure::Missing, .. } = gone
    else {
        panic!("{gone}")
    };
    containerd.start_again().unwrap();
    client.list().await.expect("the same client, once it is back");
}

#[tokio::test]
async fn a_pull_by_an_invalid_name_fails_with_the_code_that_larder_uses() {
    if let Availability::Skip(_) = require(&[Package::Containerd, Package::Runc]) {
        return;
    }
    let containerd = Containerd::start().unwrap();
    let wire = RawConnection::connect(&containerd.socket()).await;
    let image = Some(proto::ImageSpec { image: "registry.example/App:v1".into(), ..Default::default() });
    let pull = proto::PullImageRequest { image, ..proto::PullImageRequest::default() };
    let refused = wire.images().pull_image(pull).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unknown);
    let start = "failed to parse image reference \"registry.example/App:v1\": invalid reference format";
    assert!(refused.message().starts_with(start), "{refused}");
}
