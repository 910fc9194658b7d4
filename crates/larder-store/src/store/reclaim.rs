//! Reclaims what no image needs: ingests and layers of pulls that ended without an image, expired leases, and removed
//! files.
//!
//! Two conditions retain an ingest or a resumable layer. A running pull references them ([`Store::reference_ingests`]),
//! whatever the trigger. And until space is needed, the lease of an ended pull retains what the next attempt can use,
//! also across restarts. Such a lease is no source of [retention](larder::retention), which is about images: leases on
//! images are in the [`RemovalGate`](larder::retention::RemovalGate).

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use larder::gc::{ClockReading, ReclaimOutcome, ReclaimTrigger, ReclaimableSpace};

use super::blob_source::IngestId;
use super::db::{DbRead, DbResult, LAYERS, LEASES};
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::{OpenStore, Store};
use super::layout::{digest_of_name, names_in};
use super::records::{LayerRecord, LeaseRecord, seconds};
use super::references::{ItemReference, ReferencedItem};
use super::remove::unused;
use super::resumable_list::UncommittedLayer;
use crate::disk::{DiskSpace, measure};

/// Ingests that a running pull needs. They and their layers are not reclaimed until this is dropped.
#[derive(Debug)]
pub struct IngestReferences {
    _held: Vec<ItemReference>,
}

/// The conditions of one reclaim.
#[derive(Debug)]
struct ReclaimRule {
    trigger: ReclaimTrigger,
    now: ClockReading,
    /// How long an ingest without a lease is retained after its last write.
    ingest_keep: Duration,
}

impl ReclaimRule {
    fn needs_space(&self) -> bool {
        self.trigger != ReclaimTrigger::Schedule
    }

    /// Whether a lease still retains what it names. That of an incomplete layer ends with the layer, or its completion.
    fn is_in_force(&self, lease: &LeaseRecord, is_in_flight: impl Fn(&IngestId) -> bool) -> bool {
        if lease.is_of_fill() {
            return true;
        }
        let has_expired = lease.left(&self.now).is_zero();
        lease.leased.ingests.iter().any(is_in_flight) || !(has_expired || self.needs_space())
    }

    /// Whether an ingest that no running pull needs is reclaimed; it was last written at `written`.
    fn can_reclaim_ingest(&self, is_leased: bool, written: Option<SystemTime>) -> bool {
        let now = SystemTime::from(self.now.wall);
        let idle = |written| seconds(now).saturating_sub(seconds(written)) >= self.ingest_keep.as_secs();
        !is_leased && (self.needs_space() || written.is_none_or(idle))
    }
}

impl Store {
    /// References the ingests of a pull, so that neither they nor their layers are reclaimed while it runs.
    pub fn reference_ingests(&self, ingests: impl IntoIterator<Item = IngestId>) -> IngestReferences {
        let hold = |ingest| self.0.references.add(ReferencedItem::PulledBlob(ingest));
        IngestReferences { _held: ingests.into_iter().map(hold).collect() }
    }

    /// Creates a lease, or replaces the one with this ID. Durable when it returns.
    pub fn lease(&self, lease: &LeaseRecord) -> Result<(), StoreError> {
        self.0.db.write("create a lease", |writer| Ok(writer.put(LEASES, &lease.id, lease)?))
    }

    /// Ends a lease; succeeds if it has already ended.
    pub fn end_lease(&self, id: &str) -> Result<(), StoreError> {
        self.0.db.write("end a lease", |writer| Ok(writer.delete(LEASES, id)?))
    }

    /// The leases that have not expired at `now`.
    pub fn leases(&self, now: &ClockReading) -> Result<Vec<LeaseRecord>, StoreError> {
        let mut leases: Vec<LeaseRecord> = self.0.db.read("list leases", |reader| reader.all(LEASES))?;
        leases.retain(|lease| !lease.left(now).is_zero());
        Ok(leases)
    }

    /// Returns the space that [`reclaim`](Store::reclaim) would free now.
    pub fn reclaimable(
        &self,
        trigger: ReclaimTrigger,
        now: &ClockReading,
    ) -> Result<ReclaimableSpace, StoreError> {
        self.0.reclaimable(&self.0.reclaim_rule(trigger, now))
    }

    /// Frees what no image and no running pull needs. The space is free when this returns. With
    /// [`ReclaimTrigger::Schedule`], what a later pull could resume with is retained.
    pub fn reclaim(&self, trigger: ReclaimTrigger, now: &ClockReading) -> ReclaimOutcome<StoreError> {
        let mut freed = ReclaimableSpace::default();
        let error = self.reclaim_in_steps(&self.0.reclaim_rule(trigger, now), &mut freed).err();
        ReclaimOutcome { freed, error }
    }

    /// Adds to `freed` what is free after each step.
    fn reclaim_in_steps(&self, rule: &ReclaimRule, freed: &mut ReclaimableSpace) -> Result<(), StoreError> {
        let trash = self.0.trash_usage()?;
        // First what needs no write to the database: that may fail on a full disk.
        self.empty_trash()?;
        freed.trash += trash;
        let mut resumable = ReclaimableSpace::default();
        let discarded = self.0.discard_resumable(rule, &mut resumable);
        self.empty_trash()?;
        *freed += resumable;
        discarded?;
        self.0.end_leases(rule)?;
        let unused = self.0.sweep()?;
        let remnants = self.0.discard_remnants(&self.0.excess_remnants()?)?;
        self.empty_trash()?;
        freed.layers += unused;
        freed.remnants += remnants;
        Ok(())
    }

    /// Removes expired leases, unused layers, and partially fetched blobs that were not written
    /// for [`ingest_keep`](super::StoreConfig::ingest_keep). Cheap when there is nothing to do, and returns before the
    /// files are deleted.
    pub fn sweep(&self, now: &ClockReading) -> Result<(), StoreError> {
        let rule = &self.0.reclaim_rule(ReclaimTrigger::Schedule, now);
        self.0.discard_resumable(rule, &mut ReclaimableSpace::default())?;
        self.0.end_leases(rule)?;
        self.0.discard_remnants(&self.0.excess_remnants()?)?;
        self.0.sweep().map(drop)
    }

    /// Bytes on disk of these ingests.
    pub(crate) fn ingested_bytes<'a>(&self, ingests: impl IntoIterator<Item = &'a IngestId>) -> u64 {
        let bytes = |ingest| measure(&self.0.layout.ingest(ingest)).map_or(0, |usage| usage.bytes);
        ingests.into_iter().map(bytes).sum()
    }
}

impl OpenStore {
    fn reclaim_rule(&self, trigger: ReclaimTrigger, now: &ClockReading) -> ReclaimRule {
        ReclaimRule { trigger, now: now.clone(), ingest_keep: self.config.ingest_keep }
    }

    fn is_in_flight(&self, ingest: &IngestId) -> bool {
        self.references.has(&ReferencedItem::PulledBlob(ingest.clone()))
    }

    fn is_in_force(&self, rule: &ReclaimRule, lease: &LeaseRecord) -> bool {
        rule.is_in_force(lease, |ingest| self.is_in_flight(ingest))
    }

    /// The ingests that leases in force name.
    fn leased_by(&self, rule: &ReclaimRule) -> Result<HashSet<IngestId>, StoreError> {
        let mut leased = HashSet::new();
        let note = |lease: LeaseRecord| {
            if self.is_in_force(rule, &lease) {
                leased.extend(lease.leased.ingests);
            }
        };
        self.db.read("look up the leases of pulls", |reader| reader.for_each(LEASES, note))?;
        Ok(leased)
    }

    fn reclaimable(&self, rule: &ReclaimRule) -> Result<ReclaimableSpace, StoreError> {
        let doing = "measure reclaimable space";
        let leased = self.leased_by(rule)?;
        let mut downloads = DiskSpace::ZERO;
        for ingest in self.ingests()? {
            let in_use =
                self.is_in_flight(&ingest) || self.references.has(&ReferencedItem::Ingest(ingest.clone()));
            if !in_use && rule.can_reclaim_ingest(leased.contains(&ingest), self.written(&ingest)) {
                downloads += measure(&self.layout.ingest(&ingest)).context(doing)?;
            }
        }
        let resumable = self.uncommitted_layers.kept.usage_of(|layer| self.can_reclaim_layer(&leased, layer));
        let unused = self.db.read(doing, |reader| {
            let unused = unused(reader, &self.references, |lease| self.is_in_force(rule, lease))?;
            let usage = |key: &super::records::LayerKey| -> DbResult<DiskSpace> {
                let layer = reader.get::<LayerRecord>(LAYERS, key.as_str())?;
                let freed = |layer: LayerRecord| self.kept_of(&layer).shortfall_to(layer.usage);
                Ok(layer.filter(|layer| layer.present).map_or(DiskSpace::ZERO, freed))
            };
            unused.iter().map(usage).sum::<DbResult<DiskSpace>>()
        })?;
        let trash = self.trash_usage()?;
        let remnants = self.excess_remnants()?;
        let remnants: DiskSpace = remnants.iter().map(|remnant| self.taken_by_remnant(remnant)).sum();
        let layers = resumable + unused;
        Ok(ReclaimableSpace { downloads, layers, remnants, trash, ..ReclaimableSpace::default() })
    }

    /// Moves ingests and resumable layers to the trash. Adds each to `freed`.
    fn discard_resumable(&self, rule: &ReclaimRule, freed: &mut ReclaimableSpace) -> Result<(), StoreError> {
        let leased = self.leased_by(rule)?;
        self.discard_idle_ingests(rule, &leased, &mut freed.downloads)?;
        self.discard_resumable_layers(|layer| self.can_reclaim_layer(&leased, layer), &mut freed.layers)
    }

    fn can_reclaim_layer(&self, leased: &HashSet<IngestId>, layer: &UncommittedLayer) -> bool {
        !layer.is_of(leased) && !layer.ingests().any(|ingest| self.is_in_flight(&ingest))
    }

    fn discard_idle_ingests(
        &self,
        rule: &ReclaimRule,
        leased: &HashSet<IngestId>,
        freed: &mut DiskSpace,
    ) -> Result<(), StoreError> {
        let doing = "clean up interrupted fetches";
        for ingest in self.ingests()? {
            // No fetch of it can start in between.
            let Some(_hold) = self.references.add_exclusive(ReferencedItem::Ingest(ingest.clone())) else {
                continue;
            };
            if self.is_in_flight(&ingest)
                || !rule.can_reclaim_ingest(leased.contains(&ingest), self.written(&ingest))
            {
                continue;
            }
            let dir = self.layout.ingest(&ingest);
            let usage = measure(&dir).context(doing)?;
            self.discard(&dir).context(doing)?;
            *freed += usage;
            self.trash.kick();
        }
        Ok(())
    }

    /// Drops the leases that are not in force.
    fn end_leases(&self, rule: &ReclaimRule) -> Result<(), StoreError> {
        let doing = "end leases";
        let is_over = |lease: &LeaseRecord| !self.is_in_force(rule, lease);
        let leases: Vec<LeaseRecord> = self.db.read(doing, |reader| reader.all(LEASES))?;
        if !leases.iter().any(is_over) {
            return Ok(());
        }
        self.db.write(doing, |writer| {
            // Read again: a lease may have been renewed since.
            for lease in writer.all::<LeaseRecord>(LEASES)?.iter().filter(|lease| is_over(lease)) {
                writer.delete(LEASES, &lease.id)?;
            }
            Ok(())
        })
    }

    /// The ingests on the disk.
    fn ingests(&self) -> Result<Vec<IngestId>, StoreError> {
        let names = names_in(&self.layout.ingests()).context("list downloads")?;
        Ok(names.iter().filter_map(|name| digest_of_name(name)).map(IngestId::of_digest).collect())
    }

    /// When an ingest was last written.
    fn written(&self, ingest: &IngestId) -> Option<SystemTime> {
        fs_err::metadata(self.layout.ingest(ingest)).and_then(|metadata| metadata.modified()).ok()
    }

    fn trash_usage(&self) -> Result<DiskSpace, StoreError> {
        let doing = "measure the trash";
        let names = names_in(&self.layout.trash()).context(doing)?;
        names.iter().map(|name| measure(&self.layout.trash().join(name)).context(doing)).sum()
    }
}
