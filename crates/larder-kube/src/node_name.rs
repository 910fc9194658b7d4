//! The name of a node, as its credentials have it.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::kubeconfig::{certificate, current_user};

/// User names of nodes begin with this.
pub(crate) const USER: &str = "system:node:";
/// The attribute type `commonName` of X.509, 2.5.4.3, as DER has it.
const COMMON_NAME: &[u8] = &[0x06, 0x03, 0x55, 0x04, 0x03];

/// Name of the node whose client certificate a kubeconfig has; `None` if it has none, or if it cannot be read. Reads
/// files.
pub fn node_name(kubeconfig: &Path) -> Option<String> {
    name_in_pem(&certificate(&current_user(kubeconfig)?)?)
}

/// That the credentials in a kubeconfig are of another node than the settings say, and the next step: the Node
/// authorizer lets them read neither this node nor its pods.
pub fn other_node(kubeconfig: &Path, of_credentials: &str, name: &str) -> Option<(String, String)> {
    (of_credentials != name).then(|| {
        let found = format!(
            "the node is called {name} here, but {} is of node {of_credentials}",
            kubeconfig.display()
        );
        (found, format!("set kubernetes.nodeName: {of_credentials}"))
    })
}

/// The name in the first certificate that names a node.
fn name_in_pem(pem: &str) -> Option<String> {
    let certificates = pem.split("-----BEGIN CERTIFICATE-----").skip(1);
    certificates.filter_map(|rest| rest.split_once("-----END")).find_map(|(body, _)| {
        let body: String = body.split_whitespace().collect();
        name_in_der(&STANDARD.decode(body).ok()?)
    })
}

/// The first common name that is that of a node: of the subject, as no issuer has such a name.
fn name_in_der(der: &[u8]) -> Option<String> {
    let attributes = der.windows(COMMON_NAME.len()).enumerate().filter(|(_, window)| *window == COMMON_NAME);
    attributes.map(|(start, _)| start + COMMON_NAME.len()).find_map(|at| {
        let [_tag, length, value @ ..] = der.get(at..)? else { return None };
        let name = value.get(..usize::from(*length))?.strip_prefix(USER.as_bytes())?;
        String::from_utf8(name.to_vec()).ok().filter(|name| !name.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_node_is_that_of_its_certificate() {
        let attribute = |name: &str| {
            let length = u8::try_from(name.len()).unwrap();
            [COMMON_NAME, &[0x13, length], name.as_bytes()].concat()
        };
        let pem = |der: &[u8]| {
            format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", STANDARD.encode(der))
        };
        let of_node = [attribute("kubernetes-ca"), attribute("system:node:node-1.example")].concat();
        assert_eq!(name_in_pem(&pem(&of_node)).as_deref(), Some("node-1.example"));
        for other in [attribute("admin"), attribute("system:node:"), COMMON_NAME.to_vec()] {
            assert_eq!(name_in_pem(&pem(&other)), None);
        }
        assert_eq!(name_in_pem("no certificate"), None);
    }
}
