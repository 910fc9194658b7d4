//! The lock between ensures and removals: an image that was just reported present is leased, and is not removed before
//! the lease expires.
//!
//! The lock is never held across a call. An ensure [begins a presence check](RemovalGate::begin_presence_check), asks
//! the backend, and [leases](PresenceCheck::lease) the image that it found; a removal
//! [begins](RemovalGate::try_begin_removal) only without a lease. If a removal of the image ran since the check began,
//! the lease is refused, because the backend's answer may be older than the removal, and the ensure checks again.
//!
//! The lease of an ensure ends when a use of the image is seen that began after the lease: from then on the use
//! protects it. A look at uses [tells the gate](RemovalGate::note_uses), a backend also [of uses that
//! ended](RemovalGate::end_used) between two looks; the expiry is for images that nothing uses.
//!
//! The gate has all leases of images, whoever takes them. With a file it saves them for later processes: a caller that
//! promises a durable lease [saves](RemovalGate::save_leases) before it answers.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::entry::{Lease, LeasePurpose, Retention, RetentionError, RetentionPurpose};
use super::lease_file::{LeaseFile, LeaseFileError};
use super::source::RetentionSource;
use crate::backend::Image;
use crate::gc::ClockReading;
use crate::reference::ImageId;
use crate::threads::blocking;

/// Leases that may have expired without being dropped.
const MAX_EXPIRED: usize = 256;

/// The longest lease: a year, so that no instant overflows.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// How much longer a lease may last than the file says before it is saved again.
const UNSAVED: Duration = Duration::from_secs(30);

/// Leases of images, and removals in progress. On tokio's clock.
#[derive(Debug)]
pub struct RemovalGate {
    state: Mutex<LeaseTable>,
    /// Notified whenever a removal ends.
    ended: watch::Sender<()>,
    file: Option<LeaseFile>,
    /// Locked while the file is read or written.
    saving: Arc<tokio::sync::Mutex<()>>,
}

/// When a lease began and when it expires.
#[derive(Debug, Clone, Copy)]
struct LeaseEnd {
    /// A use of the image from then on is the one that the lease waits for. Of the file: when that was read.
    from: Instant,
    at: Instant,
    /// When it expires by the file; `None` if the file does not have it.
    saved: Option<Instant>,
}

impl LeaseEnd {
    /// Whether a later process would retain the image for about as long.
    fn is_saved(self, now: Instant) -> bool {
        self.saved.is_some_and(|saved| {
            let lacks = self.at.saturating_duration_since(saved);
            saved == self.at || (saved < self.at && lacks < UNSAVED && saved >= now + UNSAVED)
        })
    }
}

/// A use of an image: the image as the source reports it, and what uses it.
type Use = (ImageId, String);

#[derive(Debug, Default)]
struct LeaseTable {
    /// By image ID and purpose.
    leases: HashMap<(ImageId, LeasePurpose), LeaseEnd>,
    /// The uses of the last look, each with the beginning of the first look that found it.
    uses: HashMap<Use, Instant>,
    /// When the last look began.
    looked: Option<Instant>,
    /// Whether the leases of the file are among them.
    is_loaded: bool,
    /// Whether the file has a lease that was ended.
    has_ended_lease: bool,
    removing: HashSet<ImageId>,
    /// The number of the last removal of each image that ended while a presence check was open.
    ended: HashMap<ImageId, u64>,
    /// How many removals have ended; this is the number of the next.
    removals: u64,
    /// The number of open presence checks, by the removal number at which they began.
    open_checks: BTreeMap<u64, usize>,
}

impl LeaseTable {
    /// Drops expired leases if there are many. Without GC rounds no other call does.
    fn drop_expired(&mut self, now: Instant) {
        if self.leases.len() >= MAX_EXPIRED {
            self.leases.retain(|_, ends| ends.at > now);
        }
    }

    fn is_leased(&self, id: &ImageId, now: Instant) -> bool {
        self.leases.iter().any(|((leased, _), ends)| leased == id && ends.at > now)
    }

    /// Leases an image: for a request until this time, else at least until then.
    fn lease(&mut self, id: ImageId, purpose: LeasePurpose, now: Instant, ends: Instant) {
        let lease = self.leases.entry((id, purpose)).or_insert(LeaseEnd { from: now, at: ends, saved: None });
        lease.at = if purpose == LeasePurpose::Request { ends } else { ends.max(lease.at) };
        lease.from = now;
    }

    /// Takes in the result of a look that began at this time. Returns the images whose uses are new, by ID or name.
    fn note_uses(&mut self, found: &[Retention], looked: Instant) -> HashMap<ImageId, Instant> {
        if self.looked.is_some_and(|last| last > looked) {
            return HashMap::new();
        }
        self.looked = Some(looked);
        let mut present = HashMap::new();
        let mut latest: HashMap<ImageId, Instant> = HashMap::new();
        for Retention { image, purpose, .. } in found {
            let Some(user) = purpose.user() else { continue };
            let one = (image.clone(), user.to_owned());
            let since = self.uses.get(&one).copied().unwrap_or(looked);
            let newest = latest.entry(image.clone()).or_insert(since);
            *newest = since.max(*newest);
            present.insert(one, since);
        }
        self.uses = present;
        latest
    }

    /// Whether an image is leased for its first use.
    fn awaits_use(&self, now: Instant) -> bool {
        self.leases.iter().any(|((_, purpose), ends)| *purpose == LeasePurpose::Ensure && ends.at > now)
    }

    /// Ends the leases of ensures that began before a use of the image.
    fn end_used(&mut self, used: &HashMap<ImageId, Instant>) {
        self.end_leases(|id, purpose, lease| {
            let is_used = used.get(id).is_some_and(|used| *used > lease.from);
            purpose == LeasePurpose::Ensure && is_used
        });
    }

    fn end_leases(&mut self, is_ended: impl Fn(&ImageId, LeasePurpose, &LeaseEnd) -> bool) {
        self.leases.retain(|(id, purpose), ends| {
            let is_ended = is_ended(id, *purpose, ends);
            self.has_ended_lease |= is_ended && ends.saved.is_some();
            !is_ended
        });
    }

    /// Adds the leases of the file.
    fn load(&mut self, saved: Vec<(ImageId, Lease)>, now: Instant) {
        for (id, Lease { purpose, left }) in saved {
            let at = now + left.min(LONGEST);
            let lease = self.leases.entry((id, purpose)).or_insert(LeaseEnd { from: now, at, saved: None });
            lease.saved = Some(at);
        }
        self.is_loaded = true;
    }

    fn is_saved(&self, now: Instant) -> bool {
        let mut in_force = self.leases.values().filter(|ends| ends.at > now);
        !self.has_ended_lease && in_force.all(|ends| ends.is_saved(now))
    }

    /// The leases in force.
    fn in_force(&self, now: Instant) -> Vec<(ImageId, Lease)> {
        let in_force = self.leases.iter().filter(|(_, ends)| ends.at > now);
        let lease = |purpose, at: Instant| Lease { purpose, left: at.duration_since(now) };
        in_force.map(|((id, purpose), ends)| (id.clone(), lease(*purpose, ends.at))).collect()
    }

    fn begin_presence_check(&mut self) -> u64 {
        *self.open_checks.entry(self.removals).or_default() += 1;
        self.removals
    }

    fn end_presence_check(&mut self, from: u64) {
        let Some(alike) = self.open_checks.get_mut(&from) else { return };
        *alike -= 1;
        if *alike > 0 {
            return;
        }
        let was_oldest = self.open_checks.first_key_value().is_some_and(|(oldest, _)| *oldest == from);
        self.open_checks.remove(&from);
        if was_oldest {
            // No open check needs removals that ended before all of them began.
            let oldest = self.open_checks.first_key_value().map_or(self.removals, |(oldest, _)| *oldest);
            self.ended.retain(|_, number| *number >= oldest);
        }
    }

    fn ended(&mut self, id: ImageId) {
        if !self.open_checks.is_empty() {
            self.ended.insert(id, self.removals);
        }
        self.removals += 1;
    }

    /// Whether a removal of the image ended since a check began.
    fn ended_since(&self, from: u64, id: &ImageId) -> bool {
        [id, &ImageId::default()].iter().any(|id| self.ended.get(*id).is_some_and(|number| *number >= from))
    }

    /// Whether the image, or one without an ID, is being removed.
    fn is_removing(&self, id: &ImageId) -> bool {
        self.removing.contains(id) || self.removing.contains(&ImageId::default())
    }
}

impl Default for RemovalGate {
    fn default() -> Self {
        RemovalGate {
            state: Mutex::default(),
            ended: watch::Sender::new(()),
            file: None,
            saving: Arc::default(),
        }
    }
}

impl RemovalGate {
    /// A gate whose leases outlive the process in this file, of which it is the only user. Leases of ensures in the
    /// file last at most `longest_ensure` from now. Until the file can be read,
    /// [`retentions`](RetentionSource::retentions) and [`save_leases`](RemovalGate::save_leases) fail. May block.
    pub fn with_file(path: PathBuf, longest_ensure: Duration) -> RemovalGate {
        let gate = RemovalGate { file: Some(LeaseFile::new(path, longest_ensure)), ..RemovalGate::default() };
        // Reported by each later use.
        let _ = gate.load();
        gate
    }

    /// Must be called before asking the backend whether an image is present.
    pub fn begin_presence_check(self: &Arc<Self>) -> PresenceCheck {
        PresenceCheck { from: self.state().begin_presence_check(), gate: self.clone() }
    }

    /// Must be called right before an image is removed; drop the guard right after. `None` while the image is leased or
    /// already being removed.
    pub fn try_begin_removal(self: &Arc<Self>, id: impl Into<ImageId>) -> Option<RemovalGuard> {
        let (id, mut state) = (id.into(), self.state());
        if state.is_leased(&id, Instant::now()) || !state.removing.insert(id.clone()) {
            return None;
        }
        Some(RemovalGuard { gate: self.clone(), id })
    }

    /// Must be awaited before an explicitly requested removal; drop the guard right after. Ignores the image's leases,
    /// which only defer garbage collection. Waits while the image is already being removed.
    ///
    /// Without an ID, which a backend does not report of an incomplete image, no image is leased until the guard is
    /// dropped.
    pub async fn wait_begin_removal(self: &Arc<Self>, id: impl Into<ImageId>) -> RemovalGuard {
        let id = id.into();
        let mut ended = self.ended.subscribe();
        loop {
            if self.state().removing.insert(id.clone()) {
                return RemovalGuard { gate: self.clone(), id };
            }
            // This gate owns the sender, so the channel is open.
            let _ = ended.changed().await;
        }
    }

    /// Ends the leases of these images for these purposes. Durable after [`save_leases`](RemovalGate::save_leases).
    pub fn end_leases(&self, images: &[ImageId], purposes: &[LeasePurpose]) {
        self.state().end_leases(|id, purpose, _| purposes.contains(&purpose) && images.contains(id));
    }

    /// Whether an image is leased for its first use, so that a look at uses may end a lease.
    pub(crate) fn awaits_use(&self) -> bool {
        self.state().awaits_use(Instant::now())
    }

    /// Ends the leases of ensures whose images are used since. `found` has the uses of all sources by a look that began
    /// at this time, `images` the present images, for uses that are reported by name. A use that is found for the first
    /// time counts as begun then.
    pub(crate) fn note_uses(&self, found: &[Retention], images: &[Image], looked: Instant) {
        let mut state = self.state();
        let mut used = state.note_uses(found, looked);
        if !state.awaits_use(Instant::now()) {
            return;
        }
        for image in images {
            let names = image.repo_tags.iter().chain(&image.repo_digests);
            let latest = names.filter_map(|name| used.get(name.as_str()).copied()).max();
            if let Some(latest) = latest {
                used.entry(image.id.clone()).and_modify(|used| *used = latest.max(*used)).or_insert(latest);
            }
        }
        state.end_used(&used);
    }

    /// Ends the leases of ensures whose images were used at these times, and the lease was there before.
    pub(crate) fn end_used(&self, used: &HashMap<ImageId, Instant>) {
        self.state().end_used(used);
    }

    /// Waits until the current leases are on disk: one write for all callers that wait. Does nothing without a file. A
    /// lease that was saved not long ago is not saved again.
    pub async fn save_leases(self: &Arc<Self>) -> Result<(), LeaseFileError> {
        if self.file.is_none() || self.state().is_saved(Instant::now()) {
            return Ok(());
        }
        // The write goes on if its caller is dropped, and no other must begin.
        let (gate, saving) = (Arc::clone(self), Arc::clone(&self.saving).lock_owned().await);
        blocking(move || {
            let _saving = saving;
            gate.save()
        })
        .await
    }

    fn save(&self) -> Result<(), LeaseFileError> {
        self.load()?;
        let Some(file) = &self.file else { return Ok(()) };
        let (clock, now) = (ClockReading::now(), Instant::now());
        let leases = {
            let mut state = self.state();
            if state.is_saved(now) {
                return Ok(());
            }
            state.has_ended_lease = false;
            state.in_force(now)
        };
        let written = file.write(leases.clone(), &clock);
        let mut state = self.state();
        match &written {
            Ok(()) => {
                for (id, Lease { purpose, left }) in leases {
                    match state.leases.get_mut(&(id, purpose)) {
                        Some(lease) => lease.saved = Some(now + left),
                        // It was ended while the file was written.
                        None => state.has_ended_lease = true,
                    }
                }
            }
            Err(_) => state.has_ended_lease = true,
        }
        written
    }

    /// Adds the leases of the file, unless that was done. May block.
    fn load(&self) -> Result<(), LeaseFileError> {
        let Some(file) = self.file.as_ref().filter(|_| !self.state().is_loaded) else { return Ok(()) };
        let saved = file.read(&ClockReading::now())?;
        self.state().load(saved, Instant::now());
        Ok(())
    }

    /// Waits until every removal that is in progress now has ended, for at most this long.
    pub(crate) async fn wait_for_removals(&self, at_most: Duration) {
        let mut ended = self.ended.subscribe();
        let in_progress = self.state().removing.clone();
        let ended_all = async {
            while !self.state().removing.is_disjoint(&in_progress) && ended.changed().await.is_ok() {}
        };
        // The caller retries either way.
        let _ = timeout(at_most, ended_all).await;
    }

    /// The current leases, by image ID.
    pub fn active_leases(&self) -> Vec<(ImageId, Lease)> {
        let now = Instant::now();
        let mut state = self.state();
        state.leases.retain(|_, ends| ends.at > now);
        let mut leased = state.in_force(now);
        leased.sort();
        leased
    }

    fn state(&self) -> MutexGuard<'_, LeaseTable> {
        self.state.lock()
    }
}

/// An open presence check. Removals are recorded until it is dropped.
#[derive(Debug)]
pub struct PresenceCheck {
    gate: Arc<RemovalGate>,
    from: u64,
}

impl PresenceCheck {
    /// Whether a removal of any image ran since this check began.
    pub(crate) fn has_raced_removal(&self) -> bool {
        let state = self.gate.state();
        !state.removing.is_empty() || state.removals > self.from
    }

    /// Leases an image that was found present since this check began, for a request instead of the request before it.
    /// False if a removal may have overtaken the answer: check again. Waits while the image is being removed.
    pub async fn lease(self, id: impl Into<ImageId>, purpose: LeasePurpose, time: Duration) -> bool {
        let id = id.into();
        let mut ended = self.gate.ended.subscribe();
        let removing = {
            let mut state = self.gate.state();
            let removing = state.is_removing(&id);
            let overtaken = removing || state.ended_since(self.from, &id);
            if !overtaken {
                state.drop_expired(Instant::now());
                let now = Instant::now();
                state.lease(id, purpose, now, now + time.min(LONGEST));
                return true;
            }
            removing
        };
        if removing {
            while self.gate.state().is_removing(&id) && ended.changed().await.is_ok() {}
        }
        false
    }
}

impl Drop for PresenceCheck {
    fn drop(&mut self) {
        self.gate.state().end_presence_check(self.from);
    }
}

/// A removal in progress.
#[derive(Debug)]
pub struct RemovalGuard {
    gate: Arc<RemovalGate>,
    id: ImageId,
}

impl RemovalGuard {
    /// Ends the leases of the image, which is gone.
    pub(crate) fn end_leases(&self) {
        self.gate.end_leases(std::slice::from_ref(&self.id), &LeasePurpose::ALL);
    }
}

impl Drop for RemovalGuard {
    fn drop(&mut self) {
        {
            let mut state = self.gate.state();
            state.removing.remove(&self.id);
            state.ended(std::mem::take(&mut self.id));
        }
        self.gate.ended.send_replace(());
    }
}

#[async_trait]
impl RetentionSource for RemovalGate {
    async fn retentions(&self) -> Result<Vec<Retention>, RetentionError> {
        // A small file, which is read again only after an error.
        self.load().map_err(RetentionError::other)?;
        let leased = self.active_leases().into_iter();
        Ok(leased.map(|(image, lease)| Retention::new(image, RetentionPurpose::Lease(lease))).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn expired_leases_do_not_pile_up_without_collection() {
        let gate = Arc::new(RemovalGate::default());
        for number in 0..1000 {
            assert!(
                gate.begin_presence_check()
                    .lease(format!("image {number}"), LeasePurpose::Ensure, MINUTE)
                    .await
            );
            tokio::time::advance(MINUTE / 10).await;
        }
        assert!(gate.state().leases.len() <= MAX_EXPIRED, "{}", gate.state().leases.len());
    }

    fn leased(gate: &RemovalGate) -> Vec<String> {
        gate.active_leases().into_iter().map(|(image, _)| image.to_string()).collect()
    }

    async fn lease(gate: &Arc<RemovalGate>, image: &str, purpose: LeasePurpose, time: Duration) {
        assert!(gate.begin_presence_check().lease(image, purpose, time).await);
    }

    #[tokio::test]
    async fn saved_leases_outlive_the_process_and_ended_ones_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("leases.json");
        let gate = || Arc::new(RemovalGate::with_file(path.clone(), 10 * MINUTE));
        let first = gate();
        lease(&first, "a", LeasePurpose::Ensure, MINUTE).await;
        lease(&first, "b", LeasePurpose::Request, MINUTE).await;
        assert_eq!(leased(&gate()), [""; 0], "not saved yet");
        first.save_leases().await.unwrap();
        assert_eq!(leased(&gate()), ["a", "b"]);
        let second = gate();
        second.end_leases(&["a".into(), "b".into()], &LeasePurpose::ALL);
        lease(&second, "b", LeasePurpose::Ensure, MINUTE).await;
        second.save_leases().await.unwrap();
        assert_eq!(leased(&gate()), ["b"], "it was ensured after the end");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_was_saved_not_long_ago_is_not_saved_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("leases.json");
        let gate = Arc::new(RemovalGate::with_file(path.clone(), 10 * MINUTE));
        for (wait, is_written) in [(0, true), (1, false), (28, false), (2, true), (1, false)] {
            tokio::time::advance(Duration::from_secs(wait)).await;
            lease(&gate, "a", LeasePurpose::Ensure, 10 * MINUTE).await;
            let _ = fs_err::remove_file(&path);
            gate.save_leases().await.unwrap();
            assert_eq!(path.exists(), is_written, "after {wait} s");
        }
        lease(&gate, "b", LeasePurpose::Request, 10 * MINUTE).await;
        gate.save_leases().await.unwrap();
        lease(&gate, "b", LeasePurpose::Request, MINUTE).await;
        assert_eq!(gate.active_leases()[1].1.left, MINUTE, "it replaces the request before it");
        fs_err::remove_file(&path).unwrap();
        gate.save_leases().await.unwrap();
        assert!(path.exists(), "a shorter lease is saved");
    }

    #[tokio::test]
    async fn until_the_file_can_be_read_nothing_is_known_and_nothing_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("leases.json");
        fs_err::write(&path, "{").unwrap();
        let gate = Arc::new(RemovalGate::with_file(path.clone(), MINUTE));
        lease(&gate, "a", LeasePurpose::Ensure, MINUTE).await;
        assert!(gate.save_leases().await.is_err() && gate.retentions().await.is_err());
        assert_eq!(fs_err::read_to_string(&path).unwrap(), "{");
        fs_err::remove_file(&path).unwrap();
        assert_eq!(gate.retentions().await.unwrap().len(), 1);
        gate.save_leases().await.unwrap();
        assert_eq!(leased(&RemovalGate::with_file(path, MINUTE)), ["a"]);
    }

    #[tokio::test(start_paused = true)]
    async fn while_an_image_without_an_id_is_removed_none_is_leased() {
        let gate = Arc::new(RemovalGate::default());
        let check = gate.begin_presence_check();
        let removing = gate.wait_begin_removal("").await;
        let leasing = tokio::spawn(check.lease("a", LeasePurpose::Ensure, MINUTE));
        tokio::time::advance(MINUTE).await;
        assert!(!leasing.is_finished(), "it waits for the removal");
        drop(removing);
        assert!(!leasing.await.unwrap(), "the removal may have been that of the image");
        lease(&gate, "a", LeasePurpose::Ensure, MINUTE).await;
    }

    #[tokio::test(start_paused = true)]
    async fn removals_are_remembered_once_and_only_for_checks_that_saw_them_end() {
        let gate = Arc::new(RemovalGate::default());
        let remembered = || gate.state().ended.len();
        drop(gate.try_begin_removal("a"));
        assert_eq!(remembered(), 0, "no open check");
        let hung = gate.begin_presence_check();
        for _ in 0..100 {
            drop(gate.try_begin_removal("a"));
        }
        let second = gate.begin_presence_check();
        drop(gate.try_begin_removal("b"));
        assert_eq!(remembered(), 2, "each image once");
        drop(hung);
        assert_eq!(remembered(), 1, "that of b alone");
        assert!(second.lease("a", LeasePurpose::Ensure, MINUTE).await, "it was removed before the check");
        assert_eq!(remembered(), 0);
        let check = gate.begin_presence_check();
        drop(gate.try_begin_removal("b"));
        assert!(!check.lease("b", LeasePurpose::Ensure, MINUTE).await);
    }
}
