//! Plans an ensure, decided as the image manager does. Takes no lease, writes no record, emits no event.

use larder::backend::{Image, ImageSpec};
use larder::credentials::LazyCredentialLookup;
use larder::pull::{EnsurePlan, EnsureRequest};
use larder_api::convert;
use larder_api::v1 as api;
use larder_api::v1::planned_image::Plan;

use super::ensure;
use crate::error::Error;
use crate::node::pulls::Pulls;

/// The plan for each image of the request.
pub(super) async fn plan(
    pulls: &Pulls,
    request: api::EnsureRequest,
) -> Result<api::PlanEnsureResponse, Error> {
    let mut images = Vec::new();
    for (request, index) in ensure::requests(request)?.iter().zip(0..) {
        let present = find_present(pulls, request).await?;
        let plan = match EnsurePlan::of(request, present) {
            EnsurePlan::Present(id) => {
                Plan::Present(api::Ensured { index, image_ref: id.to_string(), ..api::Ensured::default() })
            }
            EnsurePlan::Pull { access_denied } => Plan::Pull(api::PlannedPull { withheld: access_denied }),
            EnsurePlan::Refused(error) => Plan::Refused(convert::failed(index, error)),
        };
        images.push(api::PlannedImage { plan: Some(plan) });
    }
    Ok(api::PlanEnsureResponse { images })
}

/// The present image, where the policy looks for one, and whether its pull record allows this pod to use it.
async fn find_present(pulls: &Pulls, request: &EnsureRequest) -> Result<Option<(Image, bool)>, Error> {
    if !request.policy.checks_presence_first() {
        return Ok(None);
    }
    let image = request.image.with_default_tag().map_err(|error| Error::bad_input(error.to_string()))?;
    let spec = ImageSpec { annotations: request.pod.annotations.clone(), ..ImageSpec::named(image) };
    let Some(present) = pulls.manager().backend().usable_status(&spec).await.map_err(Error::from)? else {
        return Ok(None);
    };
    let Some(records) = pulls.records() else { return Ok(Some((present, true))) };
    let keyring = pulls.manager().credentials();
    let mut lookup = LazyCredentialLookup::new(keyring, &spec.image, &request.secrets, &request.pod);
    let must_pull = records.would_require_pull(&request.image, &present.id, &mut lookup).await;
    let must_pull = must_pull.map_err(|error| Error::failed(format!("{}: {error}", request.image)))?;
    Ok(Some((present, !must_pull)))
}
