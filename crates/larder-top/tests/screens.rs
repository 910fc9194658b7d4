//! Compares the screen, as text, with `golden/`. `LARDER_BLESS=1` writes the files.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::path::Path;
use std::time::Duration;

use larder_api::v1::{self as api, DecisionReason};
use larder_top::{Answer, App, Call, Input, Moment, draw, update};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::{Buffer, Cell};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::Size;
use ratatui::style::Color;
use tokio::time::Instant;

/// After this, keys answer a question.
const ANSWERABLE: Duration = Duration::from_millis(300);

/// The view on a terminal, at 12:00.
struct View {
    app: App,
    size: Size,
    began: Instant,
}

impl View {
    fn new(width: u16, height: u16, colors: bool) -> View {
        let size = Size { width, height };
        View { app: App::new(size, colors), size, began: Instant::now() }
    }

    fn now(&self) -> Moment {
        Moment { instant: self.began, wall: "2026-11-23T12:00:00Z".parse().unwrap() }
    }

    fn input(&mut self, input: Input) -> Vec<Call> {
        let now = self.now();
        update(&mut self.app, input, now)
    }

    fn answer(&mut self, answer: Answer) {
        assert_eq!(self.input(Input::Answered(answer)), []);
    }

    fn press(&mut self, code: KeyCode) -> Vec<Call> {
        self.input(Input::Key(KeyEvent::new(code, KeyModifiers::NONE)))
    }

    fn type_text(&mut self, text: &str) {
        for c in text.chars() {
            self.press(KeyCode::Char(c));
        }
    }

    fn resize(&mut self, width: u16, height: u16) {
        self.size = Size { width, height };
        self.input(Input::Resized(self.size));
    }

    fn buffer(&self) -> Buffer {
        let mut terminal = Terminal::new(TestBackend::new(self.size.width, self.size.height)).unwrap();
        terminal.draw(|frame| draw(&self.app, frame, self.now())).unwrap();
        terminal.backend().buffer().clone()
    }

    fn screen(&self) -> String {
        let buffer = self.buffer();
        let rows = buffer.content.chunks(usize::from(self.size.width));
        let rows = rows.map(|row| row.iter().map(Cell::symbol).collect::<String>());
        rows.map(|row| row.trim_end().to_owned() + "\n").collect()
    }

    fn is_golden(&self, name: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        let screen = self.screen();
        if std::env::var_os("LARDER_BLESS").is_some() {
            fs_err::write(&path, &screen).unwrap();
        }
        let expected = fs_err::read_to_string(&path).unwrap_or_default();
        assert!(screen == expected, "{name} differs; the screen is:\n{screen}");
    }
}

fn image(name: &str, size: u64, unique: u64, state: DecisionReason, hours: u64) -> api::Image {
    let last_used = format!("2026-11-23T{:02}:00:00Z", 12 - hours);
    let mut details = api::ImageListDetails {
        unique_bytes: Some(unique),
        last_used: (hours > 0).then_some(last_used),
        in_use: state == DecisionReason::InUse,
        ..api::ImageListDetails::default()
    };
    details.set_reason(state);
    details.why = format!("kept by rule 1 (name {name})");
    api::Image {
        id: name.bytes().fold("sha256:".to_owned(), |id, byte| id + &format!("{byte:02x}")),
        repo_tags: vec![name.to_owned()],
        size_bytes: size,
        pinned: state == DecisionReason::Pinned,
        details: Some(details),
        ..api::Image::default()
    }
}

/// Images with a layer of their own each; the larger ones share another one.
fn images() -> api::ImagesResponse {
    let mut images = vec![
        image("registry.k8s.io/pause:3.10", 742_385, 742_385, DecisionReason::Pinned, 0),
        image("docker.io/library/postgres:17.2", 438_000_000, 260_000_000, DecisionReason::InUse, 1),
        image(
            "registry.example:5000/shop/team/checkout-service:v1.27.3",
            212_000_000,
            34_000_000,
            DecisionReason::Unused,
            11,
        ),
        image("docker.io/library/busybox:1.36", 4_260_000, 4_260_000, DecisionReason::Kept, 3),
        image("registry.example:5000/shop/cart:7", 198_000_000, 20_000_000, DecisionReason::Leased, 2),
    ];
    let layer = |size_bytes| api::ImageLayer { size_bytes, ..api::ImageLayer::default() };
    let mut layers = vec![layer(178_000_000)];
    for (image, index) in images.iter_mut().zip(1..) {
        let details = image.details.as_mut().unwrap();
        let own = details.unique_bytes.unwrap();
        details.layers = (image.size_bytes > own).then_some(0).into_iter().chain([index]).collect();
        layers.push(layer(own));
    }
    api::ImagesResponse { images, layers, ..api::ImagesResponse::default() }
}

fn layer(digit: char, phase: api::LayerPhase, done: u64, waiting: &str) -> api::PullLayer {
    let mut layer = api::PullLayer {
        digest: format!("sha256:{}", digit.to_string().repeat(64)),
        done_bytes: done,
        total_bytes: Some(40_000_000),
        bytes_per_second: (phase == api::LayerPhase::Fetching).then_some(6_200_000),
        waiting: waiting.to_owned(),
        waiting_milliseconds: (!waiting.is_empty()).then_some(12_000),
        ..api::PullLayer::default()
    };
    layer.set_phase(phase);
    layer
}

fn pulls() -> Vec<api::Pull> {
    use api::LayerPhase::{Done, Elsewhere, Fetching, Queued, Unpacking};

    let mut pulling = api::Pull {
        image: "registry.example:5000/shop/web:42".to_owned(),
        done_bytes: Some(101_000_000),
        total_bytes: Some(160_000_000),
        milliseconds: 21_000,
        layers: vec![
            layer('a', Done, 40_000_000, ""),
            layer('b', Fetching, 21_000_000, ""),
            layer('c', Unpacking, 40_000_000, ""),
            layer('d', Queued, 0, "rate limited by registry.example:5000"),
            layer('e', Elsewhere, 9_000_000, ""),
        ],
        ..api::Pull::default()
    };
    pulling.set_phase(api::PullPhase::Pulling);
    pulling.set_step(api::PullStep::Pulling);
    let mut queued = api::Pull {
        image: "docker.io/library/redis:8".to_owned(),
        waiting: "for 2 other pulls".to_owned(),
        ..api::Pull::default()
    };
    queued.set_phase(api::PullPhase::Queued);
    vec![pulling, queued]
}

fn round() -> api::GcRound {
    let removing = api::Removal {
        id: "sha256:1".into(),
        names: vec!["registry.example:5000/shop/cart:6".into()],
        why: "unused for 5h0m0s".into(),
        promised_bytes: 64_000_000,
        ..api::Removal::default()
    };
    let mut round = api::GcRound {
        milliseconds: 4_000,
        promised_bytes: 900_000_000,
        freed_bytes: 310_000_000,
        planned_images: 12,
        removed_images: 4,
        removing: Some(removing),
        ..api::GcRound::default()
    };
    round.set_goal(api::CollectionGoal::Thresholds);
    round.set_phase(api::GcPhase::Removing);
    round
}

fn status() -> api::StatusResponse {
    api::StatusResponse {
        backend: "larder's own store in /var/lib/larder".into(),
        backend_available: true,
        socket: Some("/run/larder/larder.sock".into()),
        pid: 812,
        uptime_seconds: 7300,
        disk: Some(api::DiskUse {
            size_bytes: 40_000_000_000,
            available_bytes: 7_000_000_000,
            used_percent: 83,
            gc_starts_at_percent: Some(85),
            gc_frees_to_percent: Some(80),
            inodes_used_percent: Some(12),
            gc_starts_at_inodes_percent: Some(90),
            ..api::DiskUse::default()
        }),
        gc: Some(api::GcStatus {
            rounds: 7,
            ended: Some("2026-11-23T11:57:00Z".into()),
            result: Some("removed 3 images and freed 120MB".into()),
            ..api::GcStatus::default()
        }),
        ..api::StatusResponse::default()
    }
}

fn busy() -> api::StatusResponse {
    let registry = |host: &str, connections, waiting, retry| api::RegistryStatus {
        host: host.to_owned(),
        connections,
        connection_limit: 8,
        waiting_requests: waiting,
        retry_after_milliseconds: retry,
        requests: 48,
        throttled: 2,
        received_bytes: 312_000_000,
        quota_remaining: retry.map(|_| 0),
        quota_limit: retry.map(|_| 100),
    };
    api::StatusResponse {
        pulls: pulls(),
        gc: Some(api::GcStatus { round: Some(round()), ..status().gc.unwrap() }),
        disk: Some(api::DiskUse { used_percent: 87, ..status().disk.unwrap() }),
        registries: vec![
            registry("docker.io", 0, 3, Some(12_000)),
            registry("registry.example:5000", 8, 5, None),
        ],
        ..status()
    }
}

fn view(status: api::StatusResponse) -> View {
    let mut view = View::new(80, 24, false);
    view.answer(Answer::Status(Box::new(status)));
    view.answer(Answer::Images(images()));
    view
}

#[test]
fn an_idle_node_in_80_columns() {
    view(status()).is_golden("idle.txt");
}

#[test]
fn a_busy_node() {
    let mut view = view(busy());
    view.is_golden("busy.txt");
    view.press(KeyCode::Char('2'));
    view.is_golden("pulls.txt");
    view.press(KeyCode::Tab);
    let entry = api::HistoryEntry {
        time: Some("2026-11-23T11:56:58Z".into()),
        id: "sha256:2".into(),
        names: vec!["registry.example:5000/shop/cart:5".into()],
        why: "unused for 6h0m0s".into(),
        freed_bytes: Some(48_000_000),
        trigger: api::RemovalTrigger::Space.into(),
        ..api::HistoryEntry::default()
    };
    view.answer(Answer::History(api::HistoryResponse {
        entries: vec![entry],
        ..api::HistoryResponse::default()
    }));
    view.is_golden("gc.txt");
    view.press(KeyCode::Char('4'));
    view.is_golden("registries.txt");
    view.press(KeyCode::Char('1'));
    view.resize(120, 44);
    view.is_golden("tall.txt");
    view.resize(44, 14);
    view.is_golden("narrow.txt");
    view.resize(60, 15);
    view.is_golden("small.txt");
    view.press(KeyCode::Char('4'));
    view.is_golden("small-registries.txt");
    view.resize(30, 8);
    view.is_golden("too-small.txt");
}

#[test]
fn windows_over_the_images() {
    let mut view = view(status());
    view.press(KeyCode::Char('?'));
    view.is_golden("help.txt");
    view.press(KeyCode::Esc);
    let explain = view.press(KeyCode::Char('e'));
    let [Call::Explain { name, .. }] = &explain[..] else { panic!("{explain:?}") };
    assert_eq!(name, "docker.io/library/postgres:17.2");
    let lines = [
        "docker.io/library/postgres:17.2",
        "  next GC:    retain: in use by container db of pod default/shop-db-0 and 2 more",
        "  size:       438MB",
    ];
    view.answer(Answer::Explained { name: name.clone(), lines: lines.map(str::to_owned).to_vec() });
    view.is_golden("explain.txt");
    view.press(KeyCode::Esc);
    view.press(KeyCode::Char('x'));
    view.is_golden("confirm.txt");
}

#[test]
fn the_question_about_an_image_with_many_names_shows_what_it_costs() {
    let mut view = view(status());
    let mut image = image("registry.example/shop/web:0", 212_000_000, 34_000_000, DecisionReason::Kept, 3);
    image.repo_tags = (0..30).map(|number| format!("registry.example/shop/web:{number}")).collect();
    view.answer(Answer::Images(api::ImagesResponse { images: vec![image], ..Default::default() }));
    view.press(KeyCode::Char('x'));
    view.is_golden("confirm-names.txt");
    view.resize(40, 12);
    let screen = view.screen();
    assert!(screen.contains("This frees 34MB.") && screen.contains("y removes it"), "{screen}");
    assert!(!screen.contains("scrolls"), "{screen}");
}

#[test]
fn a_terminal_that_is_too_small_takes_no_key_but_quit() {
    for (width, height) in [(39, 12), (40, 11)] {
        let mut view = view(status());
        view.press(KeyCode::Char('x'));
        view.resize(width, height);
        view.began += ANSWERABLE;
        assert_eq!(view.press(KeyCode::Char('y')), [], "the question is not in view");
        for key in "nx".chars() {
            assert_eq!(view.press(KeyCode::Char(key)), []);
        }
        view.began += ANSWERABLE;
        assert_eq!(view.press(KeyCode::Char('y')), []);
        view.resize(80, 24);
        assert!(view.screen().contains("y removes it"), "{}", view.screen());
        view.resize(width, height);
        view.press(KeyCode::Char('q'));
        assert!(view.app.is_done());
    }
}

#[test]
fn the_question_before_a_removal_names_the_keep_rule() {
    let mut view = view(status());
    view.press(KeyCode::Char('/'));
    view.type_text("busybox");
    view.press(KeyCode::Enter);
    view.press(KeyCode::Char('x'));
    let screen = view.screen();
    assert!(
        screen.contains("GC retains it: kept by rule 1 (name docker.io/library/busybox:1.36), which"),
        "{screen}"
    );
}

#[test]
fn next_steps_are_shown_as_they_are_printed_and_long_lines_end_in_an_ellipsis() {
    let mut view = view(status());
    let call = Call::Explain { id: "sha256:0".into(), name: "absent".into() };
    let hints = vec!["hint: larder images lists them".to_owned()];
    view.answer(Answer::Failed { call, message: "no such image".into(), hints });
    assert_eq!(view.screen().matches("hint: ").count(), 1, "{}", view.screen());
    view.press(KeyCode::Esc);
    let mountpoint = format!("/var/lib/{}", "x".repeat(90));
    let other = api::OtherFilesystem { mountpoint, used_percent: 7, ..api::OtherFilesystem::default() };
    view.answer(Answer::Status(Box::new(api::StatusResponse { other_filesystems: vec![other], ..status() })));
    let screen = view.screen();
    let line = screen.lines().find(|line| line.contains("/var/lib/xxx")).expect("a line of the head");
    assert!(line.trim_end().ends_with('\u{2026}'), "{line}");
}

#[test]
fn a_removal_needs_a_yes() {
    let mut view = view(status());
    for no in [KeyCode::Char('n'), KeyCode::Enter, KeyCode::Esc, KeyCode::Char('x')] {
        assert_eq!(view.press(KeyCode::Delete), []);
        view.began += ANSWERABLE;
        assert_eq!(view.press(no), [], "{no:?}");
        assert!(!view.screen().contains("Remove docker.io"));
    }
    view.press(KeyCode::F(9));
    view.began += ANSWERABLE;
    let name = "docker.io/library/postgres:17.2".to_owned();
    let id = images().images[1].id.clone();
    let expected = Call::Remove { id: id.clone(), name: name.clone(), images: vec![name] };
    assert_eq!(view.press(KeyCode::Char('y')), [expected], "the ID is that of the row");
    view.began += Duration::from_secs(60);
    view.input(Input::Tick);
    assert!(view.screen().contains("removing docker.io/library/postgres:17.2"), "{}", view.screen());
    view.press(KeyCode::Char('x'));
    assert!(!view.screen().contains("y removes it"), "it is asked once");
    let refused = api::Refused { message: "postgres is in use\u{1b}[2J".into(), ..api::Refused::default() };
    let result =
        api::Removed { result: Some(api::removed::Result::Refused(refused)), ..api::Removed::default() };
    let answer = api::RemoveResponse { results: vec![result], ..api::RemoveResponse::default() };
    view.answer(Answer::Removed { id, answer });
    assert!(!view.screen().contains("removing"), "{}", view.screen());
    assert!(view.screen().contains("error: postgres is in use\\u{1b}[2J"), "{}", view.screen());
}

#[test]
fn an_answer_waits_while_a_filter_is_typed_or_a_question_is_open() {
    let explained =
        |name: &str| Answer::Explained { name: name.into(), lines: vec![format!("next GC of {name}")] };
    let mut view = view(status());
    view.press(KeyCode::Char('/'));
    view.type_text("pos");
    view.answer(explained("first"));
    let call = Call::Explain { id: "sha256:0".into(), name: "absent".into() };
    let failed = Answer::Failed { call, message: "no such image".into(), hints: Vec::new() };
    view.answer(failed);
    view.type_text("txy");
    let screen = view.screen();
    assert!(screen.contains("Filter: postxy") && !screen.contains("next GC of"), "{screen}");
    view.press(KeyCode::Backspace);
    view.press(KeyCode::Backspace);
    view.press(KeyCode::Enter);
    assert!(view.screen().contains("next GC of first"), "{}", view.screen());
    view.press(KeyCode::Esc);
    assert!(view.screen().contains("error: no such image"), "{}", view.screen());
    view.press(KeyCode::Esc);

    view.press(KeyCode::Char('x'));
    view.answer(explained("second"));
    assert!(view.screen().contains("Remove docker.io/library/postgres:17.2?"), "{}", view.screen());
    view.began += ANSWERABLE;
    assert_eq!(view.press(KeyCode::Char('n')), []);
    assert!(view.screen().contains("next GC of second"), "{}", view.screen());
}

#[test]
fn keys_that_were_typed_before_the_question_was_seen_do_not_answer_it() {
    let mut view = view(status());
    view.press(KeyCode::Char('x'));
    for early in [KeyCode::Char('y'), KeyCode::Esc, KeyCode::Char('Y')] {
        assert_eq!(view.press(early), [], "{early:?}");
        assert!(view.screen().contains("y removes it"), "{}", view.screen());
    }
    view.began += ANSWERABLE;
    assert!(matches!(view.press(KeyCode::Char('y'))[..], [Call::Remove { .. }]));
}

#[test]
fn a_terminal_that_shrank_before_its_size_is_known_is_drawn() {
    let mut view = view(busy());
    view.resize(120, 44);
    let name = "registry.example:5000/shop/cart:".to_owned();
    let lines = (0..60).map(|line| format!("{line} ").repeat(60)).collect();
    for key in ["1", "2", "3", "4", "?", "e", "x"] {
        view.press(KeyCode::Char('1'));
        view.press(KeyCode::Char(key.chars().next().unwrap()));
        if key == "e" {
            view.answer(Answer::Explained { name: name.clone(), lines: Vec::clone(&lines) });
        }
        for (width, height) in [(119, 43), (60, 14), (40, 12), (39, 12), (40, 11), (10, 3), (1, 1), (200, 60)]
        {
            view.size = Size { width, height };
            assert_ne!(view.screen().trim(), "", "{key} in {width}x{height}");
        }
        view.began += ANSWERABLE;
        view.press(KeyCode::Esc);
    }
}

#[test]
fn a_filter_is_typed_and_cleared() {
    let mut view = view(status());
    view.press(KeyCode::Char('/'));
    view.type_text("shop q");
    assert!(view.screen().contains("no match") || view.screen().contains("(0 match shop q)"));
    view.press(KeyCode::Backspace);
    view.press(KeyCode::Backspace);
    view.press(KeyCode::Enter);
    let screen = view.screen();
    assert!(screen.contains("(2 match shop)") && !screen.contains("postgres"), "{screen}");
    view.press(KeyCode::Esc);
    assert!(view.screen().contains("postgres"));
    view.press(KeyCode::Char('/'));
    view.type_text("q");
    view.press(KeyCode::Esc);
    assert!(!view.app.is_done() && view.screen().contains("postgres"), "a typed q is no quit");
}

#[test]
fn no_state_is_shown_by_color_alone_and_none_without_colors() {
    let mut view = view(busy());
    let colors = |view: &View| {
        view.buffer().content.iter().any(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset)
    };
    assert!(!colors(&view));
    let plain = view.screen();
    assert!(plain.contains("past GC threshold 85%") && plain.contains("in use"), "{plain}");
    view.app = App::new(view.size, true);
    view.answer(Answer::Status(Box::new(busy())));
    view.answer(Answer::Images(images()));
    assert!(colors(&view));
    assert_eq!(view.screen(), plain, "the words are the same");
}

#[test]
fn a_lost_connection_is_shown_until_the_next_status() {
    let mut view = view(status());
    let failed = || Answer::Failed {
        call: Call::Status,
        message: "the daemon closed the connection".into(),
        hints: Vec::new(),
    };
    view.answer(failed());
    view.began += Duration::from_secs(7);
    view.answer(failed());
    let screen = view.screen();
    assert!(screen.contains("no connection for 7s, retrying: the daemon closed the connection"), "{screen}");
    assert!(screen.contains("postgres"), "the last state stays");
    view.answer(Answer::Status(Box::new(status())));
    assert!(!view.screen().contains("no connection"));
}

#[test]
fn ten_thousand_images_are_sorted_filtered_and_scrolled() {
    let mut view = view(status());
    let name = |number: u64| format!("registry.example/team-{}/service-{number:05}:v1", number % 50);
    let images =
        (0..10_000).map(|number| image(&name(number), number * 1000, number, DecisionReason::Unused, 1));
    view.answer(Answer::Images(api::ImagesResponse { images: images.collect(), ..Default::default() }));
    assert!(view.screen().contains("service-09999"));
    view.press(KeyCode::End);
    let screen = view.screen();
    assert!(screen.contains("service-00000") && !screen.contains("service-09999"), "{screen}");
    view.press(KeyCode::Char('r'));
    view.press(KeyCode::Char('/'));
    view.type_text("TEAM-7/ 05007");
    view.press(KeyCode::Enter);
    let screen = view.screen();
    assert!(screen.contains("service-05007") && screen.contains("1 Images 10000"), "{screen}");
}

#[test]
fn text_of_a_node_cannot_control_the_terminal() {
    let evil = "\u{1b}]0;title\u{7}\u{202e}\u{9b}2J\r\n";
    let mut view = View::new(160, 50, true);
    let mut pull = pulls().remove(0);
    (pull.image, pull.waiting) = (evil.into(), evil.into());
    pull.layers[0].digest = evil.into();
    let mut status = api::StatusResponse {
        pulls: vec![pull],
        backend: evil.into(),
        warnings: vec![evil.into()],
        ..busy()
    };
    status.registries[0].host = evil.into();
    let removing =
        status.gc.as_mut().and_then(|gc| gc.round.as_mut()).and_then(|round| round.removing.as_mut());
    removing.unwrap().names = vec![evil.into()];
    view.answer(Answer::Status(Box::new(status)));
    view.answer(Answer::Images(api::ImagesResponse {
        images: vec![image(evil, 1, 1, DecisionReason::Unused, 1)],
        ..Default::default()
    }));
    view.answer(Answer::Failed { call: Call::History, message: evil.into(), hints: vec![evil.into()] });
    for key in "1234?".chars() {
        view.press(KeyCode::Char(key));
        let screen = view.screen();
        let body = screen.lines().skip_while(|line| !line.contains("4 Registries")).skip(1);
        let body: Vec<&str> = body.take(50 - 5 - 2).collect();
        let is_escaped = body.iter().any(|line| line.contains("\\u{1b}]0;title"));
        assert!(is_escaped || key == '?', "{key}: {screen}");
        assert!(!screen.contains(['\u{1b}', '\u{7}', '\u{202e}', '\u{9b}', '\r']), "{key}");
    }
    view.press(KeyCode::Esc);
    view.answer(Answer::Explained { name: evil.into(), lines: vec![evil.into()] });
    let screen = view.screen();
    assert!(screen.contains("\\u{1b}]0;title"), "{screen}");
    assert!(!screen.contains(['\u{1b}', '\u{7}', '\u{202e}', '\u{9b}', '\r']));
}
