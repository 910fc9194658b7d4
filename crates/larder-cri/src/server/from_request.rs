//! Requests in larder's types. Invalid ones are refused here, before they reach the backend.

use std::fmt;

use larder::backend::{ImageSpec, PullOptions};
use larder::credentials::{Credential, Secret, decode_auth};
use larder::go_format;
use larder::pod::SandboxConfig;
use larder::reference::{ImageName, Reference, ReferenceErrorKind};
use tonic::Status;

use crate::proto;

/// Other host names of Docker Hub.
const HUB: &[&str] = &["index.docker.io", "registry-1.docker.io"];

/// The requested image. A blank name is refused: as the prefix of an ID it would match any image.
pub(super) fn spec(spec: Option<proto::ImageSpec>) -> Result<ImageSpec, Status> {
    let spec = spec.unwrap_or_default();
    if spec.image.trim().is_empty() {
        let quoted = go_format::quote(&spec.image);
        return Err(Status::invalid_argument(format!("{quoted}: an image name must not be empty")));
    }
    Ok(ImageSpec {
        image: spec.image.into(),
        annotations: spec.annotations,
        runtime_handler: spec.runtime_handler,
        user_specified_image: spec.user_specified_image.into(),
        options: PullOptions::default(),
    })
}

/// The image that a filter selects; `None` for all.
pub(super) fn filter(filter: Option<proto::ImageFilter>) -> Option<ImageSpec> {
    let named = filter.and_then(|filter| filter.image).filter(|spec| !spec.image.trim().is_empty());
    named.and_then(|named| spec(Some(named)).ok())
}

/// The repository, in full, of a name without tag and digest; `None` for any other text. It may also be part of an ID.
pub(super) fn repository(image: &ImageName) -> Option<String> {
    let named = image.reference().ok()?;
    let is_bare = named.tag().is_none() && named.digest().is_none();
    is_bare.then(|| named.name().to_owned())
}

/// The name of an image to pull. Code and text of an invalid one are containerd's. The images of pods are this
/// machine's.
pub(super) fn name(image: &ImageName) -> Result<&Reference, Status> {
    let name = image.reference().map_err(|error| {
        let hint = error.hint().map_or_else(String::new, |hint| format!(" ({hint})"));
        unparsable(image.as_str(), format_args!("{}{hint}", error.kind()))
    })?;
    if name.platform().is_some() {
        return Err(unparsable(image.as_str(), format_args!("{}", ReferenceErrorKind::Format)));
    }
    Ok(name)
}

fn unparsable(image: &str, why: fmt::Arguments<'_>) -> Status {
    Status::unknown(format!("failed to parse image reference {}: {why}", go_format::quote(image)))
}

/// The image to pull.
pub(super) fn to_pull(spec: Option<proto::ImageSpec>) -> Result<ImageSpec, Status> {
    let named = spec.as_ref().map_or("", |spec| spec.image.as_str()).to_owned();
    self::spec(spec).map_err(|_| unparsable(&named, format_args!("an image name must not be empty")))
}

/// The credential for the registry of this image: all non-empty fields, of which the backend uses the most specific;
/// `None` for anonymous. A credential for another server is ignored.
pub(super) fn credential(
    auth: Option<proto::AuthConfig>,
    image: &Reference,
) -> Result<Option<Credential>, Status> {
    let Some(auth) = auth else { return Ok(None) };
    if !auth.server_address.is_empty() && host_of(&auth.server_address) != image.registry() {
        let (server, registry) = (auth.server_address, image.registry());
        tracing::info!(server, registry, "ignored the request's credentials: they are for another server");
        return Ok(None);
    }
    let mut credential = Credential {
        username: auth.username,
        password: Secret::new(auth.password),
        identity_token: Secret::new(auth.identity_token),
        registry_token: Secret::new(auth.registry_token),
        ..Credential::default()
    };
    if credential.username.is_empty() && !auth.auth.is_empty() {
        let (username, password) = decode_auth(&auth.auth).map_err(|error| {
            Status::invalid_argument(format!("auth of the request for {}: {error}", image.name()))
        })?;
        credential.username = username;
        // Old tools pad the encoded text with NUL bytes.
        credential.password = Secret::new(password.reveal().trim_matches('\0'));
    }
    Ok((credential != Credential::default()).then_some(credential))
}

/// `host[:port]` of an address, as in image names.
fn host_of(address: &str) -> &str {
    let bare = address.split_once("://").map_or(address, |(_, rest)| rest);
    let host = bare.split('/').next().unwrap_or_default();
    if HUB.contains(&host) { "docker.io" } else { host }
}

/// The sandbox that a pull is for.
pub(super) fn sandbox(config: proto::PodSandboxConfig) -> SandboxConfig {
    let metadata = config.metadata.unwrap_or_default();
    SandboxConfig {
        name: metadata.name,
        uid: metadata.uid,
        namespace: metadata.namespace,
        labels: config.labels,
        annotations: config.annotations,
    }
}

#[cfg(test)]
mod tests {
    use larder::credentials::encode_auth;

    use super::*;

    fn app() -> Reference {
        Reference::parse("registry.example/app:v1").unwrap()
    }

    fn read(auth: proto::AuthConfig) -> Option<(String, String, String, String)> {
        let credential = credential(Some(auth), &app()).expect("it can be read")?;
        let Credential { username, password, identity_token, registry_token, .. } = credential;
        let [password, identity, registry] =
            [password, identity_token, registry_token].map(|secret| secret.reveal().to_owned());
        Some((username, password, identity, registry))
    }

    fn parts(
        username: &str,
        password: &str,
        identity: &str,
        registry: &str,
    ) -> (String, String, String, String) {
        (username.into(), password.into(), identity.into(), registry.into())
    }

    #[test]
    fn credentials_are_passed_on_as_they_are_set() {
        let everything = proto::AuthConfig {
            username: "ann".into(),
            password: "pw".into(),
            auth: encode_auth("bob", &Secret::new("secret\0\0")).reveal().into(),
            server_address: "https://registry.example/v2/".into(),
            identity_token: "identity".into(),
            registry_token: "registry".into(),
        };
        assert_eq!(read(everything.clone()), Some(parts("ann", "pw", "identity", "registry")));
        let encoded = proto::AuthConfig { username: String::new(), ..everything };
        assert_eq!(read(encoded.clone()), Some(parts("bob", "secret", "identity", "registry")));
        let tokens = proto::AuthConfig { auth: String::new(), password: String::new(), ..encoded };
        assert_eq!(read(tokens), Some(parts("", "", "identity", "registry")));
        assert_eq!(read(proto::AuthConfig::default()), None, "nothing is anonymous");
        assert!(credential(None, &app()).expect("anonymous").is_none());
    }

    #[test]
    fn credentials_are_sent_only_to_their_server() {
        let of = |server: &str| proto::AuthConfig {
            username: "ann".into(),
            server_address: server.into(),
            ..proto::AuthConfig::default()
        };
        for theirs in ["registry.example", "https://registry.example", "http://registry.example/v1/"] {
            assert!(read(of(theirs)).is_some(), "{theirs}");
        }
        for other in ["other.example", "https://registry.example:5000", "registry.example.evil", "https://"] {
            assert!(read(of(other)).is_none(), "{other}");
        }
        let busybox = Reference::parse("busybox").unwrap();
        for hub in ["https://index.docker.io/v1/", "docker.io", "https://registry-1.docker.io"] {
            assert!(credential(Some(of(hub)), &busybox).expect("it can be read").is_some(), "{hub}");
        }
    }

    #[test]
    fn undecodable_input_is_refused_and_not_shown() {
        for auth in ["c2VjcmV0", "secret!", "c2VjcmV0OnB3="] {
            let auth = proto::AuthConfig { auth: auth.into(), ..proto::AuthConfig::default() };
            let Err(status) = credential(Some(auth.clone()), &app()) else { panic!("{auth:?}") };
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            let shown = format!("{status:?}");
            assert!(shown.contains("registry.example/app") && !shown.contains("secret"), "{shown}");
            assert!(!shown.contains(&auth.auth), "{shown}");
        }
    }
}
