//! The process at the other end of a connection, for events and logs.

use std::fmt;

use tokio::net::UnixStream;

tokio::task_local! {
    static PEER: Peer;
}

/// A process. Its command is a claim of its own, and no proof of anything.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Peer {
    pid: Option<u32>,
    command: String,
}

impl Peer {
    /// The process that opened this connection. If it has ended, its command is unknown.
    pub(crate) fn of(stream: &UnixStream) -> Peer {
        // In a container without the host's PIDs, the kernel reports 0.
        let pid = stream.peer_cred().ok().and_then(|peer| peer.pid()).and_then(|pid| u32::try_from(pid).ok());
        pid.filter(|pid| *pid > 0).map_or_else(Peer::default, Peer::of_process)
    }

    /// Its command; empty if unknown.
    pub(crate) fn command(&self) -> &str {
        &self.command
    }

    fn of_process(pid: u32) -> Peer {
        // Files of procfs are made in memory when they are read.
        let command = fs_err::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let command = command.trim().chars().filter(|c| !c.is_control()).collect();
        Peer { pid: Some(pid), command }
    }

    /// Carries out a call for this process.
    pub(crate) async fn scope<T>(self, call: impl Future<Output = T>) -> T {
        PEER.scope(self, call).await
    }

    /// The process whose call is carried out; this one for a call from within.
    pub(crate) fn current() -> Peer {
        Peer::of_call().unwrap_or_else(|| Peer::of_process(std::process::id()))
    }

    /// The process whose call is carried out; `None` for a call from within.
    pub(crate) fn of_call() -> Option<Peer> {
        PEER.try_with(Clone::clone).ok()
    }
}

/// `crictl (pid 4242)`.
impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.pid, self.command.as_str()) {
            (None, _) => f.write_str("an unknown process"),
            (Some(pid), "") => write!(f, "process {pid}"),
            (Some(pid), command) => write!(f, "{command} (pid {pid})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_peer_of_a_connection_is_named_by_command_and_pid() {
        let (stream, _other) = UnixStream::pair().unwrap();
        let (peer, own) = (Peer::of(&stream), std::process::id());
        assert!(peer.to_string().ends_with(&format!("(pid {own})")), "{peer}");
        assert_eq!(peer.clone().scope(async { Peer::current() }).await, peer);
        let gone = Peer { pid: Some(7), command: String::new() };
        assert_eq!(gone.to_string(), "process 7");
        assert_eq!(Peer::default().to_string(), "an unknown process");
    }
}
