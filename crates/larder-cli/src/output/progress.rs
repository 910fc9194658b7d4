//! What is being pulled right now, live on a terminal; nothing anywhere else.

use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use larder::pull::{Phase, PullStatus};
use tokio::time::Instant;

use super::size;

/// How many pulls are shown at once; more would push the events off the screen.
const SHOWN: usize = 12;

/// Lines at the bottom of the terminal. Everything else that is printed goes [above](Progress::above) them.
pub(crate) struct Progress {
    /// `None` when standard error is no terminal.
    live: Option<Live>,
}

struct Live {
    screen: MultiProgress,
    lines: Mutex<Vec<ProgressBar>>,
}

impl Progress {
    /// Draws if `live`.
    pub(crate) fn new(live: bool) -> Self {
        let live = live.then(|| Live {
            screen: MultiProgress::with_draw_target(ProgressDrawTarget::stderr()),
            lines: Mutex::default(),
        });
        Progress { live }
    }

    /// Whether anything is drawn.
    pub(crate) fn is_live(&self) -> bool {
        self.live.is_some()
    }

    /// Prints something that stays, above the lines.
    pub(crate) fn above(&self, print: impl FnOnce()) {
        match &self.live {
            Some(live) => live.screen.suspend(print),
            None => print(),
        }
    }

    /// Shows these pulls, and how many of all images are done.
    pub(crate) fn update(&self, pulls: &[PullStatus], done: usize, all: usize, now: Instant) {
        let Some(live) = &self.live else {
            return;
        };
        let mut texts: Vec<String> = pulls.iter().take(SHOWN).map(|pull| line(pull, now)).collect();
        if pulls.len() > SHOWN {
            texts.push(format!("... and {} more", pulls.len() - SHOWN));
        }
        texts.push(format!("{done} of {all} done"));
        live.show(&texts);
    }

    /// Wipes the lines.
    pub(crate) fn clear(&self) {
        if let Some(live) = &self.live {
            live.show(&[]);
        }
    }
}

impl Live {
    fn show(&self, texts: &[String]) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = texts.len().min(lines.len());
        for gone in lines.drain(kept..) {
            gone.finish_and_clear();
            self.screen.remove(&gone);
        }
        while lines.len() < texts.len() {
            // The template is a constant of ours; were it wrong, the default look would do.
            let style =
                ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
            lines.push(self.screen.add(ProgressBar::new(0).with_style(style)));
        }
        for (line, text) in lines.iter().zip(texts) {
            line.set_message(text.clone());
            line.tick();
        }
    }
}

/// One pull: image, phase, what it waits for, how long, how much. Writing to a text does not fail.
fn line(pull: &PullStatus, now: Instant) -> String {
    let elapsed = now.saturating_duration_since(pull.since).as_secs();
    let mut text = format!("{}   {}", pull.image, pull.phase);
    if let Some(waiting) = pull.waiting.filter(|_| pull.phase != Phase::Pulling) {
        let _ = write!(text, ", waits for {waiting}");
    }
    let _ = write!(text, "   {elapsed}s");
    if let Some(bytes) = pull.bytes {
        let _ = write!(text, "   {}", size::bytes(bytes.done));
        if let Some(total) = bytes.total {
            let _ = write!(text, " of {} ({})", size::bytes(total), size::percent(bytes.done, total));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use larder::backend::Bytes;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_line_tells_phase_wait_time_and_bytes() {
        let since = Instant::now();
        let mut pull = PullStatus {
            image: "busybox:1.36".into(),
            phase: Phase::Queued,
            waiting: Some("a free slot"),
            bytes: None,
            since,
        };
        assert_eq!(line(&pull, since), "busybox:1.36   queued, waits for a free slot   0s");
        pull.phase = Phase::Pulling;
        pull.bytes = Some(Bytes { done: 1_500_000, total: Some(3_000_000) });
        let now = since + Duration::from_secs(7);
        assert_eq!(line(&pull, now), "busybox:1.36   pulling   7s   1.5MB of 3MB (50%)");
    }
}
