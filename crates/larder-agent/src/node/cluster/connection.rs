//! Whether the API server answers, for logs, status and metrics.

use std::collections::BTreeMap;
use std::mem;
use std::time::SystemTime;

use larder_api::convert;
use larder_api::v1 as api;
use larder_kube::{ClusterError, ResponseObserver};
use parking_lot::Mutex;

/// Whether the API server answers requests of one identity. Each change is logged, each repetition is not.
pub(crate) struct Connection {
    /// Object of the request, such as `pods of node n1`.
    subject: String,
    state: Mutex<ConnectionState>,
}

struct ConnectionState {
    /// `None` while it answers, or before the first answer.
    problem: Option<ClusterError>,
    /// Actions that fail for a reason of their own, such as a missing rule for `list pods`: other actions may succeed.
    actions: BTreeMap<String, ClusterError>,
    is_known: bool,
    since: SystemTime,
}

impl ConnectionState {
    fn problem(&self) -> Option<&ClusterError> {
        self.problem.as_ref().or_else(|| self.actions.values().next())
    }
}

impl Connection {
    /// Not tried yet.
    pub(crate) fn new(subject: String, now: SystemTime) -> Connection {
        let state = ConnectionState { problem: None, actions: BTreeMap::new(), is_known: false, since: now };
        Connection { subject, state: Mutex::new(state) }
    }

    /// The outcome of a request for this action. What was known before a failure remains in force.
    pub(crate) fn note(&self, action: &str, outcome: Result<(), ClusterError>, now: SystemTime) {
        self.change(now, |state| match outcome {
            Ok(()) => {
                state.problem = None;
                state.actions.remove(action);
                None
            }
            Err(error) if is_of_action(&error) => {
                state.problem = None;
                let known = state.actions.insert(action.to_owned(), error.clone());
                known.is_none().then_some(error)
            }
            Err(error) => {
                let known = state.problem.replace(error.clone());
                (known.as_ref().map(mem::discriminant) != Some(mem::discriminant(&error))).then_some(error)
            }
        });
    }

    /// This action is over, with its problem.
    fn forget_action(&self, action: &str, now: SystemTime) {
        if self.state.lock().actions.contains_key(action) {
            self.change(now, |state| {
                state.actions.remove(action);
                None
            });
        }
    }

    /// A part of a watch arrived. The credentials were checked when it began: they may have expired since.
    fn note_watch(&self, now: SystemTime) {
        self.change(now, |state| {
            state.problem.take_if(|problem| matches!(problem, ClusterError::Unavailable { .. }));
            None
        });
    }

    /// Logs a change of the state; the change returns a problem that is new.
    fn change(&self, now: SystemTime, change: impl FnOnce(&mut ConnectionState) -> Option<ClusterError>) {
        let mut state = self.state.lock();
        let was_connected = state.is_known.then(|| state.problem().is_none());
        let new_problem = change(&mut state);
        state.is_known = true;
        let is_connected = state.problem().is_none();
        if was_connected != Some(is_connected) {
            state.since = now;
        }
        if let Some(error) = new_problem {
            tracing::warn!("kubernetes: {}: {error}; retrying, with what was known before", self.subject);
        } else if is_connected && was_connected != Some(true) {
            tracing::info!("kubernetes: {}: connected to the API server", self.subject);
        }
    }

    pub(crate) fn status(&self) -> api::KubernetesConnection {
        let state = self.state.lock();
        let unknown = (!state.is_known).then(|| "not connected yet".to_owned());
        api::KubernetesConnection {
            connected: state.is_known && state.problem().is_none(),
            since: convert::time(state.since),
            problem: state.problem().map(ToString::to_string).or(unknown),
        }
    }
}

impl ResponseObserver for Connection {
    fn observe(&self, action: &str, outcome: Result<(), ClusterError>) {
        self.note(action, outcome, SystemTime::now());
    }

    fn forget(&self, action: &str) {
        self.forget_action(action, SystemTime::now());
    }

    fn observe_watch(&self) {
        self.note_watch(SystemTime::now());
    }
}

/// Whether other actions may succeed all the same.
fn is_of_action(error: &ClusterError) -> bool {
    use ClusterError::{Forbidden, NotInstalled, Relisting};
    matches!(error, Forbidden { .. } | NotInstalled { .. } | Relisting { .. })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn state(connection: &Connection) -> (bool, String, String) {
        let status = connection.status();
        (status.connected, status.since, status.problem.unwrap_or_default())
    }

    #[test]
    fn a_state_lasts_from_its_first_answer_and_the_latest_problem_is_reported() {
        let connection = Connection::new("pods".into(), at(0));
        let note = |outcome, seconds| connection.note("list pods", outcome, at(seconds));
        assert_eq!(state(&connection).2, "not connected yet");
        note(Ok(()), 1);
        note(Ok(()), 2);
        assert_eq!(state(&connection), (true, convert::time(at(1)), String::new()));
        let down = |message: &str| Err(ClusterError::Unavailable { message: message.into() });
        note(down("refused"), 3);
        note(down("no route"), 4);
        let problem = "the API server is unavailable: no route".to_owned();
        assert_eq!(state(&connection), (false, convert::time(at(3)), problem));
        note(Ok(()), 5);
        assert_eq!(state(&connection), (true, convert::time(at(5)), String::new()));
    }

    #[test]
    fn a_missing_rule_is_reported_until_its_action_is_allowed() {
        let connection = Connection::new("pods".into(), at(0));
        let forbidden = Err(ClusterError::Forbidden { message: "cannot list pods".into() });
        connection.note("list pods", forbidden.clone(), at(1));
        connection.note("get secrets", Ok(()), at(2));
        assert_eq!(state(&connection), (false, convert::time(at(1)), "cannot list pods".into()));
        connection.note("get secrets", Err(ClusterError::Unavailable { message: "x".into() }), at(3));
        connection.note("list pods", forbidden, at(4));
        assert_eq!(state(&connection), (false, convert::time(at(1)), "cannot list pods".into()));
        connection.note("list pods", Ok(()), at(5));
        assert_eq!(state(&connection), (true, convert::time(at(5)), String::new()));
    }

    #[test]
    fn a_watch_that_continues_shows_that_the_server_is_reached_but_not_that_credentials_are_valid() {
        let connection = Connection::new("pods".into(), at(0));
        let note = |error| connection.note("get secrets", Err(error), at(1));
        let (message, place) = (|| "m".to_owned(), "k".to_owned());
        note(ClusterError::Unavailable { message: message() });
        connection.note_watch(at(2));
        assert!(state(&connection).0, "it was reached again");
        for problem in [
            ClusterError::Unauthorized { message: message() },
            ClusterError::Unusable { place, problem: message() },
            ClusterError::Forbidden { message: message() },
        ] {
            note(problem.clone());
            connection.note_watch(at(3));
            assert_eq!(state(&connection), (false, convert::time(at(1)), problem.to_string()));
            connection.note("get secrets", Ok(()), at(1));
        }
    }

    #[test]
    fn the_end_of_a_watch_says_nothing_of_the_server() {
        let connection = Connection::new("image sets".into(), at(0));
        let relisting = ClusterError::Relisting { what: "the list of pods".into() };
        connection.forget_action("relist 1", at(1));
        assert_eq!(state(&connection).2, "not connected yet");
        connection.note("relist 1", Err(relisting), at(1));
        connection.note("list pods", Err(ClusterError::Unavailable { message: "m".into() }), at(2));
        connection.forget_action("relist 1", at(3));
        assert_eq!(state(&connection).2, "the API server is unavailable: m");
        connection.note("list pods", Ok(()), at(4));
        assert!(state(&connection).0);
    }

    #[test]
    fn a_missing_resource_is_a_problem_although_other_requests_succeed() {
        let connection = Connection::new("image sets".into(), at(0));
        let missing = ClusterError::NotInstalled { resource: "imagesets.images.larder.dev".into() };
        connection.note("list imagesets", Err(missing.clone()), at(1));
        connection.note("list nodes", Ok(()), at(2));
        assert_eq!(state(&connection), (false, convert::time(at(1)), missing.to_string()));
        connection.note("list imagesets", Ok(()), at(3));
        assert!(state(&connection).0);
    }
}
