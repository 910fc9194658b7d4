//! Keep rules and leases: what collection leaves alone.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use larder::backend::ImageSpec;
use larder_control::v1alpha1 as api;
use tokio::task::spawn_blocking;

use crate::collect::{KeepFile, RuleDocument};
use crate::commands::inspect::absent;
use crate::commands::{keep, lease};
use crate::daemon::convert;
use crate::duration::LONGEST;
use crate::failure::Failure;
use crate::serve::build;
use crate::serve::node::Node;

/// Changes the rules, on disk and in force, and lists them.
pub(super) async fn keep(node: &Arc<Node>, request: api::KeepRequest) -> Result<api::KeepResponse, Failure> {
    let changing = Arc::clone(node);
    let changed = spawn_blocking(move || -> Result<_, Failure> {
        let node = &changing;
        // A reload, too, puts rules and settings together.
        let _alone = node.settings.changing();
        let config = node.settings.now();
        let place = |index| config.origin_of_item("gc.keep", index).to_string();
        let configured = config.gc.keep.iter().enumerate();
        let configured = configured
            .map(|(index, rule)| api::ConfiguredRule { rule: rule.to_document(), place: place(index) })
            .collect();
        let (rules, new) = keep::change(&KeepFile::at(&node.place), &request)?;
        let documents = rules.iter().map(RuleDocument::to_document).collect();
        node.collector.set_policy(build::policy(&config, rules));
        Ok((documents, configured, new))
    });
    let changed = changed.await.map_err(|error| super::gave_no_answer("the file of keep rules", &error))?;
    let (rules, configured, new) = changed?;
    let warnings = if new == 0 { Vec::new() } else { keep::idle(&node.collector, new).await };
    Ok(api::KeepResponse { rules, warnings, configured })
}

/// Takes or ends a lease: in larder's own store one that outlives the daemon, else one that ends with it.
pub(super) async fn lease(node: &Node, request: &api::LeaseRequest) -> Result<api::LeaseResponse, Failure> {
    let time = Duration::from_secs(request.seconds);
    if time > LONGEST {
        return Err(Failure::bad_input(format!("a lease of {} s is too long", request.seconds))
            .hint(format!("at most {} s; larder keep has no end", LONGEST.as_secs())));
    }
    if let Some(store) = node.store.clone() {
        let image = request.image.clone();
        let taken = spawn_blocking(move || lease::take(store.store(), &image, time)).await;
        return taken.map_err(|error| super::gave_no_answer("the store", &error))?;
    }
    if time.is_zero() {
        return Err(Failure::failed(format!(
            "{}: a lease on an image of a runtime ends by itself",
            request.image
        ))
        .hint("it ends with its time, or with the daemon"));
    }
    loop {
        let look = Arc::clone(&node.gate).look();
        let found = node.backend.status(&ImageSpec::named(&request.image)).await?;
        let Some(image) = found else { return Err(absent(&request.image)) };
        if look.lease(&image.id, time).await {
            let ends = SystemTime::now().checked_add(time).map(convert::time);
            return Ok(api::LeaseResponse { id: image.id, ends });
        }
    }
}
