//! Which images are hidden: without clock, disk or backend.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::{PrefetchEnd, PresentImages};
use crate::backend::Image;
use crate::files;
use crate::reference::{ImageId, ImageName};

/// How long a runtime may continue a pull whose end is unknown.
const CONTINUES_FOR: Duration = Duration::from_secs(24 * 60 * 60);

/// The hidden images, and what is not known of them yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct HiddenState {
    hidden: BTreeSet<ImageId>,
    /// Pulls that may make an image present at any moment. New images of their repositories are hidden.
    repositories: BTreeMap<String, BTreeMap<ImageName, OpenPulls>>,
    /// Whether the hidden images were lost: all are hidden, except `visible`.
    is_lost: bool,
    /// Images that are visible whatever `repositories` and `is_lost` say.
    visible: BTreeSet<ImageId>,
    /// Counts changes, so that a list that was read before one is not used after it.
    changes: u64,
}

/// The pulls of one name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct OpenPulls {
    running: usize,
    /// Whether the end of one is unknown, in this process or an earlier one: the runtime may continue it.
    is_abandoned: bool,
    /// When the last one began or was abandoned, in seconds of Unix time.
    since: u64,
}

/// The file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct HiddenDocument {
    version: u32,
    hidden: BTreeSet<ImageId>,
    /// The names that are pulled, or whose pulls a runtime may continue, and since when.
    pulls: BTreeMap<String, u64>,
    is_lost: bool,
    visible: BTreeSet<ImageId>,
}

const VERSION: u32 = 1;

impl HiddenState {
    /// The state in the file, or why it cannot be read.
    pub(super) fn read(text: &[u8]) -> Result<HiddenState, String> {
        files::decode_document::<HiddenDocument>(text, VERSION).map(HiddenState::from)
    }

    /// The state of a file that cannot be read: no image is known to be visible.
    pub(super) fn lost() -> HiddenState {
        HiddenState { is_lost: true, ..HiddenState::default() }
    }

    pub(super) fn hides(&self, image: &Image) -> bool {
        self.hidden.contains(&image.id) || self.may_be_hidden(image)
    }

    /// Returns true if the image could be hidden and is not yet recorded as such.
    fn may_be_hidden(&self, image: &Image) -> bool {
        let mut names = image.repo_tags.iter().chain(&image.repo_digests);
        let is_of_pull = !self.repositories.is_empty()
            && names.any(|name| self.repositories.contains_key(&repository(name)));
        (self.is_lost || is_of_pull) && !self.visible.contains(&image.id)
    }

    /// A pull of this image begins, if these are the images that are present: nothing has changed since they were
    /// listed.
    pub(super) fn begin(
        &mut self,
        image: &ImageName,
        changes: u64,
        present: &PresentImages,
        now: SystemTime,
    ) -> bool {
        if !self.note_present(changes, present, now) {
            return false;
        }
        let visible: Vec<_> =
            present.listed.iter().filter(|image| !self.hides(image)).map(|image| image.id.clone()).collect();
        self.visible.extend(visible);
        let names = self.repositories.entry(repository(image.as_str())).or_default();
        let pulls = names.entry(image.clone()).or_default();
        pulls.running += 1;
        pulls.since = seconds(now);
        self.changes += 1;
        true
    }

    /// A pull of this image has ended.
    pub(super) fn end(&mut self, image: &ImageName, end: PrefetchEnd<'_>, now: SystemTime) {
        if let PrefetchEnd::Pulled(id) = end
            && !self.visible.contains(id)
        {
            self.hidden.insert(id.clone());
        }
        let names = self.repositories.get_mut(&repository(image.as_str()));
        if let Some(pulls) = names.and_then(|names| names.get_mut(image)) {
            pulls.running = pulls.running.saturating_sub(1);
            match end {
                PrefetchEnd::Pulled(_) => pulls.is_abandoned = false,
                // What an earlier one left to the runtime may still become present.
                PrefetchEnd::Failed => {}
                PrefetchEnd::Unknown => (pulls.is_abandoned, pulls.since) = (true, seconds(now)),
            }
        }
        self.changes += 1;
        self.drop_ended();
    }

    /// An image becomes visible. Returns whether it was hidden.
    pub(super) fn show(&mut self, id: &ImageId) -> bool {
        let was_hidden = self.hidden.remove(id);
        let is_new = (self.is_lost || !self.repositories.is_empty()) && self.visible.insert(id.clone());
        self.changes += u64::from(was_hidden || is_new);
        was_hidden
    }

    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// These images were present after as many changes: others are forgotten, and those that a lost file or an
    /// abandoned pull may have hidden are. Returns whether nothing has changed since.
    pub(super) fn note_present(&mut self, changes: u64, present: &PresentImages, now: SystemTime) -> bool {
        if changes != self.changes {
            return false;
        }
        let PresentImages { listed, recorded } = present;
        let ids: BTreeSet<&ImageId> = listed.iter().map(|image| &image.id).chain(recorded).collect();
        self.hidden.retain(|id| ids.contains(id));
        self.visible.retain(|id| ids.contains(id));
        if self.is_lost {
            // Images that lack a layer too: they may be complete later.
            self.hidden.extend(ids.into_iter().filter(|id| !self.visible.contains(*id)).cloned());
        }
        if self.is_lost || self.names().any(|(_, pulls)| pulls.is_abandoned) {
            self.hide_new(listed);
            self.is_lost = false;
        }
        let over = seconds(now).saturating_sub(CONTINUES_FOR.as_secs());
        for pulls in self.repositories.values_mut().flat_map(BTreeMap::values_mut) {
            pulls.is_abandoned &= pulls.since > over;
        }
        self.drop_ended();
        true
    }

    /// Hides those of the present images that a pull may have made present.
    pub(super) fn hide_new(&mut self, present: &[Image]) {
        let new = present.iter().filter(|image| self.may_be_hidden(image));
        let new: Vec<_> = new.map(|image| image.id.clone()).collect();
        let before = self.hidden.len();
        self.hidden.extend(new);
        self.changes += u64::from(self.hidden.len() != before);
    }

    fn names(&self) -> impl Iterator<Item = (&ImageName, &OpenPulls)> {
        self.repositories.values().flatten()
    }

    fn drop_ended(&mut self) {
        self.repositories.retain(|_, names| {
            names.retain(|_, pulls| pulls.running > 0 || pulls.is_abandoned);
            !names.is_empty()
        });
        if self.repositories.is_empty() && !self.is_lost {
            self.visible.clear();
        }
    }

    pub(super) fn document(&self) -> HiddenDocument {
        HiddenDocument {
            version: VERSION,
            hidden: self.hidden.clone(),
            pulls: self.names().map(|(name, pulls)| (name.to_string(), pulls.since)).collect(),
            is_lost: self.is_lost,
            visible: self.visible.clone(),
        }
    }
}

impl From<HiddenDocument> for HiddenState {
    fn from(document: HiddenDocument) -> HiddenState {
        let HiddenDocument { hidden, pulls, is_lost, visible, .. } = document;
        let mut state = HiddenState { hidden, is_lost, visible, ..HiddenState::default() };
        for (name, since) in pulls {
            let names = state.repositories.entry(repository(&name)).or_default();
            let abandoned = OpenPulls { running: 0, is_abandoned: true, since };
            names.insert(ImageName::from(name.as_str()), abandoned);
        }
        state
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The repository of a name, in full; the text itself if it is no name.
pub(super) fn repository(name: &str) -> String {
    let name = ImageName::from(name);
    name.reference().map_or_else(|_| name.to_string(), |parsed| parsed.name().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(id: &str, names: &[&str]) -> Image {
        let repo_tags = names.iter().map(|&name| name.to_owned()).collect();
        Image { id: id.into(), repo_tags, ..Image::default() }
    }

    fn listed(images: &[Image]) -> PresentImages {
        PresentImages { listed: images.to_vec(), recorded: Vec::new() }
    }

    fn after_restart(state: &HiddenState) -> HiddenState {
        HiddenState::from(state.document())
    }

    fn at(hours: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs((1_000 + hours) * 60 * 60)
    }

    impl HiddenState {
        fn begins(&mut self, name: &str, present: &[Image]) {
            assert!(self.begin(&name.into(), self.changes(), &listed(present), at(0)));
        }

        fn ends(&mut self, name: &str, end: PrefetchEnd<'_>) {
            self.end(&name.into(), end, at(0));
        }
    }

    #[test]
    fn an_image_is_hidden_from_the_start_of_its_pull_until_it_is_shown() {
        let (old, new) = (image("sha256:old", &["r.io/a/b:1"]), image("sha256:new", &["r.io/a/b:2"]));
        let other = image("sha256:other", &["r.io/other:1"]);
        let mut state = HiddenState::default();
        state.begins("r.io/a/b:2", std::slice::from_ref(&old));
        assert!(!state.hides(&old), "present before");
        assert!(state.hides(&new), "the runtime may have it before the pull ends");
        assert!(!state.hides(&other));
        state.ends("r.io/a/b:2", PrefetchEnd::Pulled(&new.id));
        let again = image("sha256:new", &["docker.io/library/copy:1"]);
        assert!(state.hides(&new) && state.hides(&again) && !state.hides(&old));
        assert!(after_restart(&state).hides(&again));
        assert!(state.show(&new.id) && !state.hides(&new) && !state.show(&new.id));
    }

    #[test]
    fn an_image_that_was_visible_stays_so() {
        let known = image("sha256:known", &["r.io/a:1", "r.io/other:1"]);
        let mut state = HiddenState::default();
        state.begins("r.io/a:1", &[image("sha256:known", &["r.io/other:1"])]);
        state.ends("r.io/a:1", PrefetchEnd::Pulled(&known.id));
        assert!(!state.hides(&known), "it was present under another name");

        state.begins("r.io/a:1", &[]);
        let before = state.changes();
        state.show(&known.id);
        state.note_present(before, &listed(&[]), at(0));
        state.ends("r.io/a:1", PrefetchEnd::Pulled(&known.id));
        assert!(!state.hides(&known), "kubelet pulled it at the same time");
        assert_eq!(state.document().visible, BTreeSet::new());
    }

    #[test]
    fn a_pull_that_may_go_on_hides_what_it_makes_present_until_a_pull_of_its_name_succeeds() {
        let (new, other) = (image("sha256:new", &["r.io/a:1"]), image("sha256:other", &["r.io/a:2"]));
        let mut state = HiddenState::default();
        state.begins("r.io/a:1", &[]);
        state.ends("r.io/a:1", PrefetchEnd::Unknown);
        assert!(state.hides(&new));
        state.begins("r.io/a:2", &[]);
        state.ends("r.io/a:2", PrefetchEnd::Pulled(&other.id));
        assert!(state.hides(&new), "that was the pull of another name");
        state.begins("r.io/a:1", std::slice::from_ref(&other));
        state.ends("r.io/a:1", PrefetchEnd::Failed);
        assert!(state.hides(&new), "the runtime may continue the first one");
        state.begins("r.io/a:1", std::slice::from_ref(&other));
        state.ends("r.io/a:1", PrefetchEnd::Pulled(&new.id));
        assert!(state.hides(&new));
        assert!(!state.hides(&image("sha256:later", &["r.io/a:3"])), "loaded by its user");
    }

    #[test]
    fn what_a_killed_process_pulled_is_hidden_by_the_next_one_for_a_day() {
        let (old, new) = (image("sha256:old", &["r.io/a:1"]), image("sha256:new", &["r.io/a:2"]));
        let mut killed = HiddenState::default();
        killed.begins("r.io/a:2", std::slice::from_ref(&old));
        let mut next = after_restart(&killed);
        assert!(next.hides(&new) && !next.hides(&old));
        assert!(next.note_present(next.changes(), &listed(std::slice::from_ref(&old)), at(0)));
        let mut next = after_restart(&next);
        assert!(next.hides(&new) && !next.hides(&old), "the runtime may still pull it");
        next.note_present(next.changes(), &listed(&[old.clone(), new.clone()]), at(24));
        assert_eq!(next.document().pulls, BTreeMap::new());
        assert!(next.hides(&new) && !next.hides(&old));
        assert!(!next.hides(&image("sha256:later", &["r.io/a:3"])), "loaded by its user");
    }

    #[test]
    fn a_file_of_another_version_is_named_as_such() {
        for (text, problem) in [
            (r#"{"version":2,"concealed":{}}"#, "unsupported version 2: expected 1"),
            (r#"{"version":1,"hidden":[]}"#, "missing field `pulls`"),
            ("{}", "missing field `version`"),
        ] {
            let error = HiddenState::read(text.as_bytes()).unwrap_err();
            assert!(error.starts_with(problem), "{error}");
        }
    }

    #[test]
    fn all_that_is_present_is_hidden_once_the_hidden_images_are_lost() {
        let (present, later) = (image("sha256:1", &["a:1"]), image("sha256:2", &["b:1"]));
        let mut state = after_restart(&HiddenState::lost());
        assert!(state.hides(&present));
        state.note_present(state.changes(), &listed(std::slice::from_ref(&present)), at(0));
        assert!(state.hides(&present) && !state.hides(&later));
    }

    #[test]
    fn an_image_that_lacks_a_layer_keeps_its_state() {
        let (whole, lacking) = (image("sha256:1", &["r.io/a:1"]), image("sha256:2", &["r.io/b:1"]));
        let present =
            PresentImages { recorded: vec![lacking.id.clone()], ..listed(std::slice::from_ref(&whole)) };
        let mut state = HiddenState::default();
        state.begins("r.io/b:1", &[]);
        state.ends("r.io/b:1", PrefetchEnd::Pulled(&lacking.id));
        state.note_present(state.changes(), &present, at(0));
        assert!(state.hides(&lacking) && !state.hides(&whole), "another pull may complete it");

        let mut state = after_restart(&HiddenState::lost());
        state.note_present(state.changes(), &present, at(0));
        assert!(state.hides(&lacking) && state.hides(&whole));
    }

    #[test]
    fn a_removed_image_is_forgotten_but_not_because_of_a_list_from_before_its_pull() {
        let new = image("sha256:new", &["r.io/a:1"]);
        let mut state = HiddenState::default();
        let before = state.changes();
        state.begins("r.io/a:1", &[]);
        state.ends("r.io/a:1", PrefetchEnd::Pulled(&new.id));
        state.note_present(before, &listed(&[]), at(0));
        assert!(state.hides(&new));
        state.note_present(state.changes(), &listed(&[]), at(0));
        assert!(!state.hides(&new));
    }

    #[test]
    fn a_visible_image_that_was_removed_is_hidden_when_it_is_fetched_again() {
        let image = image("sha256:1", &["r.io/a:1"]);
        let mut state = HiddenState::default();
        state.begins("r.io/a:2", std::slice::from_ref(&image));
        let before = state.changes();
        state.begins("r.io/other:1", std::slice::from_ref(&image));
        assert!(
            !state.begin(&"r.io/a:1".into(), before, &listed(&[]), at(0)),
            "listed before another change"
        );
        state.begins("r.io/a:1", &[]);
        state.ends("r.io/a:1", PrefetchEnd::Pulled(&image.id));
        assert!(state.hides(&image));
    }
}
