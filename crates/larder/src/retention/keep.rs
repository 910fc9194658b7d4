//! Keep rules: unused images that garbage collection must retain. Matching is pure.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use crate::artifact_type::type_matches;
use crate::gc::MAX_LABEL_VALUE;
use crate::gc::unix_millis::{UnixMillis, millis};
use crate::glob;
use crate::go_format;
use crate::reference::{Digest, ImageId, PLATFORM_MARK, Reference};

/// A keep rule.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KeepRule {
    /// The images that it selects.
    pub select: Selector,
    /// Only while they were used, or first seen, within this time. Default `None`: no limit.
    pub ttl: Option<Duration>,
    /// Only as many as fit into these bytes, most recently used first. Default `None`: all.
    pub budget_bytes: Option<u64>,
}

/// The images that a rule selects.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Selector {
    /// Images with a matching name. `*` stands for any text, `?` for one character; `docker.io/library/` may be left
    /// out.
    Name(String),
    /// Images whose config has this label, with this value if given.
    Label(String, Option<String>),
    /// The image with this ID, or with a name of this digest: `sha256:...`.
    Digest(String),
    /// Images of this type, in a word such as `model`, or artifacts of this artifact type; `*` and `?` as in
    /// [`Selector::Name`].
    Type(String),
    /// The newest images of each matching repository, by first seen.
    Newest {
        /// Name without tag; `*` and `?` as in [`Selector::Name`].
        repository: String,
        /// How many.
        count: usize,
    },
}

impl KeepRule {
    /// A rule without time limit and budget.
    pub fn new(select: Selector) -> KeepRule {
        KeepRule { select, ttl: None, budget_bytes: None }
    }

    /// The index of the image name that the rule matches; `None` if the rule does not select by name.
    pub fn parse_selector(&self, names: &[String]) -> Option<usize> {
        names.iter().position(|name| match &self.select {
            Selector::Name(pattern) => name_matches(pattern, name),
            Selector::Newest { repository, .. } => name_matches(repository, repository_of(name)),
            Selector::Digest(digest) => has_digest(name, digest),
            Selector::Label(..) | Selector::Type(_) => false,
        })
    }

    /// Whether what it retains depends on more than one image and its records: on other images, or on labels.
    pub(crate) fn needs_all_images(&self) -> bool {
        self.budget_bytes.is_some() || matches!(self.select, Selector::Newest { .. } | Selector::Label(..))
    }

    /// The rule as text, for an image that it retains; `labels_known` of that image.
    pub(crate) fn text_for(&self, labels_known: bool) -> String {
        match &self.select {
            Selector::Label(..) if !labels_known => format!("{self}; labels unknown"),
            _ => self.to_string(),
        }
    }

    /// Why the rule is invalid, with the next step.
    pub(crate) fn problem(&self) -> Option<String> {
        let problem = match &self.select {
            Selector::Name(text) if text.trim().is_empty() => "empty name; use * for all images",
            Selector::Label(key, _) if key.trim().is_empty() => "label without key; use KEY or KEY=VALUE",
            Selector::Label(_, Some(value)) if value.len() >= MAX_LABEL_VALUE => {
                "label value too long; use up to 1023 bytes, or KEY for any value"
            }
            Selector::Digest(text) if Digest::parse(text).is_err() => {
                return Some(format!("{text}: not a digest; use sha256: and 64 hexadecimal digits"));
            }
            Selector::Type(text) if text.trim().is_empty() => "empty type; use a word such as model",
            Selector::Newest { repository, .. } if repository.trim().is_empty() => {
                "empty repository; use * for each repository"
            }
            Selector::Newest { count: 0, .. } => "newest must be 1 or more",
            Selector::Name(text) | Selector::Newest { repository: text, .. } => return pattern_problem(text),
            _ => return None,
        };
        Some(problem.to_owned())
    }
}

impl fmt::Display for KeepRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.select {
            Selector::Name(name) => write!(f, "name {name}")?,
            Selector::Label(key, None) => write!(f, "label {key}")?,
            Selector::Label(key, Some(value)) => write!(f, "label {key}={value}")?,
            Selector::Digest(digest) => write!(f, "digest {digest}")?,
            Selector::Type(of) => write!(f, "type {of}")?,
            Selector::Newest { repository, count } => write!(f, "newest {count} of {repository}")?,
        }
        if let Some(ttl) = self.ttl {
            write!(f, ", for {} after its last use", go_format::duration(ttl))?;
        }
        if let Some(bytes) = self.budget_bytes {
            let size = go_format::bytes(bytes);
            write!(f, ", up to {size}")?;
        }
        Ok(())
    }
}

/// The keep rule that retains an image.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KeptBy {
    /// Its index in the policy, from 0.
    pub index: usize,
    /// The rule.
    pub rule: KeepRule,
    /// Whether the labels of the image are known.
    pub labels_known: bool,
}

/// `kept by rule 1 (name shop/*)`
impl fmt::Display for KeptBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kept by rule {} ({})", self.index + 1, self.rule.text_for(self.labels_known))
    }
}

/// An image as input for keep rules.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeepRuleInput<'a> {
    /// Its id.
    pub id: &'a ImageId,
    /// Its artifact type; empty for an image.
    pub artifact_type: &'a str,
    /// Its names, with tags and digests.
    pub names: &'a [String],
    /// Labels of its config, where known.
    pub labels: Option<&'a BTreeMap<String, String>>,
    /// Size in bytes.
    pub size: u64,
    /// When it was first seen.
    pub first_seen: UnixMillis,
    /// When it was last used.
    pub last_used: Option<UnixMillis>,
}

impl KeepRuleInput<'_> {
    fn last_wanted(&self) -> UnixMillis {
        self.last_used.map_or(self.first_seen, |used| used.max(self.first_seen))
    }
}

/// For each image the first rule that retains it. A label rule also retains an image with unknown labels:
/// losing an image that was to be kept is worse than a full disk.
pub(crate) fn matching_rules(
    now: UnixMillis,
    rules: &[KeepRule],
    images: &[KeepRuleInput<'_>],
) -> Vec<Option<KeptBy>> {
    let mut kept = vec![None; images.len()];
    for (index, rule) in rules.iter().enumerate() {
        let mut chosen = select(&rule.select, images);
        let mut unjudged = images_without_labels(&rule.select, images);
        if let Some(ttl) = rule.ttl {
            unjudged.retain(|&image| now.millis_since(images[image].last_wanted()) <= millis(ttl));
            chosen.retain(|&image| now.millis_since(images[image].last_wanted()) <= millis(ttl));
        }
        if let Some(budget) = rule.budget_bytes {
            chosen.sort_by(|&a, &b| {
                let (a, b) = (&images[a], &images[b]);
                b.last_wanted().cmp(&a.last_wanted()).then_with(|| a.id.cmp(b.id))
            });
            let mut left = budget;
            chosen.retain(|&image| match left.checked_sub(images[image].size) {
                Some(rest) => {
                    left = rest;
                    true
                }
                None => false,
            });
        }
        // Not counted in the budget: they must not displace images that match.
        for image in chosen.into_iter().chain(unjudged) {
            kept[image].get_or_insert_with(|| KeptBy {
                index,
                rule: rule.clone(),
                labels_known: images[image].labels.is_some(),
            });
        }
    }
    kept
}

fn select(selector: &Selector, images: &[KeepRuleInput<'_>]) -> Vec<usize> {
    let all = |matches: &dyn Fn(&KeepRuleInput<'_>) -> bool| {
        (0..images.len()).filter(|&image| matches(&images[image])).collect()
    };
    match selector {
        Selector::Name(pattern) => {
            all(&|image| image.names.iter().any(|name| name_matches(pattern, name)) || image.id == pattern)
        }
        Selector::Label(key, value) => all(&|image| {
            let found = image.labels.and_then(|labels| labels.get(key));
            found.is_some_and(|found| value.as_ref().is_none_or(|value| value == found))
        }),
        Selector::Digest(digest) => {
            all(&|image| image.id == digest || image.names.iter().any(|name| has_digest(name, digest)))
        }
        Selector::Type(of) => all(&|image| type_matches(of, image.artifact_type)),
        Selector::Newest { repository, count } => newest(repository, *count, images),
    }
}

/// The images with unknown labels, which a label rule may select.
fn images_without_labels(selector: &Selector, images: &[KeepRuleInput<'_>]) -> Vec<usize> {
    match selector {
        Selector::Label(..) => (0..images.len()).filter(|&image| images[image].labels.is_none()).collect(),
        Selector::Name(_) | Selector::Digest(_) | Selector::Type(_) | Selector::Newest { .. } => Vec::new(),
    }
}

fn newest(repository: &str, count: usize, images: &[KeepRuleInput<'_>]) -> Vec<usize> {
    let mut by_repository: HashMap<&str, Vec<usize>> = HashMap::new();
    for (index, image) in images.iter().enumerate() {
        let mut of: Vec<&str> = image.names.iter().map(|name| repository_of(name)).collect();
        of.sort_unstable();
        of.dedup();
        for name in of.into_iter().filter(|name| name_matches(repository, name)) {
            by_repository.entry(name).or_default().push(index);
        }
    }
    let mut chosen = Vec::new();
    for mut members in by_repository.into_values() {
        members.sort_by(|&a, &b| {
            let (a, b) = (&images[a], &images[b]);
            b.first_seen.cmp(&a.first_seen).then_with(|| b.id.cmp(a.id))
        });
        chosen.extend(members.into_iter().take(count));
    }
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

/// Why a pattern matches no name of any image, with the next step.
fn pattern_problem(pattern: &str) -> Option<String> {
    if !pattern.contains(['*', '?']) {
        let (name, _) = pattern.split_once(PLATFORM_MARK).unwrap_or((pattern, ""));
        let error = Reference::parse(name).err().filter(|_| Digest::parse(pattern).is_err())?;
        let next = error.hint().map_or_else(String::new, |hint| format!("; {hint}"));
        return Some(format!("{}: {}{next}", go_format::quote(pattern), error.kind()));
    }
    let of_names = |letter: char| letter.is_ascii_alphanumeric() || "*?._-/:@#+[]".contains(letter);
    if let Some(other) = pattern.chars().find(|letter| !of_names(*letter)) {
        let (pattern, other) = (go_format::quote(pattern), other.to_string());
        let other = go_format::quote(&other);
        return Some(format!(
            "{pattern}: no image name has {other}; use * for any text, ? for one character"
        ));
    }
    // An IPv6 address is the only part of a name with brackets: at its start, before a port or a slash.
    let address = pattern.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    let rest = address.map_or(pattern, |(_, rest)| rest);
    if rest.contains(['[', ']']) {
        let pattern = go_format::quote(pattern);
        return Some(format!(
            "{pattern}: sets of characters in brackets are not supported; use * for any text, ? for one character"
        ));
    }
    let (repository, _) = rest.rsplit_once('/')?;
    // The first part is a registry if it has upper-case letters.
    let has_upper = |part: &str| part.contains(|letter: char| letter.is_ascii_uppercase());
    if repository.split('/').skip(1).any(has_upper) {
        let pattern = go_format::quote(pattern);
        return Some(format!(
            "{pattern}: repository names have no upper-case letters; write them in lower case"
        ));
    }
    None
}

/// A name without tag, digest and platform.
fn repository_of(name: &str) -> &str {
    let (name, _) = name.split_once(PLATFORM_MARK).unwrap_or((name, ""));
    let name = name.split_once('@').map_or(name, |(name, _)| name);
    match name.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => repository,
        _ => name,
    }
}

fn has_digest(name: &str, digest: &str) -> bool {
    let (name, _) = name.split_once(PLATFORM_MARK).unwrap_or((name, ""));
    name.split_once('@').is_some_and(|(_, of)| of == digest)
}

/// Whether a pattern matches a name, in full or in Docker's short form.
fn name_matches(pattern: &str, name: &str) -> bool {
    short_forms(name).any(|form| glob(pattern, form))
}

fn short_forms(name: &str) -> impl Iterator<Item = &str> {
    let prefixes = ["docker.io/", "docker.io/library/"];
    std::iter::once(name).chain(prefixes.into_iter().filter_map(|prefix| name.strip_prefix(prefix)))
}

/// A rule that matches no image, usually because of a typing error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeepWarning {
    /// The rule's index, from 0.
    pub rule: usize,
    /// The rule as text.
    pub text: String,
    /// The most similar names of present images, best first; at most three.
    pub nearest: Vec<String>,
    /// Number of images retained only because their labels are unknown.
    pub labels_unknown: usize,
}

impl fmt::Display for KeepWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "keep rule {} ({}) matches no image", self.rule + 1, self.text)?;
        if self.labels_unknown > 0 {
            let unknown = self.labels_unknown;
            write!(
                f,
                "; images kept because their labels are unknown: {unknown}; keep images by name instead"
            )?;
        } else if !self.nearest.is_empty() {
            write!(f, "; similar images: {}", self.nearest.join(", "))?;
        }
        Ok(())
    }
}

/// The rules that match no image, ignoring time limit and budget.
pub(crate) fn warnings(rules: &[KeepRule], images: &[KeepRuleInput<'_>]) -> Vec<KeepWarning> {
    let unmatched = rules.iter().enumerate().filter(|(_, rule)| select(&rule.select, images).is_empty());
    unmatched
        .map(|(index, rule)| KeepWarning {
            rule: index,
            text: rule.to_string(),
            nearest: nearest(&rule.select, images),
            labels_unknown: images_without_labels(&rule.select, images).len(),
        })
        .collect()
}

fn nearest(selector: &Selector, images: &[KeepRuleInput<'_>]) -> Vec<String> {
    let wanted = match selector {
        Selector::Name(name) => name,
        Selector::Newest { repository, .. } => repository,
        Selector::Label(..) | Selector::Digest(_) | Selector::Type(_) => return Vec::new(),
    };
    nearest_names(wanted, images.iter().flat_map(|image| image.names))
}

/// The names that are similar to a text, best first; at most three. Similar is a repository whose last part differs by
/// a typing error or begins with that of the text, whatever its registry and tag. Names with a digest are ignored.
pub fn nearest_names<'a>(text: &str, names: impl IntoIterator<Item = &'a String>) -> Vec<String> {
    let wanted = text.replace(['*', '?'], "");
    let part = last_part(&wanted);
    let mut near: Vec<((usize, usize), &String)> = Vec::new();
    for name in names.into_iter().filter(|name| !name.contains('@')) {
        let Some(errors) = typing_errors(part, last_part(name)) else { continue };
        let whole = short_forms(name).map(|form| strsim::osa_distance(&wanted, form)).min();
        near.push(((errors, whole.unwrap_or(usize::MAX)), name));
    }
    near.sort_unstable();
    near.dedup();
    near.into_iter().take(3).map(|(_, name)| name.clone()).collect()
}

/// The last part of a name's repository.
fn last_part(name: &str) -> &str {
    repository_of(name).trim_end_matches('/').rsplit('/').next().unwrap_or_default()
}

/// In how many characters a word differs from the one that was meant; `None` if that is too many.
fn typing_errors(word: &str, meant: &str) -> Option<usize> {
    let length = word.chars().count();
    if length > 1 && meant.starts_with(word) {
        return Some(usize::from(meant != word));
    }
    let errors = strsim::osa_distance(word, meant);
    (errors <= length.div_ceil(3) && errors < length).then_some(errors)
}

#[cfg(test)]
mod tests;
