//! Who may use a present image without asking the registry: its pull record.

use larder_api::v1alpha1::PullRecord;

use crate::printer::Printer;

/// Tells it, a line for each name.
pub(super) fn tell(records: &[PullRecord], out: &Printer) {
    if records.is_empty() {
        out.line("  pull record: none");
    }
    for record in records {
        out.line(format_args!("  pull record: as {}, for {}", record.name, holders(record)));
    }
}

fn holders(record: &PullRecord) -> String {
    if record.every_pod {
        return "every pod".to_owned();
    }
    let secrets = record.secrets.iter().map(|secret| {
        if is_login(secret) {
            format!("who has the login of {secret}")
        } else {
            // The same secret with another password is somebody else.
            format!("who has secret {secret} with the content of then")
        }
    });
    let accounts = record.service_accounts.iter().map(|account| format!("service account {account}"));
    let all: Vec<_> = secrets.chain(accounts).collect();
    if all.is_empty() { "nobody yet: each shows credentials first".to_owned() } else { all.join(", ") }
}

/// Names of secrets have a namespace before a slash; a login is a path or a flag.
fn is_login(secret: &str) -> bool {
    secret.starts_with(['/', '-']) || !secret.contains('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_names_who_may_use_the_image() {
        let record = |secrets: &[&str], accounts: &[&str]| PullRecord {
            secrets: secrets.iter().map(|&secret| secret.to_owned()).collect(),
            service_accounts: accounts.iter().map(|&account| account.to_owned()).collect(),
            ..PullRecord::default()
        };
        for (record, says) in [
            (PullRecord { every_pod: true, ..PullRecord::default() }, "every pod"),
            (record(&[], &[]), "nobody yet: each shows credentials first"),
            (
                record(&["team/reg"], &["team/ci"]),
                "who has secret team/reg with the content of then, service account team/ci",
            ),
            (record(&["/root/.docker/config.json"], &[]), "who has the login of /root/.docker/config.json"),
            (record(&["--username"], &[]), "who has the login of --username"),
        ] {
            assert_eq!(holders(&record), says);
        }
    }
}
