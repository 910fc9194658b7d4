//! The pod that requests an image, and the object of its events.

use std::collections::BTreeMap;
use std::fmt;

/// The pod for which an image is ensured.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pod {
    /// `metadata.uid`; back-off is counted per uid and image.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.annotations`; they travel to the runtime with each pull and status call.
    pub annotations: BTreeMap<String, String>,
    /// `spec.serviceAccountName`, empty if none.
    pub service_account: String,
}

impl Pod {
    /// The uid, or namespace and name of a pod without one, such as one in a manifest that was not applied.
    pub fn key(&self) -> String {
        let Pod { uid, namespace, name, .. } = self;
        if uid.is_empty() && !name.is_empty() { format!("{namespace}/{name}") } else { uid.clone() }
    }
}

/// Whether this is a lowercase RFC 1123 subdomain, as Kubernetes wants it of the names of most objects, such as nodes.
pub fn is_subdomain(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    text.len() <= 253 && text.split('.').all(|label| label.bytes().all(inner) && is_edged(label))
}

/// Returns true if the text begins and ends with a letter or digit.
pub(crate) fn is_edged(text: &str) -> bool {
    let edge = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
    edge(text.bytes().next()) && edge(text.bytes().next_back())
}

/// Kind of an event's object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ObjectKind {
    /// A pod, or a part of it.
    #[default]
    Pod,
    /// The node.
    Node,
}

/// Object of an event: a pod, one container of it, or the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectRef {
    /// Which of them.
    pub kind: ObjectKind,
    /// Namespace of the pod; empty for a node.
    pub namespace: String,
    /// Name of the pod or the node.
    pub name: String,
    /// Uid of the pod; for a node its name, as kubelet has it.
    pub uid: String,
    /// Such as `spec.containers{web}`; empty when the event is about the pod as a whole (image volumes).
    pub field_path: String,
}

impl ObjectRef {
    /// Returns true for one container of a pod.
    pub fn is_container(&self) -> bool {
        self.kind == ObjectKind::Pod && !self.field_path.is_empty()
    }

    /// The pod, or the part of it that `field_path` names.
    pub fn new(pod: &Pod, field_path: impl Into<String>) -> Self {
        ObjectRef {
            kind: ObjectKind::Pod,
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            field_path: field_path.into(),
        }
    }

    /// The node of this name.
    pub fn node(name: impl Into<String>) -> Self {
        let name = name.into();
        ObjectRef {
            kind: ObjectKind::Node,
            namespace: String::new(),
            uid: name.clone(),
            name,
            field_path: String::new(),
        }
    }
}

/// `pod/NAME` or `node/NAME`, as `kubectl get events` shows it.
impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            ObjectKind::Pod => "pod",
            ObjectKind::Node => "node",
        };
        write!(f, "{kind}/{}", self.name)
    }
}

/// The part of a pod sandbox's configuration that a pull passes to the runtime.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SandboxConfig {
    /// Name of the pod.
    pub name: String,
    /// Uid of the pod.
    pub uid: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Labels of the sandbox.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the sandbox.
    pub annotations: BTreeMap<String, String>,
}

impl SandboxConfig {
    /// The configuration that is known before the sandbox exists.
    pub fn of(pod: &Pod) -> Self {
        SandboxConfig {
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            namespace: pod.namespace.clone(),
            labels: BTreeMap::new(),
            annotations: pod.annotations.clone(),
        }
    }
}
