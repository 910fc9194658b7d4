//! Whose credentials larder has, and what admission lets them write.

use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use kube::Api;
use kube::api::PostParams;

use super::ClusterCheck;
use crate::cluster::{Cluster, ClusterOptions};
use crate::error::ClusterError;
use crate::image_sets::{NodeImages, NodeImagesReport};
use crate::node_name::USER;

/// As packaging/kubernetes/agent/admission.yaml names it; the API server's refusal has its name.
const POLICY: &str = "larder-nodeimages";

/// The node that the identity is of; `None` if it is of none, or if the server does not say.
pub(super) async fn node_of(cluster: &Cluster) -> Option<String> {
    let reviews: Api<SelfSubjectReview> = Api::all(cluster.client.clone());
    let (params, review) = (PostParams::default(), SelfSubjectReview::default());
    let answer = cluster.call("review of the identity".to_owned(), reviews.create(&params, &review)).await;
    let user = answer.ok()?.status?.user_info?.username?;
    user.strip_prefix(USER).map(str::to_owned)
}

/// Whether admission lets a node write its own report only; `None` if the server has no such policies. A hint: larder
/// works without it. Writes nothing.
pub(super) async fn admission(cluster: &Cluster, options: &ClusterOptions) -> Option<ClusterCheck> {
    let call = cluster.client.list_api_group_resources("admissionregistration.k8s.io/v1");
    let served = cluster.call("admission policies".to_owned(), call).await.ok()?.resources;
    served.iter().find(|resource| resource.name == "validatingadmissionpolicies")?;
    let reports: Api<NodeImages> = Api::all(cluster.client.clone());
    // No node has this name.
    let other = NodeImages::new("larder-kube-check", NodeImagesReport::default());
    let params = PostParams { dry_run: true, ..PostParams::default() };
    let (found, next) = match cluster.call("nodeimages".to_owned(), reports.create(&params, &other)).await {
        // A refusal may be that of another policy or webhook.
        Err(ClusterError::Forbidden { message }) if message.contains(POLICY) => {
            ("a node writes its own NodeImages only", None)
        }
        Ok(_) => {
            // A token that is of no pod on a node may write none under the policy.
            let apply = "kubectl apply -f packaging/kubernetes/agent/admission.yaml";
            let next = options.kubeconfig.is_none().then(|| apply.to_owned());
            ("no policy applies: with this identity, a node can write the NodeImages of others", next)
        }
        Err(_) => return None,
    };
    Some(ClusterCheck { name: "admission", ok: true, found: found.to_owned(), next })
}
