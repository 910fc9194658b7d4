//! The collection of images without a tag.

use std::sync::Arc;

use async_trait::async_trait;
use larder::gc::{GcDecision, GcGoal, GcPolicy, RetainReason};
use larder::retention::{Retention, RetentionError, RetentionSource};

use crate::world::{FakeNode, OwnPolicy as _, id};

/// Gives an image a tag while the round looks for uses: after it listed the images, and before it removes one.
struct TagDuringRound(FakeNode, &'static str);

#[async_trait]
impl RetentionSource for TagDuringRound {
    async fn retentions(&self) -> Result<Vec<Retention>, RetentionError> {
        self.0.state().nameless.remove(self.1);
        Ok(Vec::new())
    }
}

#[tokio::test(start_paused = true)]
async fn images_with_a_tag_are_retained_even_if_it_is_new() {
    for policy in [GcPolicy::default(), GcPolicy::kubelet()] {
        let node = FakeNode::new(1000);
        for name in ["web:1", "dangling", "tagged-again"] {
            node.have(name, &[(name, 10)]);
        }
        node.state().nameless.extend(["dangling".into(), "tagged-again".into()]);
        let policy = GcPolicy { minimum_age: std::time::Duration::ZERO, ..policy };
        let source = Arc::new(TagDuringRound(node.clone(), "tagged-again"));
        let collector = node.collector().policy(policy).retention_source(source).build();
        node.advance(60_000);
        let round = collector.round_for(GcGoal::Dangling).await;
        assert_eq!(round.error, None);
        let state = node.state();
        assert_eq!(state.present.iter().collect::<Vec<_>>(), ["tagged-again", "web:1"]);
        let swept = &round.report.swept[0];
        assert_eq!(swept.skipped, [id("tagged-again")]);
        let decisions = &round.report.plans[0].decisions;
        let tagged = decisions.iter().find(|image| image.id == id("web:1")).unwrap();
        assert_eq!(tagged.decision, GcDecision::Retain(RetainReason::NotNeeded));
    }
}
