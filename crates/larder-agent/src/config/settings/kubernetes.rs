//! Settings of the node's Kubernetes cluster.

use super::super::codecs::{AbsolutePathCodec, BoolCodec, NodeNameCodec, OptionalCodec, SettingCodec};
use super::{ReloadSupport, Setting, settings};

settings! {
    SETTINGS:
    /// Connect the daemon to the [Kubernetes cluster](kubernetes.md) of its node. Needs a larder with the feature
    /// `kube`, which packages have.
    "kubernetes.enabled": BoolCodec => kubernetes.enabled, Restart;

    /// kubelet's kubeconfig: with the node's identity, larder reads pods, their pull secrets and tokens. Read again
    /// when its certificates are rotated. Empty: without them.
    "kubernetes.nodeKubeconfig": OptionalCodec<AbsolutePathCodec> => kubernetes.node_kubeconfig, Restart;

    /// Name of the node's object, as kubelet's `--hostname-override`. Empty: the name in the client certificate of
    /// `kubernetes.nodeKubeconfig`, or else `NODE_NAME` of the pod that larder runs in, or else the host name in lower
    /// case.
    "kubernetes.nodeName": OptionalCodec<NodeNameCodec> => kubernetes.node_name, Restart;

    /// A kubeconfig of larder's own identity, for image sets and events. Empty: the service account of the pod that
    /// larder runs in; outside of a pod, without them.
    "kubernetes.kubeconfig": OptionalCodec<AbsolutePathCodec> => kubernetes.kubeconfig, Restart;

    /// Pull the images of pods as soon as they are bound to the node, and retain them while they are.
    "kubernetes.pods": BoolCodec => kubernetes.pods, Live;

    /// Pull the images of `ImageSet` objects that select the node.
    "kubernetes.imageSets": BoolCodec => kubernetes.image_sets, Live;

    /// Send larder's events about the node and about image sets to the cluster. kubelet's own events are not sent
    /// again.
    "kubernetes.events": BoolCodec => kubernetes.events, Live;
}
