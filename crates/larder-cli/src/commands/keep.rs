//! `larder keep` and `larder unkeep`: the rules that spare images.

use larder::gc::{GcPolicy, KeepRule, Selector};

use crate::args::{Connection, KeepArgs, Limits, UnkeepArgs};
use crate::collect::{self, KeepFile, Place, Rule};
use crate::connect;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::output;
use crate::output::table::Table;

/// Adds a rule, or lists all.
pub(super) async fn keep(args: &KeepArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let chosen = connect::chosen(connection)?;
    let place = Place::of(connection, &chosen)?;
    let Some(select) = select(args)? else {
        let rules = KeepFile::at(&place).read()?;
        let shown: Vec<Rule> = rules.iter().map(Rule::from).collect();
        output::show(out, args.output, &shown, || table(&rules));
        return Ok(Outcome::Done);
    };
    let rule = KeepRule { select, ttl: args.ttl, budget_bytes: args.budget };
    let policy = GcPolicy { keep: vec![rule.clone()], ..GcPolicy::default() };
    if let Some(problem) = policy.problems().first() {
        return Err(Failure::bad_input(problem.to_string()));
    }
    let place = place.locked()?;
    let file = KeepFile::at(&place);
    let mut rules = file.read()?;
    // One rule for one selection: the later word counts.
    rules.retain(|known| known.select != rule.select);
    rules.push(rule.clone());
    file.write(&rules)?;
    out.line(format_args!("Keeps {rule}."));
    drop(place);
    // A rule that keeps nothing yet may be meant so, or be a slip.
    if let Ok(collecting) = collect::collecting_from(chosen, connection, Limits::default().policy()?, out)
        && let Ok(scene) = collecting.collector.scene().await
    {
        let last = rules.len() - 1;
        for warning in collecting.collector.warnings(&scene).iter().filter(|warning| warning.rule == last) {
            out.warning(warning);
        }
    }
    Ok(Outcome::Done)
}

/// Which images the arguments mean; `None` when there is no rule.
fn select(args: &KeepArgs) -> Result<Option<Selector>, Failure> {
    let select = match (&args.rule, &args.label, args.newest) {
        (Some(repository), _, Some(count)) => Selector::Newest { repository: repository.clone(), count },
        (Some(rule), _, None) => named(rule),
        (None, Some(label), _) => labelled(label),
        (None, None, _) if args.ttl.is_some() || args.budget.is_some() => {
            return Err(Failure::bad_input(
                "--ttl and --budget are part of a rule; name images or a --label",
            ));
        }
        (None, None, _) => return Ok(None),
    };
    Ok(Some(select))
}

fn named(text: &str) -> Selector {
    if text.starts_with("sha256:") || text.starts_with("sha512:") {
        Selector::Digest(text.to_owned())
    } else {
        Selector::Name(text.to_owned())
    }
}

fn labelled(text: &str) -> Selector {
    match text.split_once('=') {
        Some((key, value)) => Selector::Label(key.to_owned(), Some(value.to_owned())),
        None => Selector::Label(text.to_owned(), None),
    }
}

/// Drops rules.
pub(super) fn unkeep(args: &UnkeepArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let place = Place::of(connection, &connect::chosen(connection)?)?.locked()?;
    let file = KeepFile::at(&place);
    if args.all {
        file.write(&[])?;
        out.line("Keeps nothing any more.");
        return Ok(Outcome::Done);
    }
    let mut rules = file.read()?;
    let Some(at) = rules.iter().position({
        let number = args.rule.as_deref().and_then(|text| text.parse::<usize>().ok());
        let mut place = 0;
        move |rule| {
            place += 1;
            match (&args.rule, &args.label) {
                (_, Some(label)) => rule.select == labelled(label),
                (Some(text), None) => number == Some(place) || is_named(rule, text),
                (None, None) => false,
            }
        }
    }) else {
        let asked = args.rule.as_ref().or(args.label.as_ref()).map_or("", String::as_str);
        return Err(Failure::failed(format!("{asked}: no such rule")).hint("larder keep lists them"));
    };
    let dropped = rules.remove(at);
    file.write(&rules)?;
    out.line(format_args!("Does not keep {dropped} any more."));
    Ok(Outcome::Done)
}

fn is_named(rule: &KeepRule, text: &str) -> bool {
    match &rule.select {
        Selector::Name(name) | Selector::Digest(name) | Selector::Newest { repository: name, .. } => {
            name == text
        }
        Selector::Label(..) => false,
    }
}

fn table(rules: &[KeepRule]) -> Table {
    let mut table = Table::new(["RULE", "KEEPS"]);
    for (index, rule) in rules.iter().enumerate() {
        table.row([(index + 1).to_string(), rule.to_string()]);
    }
    table
}
