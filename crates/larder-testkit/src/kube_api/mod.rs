//! A Kubernetes API server for tests: one inside the test's process, or a real one.
//!
//! [`KubeApi::start`] starts the one inside the process, or etcd and the kube-apiserver that `LARDER_KUBE_APISERVER`
//! names (with `etcd` and `openssl` in the path). Both take the same calls.
//!
//! The one inside the process stores any object as JSON and answers get, list (with selectors), watch (with bookmarks,
//! initial events and 410 for forgotten versions), create, update, merge patch and delete, the status of objects, and
//! requests for tokens of service accounts. Definitions of custom resources take effect; their schemas and CEL rules
//! are not checked, nor are objects validated or defaulted: for that, the same tests run against the real server.
//!
//! Both serve on threads of their own: a test may block its thread or pause its clock.

mod authorization;
mod fault;
mod in_process;
mod kubeconfig;
mod objects;
mod real;
mod resources;
mod response;
mod reviews;
mod selectors;
mod serve;
mod state;
mod thread;
mod tokens;

use std::net::SocketAddr;
use std::path::PathBuf;

use serde_json::Value;

pub use authorization::PolicyRule;
pub use fault::ApiFault;
pub use kubeconfig::ADMINISTRATOR;

use fault::InjectedFault;
use in_process::InProcess;
use kubeconfig::Kubeconfigs;
use real::RealServer;

/// Names the kube-apiserver that [`KubeApi::start`] starts.
pub const PROGRAM_VARIABLE: &str = "LARDER_KUBE_APISERVER";

/// A running API server. Dropping it closes its port and all connections, and stops the programs it started.
#[derive(Debug)]
pub struct KubeApi {
    server: Server,
    kubeconfigs: Kubeconfigs,
}

#[derive(Debug)]
enum Server {
    InProcess(InProcess),
    Real(Box<RealServer>),
}

/// A request that was answered, or is being answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiRequest {
    /// `GET`, and so on.
    pub method: String,
    /// With the query.
    pub path: String,
    /// The token of its `Authorization`; empty without one.
    pub token: String,
    /// 0 while it is not answered.
    pub status: u16,
}

impl KubeApi {
    /// Starts a server with the namespaces `default` and `kube-system` on a free port of 127.0.0.1.
    ///
    /// # Panics
    /// When the machine has no free port or thread, or a program does not start.
    pub fn start() -> KubeApi {
        match std::env::var_os(PROGRAM_VARIABLE) {
            Some(program) => {
                KubeApi::with(Server::Real(Box::new(RealServer::start(&PathBuf::from(program)))))
            }
            None => KubeApi::in_process(),
        }
    }

    /// The server inside the process, for tests that inject faults or look inside it; [`KubeApi::start`] for all
    /// others.
    ///
    /// # Panics
    /// When the machine has no free port or thread.
    pub fn in_process() -> KubeApi {
        KubeApi::with(Server::InProcess(InProcess::start()))
    }

    fn with(server: Server) -> KubeApi {
        KubeApi { server, kubeconfigs: Kubeconfigs::new() }
    }

    /// A kubeconfig of a user with this token, such as [`ADMINISTRATOR`]. It is removed with the server.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn kubeconfig(&self, token: &str) -> PathBuf {
        let authority = match &self.server {
            Server::InProcess(_) => None,
            Server::Real(real) => Some(real.authority()),
        };
        self.kubeconfigs.write(&self.url(), authority.as_deref(), token)
    }

    /// `http://127.0.0.1:PORT`; `https` if it is a real server.
    pub fn url(&self) -> String {
        match &self.server {
            Server::InProcess(server) => server.url(),
            Server::Real(real) => real.url(),
        }
    }

    /// Where the server itself listens: without what [`KubeApi::stop`] closes, which has two files open for each
    /// connection.
    pub fn backend(&self) -> SocketAddr {
        match &self.server {
            Server::InProcess(server) => server.address(),
            Server::Real(real) => real.backend(),
        }
    }

    /// Closes the port and all connections; the objects stay.
    pub fn stop(&mut self) {
        match &mut self.server {
            Server::InProcess(server) => server.stop(),
            Server::Real(real) => real.close(),
        }
    }

    /// Serves again, at the same address.
    ///
    /// # Panics
    /// When the port was taken.
    pub fn restart(&mut self) {
        match &mut self.server {
            Server::InProcess(server) => server.restart(),
            Server::Real(real) => real.open(),
        }
    }

    /// From now on requests need a token; this one is of a user with these rules. [`ADMINISTRATOR`] may do everything.
    ///
    /// # Panics
    /// If a real server refuses the rules.
    pub fn authorize(&self, token: &str, user: &str, rules: Vec<PolicyRule>) {
        match &self.server {
            Server::InProcess(server) => server.state().authorization.add(token, user, rules),
            Server::Real(real) => real.authorize(token, user, &rules),
        }
    }

    /// A token is no longer valid.
    pub fn revoke(&self, token: &str) {
        match &self.server {
            Server::InProcess(server) => server.state().authorization.revoke(token),
            Server::Real(real) => real.revoke(token),
        }
    }

    /// Forgets the history: a watch from an earlier version gets 410. A real server closes all connections for that.
    ///
    /// # Panics
    /// If a real server does not start again.
    pub fn compact(&self) {
        match &self.server {
            Server::InProcess(server) => server.state().objects.compact(),
            Server::Real(real) => real.compact(),
        }
    }

    /// Creates an object in the collection at this path, as a request would; the object as it is stored.
    ///
    /// # Panics
    /// If the server refuses it.
    pub fn create(&self, path: &str, object: &Value) -> Value {
        self.administer("POST", path, object)
    }

    /// Replaces fields of the object at this path, or of its status, by a merge patch.
    ///
    /// # Panics
    /// If the server refuses it.
    pub fn patch(&self, path: &str, fields: &Value) -> Value {
        self.administer("PATCH", path, fields)
    }

    /// Deletes the object at this path at once.
    ///
    /// # Panics
    /// If there is none.
    pub fn delete(&self, path: &str) {
        self.administer("DELETE", path, &Value::Null);
    }

    /// The object or the list at this path.
    ///
    /// # Panics
    /// If there is none.
    pub fn get(&self, path: &str) -> Value {
        self.administer("GET", path, &Value::Null)
    }

    /// A request without a user, which is neither logged nor refused, even while the port is closed: the test looks and
    /// changes by itself.
    fn administer(&self, method: &str, path: &str, body: &Value) -> Value {
        let answer = match &self.server {
            Server::InProcess(server) => server.administer(method, path, body),
            Server::Real(real) => real.administer(method, path, body),
        };
        answer.unwrap_or_else(|problem| panic!("{method} {path}: {problem}"))
    }

    /// The requests so far. Those of a real server have an empty token if it is of a service account.
    pub fn requests(&self) -> Vec<ApiRequest> {
        match &self.server {
            Server::InProcess(server) => server.state().log.clone(),
            Server::Real(real) => real.requests(),
        }
    }
}

/// Methods that only the server inside the process has: see [`KubeApi::in_process`].
impl KubeApi {
    /// The next `times` requests whose `METHOD PATH` contains `part` fail like this.
    ///
    /// # Panics
    /// If it is a real server.
    pub fn fault(&self, part: &str, times: usize, fault: ApiFault) {
        self.inner().state().faults.push(InjectedFault::new(part, times, fault));
    }

    /// Rules of a token that have allowed nothing so far.
    ///
    /// # Panics
    /// If it is a real server.
    pub fn unused_rules(&self, token: &str) -> Vec<PolicyRule> {
        self.inner().state().authorization.unused(token)
    }

    /// Sends a bookmark to every watch that allows them.
    ///
    /// # Panics
    /// If it is a real server.
    pub fn send_bookmarks(&self) {
        self.inner().send_bookmarks();
    }

    #[track_caller]
    fn inner(&self) -> &InProcess {
        match &self.server {
            Server::InProcess(server) => server,
            Server::Real(_) => {
                panic!("a real API server cannot do this: start it with KubeApi::in_process()")
            }
        }
    }
}
