//! Goal and policy of a request for collection.

use std::time::Duration;

use larder::gc::{GcGoal, GcPolicy, GcStrategy};
use larder_api::v1::CollectRequest;
use larder_api::v1::collect_request;

use crate::error::Error;

/// The goal of a request. Without a threshold that can be exceeded, a round by thresholds removes no image, as in the
/// daemon.
pub(super) fn goal(request: &CollectRequest, policy: &GcPolicy) -> GcGoal {
    match request.goal {
        Some(collect_request::Goal::FreeBytes(bytes)) => GcGoal::Free { bytes },
        Some(collect_request::Goal::AllUnused(true)) => GcGoal::AllUnused,
        Some(collect_request::Goal::Dangling(true)) => GcGoal::Dangling,
        Some(collect_request::Goal::FailedPulls(true)) => GcGoal::FailedPulls,
        _ => policy.scheduled_goal(),
    }
}

/// The policy with what the request changes of it. All errors are reported together, with the origins of the two
/// thresholds: `origin_of` says where the setting with this key comes from.
pub(super) fn policy(
    base: &GcPolicy,
    request: &CollectRequest,
    origin_of: impl Fn(&str) -> String,
) -> Result<GcPolicy, Error> {
    let mut policy = base.clone();
    if request.kubelet && base.strategy != GcStrategy::Kubelet {
        policy = GcPolicy { keep: policy.keep, ..GcPolicy::kubelet() };
    }
    if let Some(high) = request.high_threshold_percent {
        policy.high_threshold_percent = high;
        if high == 100 && base.high_threshold_percent != 100 {
            // 100 is never, and the default of the inode thresholds follows it.
            policy.inodes = None;
        }
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
    let (high, low) = (request.high_threshold_percent, request.low_threshold_percent);
    let origin = |key: &str, asked: Option<i32>| match asked {
        Some(_) => "this command".to_owned(),
        None => origin_of(key),
    };
    Err(Error::bad_input(problems.join("; "))
        .hint(format!(
            "imageGCHighThresholdPercent {} is set by {}, imageGCLowThresholdPercent {} by {}",
            policy.high_threshold_percent,
            origin("imageGCHighThresholdPercent", high),
            policy.low_threshold_percent,
            origin("imageGCLowThresholdPercent", low)
        ))
        .hint("use percentages from 0 to 100, with the low threshold below the high one"))
}

#[cfg(test)]
mod tests {
    use larder::retention::{KeepRule, Selector};

    use super::*;

    fn policy(base: &GcPolicy, request: &CollectRequest) -> Result<GcPolicy, Error> {
        super::policy(base, request, |_| "/c.yaml:4".to_owned())
    }

    #[test]
    fn settings_that_are_not_given_do_not_change() {
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

    #[test]
    fn a_high_threshold_of_100_is_never_for_inodes_too() {
        let request = CollectRequest { high_threshold_percent: Some(100), ..CollectRequest::default() };
        assert!(!policy(&GcPolicy::default(), &request).unwrap().is_enabled());
    }

    #[test]
    fn limits_that_contradict_are_refused_together() {
        let limits = |high, low| CollectRequest {
            high_threshold_percent: Some(high),
            low_threshold_percent: Some(low),
            ..CollectRequest::default()
        };
        assert!(policy(&GcPolicy::default(), &limits(65, 45)).is_ok());
        for (high, low) in [(45, 65), (101, 50), (50, -1)] {
            assert!(policy(&GcPolicy::default(), &limits(high, low)).is_err());
        }
        let both = policy(&GcPolicy::default(), &limits(101, -1)).unwrap_err();
        assert!(both.message().contains("HighThresholdPercent") && both.message().contains("Low"));
        let low = CollectRequest { low_threshold_percent: Some(90), ..CollectRequest::default() };
        let refused = policy(&GcPolicy::default(), &low).unwrap_err();
        assert_eq!(
            refused.next_steps()[0].to_string(),
            "imageGCHighThresholdPercent 85 is set by /c.yaml:4, imageGCLowThresholdPercent 90 by this command"
        );
    }

    #[test]
    fn kubelets_way_is_one_flag() {
        let request = CollectRequest { kubelet: true, ..CollectRequest::default() };
        assert_eq!(policy(&GcPolicy::default(), &request), Ok(GcPolicy::kubelet()));
    }
}
