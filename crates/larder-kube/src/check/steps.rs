//! The next step after an error, by what failed and with which identity. Pure.

use crate::cluster::ClusterOptions;
use crate::error::ClusterError;
use crate::kubeconfig::KubeconfigState;

/// Which of the identities of larder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// kubelet's.
    Node,
    /// larder's own.
    Own,
}

/// Writes a kubeconfig of larder's own identity into the file that follows.
const SCRIPT: &str = "sh packaging/kubernetes/overlays/snapshotter/kubeconfig.sh";
const KUBELETS: &str = "set kubernetes.nodeKubeconfig to the file of kubelet's argument --kubeconfig, which `pgrep -a kubelet` prints; \
     that of k3s is /var/lib/rancher/k3s/agent/kubelet.kubeconfig";

impl Role {
    /// How credentials become valid again.
    pub(super) fn renew(self, options: &ClusterOptions, state: &KubeconfigState) -> String {
        let path = options.kubeconfig.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
        match (self, state) {
            (_, KubeconfigState::Token(Some(file))) => {
                format!("write a valid token into {}, the tokenFile of {path}", file.display())
            }
            (Role::Node, KubeconfigState::Token(None)) => {
                format!(
                    "write a valid token into {path}; kubelet's own kubeconfig has a client certificate: {KUBELETS}"
                )
            }
            (Role::Node, _) => "kubelet rotates its certificate: systemctl restart kubelet".to_owned(),
            (Role::Own, KubeconfigState::Absent) => {
                "a new pod gets a new token: delete the pod of larder on this node".to_owned()
            }
            (Role::Own, _) => {
                format!("write a new token or certificate into {path}: `{SCRIPT} {path}` writes it whole")
            }
        }
    }

    /// How to get a usable identity.
    pub(super) fn replace(self, options: &ClusterOptions) -> String {
        match (self, &options.kubeconfig) {
            (Role::Node, _) => KUBELETS.to_owned(),
            (Role::Own, Some(path)) => format!(
                "kubernetes.kubeconfig must be of larder's ServiceAccount: `{SCRIPT} {}` writes it; in a pod of larder, remove the setting",
                path.display()
            ),
            (Role::Own, None) => {
                "the pod must mount the token of its ServiceAccount; or set kubernetes.kubeconfig".to_owned()
            }
        }
    }

    /// The step after this error; `refused` is that where the server answered that the object is missing or forbidden.
    pub(super) fn after(
        self,
        error: &ClusterError,
        options: &ClusterOptions,
        state: &KubeconfigState,
        refused: Option<&str>,
    ) -> Option<String> {
        match error {
            ClusterError::Unusable { .. } => Some(self.after_unusable(options, state)),
            ClusterError::Unauthorized { .. } => Some(self.renew(options, state)),
            ClusterError::Unavailable { message } => Some(after_unavailable(message, options)),
            ClusterError::NotFound { .. }
            | ClusterError::NotInstalled { .. }
            | ClusterError::Relisting { .. }
            | ClusterError::Forbidden { .. }
            | ClusterError::Conflict { .. }
            | ClusterError::Refused { .. } => refused.map(str::to_owned),
        }
    }

    fn after_unusable(self, options: &ClusterOptions, state: &KubeconfigState) -> String {
        let replace = self.replace(options);
        let Some(path) = options.kubeconfig.as_ref().map(|path| path.display()) else { return replace };
        match state {
            KubeconfigState::Missing => format!("there is no file {path}: {replace}"),
            KubeconfigState::Unreadable => {
                format!("this user may not read {path}: rerun as root, or as the user of the daemon")
            }
            KubeconfigState::Empty => format!("{path} has no contexts: {replace}"),
            KubeconfigState::NoContext(names) => {
                let names = names.join(", ");
                format!("kubectl config use-context NAME --kubeconfig {path}, with a NAME of: {names}")
            }
            _ => replace,
        }
    }
}

fn after_unavailable(message: &str, options: &ClusterOptions) -> String {
    let place = options.kubeconfig.as_ref().map(|path| format!(" in {}", path.display())).unwrap_or_default();
    // As rustls names it.
    let Some((_, problem)) = message.split_once("invalid peer certificate: ") else {
        return format!("the server{place} must be reached from this node: check its address and firewalls");
    };
    if problem.contains("name") || problem.contains("Name") {
        format!("the address of the server{place} must be one that its certificate has")
    } else if ["xpired", "not valid yet", "NotValidYet"].iter().any(|text| problem.contains(text)) {
        "the certificate of the API server is not valid now: renew it, or synchronise the clock of the node"
            .to_owned()
    } else {
        format!(
            "certificate-authority{place} must be that of the API server: \
             kubectl get configmap kube-root-ca.crt -n default -o 'jsonpath={{.data.ca\\.crt}}' prints it"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubeconfig;

    #[test]
    fn the_next_step_depends_on_the_identity_the_file_and_the_error() {
        use KubeconfigState::{Absent, Certificate, Empty, Missing, NoContext, Other, Token, Unreadable};
        let options =
            |path: Option<&str>| ClusterOptions { kubeconfig: path.map(Into::into), node: "n".into() };
        let (file, pod) = (options(Some("/k")), options(None));
        let message = || "m".to_owned();
        let expired = ClusterError::Unauthorized { message: message() };
        let away = ClusterError::Unavailable { message: message() };
        let tls = |problem: &str| ClusterError::Unavailable {
            message: format!("client error (Connect): invalid peer certificate: {problem}"),
        };
        let forbidden = ClusterError::Forbidden { message: message() };
        let unusable = ClusterError::Unusable { place: message(), problem: message() };
        let other = || NoContext(vec!["a".into(), "b".into()]);
        for (role, error, options, state, step) in [
            (Role::Node, &expired, &file, Certificate, "systemctl restart kubelet"),
            (
                Role::Node,
                &expired,
                &file,
                Token(None),
                "write a valid token into /k; kubelet's own kubeconfig",
            ),
            (
                Role::Node,
                &expired,
                &file,
                Token(Some("/t".into())),
                "write a valid token into /t, the tokenFile of /k",
            ),
            (Role::Own, &expired, &file, Token(None), "new token or certificate into /k"),
            (Role::Own, &expired, &pod, Absent, "delete the pod of larder"),
            (Role::Node, &away, &file, Certificate, "the server in /k must be reached"),
            (Role::Own, &away, &pod, Absent, "the server must be reached"),
            (
                Role::Own,
                &tls("UnknownIssuer"),
                &file,
                Other,
                "certificate-authority in /k must be that of the API server",
            ),
            (
                Role::Own,
                &tls("certificate not valid for name \"a\""),
                &file,
                Other,
                "the address of the server in /k",
            ),
            (Role::Own, &tls("Expired"), &file, Other, "synchronise the clock"),
            (
                Role::Own,
                &tls("certificate not valid yet: verification time 1"),
                &file,
                Other,
                "synchronise the clock",
            ),
            (Role::Node, &forbidden, &file, Certificate, "add a rule"),
            (Role::Node, &unusable, &file, Missing, "there is no file /k: set kubernetes.nodeKubeconfig to"),
            (Role::Own, &unusable, &file, Missing, "kubeconfig.sh /k` writes it"),
            (Role::Node, &unusable, &file, Unreadable, "may not read /k: rerun as root"),
            (Role::Own, &unusable, &file, Empty, "/k has no contexts: kubernetes.kubeconfig must be"),
            (
                Role::Own,
                &unusable,
                &file,
                other(),
                "kubectl config use-context NAME --kubeconfig /k, with a NAME of: a, b",
            ),
            (Role::Own, &unusable, &pod, Absent, "the pod must mount"),
        ] {
            let found = role.after(error, options, &state, Some("add a rule")).unwrap();
            assert!(found.contains(step), "{role:?} {error:?} {state:?}: {found}");
        }
    }

    #[test]
    fn a_kubeconfig_is_described_by_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("k");
        assert_eq!(kubeconfig::state(None), KubeconfigState::Absent);
        assert_eq!(kubeconfig::state(Some(&path)), KubeconfigState::Missing);
        let context = |current: &str, user: &str| {
            format!(
                "current-context: {current}\ncontexts: [{{ name: a, context: {{ cluster: c, user: u }} }}]\n\
                 users: [{{ name: u, user: {user} }}]"
            )
        };
        for (content, expected) in [
            (String::new(), KubeconfigState::Empty),
            (context("b", "{}"), KubeconfigState::NoContext(vec!["a".into()])),
            (context("a", "{}"), KubeconfigState::Other),
            (context("a", "{ token: t }"), KubeconfigState::Token(None)),
            (context("a", "{ tokenFile: /t }"), KubeconfigState::Token(Some("/t".into()))),
            (context("a", "{ client-certificate: /c }"), KubeconfigState::Certificate),
            ("<html>".to_owned(), KubeconfigState::Other),
        ] {
            fs_err::write(&path, &content).unwrap();
            assert_eq!(kubeconfig::state(Some(&path)), expected, "{content}");
        }
    }
}
