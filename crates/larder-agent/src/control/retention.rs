//! Changes and lists of keep rules and leases.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use larder::backend::Backend;
use larder::gc::{Collector, GcPolicy};
use larder::hint::Hint;
use larder::retention::{KeepRule, Lease, LeasePurpose, Selector};
use larder_api::convert;
use larder_api::v1::keep_rule::Select;
use larder_api::v1::{self as api, KeepRequest, LeaseOwner, LeaseResponse};
use tokio::task::spawn_blocking;

use super::find::{FoundImage, SIMILAR, find, find_among};
use crate::error::{Error, ErrorKind};
use crate::node::Storage;
use crate::node::collection::Collection;
use crate::node::settings::NodeSettings;
use crate::quantity::LONGEST;
use crate::state::KeepRuleFile;

/// Changes the rules, on disk and in force, and lists them.
pub(super) async fn keep(
    settings: &Arc<NodeSettings>,
    storage: &Storage,
    collection: &Arc<Collection>,
    mut request: KeepRequest,
) -> Result<api::KeepResponse, Error> {
    let advice = complete_names(&mut request.add, &**storage.backend()).await;
    let (settings, changing) = (Arc::clone(settings), Arc::clone(collection));
    let changed = spawn_blocking(move || -> Result<_, Error> {
        // A reload, too, puts rules and settings together.
        let _alone = settings.changing();
        let config = settings.now();
        let place = |index| config.origin_of_item("gc.keep", index).to_string();
        let configured = config.gc.keep.iter().enumerate();
        let configured = configured
            .map(|(index, rule)| api::ConfiguredRule {
                rule: Some(convert::keep_rule(rule)),
                place: place(index),
            })
            .collect();
        let (rules, new) = change(&KeepRuleFile::at(changing.require_state_dir()?), &request)?;
        let messages = rules.iter().map(convert::keep_rule).collect();
        changing.set_policy(config.policy(rules));
        Ok((messages, configured, new))
    });
    let changed = changed.await.map_err(|error| super::unanswered("the keep rules", &error))?;
    let (rules, configured, new) = changed?;
    let mut warnings = if new == 0 { Vec::new() } else { idle(collection.collector()?, new).await };
    if let [warning, ..] = &warnings[..] {
        let named = warning.contains(SIMILAR);
        warnings.extend(advice.into_iter().filter(|advice| !named || !advice.starts_with(SIMILAR)));
    }
    Ok(api::KeepResponse { rules, warnings, configured })
}

/// Replaces each short name or ID of one present image by its name in full, or its digest. Returns what to do about
/// those that select none, or several.
async fn complete_names(rules: &mut [api::KeepRule], backend: &dyn Backend) -> Vec<String> {
    let mut advice = Vec::new();
    for rule in rules {
        let Some(Select::Name(text)) = &mut rule.select else { continue };
        if text.contains(['*', '?']) {
            continue;
        }
        // Rules may be set while the runtime does not answer.
        let Ok(images) = backend.list().await else { continue };
        let matcher = KeepRule::new(Selector::Name(text.clone()));
        if images.iter().any(|image| matcher.parse_selector(&image.repo_tags).is_some()) {
            continue;
        }
        match find_among(text, &images, backend).await {
            Ok(FoundImage { name: Some(name), .. }) => *text = name,
            Ok(FoundImage { image, name: None }) => {
                rule.select = Some(Select::Digest(image.id.to_string()));
            }
            Err(error) if error.kind() == ErrorKind::InvalidInput => {
                advice.push(format!("{}; write a whole name, or a pattern: '*/{text}*'", error.message()));
            }
            Err(error) => advice.extend(similar(&error)),
        }
    }
    advice
}

/// The images that an error names as similar.
fn similar(error: &Error) -> Option<String> {
    error.next_steps().iter().map(ToString::to_string).find(|step| step.starts_with(SIMILAR))
}

/// Takes or ends a lease, which outlives the process.
pub(super) async fn lease(
    storage: &Storage,
    collection: &Collection,
    request: &api::LeaseRequest,
) -> Result<LeaseResponse, Error> {
    let time = Duration::from_secs(request.seconds);
    if time > LONGEST {
        return Err(Error::bad_input(format!("a lease of {} s is too long", request.seconds)).hint(
            Hint::from(format!("at most {} s; without an end: ", LONGEST.as_secs()))
                .command(["keep".to_owned(), request.image.clone()]),
        ));
    }
    if time.is_zero() {
        return end_lease(storage, collection, &request.image).await;
    }
    collection.require_state_dir()?;
    loop {
        let check = collection.gate().begin_presence_check();
        let image = find(&request.image, &**storage.backend()).await?.image;
        if check.lease(&image.id, LeasePurpose::Request, time).await {
            collection.save_leases().await?;
            let id = image.id.clone();
            let requested = Lease { purpose: LeasePurpose::Request, left: time };
            let longest = collection.leases(&[image]).await?.remove(&id).unwrap_or(requested);
            // Less time is left of the requested one than a moment before.
            let lease = if longest.left > time { longest } else { requested };
            let ends = SystemTime::now().checked_add(lease.left).map(convert::time);
            let owner = owner(lease.purpose).into();
            return Ok(LeaseResponse { id: id.to_string(), ends, ended: None, owner });
        }
    }
}

/// Ends the leases on an image.
async fn end_lease(storage: &Storage, collection: &Collection, image: &str) -> Result<LeaseResponse, Error> {
    let image = find(image, &**storage.backend()).await?.image;
    let id = image.id.clone();
    let ended = collection.leases(&[image]).await?.contains_key(&id);
    collection.end_leases(std::slice::from_ref(&id), &LeasePurpose::ALL).await?;
    Ok(LeaseResponse { id: id.to_string(), ended: Some(ended), ..LeaseResponse::default() })
}

/// The leases, those that expire first before the others.
pub(super) async fn leases(storage: &Storage, collection: &Collection) -> Result<api::LeasesResponse, Error> {
    let images = storage.backend().list().await?;
    let leases = collection.leases(&images).await?;
    let now = SystemTime::now();
    let mut listed: Vec<api::ImageLease> = images
        .into_iter()
        .filter_map(|image| {
            let lease = leases.get(&image.id)?;
            Some(api::ImageLease {
                id: image.id.to_string(),
                names: image.repo_tags.into_iter().chain(image.repo_digests).collect(),
                owner: owner(lease.purpose).into(),
                seconds_left: lease.left.as_secs(),
                ends: now.checked_add(lease.left).map(convert::time).unwrap_or_default(),
            })
        })
        .collect();
    listed.sort_by_key(|lease| lease.seconds_left);
    Ok(api::LeasesResponse { leases: listed })
}

fn owner(purpose: LeasePurpose) -> LeaseOwner {
    match purpose {
        LeasePurpose::Request => LeaseOwner::Request,
        LeasePurpose::Prefetch => LeaseOwner::Prefetch,
        LeasePurpose::Ensure => LeaseOwner::Ensure,
    }
}

/// Changes the rules in the file as asked, and returns them, and how many of the last ones are new.
fn change(file: &KeepRuleFile, request: &KeepRequest) -> Result<(Vec<KeepRule>, usize), Error> {
    let read = |rules: &[api::KeepRule]| -> Result<Vec<KeepRule>, Error> {
        rules.iter().cloned().map(convert::keep_rule_from).collect()
    };
    let (add, remove) = (read(&request.add)?, read(&request.remove)?);
    let policy = GcPolicy { keep: add.clone(), ..GcPolicy::default() };
    if let Some(problem) = policy.problems().first() {
        return Err(Error::bad_input(problem.to_string()));
    }
    // Rules that cannot be read can still all be dropped.
    let mut rules = if request.remove_all { Vec::new() } else { file.read()? };
    if add.is_empty() && remove.is_empty() && !request.remove_all {
        return Ok((rules, 0));
    }
    if let Some(unknown) = remove.iter().find(|rule| !rules.contains(rule)) {
        return Err(Error::missing(format!("{unknown}: keep rule not found"))
            .hint(Hint::new().command(["keep"]).text(" lists them")));
    }
    // One rule for one selection: the later word counts.
    rules.retain(|known| !remove.contains(known) && add.iter().all(|new| new.select != known.select));
    let new = add.len();
    rules.extend(add);
    file.write(&rules)?;
    Ok((rules, new))
}

/// Which of the last `new` rules match nothing.
async fn idle(collector: &Collector, new: usize) -> Vec<String> {
    let first_new = collector.policy().keep.len().saturating_sub(new);
    let Ok(snapshot) = collector.snapshot(&collector.policy()).await else { return Vec::new() };
    let warnings = collector.warnings(&snapshot).into_iter().filter(|warning| warning.rule >= first_new);
    warnings.map(|warning| warning.to_string()).collect()
}
