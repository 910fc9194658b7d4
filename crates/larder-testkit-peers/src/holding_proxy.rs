//! A gate in front of a registry: it counts what passes, holds answers until a test lets them go, and cuts them.
//!
//! A test that must look at a pull while it is in the middle holds blobs, waits until the gate has one, looks, and
//! opens the gate. Nothing depends on how fast anything is.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::process::WAIT_LIMIT;
use super::{PeerError, PeerResult};

/// The proxy. Dropping it cuts every connection and frees the port.
#[derive(Debug)]
pub struct HoldingProxy {
    port: u16,
    shared: Arc<HoldingProxyShared>,
}

#[derive(Debug)]
struct HoldingProxyShared {
    upstream: u16,
    state: Mutex<ProxyConnections>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ProxyConnections {
    closing: bool,
    /// Blob answers stop after this many bytes until the gate is opened. `None`: nothing is held.
    hold_after: Option<u64>,
    /// Held answers, by the number that they got when they were held, with the image's repository.
    held: BTreeMap<u64, String>,
    held_ever: u64,
    most_repositories_held: usize,
    /// Every request line that came in: method and path.
    seen: Vec<(String, String)>,
    /// Ends of running connections, so that they can be cut.
    connections: BTreeMap<u64, [TcpStream; 2]>,
    connections_ever: u64,
}

impl HoldingProxy {
    /// Opens a gate on a free port of 127.0.0.1 in front of the registry at `port`. It lets everything pass.
    ///
    /// For plain HTTP only: it reads the head of each request.
    pub fn for_registry(port: u16) -> PeerResult<HoldingProxy> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .map_err(|error| PeerError::new("open a gate", error))?;
        let shared =
            Arc::new(HoldingProxyShared { upstream: port, state: Mutex::default(), changed: Condvar::new() });
        let gate = HoldingProxy { port: listener.local_addr()?.port(), shared: Arc::clone(&shared) };
        thread::spawn(move || {
            for client in listener.incoming() {
                if shared.lock().closing {
                    return;
                }
                let shared = Arc::clone(&shared);
                // A connection that breaks is none of the gate's business: both ends notice by themselves.
                thread::spawn(move || client.and_then(|client| shared.serve(client)));
            }
        });
        Ok(gate)
    }

    /// `127.0.0.1:PORT`, the host part of the names of images that are pulled through the gate.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The name of an image pulled through the gate.
    pub fn image(&self, name: &str) -> String {
        format!("{}/{name}", self.address())
    }

    /// From now on, the answer to each fetch of a blob stops after `bytes` bytes, its head included (0: before its
    /// first). Shorter answers pass.
    pub fn hold_blobs_after(&self, bytes: u64) {
        self.shared.lock().hold_after = Some(bytes);
    }

    /// Releases all held requests, and holds no further ones.
    pub fn open(&self) {
        let mut state = self.shared.lock();
        state.hold_after = None;
        state.held.clear();
        self.shared.changed.notify_all();
    }

    /// Lets the held answers of the one repository pass that was held first. The others stay.
    pub fn release_first_repository(&self) {
        let mut state = self.shared.lock();
        if let Some(repository) = state.held.values().next().cloned() {
            state.held.retain(|_, held| *held != repository);
        }
        self.shared.changed.notify_all();
    }

    /// Ends every running connection in its middle. New ones are served.
    pub fn cut(&self) {
        self.shared.lock().cut();
    }

    /// Repositories of which at least one answer is held now, sorted.
    pub fn held_repositories(&self) -> Vec<String> {
        self.shared.lock().repositories_held()
    }

    /// The largest number of different repositories that were held at the same time.
    pub fn most_repositories_held(&self) -> usize {
        self.shared.lock().most_repositories_held
    }

    /// Waits until answers of at least `count` repositories are held.
    ///
    /// # Panics
    /// When that does not come about in time; the text says what was seen instead.
    pub fn wait_until_held(&self, count: usize) {
        let state = self.shared.lock();
        let (state, timeout) = self
            .shared
            .changed
            .wait_timeout_while(state, WAIT_LIMIT, |state| state.repositories_held().len() < count)
            .unwrap_or_else(PoisonError::into_inner);
        assert!(
            !timeout.timed_out(),
            "waited {WAIT_LIMIT:?} in vain for {count} repositories at the gate; held: {:?}; requests: {:?}",
            state.repositories_held(),
            state.seen
        );
    }

    /// How many requests with this method came for a path that contains `part`.
    pub fn count(&self, method: &str, part: &str) -> usize {
        self.shared.lock().seen.iter().filter(|(how, path)| how == method && path.contains(part)).count()
    }

    /// Every request that came, as method and path, oldest first.
    pub fn seen(&self) -> Vec<(String, String)> {
        self.shared.lock().seen.clone()
    }
}

impl Drop for HoldingProxy {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closing = true;
        state.cut();
        self.shared.changed.notify_all();
        drop(state);
        // Wakes the accepting thread, which then sees that it is to end.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}

impl ProxyConnections {
    fn repositories_held(&self) -> Vec<String> {
        let mut names: Vec<String> = self.held.values().cloned().collect();
        names.sort();
        names.dedup();
        names
    }

    fn cut(&mut self) {
        self.held.clear();
        for end in self.connections.values().flatten() {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

impl HoldingProxyShared {
    /// A thread that panicked while it held the lock has failed its test already; the others may end in peace.
    fn lock(&self) -> MutexGuard<'_, ProxyConnections> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves one request on one connection; the answer says that the connection ends with it.
    fn serve(&self, mut client: TcpStream) -> io::Result<()> {
        let Some(head) = read_head(&mut client)? else {
            return Ok(());
        };
        let mut words = head.split(' ');
        let method = words.next().unwrap_or_default().to_owned();
        let path = words.next().unwrap_or_default().to_owned();
        let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, self.upstream))?;
        server.write_all(head.replacen("\r\n", "\r\nConnection: close\r\n", 1).as_bytes())?;

        let ends = [client.try_clone()?, server.try_clone()?];
        let number = {
            let mut state = self.lock();
            state.seen.push((method.clone(), path.clone()));
            state.connections_ever += 1;
            let number = state.connections_ever;
            state.connections.insert(number, ends);
            number
        };
        let outcome = self.pass(&method, &path, client, server);
        for end in self.lock().connections.remove(&number).iter().flatten() {
            let _ = end.shutdown(Shutdown::Both);
        }
        outcome
    }

    fn pass(&self, method: &str, path: &str, mut client: TcpStream, mut server: TcpStream) -> io::Result<()> {
        let (mut from, mut to) = (client.try_clone()?, server.try_clone()?);
        thread::spawn(move || io::copy(&mut from, &mut to));
        let repository = path.strip_prefix("/v2/").and_then(|rest| rest.split_once("/blobs/sha256:"));
        if let (Some((repository, _)), "GET") = (repository, method) {
            let hold_after = self.lock().hold_after;
            if let Some(bytes) = hold_after {
                let passed = io::copy(&mut (&mut server).take(bytes), &mut client)?;
                if passed == bytes {
                    self.hold(repository);
                }
            }
        }
        io::copy(&mut server, &mut client).map(drop)
    }

    /// Returns when the gate lets this answer pass, or is gone.
    fn hold(&self, repository: &str) {
        let mut state = self.lock();
        if state.hold_after.is_none() {
            return; // opened in the meantime
        }
        state.held_ever += 1;
        let ticket = state.held_ever;
        state.held.insert(ticket, repository.to_owned());
        state.most_repositories_held = state.most_repositories_held.max(state.repositories_held().len());
        self.changed.notify_all();
        let _unlocked = self
            .changed
            .wait_while(state, |state| !state.closing && state.held.contains_key(&ticket))
            .unwrap_or_else(PoisonError::into_inner);
    }
}

/// The head of a request, up to and with its empty line, without a `Connection` field. `None` without a
/// request, or if it is not HTTP: clients try TLS first, and wait for a response to it.
fn read_head(client: &mut TcpStream) -> io::Result<Option<String>> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() > 64 * 1024 || client.read(&mut byte)? == 0 {
            return Ok(None);
        }
        if head.is_empty() && !byte[0].is_ascii_uppercase() {
            return Ok(None);
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head);
    let kept: Vec<&str> =
        head.split("\r\n").filter(|line| !line.to_ascii_lowercase().starts_with("connection:")).collect();
    Ok(Some(kept.join("\r\n")))
}
