//! `larder lease`: keeps one image from collection for a while.

use std::time::{Duration, SystemTime};

use larder_control::v1alpha1::{LeaseRequest, LeaseResponse};
use larder_store::store::{LeaseKind, LeaseRecord, Leased, Store, StoreError};

use super::inspect::{absent, names_and_ids};
use crate::args::{Connection, LeaseArgs};
use crate::connect::{self, Chosen, Target};
use crate::daemon::{Daemon, convert};
use crate::exit::Outcome;
use crate::failure::{Failure, chain};
use crate::out::Out;

pub(super) async fn run(args: &LeaseArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let (names, outcome) = names_and_ids(std::slice::from_ref(&args.image), out);
    let [name] = names[..] else { return Ok(outcome) };
    let leased = if let Some(daemon) = Daemon::find(connection)? {
        let request = LeaseRequest { image: name.to_owned(), seconds: args.time.as_secs() };
        daemon.ask(async |mut client| client.lease(request).await).await?
    } else {
        let chosen = connect::chosen(connection)?;
        let store = chosen.store().ok_or_else(|| needs_daemon(name, connection, &chosen))?;
        take(store.store(), name, args.time)?
    };
    match leased.ends {
        Some(ends) => out.line(format_args!("Keeps {name} until {ends}.")),
        None => out.line(format_args!("Does not keep {name} for a time any more.")),
    }
    Ok(Outcome::Done)
}

/// A lease on an image of a runtime ends with the process that has it.
fn needs_daemon(name: &str, connection: &Connection, chosen: &Chosen) -> Failure {
    let endpoint = match chosen.target() {
        Target::Runtime(endpoint) => endpoint,
        Target::Store(root) => root.display().to_string(),
    };
    let backend = connection.backend.as_ref().unwrap_or(&endpoint);
    Failure::failed(format!("only a daemon can lease an image of a runtime, and none serves {endpoint}"))
        .hint(format!("larder serve --backend {backend}, or larder keep {name}"))
}

/// Takes a lease on an image of this store, in place of an earlier one; no time ends it. May block.
pub(crate) fn take(store: &Store, name: &str, time: Duration) -> Result<LeaseResponse, Failure> {
    let failed = |error: StoreError| Failure::failed(chain(&error));
    let image = store.image(name).map_err(failed)?.ok_or_else(|| absent(name))?;
    let (id, lease) = (image.id.to_string(), format!("held/{}", image.id));
    if time.is_zero() {
        store.end_lease(&lease).map_err(failed)?;
        return Ok(LeaseResponse { id, ends: None });
    }
    let ends = SystemTime::now().checked_add(time);
    let ends = ends.ok_or_else(|| Failure::bad_input("a lease that ends after all time there is"))?;
    let ends_at = ends.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let leased = Leased { images: vec![image.id], layers: Vec::new(), ingests: Vec::new() };
    let record = LeaseRecord { id: lease, kind: LeaseKind::Held, leased, ends_at };
    store.lease(&record).map_err(failed)?;
    Ok(LeaseResponse { id, ends: Some(convert::time(ends)) })
}
