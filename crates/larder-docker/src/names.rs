//! Image names in requests to the engine.

use larder::backend::{BackendError, CallErrorKind};
use larder::go_format;

/// The engine's placeholder for a missing name.
const NONE: &str = "<none>";

/// A name as part of a path. Names that would change the path are refused, and so is a blank one: the engine accepts
/// prefixes of IDs.
pub(crate) fn in_path(name: &str) -> Result<String, BackendError> {
    let strange = name.trim().is_empty()
        || name.split('/').any(|part| part == "." || part == ".." || part.is_empty())
        || name.contains(|c: char| c.is_whitespace() || c.is_control());
    if strange {
        let message = format!("{}: invalid image name", go_format::quote(name));
        return Err(BackendError::call(CallErrorKind::Other, message));
    }
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/:@".contains(&byte);
    Ok(name
        .bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect())
}

/// The tag to add for a pull of a name without tag or digest: the engine would pull every tag.
pub(crate) fn tag_to_pull(name: &str) -> Option<&'static str> {
    let last = name.rsplit('/').next().unwrap_or(name);
    (!last.contains([':', '@'])).then_some("latest")
}

/// The path of a name's repository, without a registry, tag or digest.
pub(crate) fn repository(name: &str) -> &str {
    let path = match name.split_once('/') {
        Some((host, path)) if host.contains(['.', ':']) || host == "localhost" => path,
        _ => name,
    };
    let path = path.split('@').next().unwrap_or(path);
    path.rsplit_once(':').map_or(path, |(path, _)| path)
}

/// A name as the engine lists it: without the default registry, with the default tag, and without a tag if there is
/// a digest.
pub(crate) fn familiar(name: &str) -> String {
    let short = ["docker.io/", "index.docker.io/"].into_iter().find_map(|host| name.strip_prefix(host));
    let short = short.unwrap_or(name);
    let short = short.strip_prefix("library/").unwrap_or(short);
    match short.split_once('@') {
        Some((tagged, digest)) => {
            let last = tagged.rfind('/').map_or(0, |slash| slash + 1);
            let end = tagged[last..].find(':').map_or(tagged.len(), |colon| last + colon);
            format!("{}@{digest}", &tagged[..end])
        }
        None => tag_to_pull(short).map_or_else(|| short.to_owned(), |tag| format!("{short}:{tag}")),
    }
}

/// The names that are not placeholders.
pub(crate) fn without_placeholders(names: Vec<String>) -> Vec<String> {
    names.into_iter().filter(|name| !name.contains(NONE)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_does_not_leave_its_path_segment() {
        assert_eq!(in_path("127.0.0.1:5000/a/b:v1").unwrap(), "127.0.0.1:5000/a/b:v1");
        assert_eq!(in_path("a@sha256:ff").unwrap(), "a@sha256:ff");
        assert_eq!(in_path("a?b#c%").unwrap(), "a%3Fb%23c%25");
        for name in ["", " ", "../containers", "a/../b", "a//b", "/a", "a b", "a\n"] {
            assert!(in_path(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_pull_is_always_of_one_tag() {
        assert_eq!(tag_to_pull("h:5000/a"), Some("latest"));
        assert_eq!(tag_to_pull("h:5000/a:1"), None);
        assert_eq!(tag_to_pull("a@sha256:ff"), None);
    }

    #[test]
    fn the_path_of_a_repository_is_what_errors_name() {
        for name in ["h:5000/shop/web:1", "h:5000/shop/web", "localhost/shop/web@sha256:ff", "shop/web:1"] {
            assert_eq!(repository(name), "shop/web", "{name}");
        }
    }

    #[test]
    fn a_place_holder_is_no_name() {
        let names = ["a:1", "<none>:<none>", "<none>@<none>"].map(str::to_owned).to_vec();
        assert_eq!(without_placeholders(names), ["a:1"]);
    }
}
