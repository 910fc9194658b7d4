//! The budgets of all recently used hosts. Clients may name any number of hosts; only a bounded number is remembered.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use tokio::time::Instant;

use super::budget::{HostBudget, RegistryLoad};

/// Number of hosts that are remembered, unless more are in use at once.
const MAX_BUDGETS: usize = 256;
/// Number of hosts that have metrics of their own: the first that were used. Images name any number of hosts, and each
/// series of a metric is one forever.
const MAX_SERIES: usize = 32;
/// The series of all other hosts. No host has this name: hosts without a dot or port are Docker Hub's repositories.
const OTHER: &str = "other";

/// Budgets by scheme, host and port.
#[derive(Debug, Default)]
pub(super) struct HostBudgets {
    entries: HashMap<String, BudgetEntry>,
    /// Hosts with metrics of their own.
    named: BTreeSet<String>,
    /// Counts of evicted budgets by series: a counter does not decrease.
    evicted: BTreeMap<String, RegistryLoad>,
}

#[derive(Debug)]
struct BudgetEntry {
    budget: Arc<HostBudget>,
    last: Instant,
}

impl HostBudgets {
    /// The budget of a host, created if needed. May evict another host: the least recently used, and hosts with a
    /// requested wait only after all others.
    pub(super) fn of(
        &mut self,
        origin: String,
        now: Instant,
        new: impl FnOnce() -> HostBudget,
    ) -> Arc<HostBudget> {
        if !self.entries.contains_key(&origin) && self.entries.len() >= MAX_BUDGETS {
            self.forget_one(now);
        }
        let used =
            self.entries.entry(origin).or_insert_with(|| BudgetEntry { budget: Arc::new(new()), last: now });
        if self.named.len() < MAX_SERIES && !self.named.contains(used.budget.host()) {
            self.named.insert(used.budget.host().to_owned());
        }
        used.last = now;
        Arc::clone(&used.budget)
    }

    /// All remembered budgets.
    pub(super) fn all(&self) -> Vec<Arc<HostBudget>> {
        self.entries.values().map(|used| Arc::clone(&used.budget)).collect()
    }

    /// The load of each host with metrics of its own, and of all others as one.
    pub(super) fn series(&self, now: Instant) -> Vec<RegistryLoad> {
        let mut series = self.evicted.clone();
        for used in self.entries.values() {
            add_load(&mut series, self.series_of(used.budget.host()), &used.budget.load(now));
        }
        series.into_values().collect()
    }

    fn series_of(&self, host: &str) -> String {
        if self.named.contains(host) { host.to_owned() } else { OTHER.to_owned() }
    }

    fn forget_one(&mut self, now: Instant) {
        // A budget in use is never evicted: a second one for the same host would double its limits.
        let idle = self
            .entries
            .iter()
            .filter(|(_, used)| Arc::strong_count(&used.budget) == 1 && used.budget.is_idle());
        let oldest = idle.min_by_key(|(_, used)| (used.budget.held_until(now).is_some(), used.last));
        if let Some(origin) = oldest.map(|(origin, _)| origin.clone())
            && let Some(used) = self.entries.remove(&origin)
        {
            let counts = used.budget.load(now).counts();
            let series = self.series_of(used.budget.host());
            add_load(&mut self.evicted, series, &counts);
        }
    }
}

fn add_load(series: &mut BTreeMap<String, RegistryLoad>, name: String, load: &RegistryLoad) {
    match series.get_mut(&name) {
        Some(known) => known.add(load),
        None => drop(series.insert(name.clone(), RegistryLoad { host: name, ..load.clone() })),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::budget::{RateLimitScope, RequestSize};
    use crate::fetch_notice::FetchWatcher;

    #[tokio::test(start_paused = true)]
    async fn hosts_that_are_not_used_are_forgotten_and_those_that_asked_to_wait_last() {
        let (mut budgets, start) = (HostBudgets::default(), Instant::now());
        let mut of = |host: &str, seconds: u64| {
            budgets.of(host.to_owned(), start + Duration::from_secs(seconds), || HostBudget::new(host, 4))
        };
        let in_use = of("used", 0);
        let wait = Duration::from_secs(800);
        of("slow down", 1).pause(RateLimitScope::Host, start, wait, wait);
        let before = of("idle", 2).load(start).host;
        assert_eq!(before, "idle");
        for n in 0..1000 {
            of(&format!("host {n}"), 3);
        }
        assert!(Arc::ptr_eq(&of("used", 4), &in_use));
        assert!(of("slow down", 4).held_until(start).is_some(), "it would be asked too soon");
        assert_eq!(budgets.all().len(), MAX_BUDGETS);
        assert!(!budgets.entries.contains_key("idle"));
    }

    #[tokio::test(start_paused = true)]
    async fn any_number_of_hosts_has_a_bounded_number_of_series_whose_counts_never_decrease() {
        let (mut budgets, start) = (HostBudgets::default(), Instant::now());
        let mut before = BTreeMap::<String, u64>::new();
        for n in 0..3000_u64 {
            let host = format!("host-{}.example", if n % 3 == 0 { n % 7 } else { n });
            let now = start + Duration::from_secs(n);
            let budget = budgets.of(host.clone(), now, || HostBudget::new(host, 4));
            budget
                .acquire(RequestSize::Small, 0, Duration::ZERO, &FetchWatcher::default())
                .await
                .unwrap()
                .add_received(10);
            drop(budget);
            let counts = budgets
                .series(now)
                .into_iter()
                .map(|load| (load.host, load.bytes))
                .collect::<BTreeMap<_, _>>();
            assert!(before.iter().all(|(host, bytes)| counts[host] >= *bytes), "{before:?}, then {counts:?}");
            assert_eq!(counts.values().sum::<u64>(), (n + 1) * 10);
            before = counts;
        }
        assert_eq!(before.len(), MAX_SERIES + 1);
        assert!(before[OTHER] > 15_000, "{before:?}");
    }
}
