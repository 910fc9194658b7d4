//! Files that name the server and a user, as clients read them.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use tempfile::TempDir;

/// A token that may always do everything.
pub const ADMINISTRATOR: &str = "administrator";

/// A private directory of kubeconfigs.
#[derive(Debug)]
pub(super) struct Kubeconfigs {
    directory: TempDir,
    count: AtomicUsize,
}

impl Kubeconfigs {
    pub(super) fn new() -> Kubeconfigs {
        let directory = tempfile::Builder::new().prefix("kube-api-").tempdir().expect("a private directory");
        Kubeconfigs { directory, count: AtomicUsize::new(0) }
    }

    /// A new file for this token; the certificate authority is a file of PEM.
    pub(super) fn write(&self, url: &str, authority: Option<&Path>, token: &str) -> PathBuf {
        let mut cluster = json!({ "server": url });
        if let Some(authority) = authority {
            cluster["certificate-authority"] = json!(authority);
        }
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster": cluster }],
            "users": [{ "name": "test", "user": { "token": token } }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        });
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.path().join(format!("kubeconfig-{number}"));
        fs_err::write(&path, kubeconfig.to_string()).expect("a kubeconfig");
        path
    }
}
