//! The budgets of all recently used hosts. Clients may name any number of hosts; only a bounded number is remembered.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::time::Instant;

use super::budget::HostBudget;

/// Number of hosts that are remembered, unless more are in use at once.
const MAX_BUDGETS: usize = 256;

/// By scheme, host and port.
#[derive(Debug, Default)]
pub(super) struct HostBudgets(HashMap<String, BudgetEntry>);

#[derive(Debug)]
struct BudgetEntry {
    budget: Arc<HostBudget>,
    last: Instant,
}

impl HostBudgets {
    /// The budget of a host, created if needed. May evict another host: the least recently used, and hosts with a requested
    /// wait only after all others.
    pub(super) fn of(
        &mut self,
        origin: String,
        now: Instant,
        new: impl FnOnce() -> HostBudget,
    ) -> Arc<HostBudget> {
        if !self.0.contains_key(&origin) && self.0.len() >= MAX_BUDGETS {
            self.forget_one(now);
        }
        let used = self.0.entry(origin).or_insert_with(|| BudgetEntry { budget: Arc::new(new()), last: now });
        used.last = now;
        Arc::clone(&used.budget)
    }

    /// All remembered budgets.
    pub(super) fn all(&self) -> Vec<Arc<HostBudget>> {
        self.0.values().map(|used| Arc::clone(&used.budget)).collect()
    }

    fn forget_one(&mut self, now: Instant) {
        // A budget in use is never evicted: a second one for the same host would double its limits.
        let idle =
            self.0.iter().filter(|(_, used)| Arc::strong_count(&used.budget) == 1 && used.budget.is_idle());
        let oldest = idle.min_by_key(|(_, used)| (used.budget.held_until(now).is_some(), used.last));
        if let Some(origin) = oldest.map(|(origin, _)| origin.clone()) {
            self.0.remove(&origin);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::budget::RateLimitScope;

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
        assert!(!budgets.0.contains_key("idle"));
    }
}
