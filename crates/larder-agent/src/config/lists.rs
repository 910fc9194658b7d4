//! Settings that are lists of small mappings: keep rules, and images to prefetch.

use std::time::Duration;

use larder::gc::{GcPolicy, PolicyError};
use larder::reference::ImageName;
use larder::retention::{KeepRule, Selector};
use serde_json::{Map, Value, json};

use super::codecs::{
    BoolCodec, ByteSizeCodec, DurationCodec, IntegerCodec, OptionalDurationCodec, SettingCodec, StringCodec,
};
use crate::manifest::InputProblem;
use crate::manifest::tree::NodeCursor;
use larder::suggestions::nearest;

/// An image that larder keeps present although no pod has asked for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefetchItem {
    /// Its name.
    pub image: ImageName,
    /// When it is made present again, beside when larder starts.
    pub when: PrefetchSchedule,
    /// Up to so much later, at random, so that not all nodes ask at once.
    pub jitter: Duration,
    /// How collection is kept from removing it.
    pub hold: PrefetchRetention,
}

/// When an image is prefetched again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefetchSchedule {
    /// Never: only when larder starts, and when the list changes.
    Start,
    /// So long after the last time.
    Every(Duration),
    /// Each day at this time of the node's clock.
    Daily {
        /// 0 to 23.
        hour: u8,
        /// 0 to 59.
        minute: u8,
    },
}

/// How collection is kept from removing a prefetched image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefetchRetention {
    /// It is kept while it is on the list.
    Keep,
    /// It is leased for so long each time.
    Lease(Duration),
    /// Nothing, once it has been there as long as any image that was just ensured.
    Nothing,
}

/// Reads each item. A problem with one item does not hide those of the next.
fn each<T>(
    at: &NodeCursor<'_>,
    read: fn(&NodeCursor<'_>) -> Result<T, Vec<InputProblem>>,
) -> Result<Vec<T>, Vec<InputProblem>> {
    let (mut read_items, mut problems) = (Vec::new(), Vec::new());
    for item in at.items().map_err(|problem| vec![problem])? {
        match read(&item) {
            Ok(item) => read_items.push(item),
            Err(mut wrong) => problems.append(&mut wrong),
        }
    }
    if problems.is_empty() { Ok(read_items) } else { Err(problems) }
}

/// Reads fields of one item and collects what is wrong.
struct ListItemReader<'a> {
    at: &'a NodeCursor<'a>,
    problems: Vec<InputProblem>,
}

impl<'a> ListItemReader<'a> {
    fn of(at: &'a NodeCursor<'a>, known: &[&'static str]) -> Result<ListItemReader<'a>, Vec<InputProblem>> {
        if !at.is_mapping() {
            let example = known.first().copied().unwrap_or_default();
            return Err(vec![at.must_be("a mapping").hint(format!("write it like - {example}: ..."))]);
        }
        let mut problems = Vec::new();
        for (key, field) in at.entries().map_err(|problem| vec![problem])? {
            if !known.contains(&key) {
                let meant = nearest(key, known.iter().copied()).map(|word| format!("did you mean {word}?"));
                let hint = meant.unwrap_or_else(|| format!("known keys: {}", known.join(", ")));
                problems.push(field.problem("unknown key").hint(hint));
            }
        }
        Ok(ListItemReader { at, problems })
    }

    fn read_field<F: SettingCodec>(&mut self, key: &str) -> Option<F::Value> {
        match self.at.field(key).and_then(|field| field.map(|field| F::parse(&field)).transpose()) {
            Ok(value) => value,
            Err(problem) => {
                self.problems.push(problem);
                None
            }
        }
    }

    fn report(&mut self, what: &str, hint: &'static str) {
        self.problems.push(self.at.problem(what).hint(hint));
    }

    /// Reports what is wrong with a rule.
    fn check(&mut self, rule: &KeepRule) {
        let policy = GcPolicy { keep: vec![rule.clone()], ..GcPolicy::default() };
        if let Some(PolicyError::Keep { problem, .. }) = policy.problems().pop() {
            self.problems.push(self.at.problem(problem));
        }
    }

    fn finish<T>(self, value: Option<T>) -> Result<T, Vec<InputProblem>> {
        match value {
            Some(value) if self.problems.is_empty() => Ok(value),
            _ if self.problems.is_empty() => Err(vec![self.at.problem("must have a key")]),
            _ => Err(self.problems),
        }
    }
}

/// Keys of an image that is selected before it is pulled.
const SELECTOR: [&str; 2] = ["name", "digest"];

const KEEP: [&str; 8] = ["name", "digest", "label", "type", "repository", "newest", "ttl", "budget"];

/// Keep rules, with the words of `larder keep`.
pub(super) struct KeepRulesCodec;

impl SettingCodec for KeepRulesCodec {
    type Value = Vec<KeepRule>;

    fn name() -> String {
        "list of rules".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<Vec<KeepRule>, InputProblem> {
        Self::parse_all(at).map_err(|mut problems| problems.swap_remove(0))
    }

    fn parse_all(at: &NodeCursor<'_>) -> Result<Vec<KeepRule>, Vec<InputProblem>> {
        each(at, keep_rule)
    }

    fn print(rules: &Vec<KeepRule>) -> Value {
        rules.iter().map(show_rule).collect()
    }
}

/// Images by name or digest, with the words of keep rules.
pub(super) struct SelectorsCodec;

impl SettingCodec for SelectorsCodec {
    type Value = Vec<Selector>;

    fn name() -> String {
        "list of selectors".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<Vec<Selector>, InputProblem> {
        Self::parse_all(at).map_err(|mut problems| problems.swap_remove(0))
    }

    fn parse_all(at: &NodeCursor<'_>) -> Result<Vec<Selector>, Vec<InputProblem>> {
        each(at, selector)
    }

    fn print(selectors: &Vec<Selector>) -> Value {
        selectors.iter().map(|select| show_rule(&KeepRule::new(select.clone()))).collect()
    }
}

/// Name or digest of an image, which are known before it is pulled.
fn selector(at: &NodeCursor<'_>) -> Result<Selector, Vec<InputProblem>> {
    let mut item = ListItemReader::of(at, &SELECTOR)?;
    let name = item.read_field::<StringCodec>("name").map(Selector::Name);
    let digest = item.read_field::<StringCodec>("digest").map(Selector::Digest);
    let mut selectors: Vec<Selector> = [name, digest].into_iter().flatten().collect();
    if selectors.len() != 1 && item.problems.is_empty() {
        item.report("must have name or digest, and nothing else", "write it like - name: registry.example/*");
    }
    let select = selectors.pop();
    if let Some(select) = &select {
        item.check(&KeepRule::new(select.clone()));
    }
    item.finish(select)
}

fn keep_rule(at: &NodeCursor<'_>) -> Result<KeepRule, Vec<InputProblem>> {
    let mut item = ListItemReader::of(at, &KEEP)?;
    let name = item.read_field::<StringCodec>("name").map(Selector::Name);
    let digest = item.read_field::<StringCodec>("digest").map(Selector::Digest);
    let label = item.read_field::<StringCodec>("label").map(|label| match label.split_once('=') {
        Some((key, value)) => Selector::Label(key.to_owned(), Some(value.to_owned())),
        None => Selector::Label(label, None),
    });
    let of_type = item.read_field::<StringCodec>("type").map(Selector::Type);
    let newest = item.read_field::<IntegerCodec<usize, 1, 1_000_000>>("newest");
    let repository = item.read_field::<StringCodec>("repository");
    let (ttl, budget_bytes) =
        (item.read_field::<DurationCodec<1>>("ttl"), item.read_field::<ByteSizeCodec<1>>("budget"));
    let newest = match (repository, newest) {
        (Some(repository), Some(count)) => Some(Selector::Newest { repository, count }),
        (None, None) => None,
        _ if !item.problems.is_empty() => None,
        _ => {
            item.report(
                "repository and newest must be used together",
                "write both, such as repository: app/* and newest: 3",
            );
            None
        }
    };
    let mut selectors: Vec<Selector> = [name, digest, label, of_type, newest].into_iter().flatten().collect();
    if selectors.len() != 1 && item.problems.is_empty() {
        item.report(
            "a keep rule must have exactly one selector",
            "write one of name, digest, label, type, or repository with newest; write further rules as further items",
        );
    }
    let rule = selectors.pop().map(|select| KeepRule { select, ttl, budget_bytes });
    if let Some(rule) = &rule {
        item.check(rule);
    }
    item.finish(rule)
}

fn show_rule(rule: &KeepRule) -> Value {
    let mut shown = Map::new();
    match &rule.select {
        Selector::Name(name) => _ = shown.insert("name".into(), json!(name)),
        Selector::Digest(digest) => _ = shown.insert("digest".into(), json!(digest)),
        Selector::Type(of) => _ = shown.insert("type".into(), json!(of)),
        Selector::Label(key, None) => _ = shown.insert("label".into(), json!(key)),
        Selector::Label(key, Some(value)) => {
            shown.insert("label".into(), json!(format!("{key}={value}")));
        }
        Selector::Newest { repository, count } => {
            shown.insert("repository".into(), json!(repository));
            shown.insert("newest".into(), json!(count));
        }
    }
    if let Some(ttl) = &rule.ttl {
        shown.insert("ttl".into(), DurationCodec::<1>::print(ttl));
    }
    if let Some(bytes) = &rule.budget_bytes {
        shown.insert("budget".into(), ByteSizeCodec::<1>::print(bytes));
    }
    Value::Object(shown)
}

const PREFETCH: [&str; 6] = ["image", "interval", "schedule", "jitter", "keep", "lease"];

/// Images to prefetch.
pub(super) struct PrefetchCodec;

impl SettingCodec for PrefetchCodec {
    type Value = Vec<PrefetchItem>;

    fn name() -> String {
        "list of images".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<Vec<PrefetchItem>, InputProblem> {
        Self::parse_all(at).map_err(|mut problems| problems.swap_remove(0))
    }

    fn parse_all(at: &NodeCursor<'_>) -> Result<Vec<PrefetchItem>, Vec<InputProblem>> {
        let list = each(at, prefetch)?;
        let mut problems = Vec::new();
        for (index, item) in at.items().map_err(|problem| vec![problem])?.iter().enumerate() {
            let image = &list[index].image;
            if list[..index].iter().any(|earlier| earlier.image == *image) {
                problems.push(item.problem(format!("{image} is listed twice")).hint("remove one of them"));
            }
        }
        if problems.is_empty() { Ok(list) } else { Err(problems) }
    }

    fn print(list: &Vec<PrefetchItem>) -> Value {
        list.iter().map(show_item).collect()
    }
}

fn prefetch(at: &NodeCursor<'_>) -> Result<PrefetchItem, Vec<InputProblem>> {
    let mut item = ListItemReader::of(at, &PREFETCH)?;
    let image = item.read_field::<StringCodec>("image").map(ImageName::from);
    if image.is_none() && item.problems.is_empty() {
        item.problems.push(at.missing("image"));
    }
    match &image {
        // It may have a password, which is not shown.
        Some(image) if image.as_str().contains("://") => item.report(
            "image is a URL",
            "write it without scheme and credentials, such as registry.example/app:1",
        ),
        Some(image) => {
            let error = image.reference().err();
            item.problems.extend(error.map(|error| at.problem(error.to_string())));
        }
        None => {}
    }
    let (interval, daily) =
        (item.read_field::<DurationCodec<1>>("interval"), item.read_field::<TimeOfDayCodec>("schedule"));
    let jitter = item.read_field::<OptionalDurationCodec>("jitter").flatten().unwrap_or_default();
    let (keep, lease) = (item.read_field::<BoolCodec>("keep"), item.read_field::<DurationCodec<1>>("lease"));
    let when = match (interval, daily) {
        (Some(_), Some(_)) => {
            item.report("interval and schedule exclude each other", "remove one of them");
            PrefetchSchedule::Start
        }
        (Some(interval), None) => PrefetchSchedule::Every(interval),
        (None, Some((hour, minute))) => PrefetchSchedule::Daily { hour, minute },
        (None, None) => PrefetchSchedule::Start,
    };
    let hold = match (keep, lease) {
        (Some(true), Some(_)) => {
            item.report("keep and lease exclude each other", "remove one of them");
            PrefetchRetention::Keep
        }
        (_, Some(lease)) => PrefetchRetention::Lease(lease),
        (Some(false), None) => PrefetchRetention::Nothing,
        (_, None) => PrefetchRetention::Keep,
    };
    item.finish(image.map(|image| PrefetchItem { image, when, jitter, hold }))
}

/// A time of day, `HH:MM`.
struct TimeOfDayCodec;

impl SettingCodec for TimeOfDayCodec {
    type Value = (u8, u8);

    fn name() -> String {
        "time of day".into()
    }

    fn parse(at: &NodeCursor<'_>) -> Result<(u8, u8), InputProblem> {
        let wrong = |problem: InputProblem| problem.hint("write a time of day in quotes, such as \"03:30\"");
        if at.is_number() {
            return Err(wrong(at.must_be("a time of day"))); // older YAML takes 03:30 for a number
        }
        let text = at.text()?;
        let two = |text: &str, below: u8| {
            let digits = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse::<u8>().ok().filter(|number| digits && *number < below)
        };
        let time = text.split_once(':').and_then(|(hour, minute)| Some((two(hour, 24)?, two(minute, 60)?)));
        time.ok_or_else(|| wrong(at.problem("must be a time of day")))
    }

    fn print((hour, minute): &(u8, u8)) -> Value {
        json!(format!("{hour:02}:{minute:02}"))
    }
}

fn show_item(item: &PrefetchItem) -> Value {
    let mut shown = Map::from_iter([("image".to_owned(), json!(item.image))]);
    match item.when {
        PrefetchSchedule::Start => {}
        PrefetchSchedule::Every(interval) => {
            _ = shown.insert("interval".into(), DurationCodec::<1>::print(&interval));
        }
        PrefetchSchedule::Daily { hour, minute } => {
            _ = shown.insert("schedule".into(), TimeOfDayCodec::print(&(hour, minute)));
        }
    }
    if !item.jitter.is_zero() {
        shown.insert("jitter".into(), DurationCodec::<0>::print(&item.jitter));
    }
    match &item.hold {
        PrefetchRetention::Keep => {}
        PrefetchRetention::Lease(lease) => _ = shown.insert("lease".into(), DurationCodec::<1>::print(lease)),
        PrefetchRetention::Nothing => _ = shown.insert("keep".into(), json!(false)),
    }
    Value::Object(shown)
}
