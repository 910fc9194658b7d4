//! What a request for collection asks for, and the policy that it makes.

use std::time::Duration;

use larder::gc::{Accounting, GcPolicy, Goal};
use larder_control::v1alpha1::CollectRequest;
use larder_control::v1alpha1::collect_request;

use crate::failure::Failure;

/// What it is for.
pub(crate) fn goal(request: &CollectRequest) -> Goal {
    match request.goal {
        Some(collect_request::Goal::FreeBytes(bytes)) => Goal::Free { bytes },
        Some(collect_request::Goal::AllUnused(true)) => Goal::AllUnused,
        _ => Goal::Thresholds,
    }
}

/// The policy with what the request changes of it. All that is wrong is told at once.
pub(crate) fn policy(base: &GcPolicy, request: &CollectRequest) -> Result<GcPolicy, Failure> {
    let mut policy = base.clone();
    if request.kubelet && base.accounting != Accounting::Nominal {
        policy = GcPolicy { keep: policy.keep, ..GcPolicy::kubelet() };
    }
    if let Some(high) = request.high_threshold_percent {
        policy.high_threshold_percent = high;
    }
    if let Some(low) = request.low_threshold_percent {
        policy.low_threshold_percent = low;
    }
    if let Some(age) = request.minimum_age_milliseconds {
        policy.minimum_age = Duration::from_millis(age);
    }
    if let Some(age) = request.maximum_age_milliseconds {
        policy.maximum_age = Duration::from_millis(age);
    }
    let problems: Vec<String> = policy.problems().iter().map(ToString::to_string).collect();
    if problems.is_empty() {
        return Ok(policy);
    }
    Err(Failure::bad_input(problems.join("; ")).hint(
        "give percents from 0 to 100, with --image-gc-low-threshold not above --image-gc-high-threshold",
    ))
}

#[cfg(test)]
mod tests {
    use larder::gc::{KeepRule, Selector};

    use super::*;

    #[test]
    fn what_is_not_asked_for_stays_as_it_is() {
        let keep = vec![KeepRule::new(Selector::Name("a".into()))];
        let base =
            GcPolicy { high_threshold_percent: 70, low_threshold_percent: 60, keep, ..GcPolicy::default() };
        assert_eq!(policy(&base, &CollectRequest::default()), Ok(base.clone()));
        let asked = CollectRequest { low_threshold_percent: Some(10), ..CollectRequest::default() };
        assert_eq!(policy(&base, &asked), Ok(GcPolicy { low_threshold_percent: 10, ..base.clone() }));
        let kubelet = CollectRequest { kubelet: true, ..CollectRequest::default() };
        assert_eq!(policy(&base, &kubelet), Ok(GcPolicy { keep: base.keep.clone(), ..GcPolicy::kubelet() }));
        let wrong = CollectRequest { low_threshold_percent: Some(90), ..CollectRequest::default() };
        assert!(policy(&base, &wrong).is_err());
    }
}
