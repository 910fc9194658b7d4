//! Log lines of larder's own crates on standard error: warnings always, more with `-v`, and as the daemon is told.
//!
//! A logging framework would be larger than the rest of the program; spans and filters are not needed here. Only
//! larder's own lines are shown, so that no library tells what larder would not.

use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use jiff::Timestamp;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::config::LogFormat;

/// What lines look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// For someone who just typed a command: level and message.
    Terse,
    /// For someone who reads a log: time, level, message, fields.
    Text,
    /// For programs: one object a line.
    Json,
}

impl Format {
    /// That of a daemon's log.
    pub fn of(format: LogFormat) -> Format {
        match format {
            LogFormat::Text => Format::Text,
            LogFormat::Json => Format::Json,
        }
    }
}

/// What is logged now, and how.
struct Now {
    level: AtomicU8,
    format: AtomicU8,
}

static NOW: OnceLock<Arc<Now>> = OnceLock::new();

/// Starts logging lines of this level and more severe ones.
pub fn start(level: Level, write: impl Fn(&str) + Send + Sync + 'static) {
    let now = Arc::new(Now { level: AtomicU8::new(rank(level)), format: AtomicU8::new(Format::Terse as u8) });
    let _ = NOW.set(Arc::clone(&now));
    // It fails only if logging was started before, and then it runs.
    let _ = tracing::subscriber::set_global_default(Lines { write: Box::new(write), now });
}

/// Changes what is logged, and how.
pub fn change(level: Level, format: Format) {
    if let Some(now) = NOW.get() {
        now.level.store(rank(level), Ordering::Relaxed);
        now.format.store(format as u8, Ordering::Relaxed);
        // Whether anybody wants a line is remembered where the line is.
        tracing::callsite::rebuild_interest_cache();
    }
}

fn rank(level: Level) -> u8 {
    match level {
        Level::ERROR => 0,
        Level::WARN => 1,
        Level::INFO => 2,
        Level::DEBUG => 3,
        Level::TRACE => 4,
    }
}

fn word(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warning",
        Level::INFO => "info",
        _ => "debug",
    }
}

impl Now {
    fn format(&self) -> Format {
        match self.format.load(Ordering::Relaxed) {
            known if known == Format::Text as u8 => Format::Text,
            known if known == Format::Json as u8 => Format::Json,
            _ => Format::Terse,
        }
    }
}

struct Lines {
    write: Box<dyn Fn(&str) + Send + Sync>,
    now: Arc<Now>,
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event()
            && rank(*metadata.level()) <= self.now.level.load(Ordering::Relaxed)
            && metadata.target().starts_with("larder")
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let metadata = event.metadata();
        (self.write)(&line.show(self.now.format(), Timestamp::now(), *metadata.level(), metadata.target()));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// What an event says.
#[derive(Default)]
struct Line {
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Line {
    fn show(self, format: Format, now: Timestamp, level: Level, target: &str) -> String {
        let Line { message, fields } = self;
        if format == Format::Json {
            let mut object = Map::new();
            object.insert("time".into(), Value::String(now.to_string()));
            object.insert("level".into(), word(level).into());
            object.insert("target".into(), target.into());
            object.insert("message".into(), Value::String(message));
            object.extend(fields.into_iter().map(|(name, value)| (name.to_owned(), Value::String(value))));
            return Value::Object(object).to_string();
        }
        let mut line = match format {
            Format::Text => format!("{now:.3} {}: {message}", word(level)),
            Format::Terse | Format::Json => format!("{}: {message}", word(level)),
        };
        for (name, value) in fields {
            let plain = !value.is_empty() && value.chars().all(|c| c.is_ascii_graphic() && c != '"');
            // Writing to a text does not fail.
            let _ = if plain { write!(line, " {name}={value}") } else { write!(line, " {name}={value:?}") };
        }
        line
    }
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.take(field, value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.take(field, format!("{value:?}"));
    }
}

impl Line {
    fn take(&mut self, field: &Field, value: String) {
        match field.name() {
            "message" => self.message = value,
            name => self.fields.push((name, value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> Line {
        Line {
            message: "pulled \"a:1\"".into(),
            fields: vec![("pod", "x/a".into()), ("why", "it was\nabsent".into()), ("empty", String::new())],
        }
    }

    #[test]
    fn a_line_is_for_whoever_reads_it() {
        let now = Timestamp::UNIX_EPOCH;
        let show = |format| line().show(format, now, Level::WARN, "larder::pull");
        let fields = r#"pod=x/a why="it was\nabsent" empty="""#;
        assert_eq!(show(Format::Terse), format!("warning: pulled \"a:1\" {fields}"));
        assert_eq!(show(Format::Text), format!("1970-01-01T00:00:00.000Z warning: pulled \"a:1\" {fields}"));
        let json: Value = serde_json::from_str(&show(Format::Json)).unwrap();
        assert_eq!(json["time"], "1970-01-01T00:00:00Z");
        assert_eq!(json["message"], "pulled \"a:1\"");
        assert_eq!(json["why"], "it was\nabsent");
    }
}
