//! The images that keep rules retain, asked without a round: those that a round would retain.

use std::collections::HashMap;
use std::time::Duration;

use larder::backend::Backend as _;
use larder::gc::{GcDecision, GcGoal, GcPolicy, KeepRule, KeptBy, RetainReason, Selector};
use larder::reference::ImageId;

use crate::world::{FakeNode, OwnPolicy as _, id};

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
            GcDecision::Retain(RetainReason::Kept { rule: index, .. }) => {
                Some((image.id.clone(), KeptBy { index: *index, rule: rule.clone() }))
            }
            _ => None,
        });
        let retained: HashMap<ImageId, KeptBy> = retained.collect();
        assert_eq!(collector.kept_images(&images).await, Ok(retained.clone()), "{rule}");
        for image in &images {
            let alone = collector.kept_images(std::slice::from_ref(image)).await.unwrap();
            assert_eq!(alone.get(&image.id), retained.get(&image.id), "{} by {rule}", image.id);
        }
        counts.push(retained.len());
    }
    assert_eq!(counts, [2, 2, 1, 4, 1, 1]);
    collector.set_policy(GcPolicy::default());
    assert_eq!(collector.kept_images(&images).await, Ok(HashMap::new()));
}
