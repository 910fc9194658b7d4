//! Admission: is there enough disk space for a pull? Pure: sizes in, admission or refusal out.
//!
//! A manifest declares compressed sizes, and the size on disk only of some layers. Of others it is estimated with a
//! [`UnpackRatio`] learned from earlier pulls on this node. While a layer is unpacked its compressed bytes are still on
//! disk, so both count. A blob that is a file takes its size: it becomes a layer where it was downloaded.
//!
//! Images differ: some grow to twice their compressed size, some to five times. A pull is refused only if the
//! [least](SpaceEstimate) that it could take does not fit. One that grows more than that ends when it would use up the
//! reserve, leaves nothing behind, and begins again after a round of collection; refusing one that would fit would make
//! the image unavailable.
//!
//! An admitted pull [claims](PullClaims) its least until it ends: otherwise several that begin at once get the same
//! space, and all of them fail. What it leaves for later is [promised](super::PromisedSpace) to it, and is not free.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::ReclaimBytes;
use larder::go_format;
use larder::hint::Hint;
use larder_registry::manifest::{Compression, Descriptor, MediaType};
use tokio::sync::{MutexGuard, watch};
use tokio::time::{Instant, timeout_at};

use super::records::UnpackRatio;
use crate::disk::DiskSpace;

/// Before anything was learned. Distributions grow to about three times their gzip layers, with a file for 5 KiB
/// fetched; what is added to them (wheels, binaries, models) hardly grows, and comes in larger files.
const FIRST: UnpackRatio = UnpackRatio { bytes: 2.0, inodes: 1.0 / 12288.0 };

/// How many fetched bytes weigh as much as everything that was learned before them: 256 MiB. Small images then move
/// the ratio a little, large ones much.
const MEMORY: f64 = 256.0 * 1024.0 * 1024.0;

/// Added to each estimate, as part of it.
const MARGIN: f64 = 0.1;

/// The least that a layer becomes, as a part of what the ratio says; never less than what is fetched of it.
const LEAST: f64 = 0.5;

/// Disk usage of a pull, estimated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpaceEstimate {
    /// If its layers grow as those before them did.
    pub likely: DiskSpace,
    /// If they grow little.
    pub least: DiskSpace,
}

impl SpaceEstimate {
    /// The estimate with `space` that is known.
    pub(crate) fn with(self, space: DiskSpace) -> SpaceEstimate {
        SpaceEstimate { likely: self.likely + space, least: self.least + space }
    }

    /// Without the `downloaded` bytes of its archives that are on disk already. The least has only the largest archive.
    pub(crate) fn after_download(self, downloaded: u64, largest: u64) -> SpaceEstimate {
        let without = |need: DiskSpace, bytes| DiskSpace { bytes: need.bytes.saturating_sub(bytes), ..need };
        SpaceEstimate {
            likely: without(self.likely, downloaded),
            least: without(self.least, downloaded.min(largest)),
        }
    }
}

impl Default for UnpackRatio {
    fn default() -> UnpackRatio {
        FIRST
    }
}

/// Returns the ratio after `fetched` bytes became `became`; `None` when nothing can be learned from it.
#[allow(clippy::cast_precision_loss, reason = "an estimate")]
pub fn learn(before: Option<UnpackRatio>, fetched: u64, became: DiskSpace) -> Option<UnpackRatio> {
    if fetched == 0 {
        return None;
    }
    let before = before.filter(|ratio| ratio.bytes.is_finite() && ratio.inodes.is_finite()).unwrap_or(FIRST);
    let fetched = fetched as f64;
    let weight = fetched / (fetched + MEMORY);
    let towards = |old: f64, new: f64| old + (new - old) * weight;
    Some(UnpackRatio {
        bytes: towards(before.bytes, became.bytes as f64 / fetched),
        inodes: towards(before.inodes, became.inodes as f64 / fetched),
    })
}

/// The sizes that a manifest declares of a layer to unpack, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeclaredSize {
    /// As fetched.
    pub fetched: u64,
    /// Uncompressed, if that is declared.
    pub plain: Option<u64>,
}

/// Annotation of eStargz with the uncompressed size of a layer.
const PLAIN_SIZE: &str = "io.containers.estargz.uncompressed-size";

impl DeclaredSize {
    /// Returns the sizes of a layer.
    pub fn of(layer: &Descriptor) -> DeclaredSize {
        let plain = match layer.kind() {
            MediaType::Layer(Compression::None) => Some(layer.size),
            _ => layer.annotations.get(PLAIN_SIZE).and_then(|size| size.parse().ok()),
        };
        DeclaredSize { fetched: layer.size, plain }
    }
}

/// Estimates the disk usage of a pull: `missing` are the layers to unpack; `fetched` are the bytes of archives that are
/// on the disk beside what was unpacked of them.
pub fn estimate(ratio: UnpackRatio, missing: &[DeclaredSize], fetched: u64) -> SpaceEstimate {
    let (mut likely, mut least) = (DiskSpace::default(), DiskSpace::default());
    for layer in missing {
        let ratio = layer_ratio(ratio, *layer);
        likely += grown(scaled(ratio, 1.0 + MARGIN), layer.fetched);
        least += grown(scaled(ratio, LEAST), layer.fetched);
    }
    let fetched = DiskSpace { bytes: fetched, inodes: 0 };
    (likely, least) = (likely + fetched, least + fetched);
    SpaceEstimate { likely, least }
}

/// Returns the ratio of a layer: what the manifest declares, or what was learned.
#[allow(clippy::cast_precision_loss, reason = "an estimate")]
fn layer_ratio(learned: UnpackRatio, layer: DeclaredSize) -> UnpackRatio {
    match layer.plain {
        Some(plain) if layer.fetched > 0 => {
            UnpackRatio { bytes: plain as f64 / layer.fetched as f64, ..learned }
        }
        _ => learned,
    }
}

fn scaled(ratio: UnpackRatio, by: f64) -> UnpackRatio {
    UnpackRatio { bytes: ratio.bytes * by, inodes: ratio.inodes * by }
}

/// Estimates the size of an unpacked layer. It has a few directories and files of the store's own.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an estimate; a cast from a float stays within the integer's range"
)]
fn grown(ratio: UnpackRatio, size: u64) -> DiskSpace {
    let bytes = size as f64 * ratio.bytes.max(1.0);
    let inodes = size as f64 * ratio.inodes.max(0.0);
    DiskSpace { bytes: bytes as u64, inodes: (inodes as u64).saturating_add(8) }
}

/// Says whether the least of `need` fits into `free` so that `reserve` is left.
pub fn admit(
    need: SpaceEstimate,
    free: DiskSpace,
    reserve: DiskSpace,
    removable: RemovableSpace,
) -> Result<(), InsufficientSpace> {
    if fits(need.least.bytes, free.bytes, reserve.bytes)
        && fits(need.least.inodes, free.inodes, reserve.inodes)
    {
        return Ok(());
    }
    Err(InsufficientSpace { need, free, reserve, removable })
}

fn fits(need: u64, free: u64, reserve: u64) -> bool {
    need == 0 || need <= free.saturating_sub(reserve)
}

/// How long a pull waits for running ones. A slow one may never use what it claims.
const WAIT: Duration = Duration::from_secs(60);

/// Space that running pulls claim. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct PullClaims(Arc<PullClaimsInner>);

#[derive(Debug, Default)]
struct PullClaimsInner {
    running: watch::Sender<RunningClaims>,
    admitting: tokio::sync::Mutex<()>,
}

/// The claims of running pulls at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RunningClaims {
    sum: DiskSpace,
    /// Free space when all of them have used what they claim, if nothing else changes.
    left: DiskSpace,
}

impl RunningClaims {
    /// Returns the part of the claims that is not used yet while this much is free. Space that something else has freed
    /// counts as unused.
    pub fn unused(self, free: DiskSpace) -> DiskSpace {
        let unused = self.left.shortfall_to(free);
        DiskSpace { bytes: unused.bytes.min(self.sum.bytes), inodes: unused.inodes.min(self.sum.inodes) }
    }

    fn begin(&mut self, claim: DiskSpace, free: DiskSpace) {
        self.left = claim.shortfall_to(self.unused(free).shortfall_to(free));
        self.sum += claim;
    }

    fn end(&mut self, claim: DiskSpace) {
        self.sum = claim.shortfall_to(self.sum);
    }
}

/// The claim of a running pull, which ends when this is dropped.
#[derive(Debug)]
pub struct PullClaim {
    claims: PullClaims,
    space: DiskSpace,
}

impl PullClaims {
    /// To be held while a pull is admitted, from before its filesystem is measured: no two get the same space.
    pub async fn admit_alone(&self) -> MutexGuard<'_, ()> {
        self.0.admitting.lock().await
    }

    /// The claims now. To be read before the filesystem is measured, which then has what an ended pull has written.
    pub fn running(&self) -> RunningClaims {
        *self.0.running.borrow()
    }

    /// Begins a claim; `free` is the measured space.
    pub fn claim(&self, space: DiskSpace, free: DiskSpace) -> PullClaim {
        self.0.running.send_modify(|running| running.begin(space, free));
        PullClaim { claims: self.clone(), space }
    }

    /// The wait of one pull for others.
    pub fn wait(&self) -> ClaimWait {
        ClaimWait { running: self.0.running.subscribe(), until: Instant::now() + WAIT }
    }
}

impl Drop for PullClaim {
    fn drop(&mut self) {
        self.claims.0.running.send_modify(|running| running.end(self.space));
    }
}

/// The wait of a pull for running ones.
#[derive(Debug)]
pub struct ClaimWait {
    running: watch::Receiver<RunningClaims>,
    until: Instant,
}

impl ClaimWait {
    /// Whether it may wait longer. To be called before the claims are read: a later change ends the wait.
    pub fn begin(&mut self) -> bool {
        self.running.mark_unchanged();
        Instant::now() < self.until
    }

    /// Waits until a pull has begun or ended, or for the rest of the time.
    pub async fn changed(&mut self) {
        let _ = timeout_at(self.until, self.running.changed()).await;
    }
}

/// The most that removing images would free. Retention may allow less.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemovableSpace {
    /// Space of all images without a mount.
    Unmounted(DiskSpace),
    /// All used space of the filesystem, where the part of the images is unknown.
    Used(DiskSpace),
}

impl RemovableSpace {
    /// Nothing.
    pub const NONE: RemovableSpace = RemovableSpace::Unmounted(DiskSpace::ZERO);

    fn amount(self) -> DiskSpace {
        let (RemovableSpace::Unmounted(amount) | RemovableSpace::Used(amount)) = self;
        amount
    }
}

/// Not enough disk space for a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InsufficientSpace {
    /// Estimated disk usage of the pull.
    pub need: SpaceEstimate,
    /// Free space.
    pub free: DiskSpace,
    /// The part of it that must remain free.
    pub reserve: DiskSpace,
    /// The most that removing images would free.
    pub removable: RemovableSpace,
}

impl InsufficientSpace {
    /// Returns true if inodes are short, and not bytes.
    fn lacks_inodes_only(&self) -> bool {
        fits(self.need.least.bytes, self.free.bytes, self.reserve.bytes)
    }

    /// Returns true if the pull would be admitted once all that is removable was removed.
    pub(crate) fn fits_after_gc(&self) -> bool {
        admit(self.need, self.free + self.removable.amount(), self.reserve, RemovableSpace::NONE).is_ok()
    }

    /// Returns the bytes that garbage collection has to free; the likely ones are no more than removing images can
    /// free. `None` if it cannot free enough, or if only inodes are short.
    pub fn reclaim_bytes(&self) -> Option<ReclaimBytes> {
        if !self.fits_after_gc() || self.lacks_inodes_only() {
            return None;
        }
        let missing = |need: u64| need.saturating_add(self.reserve.bytes).saturating_sub(self.free.bytes);
        let (least, likely) = (missing(self.need.least.bytes), missing(self.need.likely.bytes));
        Some(ReclaimBytes { least, likely: likely.min(self.removable.amount().bytes).max(least) })
    }

    /// Returns the next step that the reader could try.
    pub fn hint(&self) -> Hint {
        if let Some(bytes) = self.reclaim_bytes() {
            let free = format!("{}MB", bytes.likely.div_ceil(1_000_000));
            Hint::new().command(["gc".to_owned(), "--free".to_owned(), free]).text(" removes unused images")
        } else if self.fits_after_gc() {
            Hint::new().command(["gc", "--all-unused"]).text(" removes unused images")
        } else {
            Hint::new()
                .command(["df"])
                .text(" shows disk usage; store.reserveBytes and store.reserveInodes of it stay free")
        }
    }
}

/// `insufficient space: needs about 3.2GB, 1.1GB free (67.1MB reserved); images that are not mounted take 0B`
impl fmt::Display for InsufficientSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show: fn(&DiskSpace) -> String = if self.lacks_inodes_only() {
            |amount| format!("{} inodes", amount.inodes)
        } else {
            |amount| go_format::bytes(amount.bytes)
        };
        write!(f, "insufficient space: needs about {}, {} free", show(&self.need.likely), show(&self.free))?;
        if self.reserve != DiskSpace::default() {
            write!(f, " ({} reserved)", show(&self.reserve))?;
        }
        match &self.removable {
            RemovableSpace::Unmounted(amount) => {
                write!(f, "; images that are not mounted take {}", show(amount))
            }
            RemovableSpace::Used(amount) => write!(f, "; {} of the filesystem are used", show(amount)),
        }
    }
}

impl std::error::Error for InsufficientSpace {}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn of(bytes: u64, inodes: u64) -> DiskSpace {
        DiskSpace { bytes, inodes }
    }

    fn just(bytes: u64, inodes: u64) -> SpaceEstimate {
        SpaceEstimate { likely: of(bytes, inodes), least: of(bytes, inodes) }
    }

    /// Into a filesystem with this much space of images without a mount.
    fn admit(
        need: SpaceEstimate,
        free: DiskSpace,
        reserve: DiskSpace,
        unmounted: DiskSpace,
    ) -> Result<(), InsufficientSpace> {
        super::admit(need, free, reserve, RemovableSpace::Unmounted(unmounted))
    }

    /// Where the archive of a layer is there until it is unpacked.
    fn estimate(ratio: UnpackRatio, missing: &[u64]) -> SpaceEstimate {
        let sizes: Vec<_> = missing.iter().map(|&fetched| DeclaredSize { fetched, plain: None }).collect();
        super::estimate(ratio, &sizes, missing.iter().copied().max().unwrap_or_default())
    }

    #[test]
    fn an_image_that_does_not_fit_is_refused_with_the_sizes() {
        let error = admit(just(3 * GIB, 10), of(2 * GIB, 1000), of(GIB / 2, 0), of(GIB, 0)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "insufficient space: needs about 3.22GB, 2.15GB free (537MB reserved); images that are not mounted take 1.07GB"
        );
        assert!(!error.fits_after_gc());
        let error = admit(just(GIB, 10), of(GIB, 1000), of(GIB / 2, 0), of(GIB, 0)).unwrap_err();
        assert!(error.fits_after_gc() && error.hint().to_string().starts_with("larder gc --free 537MB "));
        assert_eq!(admit(just(GIB, 10), of(2 * GIB, 1000), of(GIB, 0), of(0, 0)), Ok(()));
    }

    #[test]
    fn the_hint_judges_as_admission_does() {
        let need = SpaceEstimate { likely: of(700, 0), least: of(400, 0) };
        let refused = |reclaimable| admit(need, of(300, 0), of(0, 0), of(reclaimable, 0)).unwrap_err();
        assert!(refused(200).hint().to_string().contains("gc"), "then it is admitted");
        assert_eq!(admit(need, of(500, 0), of(0, 0), of(0, 0)), Ok(()));
        assert!(refused(99).hint().to_string().contains("df"));
    }

    #[test]
    fn without_the_part_of_the_images_all_that_is_used_may_be_theirs() {
        let used = |used| RemovableSpace::Used(of(used, 0));
        let error = super::admit(just(700, 0), of(300, 0), of(0, 0), used(400)).unwrap_err();
        let exactly = Some(ReclaimBytes::exactly(400));
        assert_eq!(
            (error.to_string().split_once("; ").unwrap().1, error.reclaim_bytes()),
            ("400B of the filesystem are used", exactly)
        );
        let error = super::admit(just(700, 0), of(300, 0), of(0, 0), used(399)).unwrap_err();
        assert_eq!(error.reclaim_bytes(), None, "it never fits");
    }

    #[test]
    fn what_running_pulls_have_not_used_yet_is_no_room_for_others() {
        let claims = PullClaims::default();
        let unused = |free| claims.running().unused(of(free, 0)).bytes;
        assert_eq!(unused(1000), 0);
        let first = claims.claim(of(300, 0), of(1000, 0));
        assert_eq!((unused(1000), unused(900), unused(700), unused(600)), (300, 200, 0, 0));
        let second = claims.claim(of(100, 0), of(900, 0));
        assert_eq!((unused(900), unused(700)), (300, 100), "100 of the first one were used");
        assert_eq!(unused(5000), 400, "something else was freed");
        drop(first);
        assert_eq!((unused(700), unused(900)), (100, 100), "never more than is claimed");
        drop(second);
        assert_eq!(unused(1000), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_pull_waits_for_the_end_of_others_and_no_longer_than_a_minute() {
        let claims = PullClaims::default();
        let mut wait = claims.wait();
        let running = claims.claim(of(300, 0), of(1000, 0));
        let began = Instant::now();
        assert!(wait.begin());
        let ends = async {
            tokio::time::sleep(Duration::from_secs(20)).await;
            drop(running);
        };
        tokio::join!(wait.changed(), ends);
        assert_eq!(began.elapsed().as_secs(), 20);
        assert!(wait.begin());
        wait.changed().await;
        assert_eq!(began.elapsed().as_secs(), 60);
        assert!(!wait.begin());
    }

    #[test]
    fn a_shortage_of_inodes_is_a_shortage_of_space() {
        let error = admit(just(1, 1000), of(GIB, 10), of(0, 0), of(0, 5)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "insufficient space: needs about 1000 inodes, 10 inodes free; images that are not mounted take 5 inodes"
        );
    }

    #[test]
    fn nothing_to_fetch_always_fits() {
        assert_eq!(admit(estimate(UnpackRatio::default(), &[]), of(0, 0), of(GIB, 9), of(0, 0)), Ok(()));
    }

    #[test]
    fn the_ratio_follows_what_is_pulled() {
        let mut ratio = None;
        for _ in 0..50 {
            ratio = learn(ratio, 100 << 20, of(500 << 20, 100_000));
        }
        let ratio = ratio.unwrap();
        assert!((ratio.bytes - 5.0).abs() < 0.1, "{ratio:?}");
        let need = estimate(ratio, &[100 << 20]).likely;
        assert!(need.bytes >= 600 << 20 && need.bytes < 700 << 20, "{need:?}");
        assert!(need.inodes >= 100_000, "{need:?}");
        assert_eq!(learn(Some(ratio), 0, of(0, 0)), None);
    }

    #[test]
    fn an_image_that_grows_little_is_not_refused_where_it_fits() {
        // A real one: 160 MB in eight layers, 284 MB on disk.
        let layers = [77, 49, 12, 9, 6, 4, 2, 1].map(|mb| mb * 1_000_000);
        let need = estimate(UnpackRatio::default(), &layers);
        assert!((284_000_000..450_000_000).contains(&need.likely.bytes), "{need:?}");
        assert!((5_000..15_000).contains(&need.likely.inodes), "{need:?}");
        assert_eq!(admit(need, of(350_000_000, 100_000), of(0, 0), of(0, 0)), Ok(()));
        let error = admit(need, of(230_000_000, 100_000), of(0, 0), of(0, 0)).unwrap_err();
        assert!(
            error.to_string().starts_with("insufficient space: needs about 429MB, 230MB free"),
            "{error}"
        );
        // What is fetched must fit in any case.
        let dense = estimate(UnpackRatio { bytes: 0.1, inodes: 0.0 }, &layers).least;
        assert_eq!(dense.bytes, 160_000_000 + 77_000_000);
    }

    /// Of bytes that do not compress, an unpacked layer takes what its archive takes; collection makes room for both.
    #[test]
    fn a_layer_whose_size_is_declared_needs_hardly_more_than_that() {
        let digest = larder::reference::Digest::sha256("layer");
        let layer = |media_type: &str| Descriptor::new(media_type, digest.clone(), 100_000_000);
        let needs = |layer: &Descriptor| {
            let need = super::estimate(FIRST, &[DeclaredSize::of(layer)], layer.size);
            (need.least.bytes / 1_000_000, need.likely.bytes / 1_000_000)
        };
        let gzip = "application/vnd.oci.image.layer.v1.tar+gzip";
        assert_eq!(needs(&layer(gzip)), (200, 320), "nothing is known");
        assert_eq!(needs(&layer("application/vnd.oci.image.layer.v1.tar")), (200, 210));
        let mut estargz = layer(gzip);
        estargz.annotations.insert(PLAIN_SIZE.to_owned(), "300000000".to_owned());
        assert_eq!(needs(&estargz), (250, 430));
        estargz.annotations.insert(PLAIN_SIZE.to_owned(), "many".to_owned());
        assert_eq!(needs(&estargz), (200, 320));
    }

    #[test]
    fn one_odd_image_does_not_spoil_the_ratio() {
        let ratio = learn(None, 100, of(100 << 20, 1_000_000)).unwrap();
        assert!(ratio.bytes < 5.0 && ratio.inodes < 0.01, "{ratio:?}");
    }

    #[test]
    fn no_declared_size_overflows() {
        let need = estimate(UnpackRatio { bytes: f64::MAX, inodes: f64::MAX }, &[u64::MAX, u64::MAX]);
        assert_eq!(need, just(u64::MAX, u64::MAX));
        assert!(admit(need, of(u64::MAX - 1, 0), of(u64::MAX, u64::MAX), of(0, 0)).is_err());
    }
}
