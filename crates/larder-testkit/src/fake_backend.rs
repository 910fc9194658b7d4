//! A scripted [`Backend`] in memory.
//!
//! Clones share everything: a test keeps one and hands the other to the code under test. What a pull does is a
//! [`ScriptedPull`], made of steps, queued for the next pull of any image or of one image. Nothing here reads the wall
//! clock, so that a test under tokio's paused clock decides when each pull ends.

mod call;
mod pull;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use larder::backend::{
    Backend, BackendError, CallErrorKind, ContainerInventory, Filesystems, Image, ImageDetails, ImageSpec,
    MinimumRate, ProgressReporter, RemoveOptions, Removed, RuntimeInfo,
};
use larder::credentials::Credential;
use larder::pod::SandboxConfig;
use larder::reference::ImageId;
use tokio::sync::{oneshot, watch};

pub use call::{BackendCall, BackendOp, RecordedCall};
use pull::PullStepScript;
pub use pull::{PullHold, ScriptedPull};

/// A runtime's error with this text, of no particular kind.
pub fn error(text: impl Into<String>) -> BackendError {
    BackendError::call(CallErrorKind::Other, text)
}

/// An image that is nothing but an id and a size in bytes.
pub fn image(id: impl Into<ImageId>, size: u64) -> Image {
    Image { id: id.into(), size, ..Image::default() }
}

/// Makes the config of an image, as JSON.
type ConfigOf = dyn Fn(&ImageId) -> String + Send + Sync;

/// Counts of pulls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PullCounts {
    /// Begun.
    pub started: usize,
    /// Running now.
    pub running: usize,
    /// Most that ever ran at once.
    pub most_at_once: usize,
    /// Ended with success.
    pub succeeded: usize,
    /// Ended with an error.
    pub failed: usize,
    /// Dropped before they ended.
    pub canceled: usize,
}

/// A scripted backend. See the [module](self).
#[derive(Clone)]
pub struct FakeBackend {
    state: Arc<Mutex<BackendScript>>,
    counts: Arc<watch::Sender<PullCounts>>,
    holds_removals: Arc<watch::Sender<bool>>,
}

#[derive(Default)]
struct BackendScript {
    info: RuntimeInfo,
    /// Present images, each ID once.
    images: Vec<Image>,
    /// Every name of a present image, and the id it stands for.
    names: BTreeMap<String, ImageId>,
    /// Images of the pretended registry.
    offers: HashMap<String, Image>,
    /// Makes the config of an image; without, images have none.
    config_of: Option<Box<ConfigOf>>,
    filesystems: Filesystems,
    in_use: ContainerInventory,
    log: Vec<RecordedCall>,
    records_no_calls: bool,
    down: Option<BackendError>,
    failures: HashMap<BackendOp, VecDeque<BackendError>>,
    hanging: HashSet<BackendOp>,
    panicking: HashSet<BackendOp>,
    scripts: VecDeque<ScriptedPull>,
    scripts_by_image: HashMap<String, VecDeque<ScriptedPull>>,
    hold_all: bool,
    minimum_rate: Option<MinimumRate>,
    /// Pulls held by [`FakeBackend::hold_pulls`], oldest first.
    held: VecDeque<(String, oneshot::Sender<ScriptedPull>)>,
}

impl Default for FakeBackend {
    fn default() -> Self {
        FakeBackend::new()
    }
}

impl FakeBackend {
    /// A backend without images, whose registry has none either.
    pub fn new() -> FakeBackend {
        let info = RuntimeInfo {
            endpoint: "fake".into(),
            name: "fake".into(),
            version: "1".into(),
            api_version: "v1".into(),
            conditions: Vec::new(),
        };
        FakeBackend {
            state: Arc::new(Mutex::new(BackendScript { info, ..BackendScript::default() })),
            counts: Arc::new(watch::Sender::new(PullCounts::default())),
            holds_removals: Arc::new(watch::Sender::new(false)),
        }
    }

    /// Makes an image present under a name. A second name for the same id is one more name of the same image.
    pub fn add_image(&self, name: &str, image: Image) {
        self.state().add(name, image);
    }

    /// Removes a name, and the image with its last name.
    pub fn forget(&self, name: &str) {
        let mut state = self.state();
        if let Some(id) = state.names.remove(name)
            && !state.names.values().any(|other| *other == id)
        {
            state.images.retain(|image| image.id != id);
        }
    }

    /// Replaces all present images; their tags and digests are their names.
    pub fn set_images(&self, images: Vec<Image>) {
        let mut state = self.state();
        state.names.clear();
        for image in &images {
            for name in image.repo_tags.iter().chain(&image.repo_digests) {
                state.names.insert(name.clone(), image.id.clone());
            }
        }
        state.images = images;
    }

    /// Makes images have configs, as JSON.
    pub fn set_configs(&self, config_of: impl Fn(&ImageId) -> String + Send + Sync + 'static) {
        self.state().config_of = Some(Box::new(config_of));
    }

    /// The present images, each once.
    pub fn images(&self) -> Vec<Image> {
        self.state().images.clone()
    }

    /// Lets pulls of this name that have no script succeed with this image.
    pub fn offer(&self, name: &str, image: Image) {
        self.state().offers.insert(name.to_owned(), image);
    }

    /// Queues what the next pull does, whatever its image. Scripts for one image go first. A pull without script
    /// gets what is [offered](FakeBackend::offer), or fails.
    pub fn on_pull(&self, pull: ScriptedPull) {
        self.state().scripts.push_back(pull);
    }

    /// Queues what the next pull of this image does.
    pub fn on_pull_of(&self, image: &str, pull: ScriptedPull) {
        self.state().scripts_by_image.entry(image.to_owned()).or_default().push_back(pull);
    }

    /// From now on, every pull without script waits for [`finish_pull`](FakeBackend::finish_pull).
    pub fn hold_pulls(&self) {
        self.state().hold_all = true;
    }

    /// The images of the pulls that wait for [`finish_pull`](FakeBackend::finish_pull), oldest first.
    pub fn held_pulls(&self) -> Vec<String> {
        let mut state = self.state();
        state.held.retain(|(_, end)| !end.is_closed());
        state.held.iter().map(|(image, _)| image.clone()).collect()
    }

    /// Continues the oldest held pull with this script, and returns its image; `None` when none waits.
    pub fn finish_pull(&self, pull: ScriptedPull) -> Option<String> {
        let mut state = self.state();
        state.held.retain(|(_, end)| !end.is_closed());
        let (image, end) = state.held.pop_front()?;
        drop(state);
        let _ = end.send(pull);
        Some(image)
    }

    /// Like [`finish_pull`](FakeBackend::finish_pull), for the oldest held pull of this image; false when none waits.
    pub fn finish_pull_of(&self, image: &str, pull: ScriptedPull) -> bool {
        let mut state = self.state();
        let found = state.held.iter().position(|(held, end)| held == image && !end.is_closed());
        let Some((_, end)) = found.and_then(|at| state.held.remove(at)) else {
            return false;
        };
        drop(state);
        end.send(pull).is_ok()
    }

    /// From now on a removal waits for [`release_removals`](FakeBackend::release_removals) before it does anything.
    pub fn hold_removals(&self) {
        self.holds_removals.send_replace(true);
    }

    /// Continues held removals.
    pub fn release_removals(&self) {
        self.holds_removals.send_replace(false);
    }

    /// Sets the answer of [`Backend::minimum_rate`]: pulls continue where they stopped.
    pub fn continue_pulls(&self, minimum: MinimumRate) {
        self.state().minimum_rate = Some(minimum);
    }

    /// The next call of this kind fails with this error; further ones queue up behind it.
    pub fn fail_next(&self, op: BackendOp, error: BackendError) {
        self.state().failures.entry(op).or_default().push_back(error);
    }

    /// From now on [`Backend::list`], [`Backend::inspect`] or [`Backend::container_inventory`] never answers.
    pub fn hang(&self, op: BackendOp) {
        self.state().hanging.insert(op);
    }

    /// The next call of this kind panics.
    pub fn panic_next(&self, op: BackendOp) {
        self.state().panicking.insert(op);
    }

    async fn answers(&self, op: BackendOp) {
        if self.state().hanging.contains(&op) {
            future::pending::<()>().await;
        }
    }

    /// Every call fails with this error, until `None` is set.
    pub fn set_down(&self, error: Option<BackendError>) {
        self.state().down = error;
    }

    /// Sets the answer of [`Backend::info`].
    pub fn set_info(&self, info: RuntimeInfo) {
        self.state().info = info;
    }

    /// Sets the answer of [`Backend::filesystems`].
    pub fn set_filesystems(&self, filesystems: Filesystems) {
        self.state().filesystems = filesystems;
    }

    /// Sets the answer of [`Backend::container_inventory`].
    pub fn set_in_use(&self, in_use: ContainerInventory) {
        self.state().in_use = in_use;
    }

    /// Records no further calls.
    pub fn stop_recording(&self) {
        self.state().records_no_calls = true;
    }

    /// All calls so far, in order.
    pub fn calls(&self) -> Vec<BackendCall> {
        self.state().log.iter().map(|request| request.call.clone()).collect()
    }

    /// All calls so far, in order, with all they carried.
    pub fn requests(&self) -> Vec<RecordedCall> {
        self.state().log.clone()
    }

    /// Takes the calls since the last time, in order.
    pub fn take_calls(&self) -> Vec<BackendCall> {
        self.state().log.drain(..).map(|request| request.call).collect()
    }

    /// Counts of pulls.
    pub fn counts(&self) -> PullCounts {
        *self.counts.borrow()
    }

    /// Waits until the counts are as wanted.
    pub async fn until(&self, wanted: impl FnMut(&PullCounts) -> bool) -> PullCounts {
        let mut counts = self.counts.subscribe();
        match counts.wait_for(wanted).await {
            Ok(counts) => *counts,
            Err(_closed) => unreachable!("the sender lives as long as this fake"),
        }
    }

    fn state(&self) -> MutexGuard<'_, BackendScript> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a call; returns the error if it is to fail.
    fn begin(
        &self,
        op: BackendOp,
        request: RecordedCall,
    ) -> Result<MutexGuard<'_, BackendScript>, BackendError> {
        let mut state = self.state();
        if !state.records_no_calls {
            state.log.push(request);
        }
        assert!(!state.panicking.remove(&op), "scripted panic");
        if let Some(error) = &state.down {
            return Err(error.clone());
        }
        if let Some(error) = state.failures.get_mut(&op).and_then(VecDeque::pop_front) {
            return Err(error);
        }
        Ok(state)
    }

    /// The script of this pull: its own, the one given while it is held, or the offered image.
    async fn script(&self, image: &str) -> ScriptedPull {
        let next_script = {
            let mut state = self.state();
            if let Some(pull) = state.scripts_by_image.get_mut(image).and_then(VecDeque::pop_front) {
                return pull;
            }
            if let Some(pull) = state.scripts.pop_front() {
                return pull;
            }
            if !state.hold_all {
                return match state.offers.get(image) {
                    Some(offered) => ScriptedPull::with_outcome(Ok(offered.clone())),
                    None => ScriptedPull::fails(format!("{image}: not found")),
                };
            }
            let (sender, receiver) = oneshot::channel();
            state.held.push_back((image.to_owned(), sender));
            receiver
        };
        match next_script.await {
            Ok(pull) => pull,
            Err(_dropped) => future::pending().await,
        }
    }
}

impl BackendScript {
    fn add(&mut self, name: &str, image: Image) {
        let id = image.id.clone();
        let names = image.repo_tags.iter().chain(&image.repo_digests).cloned();
        for name in names.chain([name.to_owned()]) {
            self.names.insert(name, id.clone());
        }
        let at = self.images.iter().position(|present| present.id == id).unwrap_or_else(|| {
            self.images.push(image);
            self.images.len() - 1
        });
        let known = &mut self.images[at];
        if name != id && !known.repo_tags.iter().chain(&known.repo_digests).any(|known| known == name) {
            let names = if name.contains('@') { &mut known.repo_digests } else { &mut known.repo_tags };
            names.push(name.to_owned());
        }
    }

    fn find(&self, image: &str) -> Option<&Image> {
        let id = self.names.get(image).map_or(image, ImageId::as_str);
        // A test with many images has them in the order of their ids.
        let ordered = self.images.binary_search_by(|present| present.id.as_str().cmp(id));
        let linear = || self.images.iter().find(|present| present.id == id);
        ordered.ok().map(|at| &self.images[at]).or_else(linear)
    }
}

/// Counts a pull as canceled unless it ended.
struct PullCounter<'a> {
    counts: &'a watch::Sender<PullCounts>,
    ended: bool,
}

impl<'a> PullCounter<'a> {
    fn begin(counts: &'a watch::Sender<PullCounts>) -> PullCounter<'a> {
        counts.send_modify(|counts| {
            counts.started += 1;
            counts.running += 1;
            counts.most_at_once = counts.most_at_once.max(counts.running);
        });
        PullCounter { counts, ended: false }
    }

    fn end<T>(mut self, outcome: Result<T, BackendError>) -> Result<T, BackendError> {
        self.ended = true;
        self.counts.send_modify(|counts| {
            counts.running -= 1;
            match outcome {
                Ok(_) => counts.succeeded += 1,
                Err(_) => counts.failed += 1,
            }
        });
        outcome
    }
}

impl Drop for PullCounter<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.counts.send_modify(|counts| {
                counts.running -= 1;
                counts.canceled += 1;
            });
        }
    }
}

/// A request that carries a spec and nothing else.
fn with_spec(call: BackendCall, spec: &ImageSpec) -> RecordedCall {
    RecordedCall { call, spec: Some(spec.clone()), credential: None, sandbox: None }
}

/// A request that carries nothing.
fn bare(call: BackendCall) -> RecordedCall {
    RecordedCall { call, spec: None, credential: None, sandbox: None }
}

#[async_trait]
impl Backend for FakeBackend {
    async fn info(&self) -> Result<RuntimeInfo, BackendError> {
        Ok(self.begin(BackendOp::Info, bare(BackendCall::Info))?.info.clone())
    }

    async fn list(&self) -> Result<Vec<Image>, BackendError> {
        self.answers(BackendOp::List).await;
        Ok(self.begin(BackendOp::List, bare(BackendCall::List))?.images.clone())
    }

    async fn status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        let call = BackendCall::Status { image: image.image.to_string() };
        Ok(self.begin(BackendOp::Status, with_spec(call, image))?.find(image.image.as_str()).cloned())
    }

    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        self.answers(BackendOp::Inspect).await;
        let call = BackendCall::Inspect { image: image.image.to_string() };
        let state = self.begin(BackendOp::Inspect, with_spec(call, image))?;
        let Some(image) = state.find(image.image.as_str()) else { return Ok(None) };
        let config = state.config_of.as_ref().map(|config_of| ("config".to_owned(), config_of(&image.id)));
        Ok(Some(ImageDetails { image: image.clone(), info: config.into_iter().collect() }))
    }

    async fn pull(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        sandbox: Option<&SandboxConfig>,
        progress: &ProgressReporter,
    ) -> Result<ImageId, BackendError> {
        let username = credential.map(|credential| credential.username.clone());
        let request = RecordedCall {
            call: BackendCall::Pull { image: image.image.to_string(), username },
            spec: Some(image.clone()),
            credential: credential.cloned(),
            sandbox: sandbox.cloned(),
        };
        let begun = self.begin(BackendOp::Pull, request).map(drop);
        let running = PullCounter::begin(&self.counts);
        if let Err(error) = begun {
            return running.end(Err(error));
        }
        let script = self.script(image.image.as_str()).await;
        for step in script.steps {
            match step {
                PullStepScript::Progress(bytes) => progress.set(bytes),
                PullStepScript::Sleep(time) => tokio::time::sleep(time).await,
                PullStepScript::Held(released) => {
                    if released.await.is_err() {
                        future::pending::<()>().await;
                    }
                }
            }
        }
        if let Ok(pulled) = &script.outcome {
            let mut state = self.state();
            state.add(image.image.as_str(), pulled.clone());
            state.failures.entry(BackendOp::Status).or_default().extend(script.status_error);
        }
        running.end(script.outcome.map(|pulled| pulled.id))
    }

    fn minimum_rate(&self) -> Option<MinimumRate> {
        self.state().minimum_rate
    }

    async fn remove(&self, image: &ImageSpec, options: &RemoveOptions) -> Result<Removed, BackendError> {
        options.require_all_names()?;
        let call = BackendCall::Remove { image: image.image.to_string() };
        drop(self.begin(BackendOp::Remove, with_spec(call, image))?);
        let mut holds = self.holds_removals.subscribe();
        let _ = holds.wait_for(|holds| !holds).await;
        let mut state = self.state();
        if let Some(id) = state.find(image.image.as_str()).map(|image| image.id.clone()) {
            state.images.retain(|image| image.id != id);
            state.names.retain(|_, of| *of != id);
        }
        Ok(Removed::Image { freed: None })
    }

    async fn filesystems(&self) -> Result<Filesystems, BackendError> {
        Ok(self.begin(BackendOp::Filesystems, bare(BackendCall::Filesystems))?.filesystems.clone())
    }

    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError> {
        self.answers(BackendOp::InUse).await;
        Ok(self.begin(BackendOp::InUse, bare(BackendCall::InUse))?.in_use.clone())
    }
}

#[cfg(test)]
mod tests;
