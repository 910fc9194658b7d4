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
    let leased = match Daemon::find(connection)? {
        Some(daemon) => {
            let request = LeaseRequest { image: name.to_owned(), seconds: args.time.as_secs() };
            daemon.ask(async |mut client| client.lease(request).await).await?
        }
        None => match connect::chosen(connection)? {
            Chosen::Store(store) => take(store.store(), name, args.time)?,
            other => {
                let backend = match (&connection.backend, other.target()) {
                    (Some(backend), _) => backend.clone(),
                    (None, Target::Store(root)) => root.display().to_string(),
                    (None, Target::Runtime(endpoint)) => endpoint,
                };
                return Err(Failure::failed(format!(
                    "only a daemon can lease an image of a runtime, and none serves {}",
                    other.told().trim_start_matches("the images of ")
                ))
                .hint(format!("larder serve --backend {backend}, or larder keep {name}")));
            }
        },
    };
    match leased.ends {
        Some(ends) => out.line(format_args!("Keeps {name} until {ends}.")),
        None => out.line(format_args!("Does not keep {name} for a time any more.")),
    }
    Ok(Outcome::Done)
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
