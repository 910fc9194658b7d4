//! `larder events`: what happened to images, and with `-w` what happens.

use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use larder_control::v1alpha1::events_response::Told;
use larder_control::v1alpha1::{Event, EventsRequest};
use rustix::event::{PollFd, PollFlags, poll};
use tokio::time;

use crate::args::{Connection, EventsArgs};
use crate::daemon::Daemon;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::output::{DataFormat, Format};

/// Widths of the columns: time of day, the longest type and reason there are, and an object of usual length.
const WIDTHS: [usize; 4] = [11, 10, 22, 28];

/// How often it is looked whether anybody reads.
const LOOK_AT_READER: Duration = Duration::from_secs(1);

pub(super) async fn run(args: &EventsArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let daemon = Daemon::required(connection)?;
    let request = EventsRequest { from: args.since, watch: args.watch };
    let mut told = daemon.wait(async |mut client| client.events(request).await).await?;
    let mut first = true;
    loop {
        let next = tokio::select! {
            next = told.message() => next.map_err(|status| daemon.failure(&status))?,
            // Who reads is gone, and may be so long before the next event.
            () = reader_gone() => return Ok(Outcome::Done),
        };
        match next.map(|next| next.told) {
            Some(Some(Told::Event(event))) => show(&event, args.output, &mut first, out),
            // From the beginning is from whatever is kept.
            Some(Some(Told::Missed(count))) if args.since > 0 || !first => {
                out.warning(format_args!("{count} events were not kept long enough"));
            }
            Some(_) => {}
            None if args.watch => {
                let socket = daemon.socket().display();
                return Err(Failure::unreachable(format!("the daemon at {socket} has ended")));
            }
            None => return Ok(Outcome::Done),
        }
    }
}

/// Done when nobody can read standard output any more.
async fn reader_gone() {
    let mut ticks = time::interval(LOOK_AT_READER);
    loop {
        ticks.tick().await;
        let stdout = std::io::stdout();
        let mut watched = [PollFd::new(&stdout, PollFlags::empty())];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let gone = PollFlags::ERR | PollFlags::NVAL;
        if poll(&mut watched, Some(&now)).is_ok() && watched[0].revents().intersects(gone) {
            return;
        }
    }
}

fn show(event: &Event, format: Format, first: &mut bool, out: &Out) {
    match format {
        Format::Json => {
            // Texts and numbers alone: it does not fail.
            out.line(serde_json::to_string(event).unwrap_or_default());
        }
        Format::Yaml => {
            out.line("---");
            crate::output::data(out, DataFormat::Yaml, event);
        }
        Format::Table | Format::Wide => {
            let wide = format == Format::Wide;
            if *first {
                out.line(columns(["TIME", "TYPE", "REASON", "OBJECT", "MESSAGE"].map(str::to_owned), wide));
            }
            out.line(columns(cells(event, wide), wide));
        }
    }
    *first = false;
}

fn cells(event: &Event, wide: bool) -> [String; 5] {
    // What was asked for without a pod has no name.
    let object = match event.name.as_str() {
        "" => event.uid.clone(),
        name => format!("{}/{name}", event.object_kind),
    };
    let message = match event.field_path.as_str() {
        field if wide && !field.is_empty() => format!("{field}: {}", event.message),
        _ => event.message.clone(),
    };
    let time = if wide {
        format!("{} {}", event.number.unwrap_or_default(), event.time)
    } else {
        time_of_day(&event.time)
    };
    [time, event.r#type.clone(), event.reason.clone(), object, message]
}

fn columns([time, kind, reason, object, message]: [String; 5], wide: bool) -> String {
    let [time_width, kind_width, reason_width, object_width] = WIDTHS;
    let time_width = if wide { 40 } else { time_width };
    // A long name moves the message, and does not touch it.
    let object = format!("{object}   ");
    format!("{time:<time_width$}{kind:<kind_width$}{reason:<reason_width$}{object:<object_width$}{message}")
}

/// The time of day here.
fn time_of_day(time: &str) -> String {
    let zoned = time.parse::<Timestamp>().map(|time| time.to_zoned(TimeZone::system()));
    zoned.map_or_else(|_| time.to_owned(), |time| time.strftime("%H:%M:%S").to_string())
}
