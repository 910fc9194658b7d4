//! Parts of a status as a sentence, and what all lists of events show.

use std::fmt;

use crate::v1::{ContainerdStatus, Event, KubernetesConnection, KubernetesStatus};

impl Event {
    /// The object that it is about, as a list of events names it.
    pub fn object(&self) -> String {
        match self.name.as_str() {
            "" => self.uid.clone(),
            name => format!("{}/{name}", self.object_kind),
        }
    }
}

/// How a containerd runs containers from the store.
impl fmt::Display for ContainerdStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ContainerdStatus { socket, version, published, pending, problem, .. } = self;
        let Some(socket) = socket else {
            return f.write_str(
                "has snapshots in the store; images are not published (containerd.socket is not set)",
            );
        };
        let version = version.as_deref().unwrap_or("not reached yet");
        write!(f, "{socket} ({version}) runs containers from the store; ")?;
        write!(f, "{published} images published, {pending} pending")?;
        problem.iter().try_for_each(|problem| write!(f, ": {problem}"))
    }
}

/// State of the daemon in the cluster, with failures.
impl fmt::Display for KubernetesStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}: ", self.node)?;
        match &self.node_identity {
            Some(identity) => {
                write!(f, "{} {}, {identity}", self.pods, if self.pods == 1 { "pod" } else { "pods" })?;
            }
            None => f.write_str("no pods (kubernetes.nodeKubeconfig is empty)")?,
        }
        match &self.own_identity {
            Some(identity) => write!(f, "; image sets and events: {identity}"),
            None => f.write_str("; no image sets and events (no identity of larder's own)"),
        }
    }
}

impl fmt::Display for KubernetesConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.problem {
            None => write!(f, "connected since {}", self.since),
            Some(problem) => write!(f, "{problem} (since {})", self.since),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_use_of_a_cluster_names_what_fails_and_what_is_off() {
        let connection = |problem: Option<&str>| KubernetesConnection {
            connected: problem.is_none(),
            since: "10:00".into(),
            problem: problem.map(str::to_owned),
        };
        let status = |node: Option<KubernetesConnection>, own: Option<KubernetesConnection>| {
            KubernetesStatus { node: "n1".into(), node_identity: node, own_identity: own, pods: 3 }
        };
        assert_eq!(
            status(Some(connection(None)), Some(connection(Some("401")))).to_string(),
            "node n1: 3 pods, connected since 10:00; image sets and events: 401 (since 10:00)"
        );
        let one = KubernetesStatus { pods: 1, ..status(Some(connection(None)), None) };
        assert!(one.to_string().starts_with("node n1: 1 pod, connected"), "{one}");
        assert_eq!(
            status(None, None).to_string(),
            "node n1: no pods (kubernetes.nodeKubeconfig is empty); no image sets and events (no identity of larder's own)"
        );
    }
}
