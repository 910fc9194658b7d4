//! Notifications to the service manager (`NOTIFY_SOCKET`), if there is one.

use std::future;
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::time;

/// How much longer than the grace period a stop may take.
const TO_END: Duration = Duration::from_secs(5);

/// The socket is served; also, a reload has ended.
pub(super) fn ready() {
    notify(&[NotifyState::Ready]);
}

/// A reload begins. The time is what `Type=notify-reload` wants to know.
pub(super) fn reloading() {
    let states = [Ok(NotifyState::Reloading), NotifyState::monotonic_usec_now()];
    notify(&states.into_iter().flatten().collect::<Vec<_>>());
}

/// The daemon ends, and lets what is under way go on for so long.
pub(super) fn stopping(grace: Duration) {
    let most = (grace + TO_END).as_micros().try_into().unwrap_or(u32::MAX);
    notify(&[NotifyState::Stopping, NotifyState::ExtendTimeoutUsec(most)]);
}

/// Says that the daemon lives, twice as often as the manager wants to hear it, until dropped.
pub(super) async fn watchdog() {
    let wanted = sd_notify::watchdog_enabled().filter(|period| !period.is_zero());
    let Some(period) = wanted else { return future::pending().await };
    let mut ticks = time::interval(period / 2);
    loop {
        ticks.tick().await;
        notify(&[NotifyState::Watchdog]);
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!("cannot notify systemd: {error}");
    }
}
