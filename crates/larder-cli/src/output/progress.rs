//! Progress of running pulls: live on a terminal, and as data where that is wanted.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use larder::backend::{ByteProgress, LayerPhase, LayerProgress};
use larder::pull::{PullPhase, PullStatus};
use larder::reference::ImageName;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::progress_timeline::{ProgressChange, ProgressTimeline, phase_of, wait_of};
use super::size;
use super::table::end_of;

/// Characters of a bar, for terminals with room for it.
const BAR: usize = 20;

/// How many pulls are shown at once; more would push the events off the screen.
const SHOWN: usize = 12;

/// Lines at the bottom of the terminal. [`Printer`](crate::printer::Printer) prints everything else above them.
pub(crate) struct ProgressLines {
    /// `None` when standard error is no terminal.
    live: Option<LiveLines>,
    /// `None` unless the output has progress.
    course: Option<Mutex<ProgressTimeline>>,
}

struct LiveLines {
    screen: MultiProgress,
    lines: Mutex<Option<ProgressBar>>,
    places: Mutex<RowPlaces>,
}

/// The images in the order of their rows. An image keeps its place, also after its pull has ended, until another pull
/// needs it.
#[derive(Debug, Default)]
struct RowPlaces(Vec<ImageName>);

impl RowPlaces {
    /// The pull of each row, at most `rows`; `None` after its end. Running pulls get rows before those that wait.
    fn assign<'a>(
        &mut self,
        pulls: &'a [PullStatus],
        rows: usize,
    ) -> Vec<(ImageName, Option<&'a PullStatus>)> {
        let find = |image: &ImageName| pulls.iter().find(|pull| pull.image == *image);
        let is_running = |pull: &PullStatus| pull.phase == PullPhase::Pulling;
        // A terminal that has become smaller.
        while self.0.len() > rows {
            let ended = self.0.iter().position(|image| find(image).is_none());
            let waiting =
                || self.0.iter().rposition(|image| find(image).is_some_and(|pull| !is_running(pull)));
            let at = ended.or_else(waiting).unwrap_or(self.0.len() - 1);
            self.0.remove(at);
        }
        let (running, waiting): (Vec<_>, Vec<_>) = pulls.iter().partition(|pull| is_running(pull));
        for pull in running.into_iter().chain(waiting) {
            if self.0.contains(&pull.image) {
                continue;
            }
            let ended = self.0.iter().position(|image| find(image).is_none());
            let behind = || {
                let waits = |image: &ImageName| find(image).is_some_and(|other| !is_running(other));
                self.0.iter().rposition(waits).filter(|_| is_running(pull))
            };
            if self.0.len() < rows {
                self.0.push(pull.image.clone());
            } else if let Some(at) = ended.or_else(behind) {
                self.0[at] = pull.image.clone();
            }
        }
        self.0.iter().map(|image| (image.clone(), find(image))).collect()
    }
}

impl ProgressLines {
    /// Draws on standard error if `live`, else not at all.
    pub(crate) fn new(live: bool) -> Self {
        if live {
            ProgressLines::on(ProgressDrawTarget::stderr())
        } else {
            ProgressLines { live: None, course: None }
        }
    }

    /// Draws here.
    pub(crate) fn on(target: ProgressDrawTarget) -> Self {
        let live = LiveLines {
            screen: MultiProgress::with_draw_target(target),
            lines: Mutex::default(),
            places: Mutex::default(),
        };
        ProgressLines { live: Some(live), course: None }
    }

    /// Keeps the progress as data, too.
    #[must_use]
    pub(crate) fn recorded(self) -> Self {
        ProgressLines { course: Some(Mutex::default()), ..self }
    }

    /// Returns the progress in order, if it was kept.
    pub(crate) fn course(&self) -> Vec<ProgressChange> {
        let course = self.course.as_ref().map(|course| course.lock());
        course.map(|course| course.records()).unwrap_or_default()
    }

    /// Whether [`update`](ProgressLines::update) is of any use.
    pub(crate) fn is_wanted(&self) -> bool {
        self.live.is_some() || self.course.is_some()
    }

    /// Whether anything is drawn.
    pub(crate) fn is_live(&self) -> bool {
        self.live.is_some()
    }

    /// Prints permanent text above the lines. `print` must not call this function.
    pub(crate) fn above(&self, print: impl FnOnce()) {
        match &self.live {
            Some(live) => live.screen.suspend(print),
            None => print(),
        }
    }

    /// Shows these pulls, and how many of all images are done.
    pub(crate) fn update(&self, pulls: &[PullStatus], done: usize, all: usize, now: Instant) {
        if let Some(course) = &self.course {
            course.lock().note(pulls, SystemTime::now(), now);
        }
        let Some(live) = &self.live else {
            return;
        };
        let texts = lines(&mut live.places.lock(), pulls, (done, all), now, size_of_terminal());
        live.show(&texts);
    }

    /// Wipes the lines.
    pub(crate) fn clear(&self) {
        if let Some(live) = &self.live {
            live.show(&[]);
        }
    }
}

impl LiveLines {
    /// Draws these lines in place of the earlier ones. All lines are the message of one bar: they are wiped together.
    fn show(&self, texts: &[String]) {
        let mut lines = self.lines.lock();
        if texts.is_empty() {
            if let Some(bar) = lines.take() {
                bar.finish_and_clear();
                self.screen.remove(&bar);
            }
            return;
        }
        let bar = lines.get_or_insert_with(|| {
            // The template is a constant of ours; were it wrong, the default look would do.
            let style =
                ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
            self.screen.add(ProgressBar::new(0).with_style(style))
        });
        bar.set_message(texts.join("\n"));
        bar.tick();
    }
}

/// Rows and columns of the terminal; as of old where it does not say.
fn size_of_terminal() -> (usize, usize) {
    let (rows, columns) = console::Term::stderr().size_checked().unwrap_or((24, 80));
    (rows.into(), columns.into())
}

/// Returns the lines to draw: a row for each image at its place, with reasons to wait and layers below it as far as
/// there is room; then the sum. All of it fits: at most half of the rows, so that events stay in sight, and no line
/// that would wrap.
fn lines(
    places: &mut RowPlaces,
    pulls: &[PullStatus],
    (done, all): (usize, usize),
    now: Instant,
    (rows, columns): (usize, usize),
) -> Vec<String> {
    let shown = SHOWN.min((rows / 2).saturating_sub(1)).max(1);
    let assigned = places.assign(pulls, shown);
    let mut room = shown.saturating_sub(assigned.len());
    let mut texts = Vec::new();
    for (image, pull) in assigned {
        let Some(pull) = pull else {
            let name = end_of(image.as_str(), columns.saturating_sub("   ended".len() + 1));
            texts.push(format!("{name}   ended"));
            continue;
        };
        let row = line(pull, now, columns);
        let wait = wait_of(pull).map(|wait| wait.at(now));
        let hidden = wait.as_ref().filter(|wait| !row.contains(*wait));
        texts.push(row);
        for part in hidden.iter().flat_map(|wait| wrapped(wait, columns.saturating_sub(5))).take(room) {
            texts.push(format!("    {part}"));
            room -= 1;
        }
        let layers = pull.detail.iter().flat_map(|detail| &detail.layers).filter(|layer| is_active(layer));
        for layer in layers {
            let own_wait =
                layer.waiting.as_ref().map(|wait| wait.at(now)).filter(|own| wait.as_ref() != Some(own));
            for text in layer_lines(layer, own_wait.as_deref(), columns).into_iter().take(room) {
                texts.push(text);
                room -= 1;
            }
        }
    }
    texts.push(sum(pulls, done, all, shown, now, columns));
    texts
}

/// The words of a text in lines of at most this many characters; longer words are cut.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let word: String = word.chars().take(width).collect();
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(&word);
            }
            _ => lines.push(word),
        }
    }
    lines
}

/// The sum of all pulls: how many are done, and bytes, rate and remaining time of those that run.
fn sum(pulls: &[PullStatus], done: usize, all: usize, shown: usize, now: Instant, columns: usize) -> String {
    let mut text = format!("{done} of {all} done");
    let more = pulls.len().saturating_sub(shown);
    if more > 0 {
        let _ = write!(text, ", \u{2026} {more} more");
    }
    let known: Vec<ByteProgress> = pulls.iter().filter_map(|pull| pull.bytes).collect();
    if pulls.len() > 1 && !known.is_empty() {
        let total: Option<u64> = known.iter().map(|bytes| bytes.total).sum();
        let bytes = ByteProgress { done: known.iter().map(|bytes| bytes.done).sum(), total };
        let rate: u64 = pulls.iter().filter_map(rate_of).sum();
        // Images whose size is not known yet would make it longer.
        let is_complete = known.len() == pulls.len() && done + pulls.len() == all;
        let left = pulls.iter().filter(|_| is_complete).find_map(|pull| time_left(pull, bytes, rate, now));
        push_bytes(&mut text, bytes, Some(rate).filter(|rate| *rate > 0), left);
    }
    text.chars().take(columns.saturating_sub(1)).collect()
}

/// One pull as wide as the terminal allows: with a bar and all that is known, else with less, else with the end of its
/// name.
fn line(pull: &PullStatus, now: Instant, columns: usize) -> String {
    let fits = |text: &String| text.chars().count() < columns;
    let full = full_line(pull, now);
    let bytes = bytes_of(pull);
    if let Some(with_bar) = bytes.and_then(bar).map(|bar| format!("{full}   {bar}")).filter(fits) {
        return with_bar;
    }
    if fits(&full) {
        return full;
    }
    let elapsed = now.saturating_duration_since(pull.since).as_secs();
    let phase = phase_of(pull);
    let rest = match bytes {
        Some(bytes) => {
            let left = left_text(time_left(pull, bytes, rate_of(pull).unwrap_or(0), now));
            format!("   {phase}   {elapsed}s   {}{left}", percent_of(bytes))
        }
        None => format!("   {phase}   {elapsed}s"),
    };
    let room = columns.saturating_sub(rest.chars().count() + 1);
    // Images differ in the end of their names; registries are often the same.
    format!("{}{rest}", end_of(pull.image.as_str(), room)).chars().take(columns.saturating_sub(1)).collect()
}

/// One pull: image, phase, what it waits for, how long, how much, how fast. Writing to a text does not fail.
pub(crate) fn full_line(pull: &PullStatus, now: Instant) -> String {
    let elapsed = now.saturating_duration_since(pull.since).as_secs();
    let mut text = format!("{}   {}", pull.image, phase_of(pull));
    if let Some(waiting) = pull.waiting.as_ref().filter(|_| pull.phase != PullPhase::Pulling) {
        let _ = write!(text, ", waits for {waiting}");
    }
    let _ = write!(text, "   {elapsed}s");
    push_progress(&mut text, pull, now);
    if let Some(wait) = wait_of(pull) {
        let _ = write!(text, "   {}", wait.at(now));
    }
    text
}

/// Adds how much of a pull is done, how fast it is, and how long it still takes.
pub(crate) fn push_progress(text: &mut String, pull: &PullStatus, now: Instant) {
    if let Some(bytes) = bytes_of(pull) {
        let rate = rate_of(pull);
        push_bytes(text, bytes, rate, time_left(pull, bytes, rate.unwrap_or(0), now));
    }
}

/// The bytes of a pull: those that are fetched; when all are, those that are unpacked.
fn bytes_of(pull: &PullStatus) -> Option<ByteProgress> {
    let layers = pull.detail.iter().flat_map(|detail| &detail.layers);
    if phase_of(pull) != LayerPhase::Unpacking.to_string() {
        return pull.bytes;
    }
    let counted: Vec<ByteProgress> =
        layers.map(|layer| layer.bytes).filter(|bytes| bytes.total.is_some()).collect();
    let total = counted.iter().map(|bytes| bytes.total).sum();
    Some(ByteProgress { done: counted.iter().map(|bytes| bytes.done).sum(), total })
}

/// How long a pull must have run before its rate says when it ends.
const MEASURED_AFTER: Duration = Duration::from_secs(3);

/// The time that is left at this rate; `None` while the rate says little: at the start, and while the pull waits.
fn time_left(pull: &PullStatus, bytes: ByteProgress, rate: u64, now: Instant) -> Option<Duration> {
    let is_measured = now.saturating_duration_since(pull.since) >= MEASURED_AFTER && wait_of(pull).is_none();
    let left = bytes.total?.saturating_sub(bytes.done);
    let seconds = left.div_ceil(Some(rate).filter(|rate| *rate > 0 && is_measured)?);
    (seconds > 0).then(|| Duration::from_secs(seconds))
}

/// The speed of a pull while it fetches; none while layers are unpacked and committed.
fn rate_of(pull: &PullStatus) -> Option<u64> {
    let detail = pull.detail.as_ref()?;
    let fetches = detail.layers.iter().any(|layer| layer.phase == LayerPhase::Fetching);
    detail.rate.filter(|_| fetches)
}

/// Whether something happens to a layer, or keeps it waiting.
fn is_active(layer: &LayerProgress) -> bool {
    matches!(layer.phase, LayerPhase::Fetching | LayerPhase::Unpacking | LayerPhase::FetchedByOtherPull)
}

/// One layer: the beginning of its digest, phase, how much, how fast; what it waits for is on further lines if it does
/// not fit.
fn layer_lines(layer: &LayerProgress, wait: Option<&str>, columns: usize) -> Vec<String> {
    let digest: String = layer.digest.as_str().chars().take("sha256:".len() + 12).collect();
    let mut text = format!("  {digest}   {}", layer.phase);
    if layer.phase != LayerPhase::FetchedByOtherPull {
        let rate = layer.rate.filter(|_| layer.phase == LayerPhase::Fetching);
        push_bytes(&mut text, layer.bytes, rate, None);
    }
    let fits = |more: &str| text.chars().count() + 3 + more.chars().count() < columns;
    let (beside, below) = match wait {
        Some(wait) if fits(wait) => (Some(wait.to_owned()), None),
        Some(wait) => (None, Some(wait)),
        None if matches!(layer.phase, LayerPhase::Fetching | LayerPhase::Unpacking) => {
            (bar(layer.bytes).filter(|bar| fits(bar)), None)
        }
        None => (None, None),
    };
    if let Some(beside) = beside {
        let _ = write!(text, "   {beside}");
    }
    let first = text.chars().take(columns.saturating_sub(1)).collect();
    let further = below.into_iter().flat_map(|wait| wrapped(wait, columns.saturating_sub(5)));
    std::iter::once(first).chain(further.map(|part| format!("    {part}"))).collect()
}

/// How much is done, such as `[=====>    ]`; `None` if the whole is unknown.
fn bar(bytes: ByteProgress) -> Option<String> {
    let total = u128::from(bytes.total.filter(|total| *total > 0)?);
    let filled = usize::try_from((u128::from(bytes.done) * BAR as u128 / total).min(BAR as u128)).ok()?;
    let head = if filled < BAR { ">" } else { "" };
    Some(format!("[{}{head:<1$}]", "=".repeat(filled), BAR - filled))
}

/// The percentage, or the bytes if the whole is unknown.
fn percent_of(bytes: ByteProgress) -> String {
    bytes.total.map_or_else(|| size::bytes(bytes.done), |total| size::percent(bytes.done, total))
}

/// The remaining time, with a gap before it; empty if unknown.
fn left_text(left: Option<Duration>) -> String {
    left.map_or_else(String::new, |left| format!("   ETA {}", size::whole_seconds(left)))
}

fn push_bytes(text: &mut String, bytes: ByteProgress, rate: Option<u64>, left: Option<Duration>) {
    let _ = write!(text, "   {}", size::bytes(bytes.done));
    if let Some(total) = bytes.total {
        let _ = write!(text, " of {} ({})", size::bytes(total), size::percent(bytes.done, total));
    }
    if let Some(rate) = rate {
        let _ = write!(text, "   {}/s{}", size::bytes(rate), left_text(left));
    }
}

#[cfg(test)]
mod tests {
    use larder::backend::{PullDetail, PullStep, PullWait};

    use super::*;

    /// The lines of a first drawing.
    fn lines(
        pulls: &[PullStatus],
        images: (usize, usize),
        now: Instant,
        terminal: (usize, usize),
    ) -> Vec<String> {
        super::lines(&mut RowPlaces::default(), pulls, images, now, terminal)
    }

    #[tokio::test(start_paused = true)]
    async fn a_line_shows_phase_wait_time_and_bytes() {
        let since = Instant::now();
        let mut pull = PullStatus {
            image: "busybox:1.36".into(),
            phase: PullPhase::Queued,
            waiting: Some("a free slot".into()),
            bytes: None,
            detail: None,
            since,
        };
        assert_eq!(full_line(&pull, since), "busybox:1.36   queued, waits for a free slot   0s");
        pull.phase = PullPhase::Pulling;
        pull.bytes = Some(ByteProgress { done: 1_500_000, total: Some(3_000_000) });
        let now = since + Duration::from_secs(7);
        assert_eq!(full_line(&pull, now), "busybox:1.36   pulling   7s   1.5MB of 3MB (50%)");
    }

    #[tokio::test(start_paused = true)]
    async fn progress_fits_the_terminal_and_always_has_the_total() {
        let now = Instant::now();
        let pulls: Vec<_> = (0..13)
            .map(|number| PullStatus {
                image: format!("registry.example:5000/some/team/with/a/long/name/app-{number}:1.36").into(),
                phase: if number < 11 { PullPhase::Queued } else { PullPhase::Pulling },
                waiting: Some("a pull slot (maxParallelImagePulls)".into()),
                bytes: None,
                detail: None,
                since: now,
            })
            .collect();
        for (rows, columns, shown) in [(12, 50, 5), (4, 20, 1), (24, 80, 11), (100, 200, 12)] {
            let drawn = lines(&pulls, (2, 15), now, (rows, columns));
            assert!(drawn.iter().all(|line| line.chars().count() < columns), "{drawn:#?}");
            assert_eq!(drawn.len(), shown + 1, "{drawn:#?}");
            let sum = drawn.last().expect("a sum");
            assert!(sum.starts_with("2 of 15 done"), "{sum}");
        }
        assert_eq!(
            lines(&pulls, (2, 15), now, (12, 50))[..3],
            [
                "\u{2026}team/with/a/long/name/app-11:1.36   pulling   0s".to_owned(),
                "\u{2026}team/with/a/long/name/app-12:1.36   pulling   0s".to_owned(),
                "\u{2026}e/team/with/a/long/name/app-0:1.36   queued   0s".to_owned(),
            ]
        );
        assert!(lines(&pulls, (2, 15), now, (12, 50))[5].ends_with("\u{2026} 8 more"));
    }

    #[tokio::test(start_paused = true)]
    async fn pulls_have_bars_rates_and_remaining_time_that_fit_80_columns() {
        let since = Instant::now();
        let now = since + Duration::from_secs(5);
        let pull = |image: &str, done| PullStatus {
            image: image.into(),
            phase: PullPhase::Pulling,
            waiting: None,
            bytes: Some(ByteProgress { done, total: Some(100_000_000) }),
            detail: Some(PullDetail {
                step: PullStep::Layers,
                rate: Some(10_000_000),
                layers: vec![layer('a', LayerPhase::Fetching, None)],
                ..PullDetail::default()
            }),
            since,
        };
        let name = "registry.example/team/with/a/long/name/app:1.36";
        assert_eq!(
            lines(&[pull("app:1", 25_000_000), pull(name, 50_000_000)], (1, 3), now, (40, 80)),
            [
                "app:1   pulling   5s   25MB of 100MB (25%)   10MB/s   ETA 8s",
                "  sha256:aaaaaaaaaaaa   fetching   1MB of 4MB (25%)   250kB/s",
                "registry.example/team/with/a/long/name/app:1.36   pulling   5s   50%   ETA 5s",
                "  sha256:aaaaaaaaaaaa   fetching   1MB of 4MB (25%)   250kB/s",
                "1 of 3 done   75MB of 200MB (38%)   20MB/s   ETA 7s",
            ]
        );
        let wide = lines(&[pull("app:1", 25_000_000)], (0, 1), now, (40, 100));
        assert!(wide[0].ends_with("   ETA 8s   [=====>              ]"), "{wide:?}");
        let drawn = lines(&[pull("app:1", 25_000_000), pull(name, 50_000_000)], (0, 3), now, (40, 80));
        assert!(drawn.last().unwrap().ends_with("20MB/s"), "one image is not known yet: {drawn:?}");
        let early = lines(&[pull("app:1", 25_000_000)], (0, 1), since + Duration::from_secs(1), (40, 80));
        assert!(!early.join("").contains("ETA"), "the rate says little yet: {early:?}");
        assert_eq!(bar(ByteProgress { done: 9, total: Some(9) }).unwrap(), format!("[{}]", "=".repeat(BAR)));
        assert_eq!(bar(ByteProgress { done: 9, total: None }), None);
    }

    fn layer(digit: char, phase: LayerPhase, waiting: Option<PullWait>) -> LayerProgress {
        let bytes = ByteProgress { done: 1_000_000, total: Some(4_000_000) };
        let digest = format!("sha256:{}", digit.to_string().repeat(64));
        LayerProgress { digest: digest.into(), phase, bytes, rate: Some(250_000), waiting }
    }

    #[tokio::test(start_paused = true)]
    async fn layers_stand_below_their_image_with_what_they_wait_for() {
        let now = Instant::now();
        let asked = PullWait {
            reason: "rate limited by r.example".into(),
            until: Some(now + Duration::from_secs(12)),
        };
        let detail = PullDetail {
            step: PullStep::Layers,
            rate: Some(500_000),
            layers: vec![
                layer('a', LayerPhase::Done, None),
                layer('b', LayerPhase::Fetching, Some(asked.clone())),
                layer('c', LayerPhase::Queued, None),
            ],
            ..PullDetail::default()
        };
        let mut pull = PullStatus {
            image: "r.example/app:1".into(),
            phase: PullPhase::Pulling,
            waiting: None,
            bytes: Some(ByteProgress { done: 2_000_000, total: Some(12_000_000) }),
            detail: Some(detail),
            since: now,
        };
        assert_eq!(
            lines(std::slice::from_ref(&pull), (0, 1), now, (40, 200)),
            [
                "r.example/app:1   pulling   0s   2MB of 12MB (17%)   500kB/s   \
                 rate limited by r.example, 12s left   [===>                ]",
                "  sha256:bbbbbbbbbbbb   fetching   1MB of 4MB (25%)   250kB/s   [=====>              ]",
                "0 of 1 done",
            ]
        );
        assert_eq!(lines(std::slice::from_ref(&pull), (0, 1), now, (4, 200)).len(), 2, "no room for layers");
        let layers = &mut pull.detail.as_mut().unwrap().layers;
        layers[2] = layer('c', LayerPhase::Fetching, None);
        assert_eq!(wait_of(&pull), None, "another layer gets on");
        pull.detail.as_mut().unwrap().layers.truncate(1);
        pull.detail.as_mut().unwrap().layers.push(layer('d', LayerPhase::Unpacking, None));
        assert_eq!(phase_of(&pull), "unpacking");
        let drawn = lines(std::slice::from_ref(&pull), (0, 1), now, (40, 200)).join("\n");
        assert!(drawn.contains("unpacking   1MB of 4MB (25%)   [=====>              ]"), "{drawn}");
        assert!(!drawn.contains("/s"), "nothing is fetched, so nothing has a rate: {drawn}");
        pull.detail.as_mut().unwrap().step = PullStep::Committing;
        assert_eq!(phase_of(&pull), "committing");
    }

    fn waiting(image: &str, phase: PullPhase) -> PullStatus {
        let since = Instant::now();
        PullStatus { image: image.into(), phase, waiting: None, bytes: None, detail: None, since }
    }

    #[tokio::test(start_paused = true)]
    async fn an_image_keeps_its_place_until_another_pull_needs_it() {
        use PullPhase::{Pulling, Queued};
        let mut places = RowPlaces::default();
        for (pulls, expected) in [
            (&[("a:1", Queued), ("b:1", Pulling), ("c:1", Queued)][..], ["b:1", "a:1", "c:1"]),
            (&[("a:1", Pulling), ("b:1", Pulling), ("c:1", Queued)], ["b:1", "a:1", "c:1"]),
            (&[("a:1", Pulling), ("c:1", Pulling)], ["b:1 ended", "a:1", "c:1"]),
            (&[("a:1", Pulling), ("c:1", Pulling), ("d:1", Queued)], ["d:1", "a:1", "c:1"]),
            (&[("a:1", Pulling), ("c:1", Pulling), ("d:1", Queued), ("e:1", Pulling)], ["e:1", "a:1", "c:1"]),
        ] {
            let pulls: Vec<_> = pulls.iter().map(|(image, phase)| waiting(image, *phase)).collect();
            let rows = places.assign(&pulls, 3).into_iter();
            let rows: Vec<_> = rows
                .map(|(image, pull)| {
                    pull.map_or_else(|| format!("{image} ended"), |pull| pull.image.to_string())
                })
                .collect();
            assert_eq!(rows, expected);
        }
        let pulls = [waiting("a:1", Pulling)];
        assert_eq!(places.assign(&pulls, 1).len(), 1, "a smaller terminal");
        assert_eq!(places.0, [ImageName::from("a:1")]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reason_to_wait_is_not_cut() {
        let now = Instant::now();
        let reason =
            "retries r.example: 503 Service Unavailable (the registry is being restarted for a new version)";
        let wait = PullWait { reason: reason.into(), until: None };
        let detail = PullDetail { step: PullStep::Resolving, waiting: Some(wait), ..PullDetail::default() };
        let pull = PullStatus { detail: Some(detail), ..waiting("r.example/team/app:1", PullPhase::Pulling) };
        let drawn = lines(std::slice::from_ref(&pull), (0, 1), now, (40, 60));
        assert!(drawn.iter().all(|line| line.chars().count() < 60), "{drawn:#?}");
        let words = drawn[1..drawn.len() - 1].iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
        assert_eq!(words, reason);
    }
}
