//! `larder events`: the daemon's events, and with `-w` new ones as they happen.

use std::path::Path;
use std::time::Duration;

use futures_util::TryStreamExt as _;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use larder_agent::client::{Client, ResponseStream};
use larder_api::EnumWord as _;
use larder_api::v1::events_response::Item;
use larder_api::v1::{Event, EventsRequest, EventsResponse};
use rustix::event::{PollFd, PollFlags, poll};
use tokio::time;

use crate::args::{EventsArgs, EventsSince};
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output::{DataFormat, PrintFormat};
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

/// Widths of the columns: time of day, and the longest type and reason there are.
const WIDTHS: [usize; 3] = [11, 10, 22];
/// Width of the column of objects: at least, and at most.
const OBJECT: (usize, usize) = (9, 72);

/// Spaces between an object and its message.
const GAP: usize = 3;

/// How often a closed pipe is detected.
const PIPE_CHECK_PERIOD: Duration = Duration::from_secs(1);

pub(super) async fn run(args: &EventsArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let daemon = session.open(&ImageAccess::daemon()).await?;
    let (from, oldest) = match args.since {
        None => (0, None),
        Some(EventsSince::Number(number)) => (number, None),
        Some(EventsSince::Ago(time)) => (0, Timestamp::now().checked_sub(time).ok()),
    };
    let request = EventsRequest { from, watch: args.watch };
    let mut stream = daemon.wait(async |mut calls| calls.events(request).await).await?;
    let mut page = EventPrinter {
        format: args.output,
        watched: args.watch,
        width: OBJECT.0,
        oldest,
        buffered: Vec::new(),
        first: true,
    };
    let ended = follow(&mut stream, args, &daemon, &mut page, out).await;
    page.flush(out);
    ended
}

/// Prints the stream.
async fn follow(
    stream: &mut ResponseStream<EventsResponse>,
    args: &EventsArgs,
    daemon: &Client,
    page: &mut EventPrinter,
    out: &Printer,
) -> Result<CommandOutcome, Failure> {
    loop {
        let next = tokio::select! {
            next = stream.try_next() => next.map_err(|status| daemon.error(&status))?,
            // A closed pipe ends the command before the next event.
            () = pipe_closed() => return Ok(CommandOutcome::Done),
        };
        match next.map(|next| next.item) {
            Some(Some(Item::Event(event))) => page.add(event, out),
            // A start from the beginning misses nothing.
            Some(Some(Item::Missed(count)))
                if matches!(args.since, Some(EventsSince::Number(1..))) || !page.is_empty() =>
            {
                out.warning(format_args!("{count} events are no longer available"));
            }
            Some(_) => {}
            None if args.watch => {
                let socket = daemon.socket().unwrap_or(Path::new("")).display();
                return Err(Failure::unreachable(format!("the daemon at {socket} has ended")));
            }
            None => return Ok(CommandOutcome::Done),
        }
    }
}

/// Done when standard output is a closed pipe.
pub(super) async fn pipe_closed() {
    let mut ticks = time::interval(PIPE_CHECK_PERIOD);
    loop {
        ticks.tick().await;
        let stdout = std::io::stdout();
        let mut watched = [PollFd::new(&stdout, PollFlags::empty())];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let closed = PollFlags::ERR | PollFlags::NVAL;
        if poll(&mut watched, Some(&now)).is_ok() && watched[0].revents().intersects(closed) {
            return;
        }
    }
}

/// The printed events. Columns fit all events that are known at once; those of a watch widen them as they arrive.
struct EventPrinter {
    format: PrintFormat,
    watched: bool,
    /// Of the column of objects.
    width: usize,
    /// Earlier events are left out.
    oldest: Option<Timestamp>,
    buffered: Vec<Event>,
    first: bool,
}

impl EventPrinter {
    fn is_empty(&self) -> bool {
        self.first && self.buffered.is_empty()
    }

    fn add(&mut self, event: Event, out: &Printer) {
        let is_older = |oldest: Timestamp| event.time.parse::<Timestamp>().is_ok_and(|time| time < oldest);
        if self.oldest.is_some_and(is_older) {
            return;
        }
        let width = event.object().chars().count() + GAP;
        self.width = self.width.max(width.min(OBJECT.1));
        if self.watched || self.format.data().is_some() {
            show(&event, self.format, self.width, &mut self.first, out);
        } else {
            self.buffered.push(event);
        }
    }

    fn flush(&mut self, out: &Printer) {
        for event in std::mem::take(&mut self.buffered) {
            show(&event, self.format, self.width, &mut self.first, out);
        }
    }
}

fn show(event: &Event, format: PrintFormat, width: usize, first: &mut bool, out: &Printer) {
    match format {
        PrintFormat::Json => {
            crate::output::json_line(out, event);
        }
        PrintFormat::Yaml => {
            out.line("---");
            crate::output::data(out, DataFormat::Yaml, event);
        }
        PrintFormat::Table | PrintFormat::Wide => {
            let wide = format == PrintFormat::Wide;
            if *first {
                out.line(columns(
                    ["TIME", "TYPE", "REASON", "OBJECT", "MESSAGE"].map(str::to_owned),
                    width,
                    wide,
                ));
            }
            out.line(columns(cells(event, wide), width, wide));
        }
    }
    *first = false;
}

fn cells(event: &Event, wide: bool) -> [String; 5] {
    let object = event.object();
    let mut message = match event.field_path.as_str() {
        field if wide && !field.is_empty() => format!("{field}: {}", event.message),
        _ => event.message.clone(),
    };
    if wide && !event.requester.is_empty() {
        message = format!("{message} [requested by {}]", event.requester);
    }
    let time = if wide {
        format!("{} {}", event.number.unwrap_or_default(), event.time)
    } else {
        time_of_day(&event.time)
    };
    [time, event.r#type().word().to_owned(), event.reason.clone(), object, message]
}

fn columns([time, kind, reason, object, message]: [String; 5], object_width: usize, wide: bool) -> String {
    let [time_width, kind_width, reason_width] = WIDTHS;
    let time_width = if wide { 40 } else { time_width };
    // A long name moves the message, and does not touch it.
    let object = format!("{object}{:GAP$}", "");
    format!("{time:<time_width$}{kind:<kind_width$}{reason:<reason_width$}{object:<object_width$}{message}")
}

/// The time of day here.
fn time_of_day(time: &str) -> String {
    let zoned = time.parse::<Timestamp>().map(|time| time.to_zoned(TimeZone::system()));
    zoned.map_or_else(|_| time.to_owned(), |time| time.strftime("%H:%M:%S").to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::printer::tests::TestWriter as Paper;

    /// Where the messages of events about these pods begin, in the lines after the head.
    fn messages_begin(pods: &[&str], watched: bool) -> Vec<usize> {
        let paper = Paper::default();
        let out = Printer::to(Box::new(paper.clone()), Box::new(std::io::sink()));
        let mut page = EventPrinter {
            oldest: None,
            format: PrintFormat::Table,
            watched,
            width: OBJECT.0,
            buffered: Vec::new(),
            first: true,
        };
        for pod in pods {
            let message = "Pulling".to_owned();
            let event = Event { object_kind: "pod".into(), name: (*pod).into(), message, ..Event::default() };
            page.add(event, &out);
        }
        page.flush(&out);
        paper.text().lines().skip(1).map(|line| line.find("Pulling").unwrap()).collect()
    }

    #[test]
    fn older_events_are_left_out_and_the_start_is_a_time_or_a_number() {
        let paper = Paper::default();
        let out = Printer::to(Box::new(paper.clone()), Box::new(std::io::sink()));
        let mut page = EventPrinter {
            oldest: "2026-01-01T00:00:00Z".parse().ok(),
            format: PrintFormat::Json,
            watched: false,
            width: OBJECT.0,
            buffered: Vec::new(),
            first: true,
        };
        for time in ["2025-12-31T23:59:59.9Z", "2026-01-01T00:00:00Z", "2026-01-01T02:00:00Z"] {
            page.add(Event { time: time.into(), ..Event::default() }, &out);
        }
        assert!(
            !paper.text().contains("2025") && paper.text().matches("2026").count() == 2,
            "{}",
            paper.text()
        );
        assert_eq!(EventsSince::parse("10m"), Ok(EventsSince::Ago(Duration::from_secs(600))));
        assert_eq!(EventsSince::parse("10"), Ok(EventsSince::Number(10)));
        assert!(EventsSince::parse("yesterday").is_err());
    }

    #[test]
    fn columns_line_up_whatever_the_names() {
        let long = "a-pod-with-quite-a-long-name-as-deployments-make-them";
        let begin = messages_begin(&["a", long, "b"], false);
        assert_eq!(begin, [begin[0]; 3]);
        let begin = messages_begin(&["a", long, "b"], true);
        assert!(begin[0] < begin[1] && begin[1] == begin[2], "what is watched widens: {begin:?}");
        let endless = "x".repeat(200);
        assert!(messages_begin(&[&endless, "b"], false)[1] < 200, "one name does not push all away");
    }
}
