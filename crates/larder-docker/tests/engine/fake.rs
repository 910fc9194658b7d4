//! An engine that answers as it is told: for what a real one does only at bad moments, or only in another version.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::thread;

use larder_docker::{DockerBackend, DockerConfig, EngineHost};
use tempfile::TempDir;

/// Listens until the process ends.
pub(crate) struct FakeEngine {
    folder: TempDir,
    asked: Arc<Mutex<Vec<String>>>,
}

impl FakeEngine {
    /// `answer` makes status and body from method and path.
    pub(crate) fn start(answer: impl Fn(&str, &str) -> (u16, String) + Send + 'static) -> FakeEngine {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("d.sock")).unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Some((method, path, stream)) = stream.ok().and_then(request) else { continue };
                seen.lock().unwrap().push(format!("{method} {path}"));
                let (status, body) = answer(&method, &path);
                let _ = reply(stream, status, &body);
            }
        });
        FakeEngine { folder, asked }
    }

    pub(crate) fn backend(&self) -> DockerBackend {
        let host = EngineHost::Unix(self.folder.path().join("d.sock"));
        DockerBackend::new(host, DockerConfig::default()).unwrap()
    }

    /// Every call that came, as method and path.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
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

fn reply(mut stream: UnixStream, status: u16, body: &str) -> std::io::Result<()> {
    let length = body.len();
    write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}")
}
