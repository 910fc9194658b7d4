//! `larder keep` and `larder unkeep`: the rules that spare images.

use larder::gc::{Collector, GcPolicy, KeepRule, Selector};
use larder_control::v1alpha1::{KeepRequest, KeepResponse};

use crate::args::{Connection, KeepArgs, UnkeepArgs};
use crate::collect::{self, KeepFile, Listed, Place, RuleDocument as _, ShownRule};
use crate::connect::{self, Chosen};
use crate::daemon::Daemon;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::output;
use crate::output::table::Table;

/// Adds a rule, or lists all.
pub(super) async fn keep(args: &KeepArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let book = RuleBook::open(connection)?;
    let Some(select) = select(args)? else {
        let rules = book.rules(connection).await?;
        let shown: Vec<ShownRule<'_>> = rules.iter().map(ShownRule::from).collect();
        output::show(out, args.output, &shown, || table(&rules));
        return Ok(Outcome::Done);
    };
    let rule = KeepRule { select, ttl: args.ttl, budget_bytes: args.budget };
    let request = KeepRequest { add: vec![rule.to_document()], ..KeepRequest::default() };
    // A rule that keeps nothing yet may be meant so, or be a slip.
    let answer = book.change(request, connection, out).await?;
    out.line(format_args!("Keeps {rule}."));
    for warning in answer.warnings {
        out.warning(warning);
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
pub(super) async fn unkeep(
    args: &UnkeepArgs,
    connection: &Connection,
    out: &Out,
) -> Result<Outcome, Failure> {
    let book = RuleBook::open(connection)?;
    if args.all {
        let request = KeepRequest { remove_all: true, ..KeepRequest::default() };
        let left = book.change(request, connection, out).await?.configured;
        match left.first() {
            None => out.line("Keeps nothing any more."),
            Some(rule) => out.line(format_args!("Keeps only what gc.keep of {} says.", rule.place)),
        }
        return Ok(Outcome::Done);
    }
    let rules = book.rules(connection).await?;
    let asked = args.rule.as_ref().or(args.label.as_ref()).map_or("", String::as_str);
    let found = meant(args, &rules)
        .ok_or_else(|| Failure::missing(format!("{asked}: no such rule")).hint("larder keep lists them"))?;
    let dropped = &found.rule;
    if let Some(place) = &found.place {
        return Err(Failure::failed(format!("{asked}: this rule ({dropped}) is of the settings: {place}"))
            .hint("take it out of gc.keep there; a daemon that runs notices by itself"));
    }
    let request = KeepRequest { remove: vec![dropped.to_document()], ..KeepRequest::default() };
    book.change(request, connection, out).await?;
    out.line(format_args!("Does not keep {dropped} any more."));
    Ok(Outcome::Done)
}

/// The rule that the arguments mean: by its number, or by what it selects, and then one of `larder keep` if there is one.
fn meant<'a>(args: &UnkeepArgs, rules: &'a [Listed]) -> Option<&'a Listed> {
    let number = args.rule.as_deref().and_then(|text| text.parse::<usize>().ok());
    let named = |listed: &&Listed| match (&args.rule, &args.label) {
        (_, Some(label)) => listed.rule.select == labelled(label),
        (Some(text), None) => is_named(&listed.rule, text),
        (None, None) => false,
    };
    let numbered = number.and_then(|number| rules.get(number.checked_sub(1)?));
    let own = || rules.iter().filter(|listed| listed.place.is_none()).find(named);
    numbered.or_else(own).or_else(|| rules.iter().find(named))
}

/// Who has the rules.
enum RuleBook {
    Daemon(Daemon),
    Own(Box<Chosen>),
}

impl RuleBook {
    fn open(connection: &Connection) -> Result<RuleBook, Failure> {
        Ok(match Daemon::find(connection)? {
            Some(daemon) => RuleBook::Daemon(daemon),
            None => RuleBook::Own(Box::new(connect::chosen(connection)?)),
        })
    }

    /// All that are in force, in the order in which they are numbered: those of the settings, which only a daemon has,
    /// come first.
    async fn rules(&self, connection: &Connection) -> Result<Vec<Listed>, Failure> {
        let own = |rule| Listed { rule, place: None };
        match self {
            RuleBook::Own(chosen) => {
                let rules = KeepFile::at(&Place::of(connection, chosen)?.alone()?).read()?;
                Ok(rules.into_iter().map(own).collect())
            }
            RuleBook::Daemon(daemon) => {
                let request = KeepRequest::default();
                let answer = daemon.ask(async |mut client| client.keep(request).await).await?;
                let configured = answer.configured.into_iter().map(|configured| {
                    let rule = KeepRule::from_document(&configured.rule)?;
                    Ok(Listed { rule, place: Some(configured.place) })
                });
                let others = answer.rules.iter().map(|rule| KeepRule::from_document(rule).map(own));
                configured.chain(others).collect()
            }
        }
    }

    /// Changes the rules; the answer also tells which of the new ones match nothing.
    async fn change(
        self,
        request: KeepRequest,
        connection: &Connection,
        out: &Out,
    ) -> Result<KeepResponse, Failure> {
        match self {
            RuleBook::Daemon(daemon) => daemon.ask(async |mut client| client.keep(request).await).await,
            RuleBook::Own(chosen) => {
                let place = Place::of(connection, &chosen)?.locked()?;
                let (_, new) = change(&KeepFile::at(&place), &request)?;
                drop(place);
                if new == 0 {
                    return Ok(KeepResponse::default());
                }
                let Ok(collecting) = collect::collecting_from(*chosen, connection, GcPolicy::default(), out)
                else {
                    return Ok(KeepResponse::default());
                };
                let warnings = idle(&collecting.collector, new).await;
                Ok(KeepResponse { warnings, ..KeepResponse::default() })
            }
        }
    }
}

/// Changes the rules in the file as asked, and returns them, and how many of the last ones are new.
pub(crate) fn change(file: &KeepFile, request: &KeepRequest) -> Result<(Vec<KeepRule>, usize), Failure> {
    let read = |documents: &[String]| -> Result<Vec<KeepRule>, Failure> {
        documents.iter().map(|document| KeepRule::from_document(document)).collect()
    };
    let (add, remove) = (read(&request.add)?, read(&request.remove)?);
    let policy = GcPolicy { keep: add.clone(), ..GcPolicy::default() };
    if let Some(problem) = policy.problems().first() {
        return Err(Failure::bad_input(problem.to_string()));
    }
    // Rules that cannot be read can still all be dropped.
    let mut rules = if request.remove_all { Vec::new() } else { file.read()? };
    if add.is_empty() && remove.is_empty() && !request.remove_all {
        return Ok((rules, 0));
    }
    if let Some(unknown) = remove.iter().find(|rule| !rules.contains(rule)) {
        return Err(Failure::missing(format!("{unknown}: no such rule")).hint("larder keep lists them"));
    }
    // One rule for one selection: the later word counts.
    rules.retain(|known| !remove.contains(known) && add.iter().all(|new| new.select != known.select));
    let new = add.len();
    rules.extend(add);
    file.write(&rules)?;
    Ok((rules, new))
}

/// Which of the last `new` rules match nothing.
pub(crate) async fn idle(collector: &Collector, new: usize) -> Vec<String> {
    let first_new = collector.policy().keep.len().saturating_sub(new);
    let Ok(scene) = collector.scene().await else { return Vec::new() };
    let warnings = collector.warnings(&scene).into_iter().filter(|warning| warning.rule >= first_new);
    warnings.map(|warning| warning.to_string()).collect()
}

fn is_named(rule: &KeepRule, text: &str) -> bool {
    match &rule.select {
        Selector::Name(name) | Selector::Digest(name) | Selector::Newest { repository: name, .. } => {
            name == text
        }
        Selector::Label(..) => false,
    }
}

fn table(rules: &[Listed]) -> Table {
    let mut table = Table::new(["RULE", "KEEPS", "FROM"]);
    for (index, Listed { rule, place }) in rules.iter().enumerate() {
        let from = place.as_deref().unwrap_or("larder keep");
        table.row([(index + 1).to_string(), rule.to_string(), from.to_owned()]);
    }
    table
}
