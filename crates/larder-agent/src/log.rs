//! Log lines on standard error: warnings always, more with `-v`, with `log.level` and with `LARDER_LOG`.
//!
//! `tracing-subscriber` keeps the spans and the filter. The lines are larder's own: their format is documented, and
//! they go to a closure, since the command line prints them above progress bars. Only larder's own crates are shown
//! unless `LARDER_LOG` names another target. Spans record image names, digests and goals, and never credentials.

use std::fmt::{self, Write as _};
use std::sync::OnceLock;

use jiff::Timestamp;
use larder::suggestions::nearest;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id};
use tracing::subscriber::{self, Interest};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::{LookupSpan, Registry, Scope};
use tracing_subscriber::reload::{self, Handle};

use crate::config::LogFormat;
use crate::error::Error;

/// The environment variable with filter directives, which override the level of `-v` and of the settings.
pub const VARIABLE: &str = "LARDER_LOG";

/// All targets of larder's own crates begin with this.
pub(crate) const OWN: &str = "larder";

/// Crates of larder that log, as targets.
const CRATES: [&str; 9] = [
    OWN,
    "larder_agent",
    "larder_containerd",
    "larder_cri",
    "larder_docker",
    "larder_kube",
    "larder_registry",
    "larder_snapshots",
    "larder_store",
];

/// Format of lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLineFormat {
    /// For someone who just typed a command: level, message, fields.
    Terse,
    /// For someone who reads a log: time, level, message, fields, fields of spans.
    Text,
    /// For programs: one object a line.
    Json,
}

impl LogLineFormat {
    /// Format of a daemon's log.
    pub fn of(format: LogFormat) -> LogLineFormat {
        match format {
            LogFormat::Text => LogLineFormat::Text,
            LogFormat::Json => LogLineFormat::Json,
        }
    }
}

/// Subscriber that logs, below the layer that makes traces.
#[cfg(feature = "traces")]
pub(crate) type Logged = tracing_subscriber::layer::Layered<reload::Layer<LogWriter, Registry>, Registry>;

static RUNNING: OnceLock<Handle<LogWriter, Registry>> = OnceLock::new();

/// Starts logging: what the `directives` of [`VARIABLE`] say, else lines of this level and more severe ones. Fails
/// where the directives cannot be used.
pub fn start(
    level: Level,
    directives: Option<&str>,
    write: impl Fn(&str) + Send + Sync + 'static,
) -> Result<(), Error> {
    let (lines, handle) = reload::Layer::new(LogWriter::new(level, directives, write)?);
    // It fails only if logging was started before, and then it runs.
    let logged = Registry::default().with(lines);
    #[cfg(feature = "traces")]
    let logged = logged.with(crate::traces::TraceLayer);
    if subscriber::set_global_default(logged).is_ok() {
        let _ = RUNNING.set(handle);
    }
    Ok(())
}

/// Changes what is logged, and how. Directives stay in force.
pub fn change(level: Level, format: LogLineFormat) {
    if let Some(running) = RUNNING.get() {
        // It fails only where the subscriber is gone.
        let _ = running.modify(|lines| lines.change(level, format));
    }
}

/// Lets all spans of larder's own crates be made, also those that no line shows.
#[cfg(feature = "traces")]
pub(crate) fn trace_spans() {
    if let Some(running) = RUNNING.get() {
        let _ = running.modify(|lines| lines.traces = true);
    }
}

fn own_lines(level: Level) -> Targets {
    Targets::new().with_target(OWN, level)
}

/// Reads `LEVEL` and `TARGET=LEVEL`, separated by commas. Stricter than [`Targets`], which takes a misspelt level for a
/// target.
fn parse(directives: &str) -> Result<Targets, Error> {
    let mut targets = Targets::new();
    for directive in directives.split(',').map(str::trim) {
        let (target, level) = directive.rsplit_once('=').unwrap_or((OWN, directive));
        let is_path = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        if target.is_empty() || !target.chars().all(is_path) {
            return Err(invalid(directives, &format!("{target:?} is not a target")));
        }
        if let Some(meant) = meant_target(target) {
            return Err(invalid(directives, &format!("{target:?} is not a target; did you mean {meant}?")));
        }
        // The empty text parses, as `error`.
        let level = level.parse::<LevelFilter>().ok().filter(|_| !level.is_empty());
        let level = level.ok_or_else(|| invalid(directives, &format!("{directive:?} has no known level")))?;
        targets = targets.with_target(target, level);
    }
    Ok(targets)
}

/// The crate of larder of which a target seems to be a misspelt name. Targets of dependencies are not known here, nor
/// modules.
fn meant_target(target: &str) -> Option<&'static str> {
    let name = target.split("::").next().unwrap_or_default();
    nearest(name, CRATES).filter(|_| CRATES.iter().all(|known| !known.starts_with(name)))
}

fn invalid(directives: &str, why: &str) -> Error {
    Error::bad_input(format!("{VARIABLE}={directives:?}: {why}")).hint(format!(
        "write LEVEL or TARGET=LEVEL, separated by commas, such as {VARIABLE}=larder::gc=debug,info; \
         levels: off, error, warn, info, debug, trace"
    ))
}

fn word(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warning",
        Level::INFO => "info",
        _ => "debug",
    }
}

/// Filters and writes lines.
pub(crate) struct LogWriter {
    shown: Targets,
    /// Whether spans are made for traces as well.
    traces: bool,
    /// Whether directives say what is shown.
    is_fixed: bool,
    format: LogLineFormat,
    write: Box<dyn Fn(&str) + Send + Sync>,
}

impl LogWriter {
    fn new(
        level: Level,
        directives: Option<&str>,
        write: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<LogWriter, Error> {
        let shown = directives.map_or_else(|| Ok(own_lines(level)), parse)?;
        let (is_fixed, write) = (directives.is_some(), Box::new(write));
        Ok(LogWriter { shown, traces: false, is_fixed, format: LogLineFormat::Terse, write })
    }

    fn is_traced(&self, metadata: &Metadata<'_>) -> bool {
        self.traces && metadata.is_span() && metadata.target().starts_with(OWN)
    }

    fn change(&mut self, level: Level, format: LogLineFormat) {
        if !self.is_fixed {
            self.shown = own_lines(level);
        }
        self.format = format;
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for LogWriter {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.is_traced(metadata) {
            return Interest::always();
        }
        Layer::<S>::register_callsite(&self.shown, metadata)
    }

    fn enabled(&self, metadata: &Metadata<'_>, context: Context<'_, S>) -> bool {
        self.is_traced(metadata) || self.shown.enabled(metadata, context)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        if self.traces { Some(LevelFilter::TRACE) } else { Layer::<S>::max_level_hint(&self.shown) }
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let metadata = attributes.metadata();
        if !self.shown.would_enable(metadata.target(), metadata.level()) {
            return;
        }
        let mut recorded = EventFields::default();
        attributes.record(&mut recorded);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(recorded);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut line = EventLine::default();
        event.record(&mut line.event);
        for span in context.event_scope(event).into_iter().flat_map(Scope::from_root) {
            if let Some(EventFields { fields, .. }) = span.extensions().get() {
                line.spans.push((span.name(), fields.clone()));
            }
        }
        let metadata = event.metadata();
        (self.write)(&line.show(self.format, Timestamp::now(), *metadata.level(), metadata.target()));
    }
}

type FieldList = Vec<(&'static str, String)>;

/// Message and fields of an event or a span.
#[derive(Default)]
struct EventFields {
    message: String,
    fields: FieldList,
}

/// An event and the spans that it is in, outermost first.
#[derive(Default)]
struct EventLine {
    event: EventFields,
    spans: Vec<(&'static str, FieldList)>,
}

impl EventLine {
    fn show(self, format: LogLineFormat, now: Timestamp, level: Level, target: &str) -> String {
        let EventLine { event: EventFields { message, fields }, spans } = self;
        let mut line = match format {
            LogLineFormat::Json => return json(message, fields, spans, now, level, target),
            LogLineFormat::Text => format!("{now:.3} {}: {message}", word(level)),
            LogLineFormat::Terse => format!("{}: {message}", word(level)),
        };
        for (name, value) in fields {
            write_field(&mut line, name, &value);
        }
        if format == LogLineFormat::Text {
            for (span, fields) in spans {
                for (name, value) in fields {
                    write_field(&mut line, &format!("{span}.{name}"), &value);
                }
            }
        }
        line
    }
}

fn json(
    message: String,
    fields: FieldList,
    spans: Vec<(&str, FieldList)>,
    now: Timestamp,
    level: Level,
    target: &str,
) -> String {
    let values = |fields: FieldList| fields.into_iter().map(|(name, value)| (name.to_owned(), value.into()));
    let mut object = Map::new();
    object.insert("time".into(), now.to_string().into());
    object.insert("level".into(), word(level).into());
    object.insert("target".into(), target.into());
    object.insert("message".into(), message.into());
    object.extend(values(fields));
    if !spans.is_empty() {
        let spans = spans.into_iter().map(|(span, fields)| (span.to_owned(), values(fields).collect()));
        object.insert("span".into(), Value::Object(spans.collect()));
    }
    Value::Object(object).to_string()
}

fn write_field(line: &mut String, name: &str, value: &str) {
    let plain = !value.is_empty() && value.chars().all(|c| c.is_ascii_graphic() && c != '"');
    // Writing to a text does not fail.
    let _ = if plain { write!(line, " {name}={value}") } else { write!(line, " {name}={value:?}") };
}

impl Visit for EventFields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_value(field, value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_value(field, format!("{value:?}"));
    }
}

impl EventFields {
    fn record_value(&mut self, field: &Field, value: String) {
        match field.name() {
            "message" => self.message = value,
            // For traces only.
            name if name.starts_with("otel.") => {}
            name => self.fields.push((name, value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tracing::{debug, info, info_span, warn};

    use super::*;

    fn line() -> EventLine {
        let event = EventFields {
            message: "pulled \"a:1\"".into(),
            fields: vec![("pod", "x/a".into()), ("why", "it was\nabsent".into()), ("empty", String::new())],
        };
        EventLine { event, spans: Vec::new() }
    }

    #[test]
    fn a_line_has_the_format_of_its_reader() {
        let now = Timestamp::UNIX_EPOCH;
        let show = |format| line().show(format, now, Level::WARN, "larder::pull");
        let fields = r#"pod=x/a why="it was\nabsent" empty="""#;
        assert_eq!(show(LogLineFormat::Terse), format!("warning: pulled \"a:1\" {fields}"));
        assert_eq!(
            show(LogLineFormat::Text),
            format!("1970-01-01T00:00:00.000Z warning: pulled \"a:1\" {fields}")
        );
        assert_eq!(
            show(LogLineFormat::Json),
            r#"{"empty":"","level":"warning","message":"pulled \"a:1\"","pod":"x/a","target":"larder::pull","#
                .to_owned() + r#""time":"1970-01-01T00:00:00Z","why":"it was\nabsent"}"#
        );
    }

    /// Lines that are written of the events of `work`, without the times.
    fn logged(
        level: Level,
        directives: Option<&str>,
        format: LogLineFormat,
        work: impl FnOnce(&Handle<LogWriter, Registry>),
    ) -> Vec<String> {
        let written: Arc<Mutex<Vec<String>>> = Arc::default();
        let to = Arc::clone(&written);
        let write = move |line: &str| to.lock().push(line.to_owned());
        let mut lines = LogWriter::new(level, directives, write).unwrap();
        lines.change(level, format);
        let (lines, handle) = reload::Layer::new(lines);
        subscriber::with_default(Registry::default().with(lines), || work(&handle));
        let written = written.lock();
        let timeless = |line: &String| match format {
            LogLineFormat::Text => line.split_once(' ').unwrap().1.to_owned(),
            LogLineFormat::Terse | LogLineFormat::Json => line.clone(),
        };
        written.iter().map(timeless).collect()
    }

    /// One line from each of several targets, at two levels.
    fn chatter() {
        info!(target: "larder::gc::sweep", "gc");
        debug!(target: "larder::gc::sweep", "gc, in detail");
        info!(target: "larder_store::pull", "store");
        debug!(target: "larder_store::pull", "store, in detail");
        warn!(target: "hyper::proto", "library");
    }

    #[test]
    fn the_filter_is_the_level_or_the_directives() {
        let (gc, gc_detail, store) = ("info: gc", "debug: gc, in detail", "info: store");
        let (store_detail, library) = ("debug: store, in detail", "warning: library");
        let cases: [(Level, Option<&str>, &[&str]); 9] = [
            (Level::WARN, None, &[]),
            (Level::INFO, None, &[gc, store]),
            (Level::DEBUG, None, &[gc, gc_detail, store, store_detail]),
            (Level::WARN, Some("info"), &[gc, store]),
            (Level::DEBUG, Some("off"), &[]),
            (Level::WARN, Some("larder::gc=debug,info"), &[gc, gc_detail, store]),
            (Level::WARN, Some("info, larder::gc=debug"), &[gc, gc_detail, store]),
            (Level::DEBUG, Some("larder_store=DEBUG"), &[store, store_detail]),
            (Level::DEBUG, Some("error,hyper=warn"), &[library]),
        ];
        for (level, directives, expected) in cases {
            assert_eq!(
                logged(level, directives, LogLineFormat::Terse, |_| chatter()),
                expected,
                "{directives:?}"
            );
        }
    }

    #[test]
    fn directives_that_cannot_be_used_are_named() {
        let cases = [
            ("loud", r#""loud" has no known level"#),
            ("larder::gc=loud,info", r#""larder::gc=loud" has no known level"#),
            ("larder::gc=", r#""larder::gc=" has no known level"#),
            ("info,", r#""" has no known level"#),
            ("=debug", r#""" is not a target"#),
            ("larder[pull]=debug", r#""larder[pull]" is not a target"#),
            ("info,lardr::gc=debug", r#""lardr::gc" is not a target; did you mean larder?"#),
            ("larder_stroe=debug", r#""larder_stroe" is not a target; did you mean larder_store?"#),
        ];
        for (directives, why) in cases {
            let error = parse(directives).unwrap_err();
            assert_eq!(error.message(), format!("LARDER_LOG={directives:?}: {why}"));
            assert!(
                error.next_steps()[0].to_string().contains("LARDER_LOG=larder::gc=debug,info"),
                "{error:?}"
            );
        }
        let others =
            "info,larder::gc=debug,larder_store=debug,hyper::proto=warn,kube_runtime=debug,rustls=debug";
        assert!(parse(others).is_ok());
    }

    #[test]
    fn a_reload_changes_level_and_format_and_keeps_directives() {
        let change = |handle: &Handle<LogWriter, Registry>| {
            chatter();
            handle.modify(|lines| lines.change(Level::ERROR, LogLineFormat::Terse)).unwrap();
            chatter();
            handle.modify(|lines| lines.change(Level::INFO, LogLineFormat::Terse)).unwrap();
            chatter();
        };
        assert_eq!(logged(Level::WARN, None, LogLineFormat::Terse, change), ["info: gc", "info: store"]);
        let fixed = logged(Level::WARN, Some("larder::gc=info"), LogLineFormat::Terse, change);
        assert_eq!(fixed, ["info: gc", "info: gc", "info: gc"]);
    }

    #[test]
    fn spans_that_are_made_for_traces_change_no_line() {
        let chatter = |handle: &Handle<LogWriter, Registry>| {
            handle.modify(|lines| lines.traces = true).unwrap();
            let pull =
                info_span!(target: "larder::pull", "pull", image = "a:1", otel.name = "pull.Pull").entered();
            assert!(!pull.is_disabled());
            let stage = tracing::trace_span!(target: "larder::pull", "stage", bytes = 1).entered();
            assert!(!stage.is_disabled());
            assert!(tracing::trace_span!(target: "h2::proto", "stream").is_disabled());
            warn!(target: "larder::pull", "slow");
            debug!(target: "larder::pull", "detail");
        };
        assert_eq!(logged(Level::WARN, None, LogLineFormat::Text, chatter), ["warning: slow"]);
        let shown = logged(Level::INFO, None, LogLineFormat::Text, chatter);
        assert_eq!(shown, ["warning: slow pull.image=a:1"]);
    }

    #[test]
    fn a_line_in_spans_has_their_fields_outermost_first() {
        let in_spans = |level, format| {
            logged(level, None, format, |_| {
                let _pull = info_span!(target: "larder::pull", "pull", image = "a:1").entered();
                let _layer =
                    info_span!(target: "larder_store::pull", "layer", digest = %"sha256:1").entered();
                let _library = info_span!(target: "h2::proto", "connection", peer = "x").entered();
                warn!(target: "larder_store::pull", image = "b", "slow");
            })
        };
        assert_eq!(in_spans(Level::INFO, LogLineFormat::Terse), ["warning: slow image=b"]);
        assert_eq!(
            in_spans(Level::INFO, LogLineFormat::Text),
            ["warning: slow image=b pull.image=a:1 layer.digest=sha256:1"]
        );
        assert_eq!(in_spans(Level::WARN, LogLineFormat::Text), ["warning: slow image=b"]);
        let json: Value = serde_json::from_str(&in_spans(Level::INFO, LogLineFormat::Json)[0]).unwrap();
        assert_eq!(json["image"], "b");
        assert_eq!(
            json["span"],
            serde_json::json!({"pull": {"image": "a:1"}, "layer": {"digest": "sha256:1"}})
        );
    }
}
