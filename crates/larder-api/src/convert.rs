//! Conversions between the messages of the API and domain types. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use larder::backend::{
    ByteProgress, CallErrorKind, FillProblem, Image, ImageFill, LayerPhase, LayerProgress, PullDetail,
    PullStep, PullWait, ReclaimBytes,
};
use larder::credentials::{PullSecret, SecretCoordinates};
use larder::events::{Event, EventReason, EventType};
use larder::gc::filesystem_stats::used_percent;
use larder::gc::{DiskSpace, FilesystemContent, OtherFilesystem, ReclaimableSpace};
use larder::hint::{Hint, HintPart};
use larder::pod::{ObjectKind, ObjectRef};
use larder::pull::{
    BackendFailure, EnsureError, EnsurePlan, EnsureReason, EnsuredImage, ImagePresence, PullPhase,
    PullPolicy, PullStatus, default_policy,
};
use larder::retention::{KeepRule, RetentionClass, Selector};
use tokio::time::Instant;

use crate::Error;
use crate::v1 as api;

/// The keys of secrets, by their type.
const SECRETS: [(&str, &str); 2] =
    [("kubernetes.io/dockerconfigjson", ".dockerconfigjson"), ("kubernetes.io/dockercfg", ".dockercfg")];

/// The class of an image with this reason in the retention model; `None` if the reason is unknown.
pub fn retention_class(reason: api::DecisionReason) -> Option<RetentionClass> {
    match reason {
        api::DecisionReason::Unspecified => None,
        api::DecisionReason::InUse => Some(RetentionClass::InUse),
        api::DecisionReason::Pinned => Some(RetentionClass::Pinned),
        api::DecisionReason::Kept => Some(RetentionClass::Kept),
        api::DecisionReason::Leased => Some(RetentionClass::Leased),
        api::DecisionReason::TooYoung | api::DecisionReason::ClockWentBack => Some(RetentionClass::TooYoung),
        _ => Some(RetentionClass::Unused),
    }
}

/// The state of a listed image in a word: its class in the retention model, or `unknown`.
pub fn image_state(details: &api::ImageListDetails) -> &'static str {
    retention_class(details.reason()).map_or("unknown", RetentionClass::as_str)
}

/// A time in milliseconds, as far as there are that many.
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A moment as text, to the millisecond; empty when no calendar has it.
pub fn time(time: SystemTime) -> String {
    let moment =
        Timestamp::try_from(time).and_then(|time| Timestamp::from_millisecond(time.as_millisecond()));
    moment.map(|time| time.to_string()).unwrap_or_default()
}

/// A filesystem on which GC does not act.
pub fn other_filesystem(other: &OtherFilesystem) -> api::OtherFilesystem {
    let disk = &other.disk;
    api::OtherFilesystem {
        mountpoint: other.mountpoint.display().to_string(),
        content: filesystem_content(other.content).into(),
        size_bytes: disk.capacity,
        available_bytes: disk.available,
        inodes: disk.inodes,
        inodes_free: disk.inodes_free,
        used_percent: used_percent(disk.capacity, disk.available),
    }
}

/// Content of a filesystem as a message.
pub fn filesystem_content(content: FilesystemContent) -> api::FilesystemContent {
    match content {
        FilesystemContent::Images => api::FilesystemContent::Images,
        FilesystemContent::Containers => api::FilesystemContent::Containers,
    }
}

/// Space beside images as a message, with the sum.
pub fn space_beside_images(space: &ReclaimableSpace) -> api::ReclaimableSpace {
    let of = |amount: DiskSpace| Some(api::DiskSpace { size_bytes: amount.bytes, inodes: amount.inodes });
    api::ReclaimableSpace {
        downloads: of(space.downloads),
        layers: of(space.layers),
        remnants: of(space.remnants),
        trash: of(space.trash),
        build_cache: of(space.build_cache),
        total: of(space.total()),
    }
}

/// The space beside images in a message; the sum is not read.
pub fn to_space_beside_images(space: &api::ReclaimableSpace) -> ReclaimableSpace {
    let of = |amount: Option<api::DiskSpace>| {
        let api::DiskSpace { size_bytes, inodes } = amount.unwrap_or_default();
        DiskSpace { bytes: size_bytes, inodes }
    };
    ReclaimableSpace {
        downloads: of(space.downloads),
        layers: of(space.layers),
        remnants: of(space.remnants),
        trash: of(space.trash),
        build_cache: of(space.build_cache),
    }
}

/// A hint as a message.
pub fn hint(hint: &Hint) -> api::Hint {
    let part = |part: &HintPart| {
        use api::hint_part::Part;

        let part = match part {
            HintPart::Command(args) => {
                Part::Command(api::HintCommand { args: args.iter().map(ToString::to_string).collect() })
            }
            HintPart::Setting { name, value } => {
                Part::Setting(api::HintSetting { name: name.to_string(), value: value.to_string() })
            }
            text => Part::Text(text.to_string()),
        };
        api::HintPart { part: Some(part) }
    };
    api::Hint { parts: hint.parts().iter().map(part).collect() }
}

/// The hint in a message. Parts of kinds that are not known are left out.
pub fn hint_from(hint: api::Hint) -> Hint {
    use api::hint_part::Part;

    let parts = hint.parts.into_iter().filter_map(|part| part.part);
    parts.fold(Hint::new(), |hint, part| match part {
        Part::Text(text) => hint.text(text),
        Part::Command(command) => hint.command(command.args),
        Part::Setting(api::HintSetting { name, value }) => {
            hint.with(HintPart::Setting { name: name.into(), value: value.into() })
        }
    })
}

/// An image of a backend as a message.
pub fn image(image: Image) -> api::Image {
    api::Image {
        id: image.id.into(),
        artifact_type: image.artifact_type,
        repo_tags: image.repo_tags,
        repo_digests: image.repo_digests,
        size_bytes: image.size,
        pinned: image.pinned,
        uid: image.uid,
        username: image.username,
        details: None,
        hidden: false,
        fill: image.fill.map(fill),
    }
}

/// The image in a message.
pub fn image_from(image: api::Image) -> Image {
    Image {
        id: image.id.into(),
        artifact_type: image.artifact_type,
        repo_tags: image.repo_tags,
        repo_digests: image.repo_digests,
        size: image.size_bytes,
        pinned: image.pinned,
        uid: image.uid,
        username: image.username,
        spec: None,
        fill: image.fill.map(fill_from),
    }
}

/// Missing data of an image as a message.
pub fn fill(fill: ImageFill) -> api::ImageFill {
    let left = fill.time_left();
    let ImageFill { missing_bytes, waiting_reads, hosts, bytes_per_second, problem } = fill;
    let (reason, retry_in) = problem.map(|problem| (problem.reason, problem.retry_in)).unzip();
    api::ImageFill {
        missing_bytes,
        waiting_reads,
        hosts: hosts.into_iter().collect(),
        bytes_per_second,
        problem: reason,
        retry_in_milliseconds: retry_in.flatten().map(millis),
        milliseconds_left: left.map(millis),
    }
}

/// Missing data of an image in a message.
pub fn fill_from(fill: api::ImageFill) -> ImageFill {
    let retry_in = fill.retry_in_milliseconds.map(Duration::from_millis);
    ImageFill {
        missing_bytes: fill.missing_bytes,
        waiting_reads: fill.waiting_reads,
        hosts: fill.hosts.into_iter().collect(),
        bytes_per_second: fill.bytes_per_second,
        problem: fill.problem.map(|reason| FillProblem { reason, retry_in }),
    }
}

/// An event as a message; `number` is its position in the event ring.
pub fn event(event: Event, number: Option<u64>) -> api::Event {
    let Event { time, event_type, reason, object, message, requester } = event;
    api::Event {
        number,
        time: self::time(time),
        r#type: match event_type {
            EventType::Normal => api::EventType::Normal,
            EventType::Warning => api::EventType::Warning,
        }
        .into(),
        reason: reason.to_string(),
        object_kind: match object.kind {
            ObjectKind::Pod => "pod",
            ObjectKind::Node => "node",
        }
        .to_owned(),
        namespace: object.namespace,
        name: object.name,
        uid: object.uid,
        field_path: object.field_path,
        message,
        requester,
    }
}

/// The event about this object; `None` if it is of a kind that this larder does not know.
pub fn event_from(event: api::Event, object: ObjectRef) -> Option<Event> {
    Some(Event {
        time: event.time.parse::<Timestamp>().map_or_else(|_| SystemTime::now(), SystemTime::from),
        event_type: match event.r#type() {
            api::EventType::Normal => EventType::Normal,
            api::EventType::Warning => EventType::Warning,
            api::EventType::Unspecified => return None,
        },
        reason: EventReason::ALL.into_iter().find(|known| known.to_string() == event.reason)?,
        object,
        message: event.message,
        requester: event.requester,
    })
}

/// A pull secret as a message; `None` for types that hold no registry credentials.
pub fn secret(secret: &PullSecret) -> Option<api::PullSecret> {
    let (_, key) = SECRETS.into_iter().find(|(kind, _)| *kind == secret.kind)?;
    let PullSecret { kind, coordinates, data } = secret;
    Some(api::PullSecret {
        namespace: coordinates.namespace.clone(),
        name: coordinates.name.clone(),
        r#type: kind.clone(),
        document: data.get(key).cloned().unwrap_or_default(),
    })
}

/// The pull secret in a message.
pub fn secret_from(secret: api::PullSecret) -> PullSecret {
    let api::PullSecret { namespace, name, r#type: kind, document } = secret;
    let key = SECRETS.into_iter().find(|(known, _)| *known == kind).map(|(_, key)| key.to_owned());
    PullSecret {
        kind,
        coordinates: SecretCoordinates { namespace, name, ..SecretCoordinates::default() },
        data: key.map(|key| BTreeMap::from([(key, document)])).unwrap_or_default(),
    }
}

/// A pull in flight as a message, with times relative to `now`.
pub fn pull(pull: &PullStatus, now: Instant) -> api::Pull {
    let detail = pull.detail.as_ref();
    let queued = pull.waiting.as_ref().map(|waiting| (waiting.clone().into_owned(), None));
    let (waiting, waiting_milliseconds) =
        queued.unwrap_or_else(|| wait(detail.and_then(|detail| detail.waiting.as_ref()), now));
    api::Pull {
        image: pull.image.to_string(),
        phase: match pull.phase {
            PullPhase::Queued => api::PullPhase::Queued,
            PullPhase::Throttled => api::PullPhase::Throttled,
            PullPhase::Pulling => api::PullPhase::Pulling,
        }
        .into(),
        step: detail.map_or(api::PullStep::Unspecified, |detail| step(detail.step)).into(),
        waiting,
        waiting_milliseconds,
        done_bytes: pull.bytes.map(|bytes| bytes.done),
        total_bytes: pull.bytes.and_then(|bytes| bytes.total),
        bytes_per_second: detail.and_then(|detail| detail.rate),
        milliseconds: millis(now.saturating_duration_since(pull.since)),
        layers: detail
            .iter()
            .flat_map(|detail| &detail.layers)
            .map(|layer| self::layer(layer, now))
            .collect(),
    }
}

fn step(step: PullStep) -> api::PullStep {
    match step {
        PullStep::Resolving => api::PullStep::Resolving,
        PullStep::Layers => api::PullStep::Pulling,
        PullStep::Committing => api::PullStep::Committing,
        _ => api::PullStep::Unspecified,
    }
}

fn layer(layer: &LayerProgress, now: Instant) -> api::PullLayer {
    let (waiting, waiting_milliseconds) = wait(layer.waiting.as_ref(), now);
    api::PullLayer {
        digest: layer.digest.to_string(),
        phase: match layer.phase {
            LayerPhase::Queued => api::LayerPhase::Queued,
            LayerPhase::FetchedByOtherPull => api::LayerPhase::Elsewhere,
            LayerPhase::Fetching => api::LayerPhase::Fetching,
            LayerPhase::Unpacking => api::LayerPhase::Unpacking,
            LayerPhase::Unpacked => api::LayerPhase::Unpacked,
            LayerPhase::Done => api::LayerPhase::Done,
            _ => api::LayerPhase::Unspecified,
        }
        .into(),
        done_bytes: layer.bytes.done,
        total_bytes: layer.bytes.total,
        bytes_per_second: layer.rate,
        waiting,
        waiting_milliseconds,
    }
}

fn wait(wait: Option<&PullWait>, now: Instant) -> (String, Option<u64>) {
    let Some(wait) = wait else { return (String::new(), None) };
    let left = wait.until.map(|until| millis(until.saturating_duration_since(now)));
    (wait.reason.clone(), left)
}

/// The pull in a message, with times relative to `now`.
pub fn pull_from(pull: api::Pull, now: Instant) -> PullStatus {
    let phase = match pull.phase() {
        api::PullPhase::Queued => PullPhase::Queued,
        api::PullPhase::Throttled => PullPhase::Throttled,
        api::PullPhase::Pulling | api::PullPhase::Unspecified => PullPhase::Pulling,
    };
    let step = match pull.step() {
        api::PullStep::Resolving => Some(PullStep::Resolving),
        api::PullStep::Pulling => Some(PullStep::Layers),
        api::PullStep::Committing => Some(PullStep::Committing),
        api::PullStep::Unspecified => None,
    };
    let waiting = Some(pull.waiting).filter(|waiting| !waiting.is_empty());
    let (queued, detailed) = if phase == PullPhase::Pulling { (None, waiting) } else { (waiting, None) };
    PullStatus {
        image: pull.image.into(),
        waiting: queued.map(Into::into),
        bytes: pull.done_bytes.map(|done| ByteProgress { done, total: pull.total_bytes }),
        detail: step.map(|step| PullDetail {
            step,
            waiting: wait_from(detailed, pull.waiting_milliseconds, now),
            rate: pull.bytes_per_second,
            layers: pull.layers.into_iter().map(|layer| layer_from(layer, now)).collect(),
        }),
        since: now.checked_sub(Duration::from_millis(pull.milliseconds)).unwrap_or(now),
        phase,
    }
}

fn layer_from(layer: api::PullLayer, now: Instant) -> LayerProgress {
    LayerProgress {
        phase: match layer.phase() {
            api::LayerPhase::Queued | api::LayerPhase::Unspecified => LayerPhase::Queued,
            api::LayerPhase::Elsewhere => LayerPhase::FetchedByOtherPull,
            api::LayerPhase::Fetching => LayerPhase::Fetching,
            api::LayerPhase::Unpacking => LayerPhase::Unpacking,
            api::LayerPhase::Unpacked => LayerPhase::Unpacked,
            api::LayerPhase::Done => LayerPhase::Done,
        },
        digest: layer.digest.into(),
        bytes: ByteProgress { done: layer.done_bytes, total: layer.total_bytes },
        rate: layer.bytes_per_second,
        waiting: wait_from(Some(layer.waiting), layer.waiting_milliseconds, now),
    }
}

fn wait_from(reason: Option<String>, left: Option<u64>, now: Instant) -> Option<PullWait> {
    let reason = reason.filter(|reason| !reason.is_empty())?;
    Some(PullWait { reason, until: left.map(|left| now + Duration::from_millis(left.min(MAX_WAIT))) })
}

/// The longest wait that is believed, in milliseconds: a day.
const MAX_WAIT: u64 = 24 * 3600 * 1000;

/// A keep rule as a message.
pub fn keep_rule(rule: &KeepRule) -> api::KeepRule {
    use api::keep_rule::Select;

    let select = match rule.select.clone() {
        Selector::Name(name) => Select::Name(name),
        Selector::Digest(digest) => Select::Digest(digest),
        Selector::Type(of) => Select::Type(of),
        Selector::Label(key, value) => Select::Label(api::LabelSelector { key, value }),
        Selector::Newest { repository, count } => {
            Select::Newest(api::NewestSelector { repository, count: count as u64 })
        }
    };
    let ttl_seconds = rule.ttl.map(|ttl| ttl.as_secs());
    api::KeepRule { select: Some(select), ttl_seconds, budget_bytes: rule.budget_bytes }
}

/// The keep rule in a message.
pub fn keep_rule_from(rule: api::KeepRule) -> Result<KeepRule, Error> {
    use api::keep_rule::Select;

    let select = match rule.select {
        Some(Select::Name(name)) => Selector::Name(name),
        Some(Select::Digest(digest)) => Selector::Digest(digest),
        Some(Select::Type(of)) => Selector::Type(of),
        Some(Select::Label(label)) => Selector::Label(label.key, label.value),
        Some(Select::Newest(api::NewestSelector { repository, count })) => {
            Selector::Newest { repository, count: usize::try_from(count).unwrap_or(usize::MAX) }
        }
        None => return Err(Error::bad_input("keep rule without a selector")),
    };
    let ttl = rule.ttl_seconds.map(Duration::from_secs);
    Ok(KeepRule { select, ttl, budget_bytes: rule.budget_bytes })
}

/// A pull policy as a message has it. The text of any other policy is lost: no decision depends on it.
pub fn policy(policy: &PullPolicy) -> api::PullPolicy {
    match policy {
        PullPolicy::Always => api::PullPolicy::Always,
        PullPolicy::IfNotPresent => api::PullPolicy::IfNotPresent,
        PullPolicy::Never => api::PullPolicy::Never,
        PullPolicy::Other(_) => api::PullPolicy::Other,
    }
}

/// The policy for a wanted image.
pub fn policy_from(wanted: &api::WantedImage) -> PullPolicy {
    match api::PullPolicy::try_from(wanted.pull_policy) {
        Ok(api::PullPolicy::Unspecified) => default_policy(&wanted.image),
        Ok(api::PullPolicy::Always) => PullPolicy::Always,
        Ok(api::PullPolicy::IfNotPresent) => PullPolicy::IfNotPresent,
        Ok(api::PullPolicy::Never) => PullPolicy::Never,
        Ok(api::PullPolicy::Other) | Err(_) => PullPolicy::Other("other".to_owned()),
    }
}

/// The kind of a failure as a message has it.
fn failure_kind(kind: CallErrorKind) -> api::FailureKind {
    match kind {
        CallErrorKind::NotFound => api::FailureKind::NotFound,
        CallErrorKind::Denied => api::FailureKind::Denied,
        CallErrorKind::InsufficientSpace { .. } => api::FailureKind::InsufficientSpace,
        CallErrorKind::DeadlineExceeded => api::FailureKind::DeadlineExceeded,
        _ => api::FailureKind::Other,
    }
}

/// The outcome of an ensure in a message.
pub fn ensured_from(ensured: api::Ensured) -> EnsuredImage {
    let outcome = if ensured.pulled {
        ImagePresence::Pulled {
            size_bytes: ensured.size_bytes,
            pull_duration: Duration::from_millis(ensured.pull_milliseconds),
            total_duration: Duration::from_millis(ensured.total_milliseconds),
            fill: ensured.fill.map(fill_from),
        }
    } else {
        ImagePresence::Present
    };
    EnsuredImage { image_ref: ensured.image_ref.into(), message: ensured.message, outcome }
}

/// Plan of an ensure from a message; `None` if it has nothing that this version knows.
pub fn plan_from(planned: api::PlannedImage) -> Option<EnsurePlan> {
    Some(match planned.plan? {
        api::planned_image::Plan::Present(present) => EnsurePlan::Present(present.image_ref.into()),
        api::planned_image::Plan::Pull(pull) => EnsurePlan::Pull { access_denied: pull.withheld },
        api::planned_image::Plan::Refused(failed) => EnsurePlan::Refused(failed_from(failed)),
    })
}

/// The failure of an ensure as a message about the image at `index` of the request.
pub fn failed(index: u32, error: EnsureError) -> api::Failed {
    let failure = error.failure.as_ref();
    api::Failed {
        index,
        reason: error.reason.to_string(),
        message: error.message,
        retry_milliseconds: error.retry_in.map(millis),
        hint: failure.and_then(|failure| failure.hint.as_ref()).map(hint),
        kind: failure.map(|failure| failure_kind(failure.kind)).unwrap_or_default().into(),
        reclaim_bytes: failure.and_then(|failure| Some(failure.kind.reclaim_bytes()?.likely)),
        withheld: error.access_denied,
    }
}

/// The failure of an ensure in a message.
pub fn failed_from(failed: api::Failed) -> EnsureError {
    let reclaim_bytes = failed.reclaim_bytes.map(ReclaimBytes::exactly);
    let kind = match failed.kind() {
        api::FailureKind::Unspecified => None,
        api::FailureKind::NotFound => Some(CallErrorKind::NotFound),
        api::FailureKind::Denied => Some(CallErrorKind::Denied),
        api::FailureKind::InsufficientSpace => Some(CallErrorKind::InsufficientSpace { reclaim_bytes }),
        api::FailureKind::DeadlineExceeded => Some(CallErrorKind::DeadlineExceeded),
        api::FailureKind::Other => Some(CallErrorKind::Other),
    };
    let hint = failed.hint.map(hint_from);
    EnsureError {
        reason: reason(failed.reason),
        message: failed.message,
        retry_in: failed.retry_milliseconds.map(Duration::from_millis),
        failure: kind.map(|kind| BackendFailure { kind, hint }),
        access_denied: failed.withheld,
        credentials_withheld: false,
    }
}

fn reason(text: String) -> EnsureReason {
    match text.as_str() {
        "ImagePullBackOff" => EnsureReason::ImagePullBackOff,
        "ImageInspectError" => EnsureReason::ImageInspectError,
        "ErrImagePull" => EnsureReason::ErrImagePull,
        "ErrImageNeverPull" => EnsureReason::ErrImageNeverPull,
        "InvalidImageName" => EnsureReason::InvalidImageName,
        "RegistryUnavailable" => EnsureReason::RegistryUnavailable,
        "SignatureValidationFailed" => EnsureReason::SignatureValidationFailed,
        _ => EnsureReason::Other(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EnumWord as _;

    #[tokio::test(start_paused = true)]
    async fn a_pull_survives_the_conversion() {
        let now = Instant::now();
        let wait =
            |left| Some(PullWait { reason: "rate limited by r.example".into(), until: Some(now + left) });
        let queued = PullStatus {
            image: "a:1".into(),
            phase: PullPhase::Queued,
            waiting: Some("a free slot".into()),
            bytes: None,
            detail: None,
            since: now.checked_sub(Duration::from_secs(3)).unwrap(),
        };
        let pulling = PullStatus {
            phase: PullPhase::Pulling,
            waiting: None,
            bytes: Some(ByteProgress { done: 5, total: Some(10) }),
            detail: Some(PullDetail {
                step: PullStep::Layers,
                waiting: wait(Duration::from_secs(2)),
                rate: Some(7),
                layers: [
                    LayerPhase::Queued,
                    LayerPhase::FetchedByOtherPull,
                    LayerPhase::Fetching,
                    LayerPhase::Unpacking,
                    LayerPhase::Unpacked,
                    LayerPhase::Done,
                ]
                .map(|phase| LayerProgress {
                    digest: "sha256:1".into(),
                    phase,
                    bytes: ByteProgress { done: 1, total: None },
                    rate: None,
                    waiting: wait(Duration::from_secs(1)),
                })
                .into(),
            }),
            ..queued.clone()
        };
        for status in [queued, pulling] {
            let message = pull(&status, now);
            assert_eq!(message.phase().word(), status.phase.to_string());
            for (layer, known) in
                message.layers.iter().zip(status.detail.iter().flat_map(|detail| &detail.layers))
            {
                assert_eq!(layer.phase().word(), known.phase.to_string());
            }
            assert_eq!(pull_from(message, now), status);
        }
        for known in [PullStep::Resolving, PullStep::Layers, PullStep::Committing] {
            assert_eq!(step(known).word(), known.to_string());
        }
    }

    #[test]
    fn a_policy_survives_the_conversion_and_an_unknown_one_pulls() {
        let of = |pull_policy| {
            policy_from(&api::WantedImage { image: "a:1".into(), pull_policy, ..Default::default() })
        };
        for known in [PullPolicy::Always, PullPolicy::IfNotPresent, PullPolicy::Never] {
            assert_eq!(of(policy(&known).into()), known);
        }
        assert_eq!(of(0), PullPolicy::IfNotPresent, "as the tag implies");
        for unknown in [policy(&PullPolicy::Other("always".into())).into(), 99, -1] {
            assert!(matches!(of(unknown), PullPolicy::Other(_)));
        }
    }

    #[test]
    fn events_have_no_empty_texts_and_no_nanoseconds() {
        let event = Event {
            time: SystemTime::UNIX_EPOCH + Duration::from_nanos(1_234_567_890),
            event_type: EventType::Normal,
            reason: EventReason::Pulled,
            object: ObjectRef::node("n1"),
            message: "m".into(),
            requester: String::new(),
        };
        let event = self::event(event, Some(7));
        let shown = serde_json::to_value(&event).unwrap();
        assert_eq!(
            shown,
            serde_json::json!({
                "number": 7, "time": "1970-01-01T00:00:01.234Z", "type": "Normal", "reason": "Pulled",
                "objectKind": "node", "namespace": null, "name": "n1", "uid": shown["uid"], "fieldPath": null,
                "message": "m", "requester": null,
            })
        );
        assert_eq!(serde_json::from_value::<api::Event>(shown).unwrap(), event);
    }

    #[test]
    fn a_failure_keeps_its_kind_and_what_gc_has_to_free() {
        let full = CallErrorKind::InsufficientSpace { reclaim_bytes: Some(ReclaimBytes::exactly(3_000_000)) };
        for (kind, hint) in [
            (Some(full), Some(Hint::new().command(["gc", "--free", "3MB"]))),
            (Some(CallErrorKind::NotFound), None),
            (Some(CallErrorKind::DeadlineExceeded), None),
            (None, None),
        ] {
            let error = EnsureError {
                reason: EnsureReason::ErrImagePull,
                message: "no".into(),
                retry_in: Some(Duration::from_secs(10)),
                failure: kind.map(|kind| BackendFailure { kind, hint }),
                access_denied: true,
                credentials_withheld: false,
            };
            assert_eq!(failed_from(failed(0, error.clone())), error);
        }
    }

    #[test]
    fn a_pull_secret_survives_the_conversion_and_others_are_not_sent() {
        for (kind, key) in SECRETS {
            let given = PullSecret {
                kind: kind.into(),
                coordinates: SecretCoordinates {
                    uid: String::new(),
                    namespace: "n".into(),
                    name: "s".into(),
                },
                data: BTreeMap::from([(key.into(), b"{}".to_vec())]),
            };
            assert_eq!(secret_from(secret(&given).unwrap()), given);
        }
        let mut other = PullSecret::default();
        other.kind = "Opaque".into();
        assert_eq!(secret(&other), None);
    }
}
