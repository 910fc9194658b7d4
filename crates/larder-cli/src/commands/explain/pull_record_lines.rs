//! The pull record of an image: which pods may use it without asking the registry.

use larder_api::v1::PulledRecord;

/// A line for each name; without a record, what that means for pods.
pub(super) fn lines(records: &[PulledRecord], unrecorded_access: Option<bool>) -> Vec<String> {
    if records.is_empty() {
        return vec![format!("  pulled record: {}", without_record(unrecorded_access))];
    }
    let line = |record: &PulledRecord| format!("  pulled record: {}: {}", record.name, allowed(record));
    records.iter().map(line).collect()
}

fn without_record(unrecorded_access: Option<bool>) -> &'static str {
    match unrecorded_access {
        Some(true) => "none, every pod may use the image",
        Some(false) => "none, a pod needs credentials that the registry accepts",
        None => "none",
    }
}

fn allowed(record: &PulledRecord) -> String {
    if record.every_pod {
        return "every pod".to_owned();
    }
    let secrets = record.secrets.iter().map(|secret| {
        if is_login(secret) {
            format!("pods with the login of {secret}")
        } else {
            // The same secret with another password does not count.
            format!("pods with secret {secret} (content unchanged)")
        }
    });
    let accounts = record.service_accounts.iter().map(|account| format!("service account {account}"));
    let all: Vec<_> = secrets.chain(accounts).collect();
    if all.is_empty() { "no pod without credentials".to_owned() } else { all.join(", ") }
}

/// Names of secrets have a namespace before a slash; a login is a path or a flag.
fn is_login(secret: &str) -> bool {
    secret.starts_with(['/', '-']) || !secret.contains('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_record_the_policy_decides() {
        assert_eq!(without_record(None), "none");
        assert!(without_record(Some(true)).contains("every pod"));
        assert!(without_record(Some(false)).contains("needs credentials"));
    }

    #[test]
    fn a_record_names_the_pods_that_may_use_the_image() {
        let record = |secrets: &[&str], accounts: &[&str]| PulledRecord {
            secrets: secrets.iter().map(|&secret| secret.to_owned()).collect(),
            service_accounts: accounts.iter().map(|&account| account.to_owned()).collect(),
            ..PulledRecord::default()
        };
        for (record, text) in [
            (PulledRecord { every_pod: true, ..PulledRecord::default() }, "every pod"),
            (record(&[], &[]), "no pod without credentials"),
            (
                record(&["team/reg"], &["team/ci"]),
                "pods with secret team/reg (content unchanged), service account team/ci",
            ),
            (record(&["/root/.docker/config.json"], &[]), "pods with the login of /root/.docker/config.json"),
            (record(&["--username"], &[]), "pods with the login of --username"),
        ] {
            assert_eq!(allowed(&record), text);
        }
    }
}
