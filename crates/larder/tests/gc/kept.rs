//! The images that keep rules retain, asked without a round: those that a round would retain.

use std::collections::HashMap;
use std::time::Duration;

use larder::backend::{Backend as _, Image};
use larder::gc::{Collector, GcDecision, GcGoal, GcPolicy, RetainReason};
use larder::reference::ImageId;
use larder::retention::{KeepRule, KeptBy, RetentionPurpose, Selector, SourceScope};

use crate::world::{FakeNode, OwnPolicy as _, id};

async fn kept(collector: &Collector, images: &[Image]) -> HashMap<ImageId, KeptBy> {
    let retentions = collector.retentions(images, SourceScope::Larder).await.expect("the sources answer");
    let kept = |(image, reasons): (ImageId, Vec<RetentionPurpose>)| {
        reasons.into_iter().find_map(|reason| match reason {
            RetentionPurpose::Kept(kept) => Some((image.clone(), kept)),
            _ => None,
        })
    };
    retentions.into_iter().filter_map(kept).collect()
}

#[tokio::test(start_paused = true)]
async fn what_is_kept_is_what_a_round_retains_whichever_images_are_asked_about() {
    let node = FakeNode::new(1000);
    let collector = node.collector().build();
    for name in ["app/web:1", "app/web:2", "app/api:1", "base:1"] {
        node.have(name, &[(name, 10)]);
        node.advance(60_000);
        collector.detect().await.unwrap();
    }
    let images = node.list().await.unwrap();
    let newest = Selector::Newest { repository: "app/*".into(), count: 1 };
    let name = Selector::Name("app/web:*".into());
    let rules = [
        KeepRule::new(newest),
        KeepRule::new(name.clone()),
        KeepRule::new(Selector::Digest(id("base:1").to_string())),
        KeepRule::new(Selector::Label("team".into(), None)), // labels are unknown
        KeepRule { ttl: Some(Duration::from_secs(150)), ..KeepRule::new(name.clone()) },
        KeepRule { budget_bytes: Some(15), ..KeepRule::new(name) },
    ];
    let mut counts = Vec::new();
    for rule in &rules {
        collector.set_policy(GcPolicy { keep: vec![rule.clone()], ..GcPolicy::default() });
        let plan = collector.plan(GcGoal::AllUnused).await.unwrap();
        let retained = plan.decisions.iter().filter_map(|image| match &image.decision {
            GcDecision::Retain(RetainReason::Kept(kept)) => Some((image.id.clone(), kept.clone())),
            _ => None,
        });
        let retained: HashMap<ImageId, KeptBy> = retained.collect();
        assert_eq!(kept(&collector, &images).await, retained, "{rule}");
        for image in &images {
            let alone = kept(&collector, std::slice::from_ref(image)).await;
            assert_eq!(alone.get(&image.id), retained.get(&image.id), "{} by {rule}", image.id);
        }
        counts.push(retained.len());
    }
    assert_eq!(counts, [2, 2, 1, 4, 1, 1]);
    collector.set_policy(GcPolicy::default());
    assert_eq!(kept(&collector, &images).await, HashMap::new());
}
