//! An engine with scripted responses: for what a real one does only at bad moments, or only in another version.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use larder_docker::{DockerBackend, EngineConfig, EngineHost};
use tempfile::TempDir;

/// How long a call that must come may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Listens until the process ends.
pub(crate) struct FakeEngine {
    dir: TempDir,
    asked: Arc<CallLog>,
}

/// Every call that came, as method and path.
#[derive(Default)]
struct CallLog {
    calls: Mutex<Vec<String>>,
    more: Condvar,
}

/// An answer of the engine to one request.
pub(crate) enum ScriptedHttpReply {
    /// Status and body.
    Whole(u16, String),
    /// The beginning of a body that never ends.
    Open(String),
    /// Nothing, ever.
    Never,
}

impl FakeEngine {
    /// `answer` makes status and body from method and path.
    pub(crate) fn start(answer: impl Fn(&str, &str) -> (u16, String) + Send + 'static) -> FakeEngine {
        FakeEngine::replying(move |method, path| {
            let (status, body) = answer(method, path);
            ScriptedHttpReply::Whole(status, body)
        })
    }

    /// Starts an engine whose answers may fail to come or to end.
    pub(crate) fn replying(answer: impl Fn(&str, &str) -> ScriptedHttpReply + Send + 'static) -> FakeEngine {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("d.sock")).unwrap();
        let asked = Arc::new(CallLog::default());
        let seen = Arc::clone(&asked);
        thread::spawn(move || {
            let mut open = Vec::new();
            for stream in listener.incoming() {
                let Some((method, path, stream)) = stream.ok().and_then(request) else { continue };
                seen.calls.lock().unwrap().push(format!("{method} {path}"));
                seen.more.notify_all();
                open.extend(reply(stream, &answer(&method, &path)));
            }
        });
        FakeEngine { dir, asked }
    }

    pub(crate) fn backend(&self) -> DockerBackend {
        let host = EngineHost::Unix(self.dir.path().join("d.sock"));
        DockerBackend::new(host, EngineConfig::default()).unwrap()
    }

    /// Every call that came, as method and path.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.calls.lock().unwrap().clone()
    }

    /// Waits for a call of which this is true.
    pub(crate) async fn until_asked(&self, call: impl Fn(&str) -> bool + Send + 'static) {
        let asked = Arc::clone(&self.asked);
        let wait = move || {
            let calls = asked.calls.lock().unwrap();
            let none = |calls: &mut Vec<String>| !calls.iter().any(|come| call(come));
            assert!(!asked.more.wait_timeout_while(calls, CALL_TIMEOUT, none).unwrap().1.timed_out());
        };
        tokio::task::spawn_blocking(wait).await.unwrap();
    }
}

fn request(stream: UnixStream) -> Option<(String, String, UnixStream)> {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first).ok()?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 || line == "\r\n" {
            break;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
    }
    reader.read_exact(&mut vec![0; length]).ok()?;
    let mut words = first.split(' ');
    Some((words.next()?.to_owned(), words.next()?.to_owned(), reader.into_inner()))
}

/// Returns what has to stay open.
fn reply(mut stream: UnixStream, reply: &ScriptedHttpReply) -> Option<UnixStream> {
    let close = "Connection: close\r\n";
    match reply {
        ScriptedHttpReply::Whole(status, body) => {
            let length = body.len();
            let _ = write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n{close}\r\n{body}");
            None
        }
        ScriptedHttpReply::Open(body) => {
            write!(stream, "HTTP/1.1 200 X\r\n{close}\r\n{body}").ok()?;
            Some(stream)
        }
        ScriptedHttpReply::Never => Some(stream),
    }
}
