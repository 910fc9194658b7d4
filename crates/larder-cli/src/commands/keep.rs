//! `larder keep` and `larder unkeep`: keep rules.

use larder::hint::Hint;
use larder::retention::{KeepRule, Selector};
use larder_agent::client::Client;
use larder_api::convert;
use larder_api::v1::{self as api, KeepRequest, KeepResponse};
use serde::Serialize;

use crate::args::{KeepArgs, KeepSubcommand, UnkeepArgs};
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output::table::TextTable;
use crate::output::{self, PrintFormat};
use crate::session::{CommandSession, ImageAccess};

/// A rule in force, and where the settings have it, such as `/etc/larder/config.yaml:12`; `None` for one of `larder
/// keep`.
#[derive(PartialEq)]
struct ListedRule {
    rule: KeepRule,
    place: Option<String>,
}

/// A rule as `-o json` shows it.
#[derive(Serialize)]
struct KeepRuleRecord<'a> {
    #[serde(flatten)]
    rule: api::KeepRule,
    from: Option<&'a str>,
}

impl ListedRule {
    fn record(&self) -> KeepRuleRecord<'_> {
        KeepRuleRecord { rule: convert::keep_rule(&self.rule), from: self.place.as_deref() }
    }
}

/// Adds a rule, lists all, or drops some.
pub(super) async fn keep(args: &KeepArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    match &args.action {
        Some(KeepSubcommand::Ls(args)) => list(args.output, session).await,
        Some(KeepSubcommand::Rm(args)) => unkeep(args, session).await,
        None => match select(args)? {
            Some(select) => add(select, args, session).await,
            None => list(args.output, session).await,
        },
    }
}

async fn list(format: PrintFormat, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let rules = match session.open_to_list(&ImageAccess::keep()).await? {
        Some(client) => rules(&client).await?,
        None => Vec::new(),
    };
    let shown: Vec<_> = rules.iter().map(ListedRule::record).collect();
    output::show(&session.out, format, &shown, || table(&rules));
    Ok(CommandOutcome::Done)
}

async fn add(select: Selector, args: &KeepArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let client = match session.open_to_list(&ImageAccess::keep()).await? {
        Some(client) => client,
        // A rule can be there before its images.
        None => session.open(&ImageAccess::keep().create_store()).await?,
    };
    let rule = KeepRule { select, ttl: args.ttl, budget_bytes: args.budget };
    let request = KeepRequest { add: vec![convert::keep_rule(&rule)], ..KeepRequest::default() };
    // A rule without a matching image is accepted with a warning.
    let answer = change(&client, request).await?;
    // A short name became the name of the image.
    let added = answer.rules.into_iter().last().map(convert::keep_rule_from).transpose()?;
    let rule = added.unwrap_or(rule);
    match args.output.data() {
        Some(format) => output::data(out, format, &ListedRule { rule, place: None }.record()),
        None => out.line(format_args!("added keep rule: {rule}")),
    }
    for warning in answer.warnings {
        out.warning(warning);
    }
    Ok(CommandOutcome::Done)
}

/// The selector of the arguments; `None` without a rule.
fn select(args: &KeepArgs) -> Result<Option<Selector>, Failure> {
    let select = match (&args.rule, &args.label, &args.r#type) {
        (Some(rule), ..) => match args.newest {
            Some(count) => Selector::Newest { repository: rule.clone(), count },
            None => named(rule),
        },
        (None, Some(label), _) => labelled(label),
        (None, None, Some(of)) => Selector::Type(of.clone()),
        (None, None, None) if args.ttl.is_some() || args.budget.is_some() => {
            return Err(Failure::bad_input("--ttl and --budget require a RULE, --label or --type"));
        }
        (None, None, None) => return Ok(None),
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
pub(super) async fn unkeep(args: &UnkeepArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let client = session.open(&ImageAccess::keep()).await?;
    if args.all {
        let request = KeepRequest { remove_all: true, ..KeepRequest::default() };
        let left = change(&client, request).await?.configured;
        match left.first() {
            None => out.line("removed all keep rules"),
            Some(rule) => {
                out.line(format_args!("removed all keep rules except those of gc.keep in {}", rule.place));
            }
        }
        return Ok(CommandOutcome::Done);
    }
    let rules = rules(&client).await?;
    let requested = args.rule.as_ref().or(args.label.as_ref()).map_or("", String::as_str);
    let is_last = |found: &ListedRule| rules.last() == Some(found);
    let found = find_rule(args, &rules).ok_or_else(|| {
        Failure::missing(format!("{requested}: no such rule"))
            .hint(Hint::new().command(["keep"]).text(" lists the rules"))
    })?;
    let dropped = &found.rule;
    if let Some(place) = &found.place {
        return Err(Failure::failed(format!("{requested}: this rule ({dropped}) is set in {place}"))
            .hint("remove it from gc.keep there; a running daemon reloads the file"));
    }
    let request = KeepRequest { remove: vec![convert::keep_rule(dropped)], ..KeepRequest::default() };
    change(&client, request).await?;
    out.line(format_args!("removed keep rule: {dropped}"));
    if !is_last(found) {
        out.info("note: the rules after it have new numbers: larder keep lists them");
    }
    Ok(CommandOutcome::Done)
}

/// The rule with this number, or with this selector: one of `larder keep` before one of the settings. Else the only one
/// with a name that ends so.
fn find_rule<'a>(args: &UnkeepArgs, rules: &'a [ListedRule]) -> Option<&'a ListedRule> {
    let number = args.rule.as_deref().and_then(|text| text.parse::<usize>().ok());
    let named = |listed: &&ListedRule| match (&args.rule, &args.label) {
        (_, Some(label)) => listed.rule.select == labelled(label),
        (Some(text), None) => is_named(&listed.rule, text),
        (None, None) => false,
    };
    let by_end = || {
        let mut ends =
            rules.iter().filter(|listed| args.rule.as_ref().is_some_and(|text| has_end(&listed.rule, text)));
        ends.next().filter(|_| ends.next().is_none())
    };
    let numbered = number.and_then(|number| rules.get(number.checked_sub(1)?));
    let added = || rules.iter().filter(|listed| listed.place.is_none()).find(named);
    numbered.or_else(added).or_else(|| rules.iter().find(named)).or_else(by_end)
}

/// Whether the rule has a name of which the text is the end at a slash, with or without the tag.
fn has_end(rule: &KeepRule, text: &str) -> bool {
    let Selector::Name(name) = &rule.select else { return false };
    let repository = name.rsplit_once(':').map_or(&**name, |(repository, _)| repository);
    let ends = |name: &str| name.strip_suffix(text).is_some_and(|before| before.ends_with('/'));
    ends(name) || ends(repository)
}

/// All rules in force, in the order in which they are numbered: those of the settings come first.
async fn rules(client: &Client) -> Result<Vec<ListedRule>, Failure> {
    let answer = change(client, KeepRequest::default()).await?;
    let configured = answer.configured.into_iter().map(|configured| {
        let rule = convert::keep_rule_from(configured.rule.unwrap_or_default())?;
        Ok(ListedRule { rule, place: Some(configured.place) })
    });
    let others = answer.rules.into_iter().map(|rule| {
        let rule = convert::keep_rule_from(rule)?;
        Ok(ListedRule { rule, place: None })
    });
    configured.chain(others).collect()
}

/// Changes the rules; the answer also names new ones that match nothing.
async fn change(client: &Client, request: KeepRequest) -> Result<KeepResponse, Failure> {
    client.ask(async |mut calls| calls.keep(request).await).await
}

fn is_named(rule: &KeepRule, text: &str) -> bool {
    match &rule.select {
        Selector::Name(name)
        | Selector::Digest(name)
        | Selector::Type(name)
        | Selector::Newest { repository: name, .. } => name == text,
        Selector::Label(..) => false,
    }
}

fn table(rules: &[ListedRule]) -> TextTable {
    let mut table = TextTable::new(["RULE", "KEEPS", "SOURCE"]);
    for (index, ListedRule { rule, place }) in rules.iter().enumerate() {
        let from = place.as_deref().unwrap_or("larder keep");
        table.row([(index + 1).to_string(), rule.to_string(), from.to_owned()]);
    }
    table
}
