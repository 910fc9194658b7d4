//! `larder history`: the steps in which an image was built, from its config.

mod build_history;

use jiff::Timestamp;
use larder::age;
use larder::hint::Hint;
use larder_api::v1::InspectRequest;

use super::inspect::names_and_ids;
use crate::args::HistoryArgs;
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output::table::TextTable;
use crate::output::{self, size};
use crate::session::{CommandSession, ImageAccess};
use build_history::{BuildStep, build_steps};

/// Characters of a command or comment in the narrow table.
const SHOWN: usize = 60;

pub(super) async fn run(args: &HistoryArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let Some(image) = &args.image else {
        return Err(Failure::bad_input("no image given")
            .hint(Hint::new().command(["gc", "log"]).text(" lists the images that GC removed")));
    };
    let (names, outcome) = names_and_ids(std::slice::from_ref(image), &session.out);
    let [name] = names[..] else { return Ok(outcome) };
    let client = session.open(&ImageAccess::read()).await?;
    let request = InspectRequest { image: name.to_owned(), exact: false };
    let details = client.ask(async |mut calls| calls.inspect(request).await).await?;
    let steps = build_steps(&details.info).ok_or_else(|| {
        Failure::failed(format!("{name}: the backend does not report the history of images"))
            .hint(format!("on Docker: docker history {name}"))
    })?;
    let wide = args.output.is_wide() || args.no_trunc;
    output::show(&session.out, args.output, &steps, || table(&steps, wide, Timestamp::now()));
    if steps.is_empty() {
        session.out.info(format_args!("note: the config of {name} has no history"));
    }
    Ok(CommandOutcome::Done)
}

fn table(steps: &[BuildStep], wide: bool, now: Timestamp) -> TextTable {
    let mut table = TextTable::new(["CREATED", "SIZE", "CREATED BY", "COMMENT"]);
    for step in steps {
        let size = match (step.empty_layer, step.size_bytes) {
            (true, _) => size::bytes(0),
            (false, size) => size.map_or_else(String::new, size::bytes),
        };
        let shown = |text: &str| shown(text, wide);
        let created = age::ago(step.created.as_deref().unwrap_or_default(), now);
        table.row([created, size, shown(&step.created_by), shown(&step.comment)]);
    }
    table
}

/// The text on one line, shortened unless the table is wide.
fn shown(text: &str, wide: bool) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) if !wide => format!("{}...", &text[..end]),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_ages() {
        let step = BuildStep {
            created: Some("2026-01-01T00:00:00Z".into()),
            created_by: "COPY a b".into(),
            comment: String::new(),
            empty_layer: false,
            size_bytes: Some(1),
        };
        let now = "2026-01-01T03:00:00Z".parse().unwrap();
        let text = table(&[step], false, now).to_string();
        assert!(text.contains("3 hours ago") && !text.contains("2026"), "{text}");
    }

    #[test]
    fn the_text_of_a_config_adds_no_line() {
        let forged = "x\nsha256:f   1 hour ago";
        let step = BuildStep {
            created: Some(format!("2026-01-01T00:00:00Z {forged}")),
            created_by: forged.into(),
            comment: forged.into(),
            empty_layer: true,
            size_bytes: None,
        };
        for wide in [true, false] {
            let text = table(std::slice::from_ref(&step), wide, Timestamp::UNIX_EPOCH).to_string();
            assert_eq!(text.lines().count(), 2, "{text}");
            assert!(text.lines().nth(1).is_some_and(|row| row.starts_with("- ")), "{text}");
        }
    }
}
