//! Acts on a plan: removes in order and looks what that really freed.
//!
//! A removal that fails, or whose image is used by now, does not stop the sweep: when the plan is through and its goal
//! is not reached, a new one is made of what is left. With exact accounting the file system is measured after each
//! removal, the sweep waits a bounded time for a backend that frees in the background, and stops as soon as enough is
//! really free.

use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::amount::Amount;
use super::disk;
use super::error::GcError;
use super::plan::{Aim, Goal, Plan, Removal, Scene, aim, plan_for};
use super::policy::{Accounting, GcPolicy};
use super::uses::{Use, UseError};
use crate::backend::BackendError;
use crate::image_service::Disk;
use crate::reference::ImageId;

/// What a sweep acts through.
#[async_trait]
pub trait Hands: Send + Sync {
    /// Removes one image, unless it is in use by now.
    async fn remove(&self, image: &Removal) -> Result<Outcome, RemoveError>;
    /// Reads the file system that holds the images.
    async fn measure(&self) -> Result<Disk, String>;
    /// Takes note of an image that is gone, with what that really freed, where it was measured.
    async fn removed(&self, image: &Removal, freed: Option<Amount>);
}

/// How a removal ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The image is gone.
    Removed,
    /// It was gone before: somebody else removed it.
    GoneMeanwhile,
    /// It is used now, and was left alone.
    InUse(Vec<Use>),
    /// A keep rule that came after the plan keeps it, and it was left alone: the rule in words.
    Kept(String),
}

/// Why an image was not removed. The text is the backend's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RemoveError {
    /// The backend could not.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// Nobody could tell whether it is in use.
    #[error(transparent)]
    UseUnknown(#[from] UseError),
}

/// How long a sweep waits for room that a backend frees in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Time between two looks at the file system. Default 50 ms.
    pub poll: Duration,
    /// After so long without a change, no more is expected of a removal. Default 1 s.
    pub quiet: Duration,
    /// The longest wait for one removal. Default 10 s.
    pub longest: Duration,
    /// The longest wait of a whole sweep. Default 1 min.
    pub sweep: Duration,
    /// So little missing of a promise is not waited for, since others write meanwhile: logs, databases. The next
    /// measurement finds it if it does come. Default 64 KiB and 4 inodes.
    pub noise: Amount,
}

impl Default for Patience {
    fn default() -> Self {
        Patience {
            poll: Duration::from_millis(50),
            quiet: Duration::from_secs(1),
            longest: Duration::from_secs(10),
            sweep: Duration::from_secs(60),
            noise: Amount { bytes: 64 << 10, inodes: 4 },
        }
    }
}

/// One image that was removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// The removal, with what was promised.
    pub removal: Removal,
    /// What the file system says; `None` if it was not measured. Other writers are in it.
    pub freed: Option<Amount>,
}

/// What a sweep did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Swept {
    /// Removed, in order.
    pub done: Vec<Done>,
    /// Tried and failed: id and error text, in order.
    pub errors: Vec<(ImageId, String)>,
    /// Left alone because they are used or kept by now, by id.
    pub spared: Vec<ImageId>,
    /// Gone before their turn came, because somebody else removed them, by id.
    pub gone: Vec<ImageId>,
    /// Bytes freed: measured if the accounting is exact, nominal otherwise. Of what came free, what images of `gone`
    /// were to free does not count; what else others wrote or deleted meanwhile is in it.
    pub freed: i64,
    /// Bytes that had to be freed.
    pub wanted: i64,
    /// Whether the goal was reached.
    pub reached: bool,
    /// The last reading of the file system.
    pub disk: Option<Disk>,
    /// For kubelet's hooks: what the space pass looked at and kept.
    pub(super) examined: Vec<ImageId>,
}

struct Sweep<'a> {
    hands: &'a dyn Hands,
    exact: bool,
    aim: Aim,
    patience: Patience,
    waited: Duration,
    /// Bytes that somebody else has freed by removing images, by what the plan promised of these.
    elsewhere: u64,
    scene: &'a mut Scene,
    swept: Swept,
}

/// Carries out the first plan, and further ones for what it left open. `scene` is what the first plan was made of;
/// afterwards it is what is left.
pub async fn sweep(
    hands: &dyn Hands,
    scene: &mut Scene,
    policy: &GcPolicy,
    first: Plan,
    patience: Patience,
) -> Swept {
    let goal = first.goal;
    let aim = aim(goal, scene.disk, policy);
    let before = scene.disk;
    let exact = policy.accounting == Accounting::Exact && scene.disk.is_some();
    let mut sweep = Sweep {
        hands,
        exact,
        aim,
        patience,
        waited: Duration::ZERO,
        elsewhere: 0,
        scene,
        swept: Swept::default(),
    };
    sweep.swept.wanted = match aim {
        Aim::Nominal(wanted) => wanted,
        _ => i64::try_from(first.need.bytes).unwrap_or(i64::MAX),
    };
    let mut plan = first;
    while sweep.carry_out(plan).await {
        plan = plan_for(sweep.scene, policy, goal, sweep.rest(aim));
    }
    sweep.end(aim, before)
}

impl Sweep<'_> {
    /// Whether another plan may bring it nearer to the goal.
    async fn carry_out(&mut self, plan: Plan) -> bool {
        self.note_examined(&plan);
        let planned = plan.removals.len();
        for removal in plan.removals {
            self.take(removal).await;
            self.swept.reached = self.is_reached(self.aim);
            if self.swept.reached {
                return false;
            }
        }
        !self.swept.reached && planned != 0 && !matches!(self.aim, Aim::Old | Aim::Everything)
    }

    async fn take(&mut self, removal: Removal) {
        let before = self.scene.disk;
        match self.hands.remove(&removal).await {
            Ok(Outcome::Removed) => {
                let freed = if self.exact { self.freed_by(&removal, before).await } else { None };
                self.hands.removed(&removal, freed).await;
                self.scene.forget(&removal.id, &removal.handler);
                let counted = i64::try_from(removal.frees.bytes).unwrap_or(i64::MAX);
                self.swept.freed = self.swept.freed.saturating_add(counted);
                self.swept.done.push(Done { removal, freed });
            }
            Ok(Outcome::GoneMeanwhile) => self.gone(removal).await,
            Ok(Outcome::InUse(uses)) => {
                // Whoever uses it, it must not come up in the next plan.
                let uses = if uses.is_empty() {
                    vec![Use::Ensured { ago: None, left: Duration::ZERO }]
                } else {
                    uses
                };
                self.exclude(&removal, |image| image.uses.clone_from(&uses));
                self.swept.spared.push(removal.id);
            }
            Ok(Outcome::Kept(rule)) => {
                tracing::info!(image = %removal.id, rule, "left alone: it is kept by now");
                let wanted = vec![Use::Wanted { by: format!("keep rule {rule}") }];
                self.exclude(&removal, |image| image.uses.clone_from(&wanted));
                self.swept.spared.push(removal.id);
            }
            Err(error) => {
                let error = error.to_string();
                self.exclude(&removal, |image| image.failed = Some(error.clone()));
                self.swept.errors.push((removal.id, error));
            }
        }
    }

    /// An image that somebody else removed. Its room is waited for, counts, and is nothing that this sweep has freed.
    async fn gone(&mut self, removal: Removal) {
        if self.exact {
            self.freed_by(&removal, self.scene.disk).await;
            self.elsewhere = self.elsewhere.saturating_add(removal.frees.bytes);
        }
        self.scene.forget(&removal.id, &removal.handler);
        self.swept.gone.push(removal.id);
    }

    /// Keeps an image out of further plans.
    fn exclude(&mut self, removal: &Removal, why: impl Fn(&mut super::plan::Subject)) {
        let same =
            |image: &&mut super::plan::Subject| image.id == removal.id && image.handler == removal.handler;
        self.scene.images.iter_mut().filter(same).for_each(why);
    }

    /// Measures what a removal freed, and waits for it while it may still come. `None` if it cannot be measured; then
    /// the promise counts.
    async fn freed_by(&mut self, removal: &Removal, before: Option<Disk>) -> Option<Amount> {
        let before = before?;
        let (start, mut changed) = (Instant::now(), Instant::now());
        let mut last: Option<Disk> = None;
        loop {
            let Ok(disk) = self.hands.measure().await else {
                self.scene.disk = Some(disk::with_more_free(before, removal.frees));
                return None;
            };
            if last != Some(disk) {
                (last, changed) = (Some(disk), Instant::now());
            }
            self.scene.disk = Some(disk);
            let freed = disk::free(before).short_of(disk::free(disk));
            let missing = self.watched(freed.short_of(removal.frees));
            let waiting = start.elapsed();
            let given_up = changed.elapsed() >= self.patience.quiet
                || waiting >= self.patience.longest
                || self.waited + waiting >= self.patience.sweep;
            if self.patience.noise.short_of(missing) == Amount::ZERO || given_up {
                self.waited += waiting;
                return Some(freed);
            }
            tokio::time::sleep(self.patience.poll).await;
        }
    }

    /// Of an amount, what the goal is about: it makes no sense to wait for the rest.
    fn watched(&self, amount: Amount) -> Amount {
        match self.aim {
            Aim::Free(wanted) => Amount {
                bytes: if wanted.bytes > 0 { amount.bytes } else { 0 },
                inodes: if wanted.inodes > 0 { amount.inodes } else { 0 },
            },
            _ => Amount { inodes: 0, ..amount },
        }
    }

    fn is_reached(&self, aim: Aim) -> bool {
        match (aim, self.scene.disk) {
            (Aim::Nothing, _) => true,
            // Looked at after a success only, so that at least one image goes.
            (Aim::Nominal(wanted), _) => !self.swept.done.is_empty() && self.swept.freed >= wanted,
            (Aim::Free(wanted), Some(disk)) => disk::free(disk).short_of(wanted) == Amount::ZERO,
            (Aim::Free(_), None) | (Aim::Old | Aim::Everything, _) => false,
        }
    }

    /// What is still wanted.
    fn rest(&self, aim: Aim) -> Aim {
        match aim {
            Aim::Nominal(i64::MAX) => aim,
            Aim::Nominal(wanted) => Aim::Nominal(wanted.saturating_sub(self.swept.freed)),
            aim => aim,
        }
    }

    fn note_examined(&mut self, plan: &Plan) {
        for id in &plan.examined {
            if !self.swept.examined.contains(id) {
                self.swept.examined.push(id.clone());
            }
        }
    }

    fn end(mut self, aim: Aim, before: Option<Disk>) -> Swept {
        self.swept.disk = self.scene.disk;
        if let (true, Some(before), Some(after)) = (self.exact, before, self.scene.disk) {
            let freed = disk::free(before).short_of(disk::free(after)).bytes;
            // Theirs may have been free before the first measure; what was measured after its own removals is no less.
            let freed = freed.saturating_sub(self.elsewhere).max(self.swept.measured().min(freed));
            self.swept.freed = i64::try_from(freed).unwrap_or(i64::MAX);
        }
        match aim {
            Aim::Nothing => self.swept.reached = true,
            Aim::Old | Aim::Everything | Aim::Nominal(i64::MAX) => {
                self.swept.reached = self.swept.errors.is_empty();
            }
            Aim::Nominal(wanted) => self.swept.reached = self.swept.freed >= wanted,
            Aim::Free(_) => self.swept.reached = self.is_reached(aim),
        }
        self.swept
    }
}

impl Swept {
    /// Bytes that came free right after its own removals, of each at most what was promised.
    fn measured(&self) -> u64 {
        let bytes = |done: &Done| {
            let promised = done.removal.frees.bytes;
            done.freed.map_or(promised, |freed| freed.bytes.min(promised))
        };
        self.done.iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// What failed, in kubelet's words; `None` if nothing did.
    pub(crate) fn error(&self, goal: Goal, policy: &GcPolicy) -> Option<GcError> {
        if self.errors.is_empty() {
            return None;
        }
        let errors = crate::gotext::aggregate(self.errors.iter().map(|(_, error)| error.as_str()));
        Some(match goal {
            Goal::Age => GcError::Age { maximum: policy.maximum_age, errors },
            Goal::AllUnused => GcError::Space { wanted: i64::MAX, freed: self.freed, errors },
            Goal::Thresholds | Goal::Free { .. } => {
                GcError::Space { wanted: self.wanted, freed: self.freed, errors }
            }
        })
    }
}
