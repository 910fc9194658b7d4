//! Watches the first bytes of a server on their way to the HTTP/2 implementation.
//!
//! A gRPC server opens with an HTTP/2 SETTINGS frame. Before the first response, which may take minutes for a good
//! reason, nothing else distinguishes it from a server that hangs or speaks another protocol.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use larder::go_format;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;

/// The first bytes of a server.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ServerPreface {
    /// A SETTINGS frame, as HTTP/2 requires.
    Http2,
    /// Something else, described by the text.
    Foreign(String),
    /// None: the connection was closed for this reason.
    Closed(String),
}

/// Length of the header of an HTTP/2 frame.
const FRAME_HEAD: usize = 9;

/// Bytes of a foreign preface that are kept for the message.
const SHOWN: usize = 64;

/// A connection that reports the server's preface once.
pub(crate) struct PrefaceStream<S> {
    stream: S,
    head: Vec<u8>,
    report: Option<oneshot::Sender<ServerPreface>>,
}

impl<S> PrefaceStream<S> {
    /// Wraps a connection; returns it with the receiver of the report.
    pub(crate) fn new(stream: S) -> (PrefaceStream<S>, oneshot::Receiver<ServerPreface>) {
        let (report, reported) = oneshot::channel();
        (PrefaceStream { stream, head: Vec::new(), report: Some(report) }, reported)
    }

    fn report(&mut self, greeting: ServerPreface) {
        if let Some(report) = self.report.take() {
            let _ = report.send(greeting);
        }
    }

    /// The result of a write. Before the preface, a failed one passes as done: the server has closed the connection,
    /// and the bytes it sent before that are still to be read and say more.
    fn written(&self, written: io::Result<usize>, wanted: usize) -> io::Result<usize> {
        if self.report.is_some() { written.or(Ok(wanted)) } else { written }
    }

    /// Records the result of a read: bytes, the end, or an error.
    fn note(&mut self, read: Result<&[u8], &io::Error>) {
        match read {
            Err(error) => self.report(ServerPreface::Closed(error.to_string())),
            Ok([]) if self.head.is_empty() => {
                self.report(ServerPreface::Closed("connection closed before any response".into()));
            }
            Ok([]) => self.report(ServerPreface::Foreign(described(&self.head))),
            Ok(bytes) => {
                let room = SHOWN - self.head.len();
                self.head.extend(bytes.iter().take(room));
                if let Some(head) = self.head.first_chunk() {
                    let greeting = if opens_http2(head) {
                        ServerPreface::Http2
                    } else {
                        ServerPreface::Foreign(described(&self.head))
                    };
                    self.report(greeting);
                }
            }
        }
    }
}

/// Whether this is the header of a SETTINGS frame without ACK: length, type 4, flags, stream 0.
fn opens_http2(head: &[u8; FRAME_HEAD]) -> bool {
    let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = *head;
    let length = u32::from_be_bytes([0, l0, l1, l2]);
    kind == 4 && flags & 1 == 0 && length.is_multiple_of(6) && [s0, s1, s2, s3] == [0; 4]
}

/// The first line of a preface, quoted.
fn described(head: &[u8]) -> String {
    let line = head.split(|byte| matches!(byte, b'\r' | b'\n')).next().unwrap_or_default();
    format!("received {}", go_format::quote(&String::from_utf8_lossy(line)))
}

impl<S: AsyncRead + Unpin> AsyncRead for PrefaceStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buf));
        if self.report.is_some() {
            self.note(read.as_ref().map(|()| &buf.filled()[before..]));
        }
        Poll::Ready(read)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PrefaceStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, buf));
        Poll::Ready(self.written(written, buf.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bufs));
        Poll::Ready(self.written(written, bufs.iter().map(|buf| buf.len()).sum()))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Returns the report about a server that sends these pieces and then closes.
    async fn greeting_of(pieces: &[&[u8]]) -> ServerPreface {
        let (ours, mut theirs) = tokio::io::duplex(1024);
        let (mut watched, reported) = PrefaceStream::new(ours);
        let mut read = Vec::new();
        for piece in pieces {
            theirs.write_all(piece).await.unwrap();
            let mut buf = vec![0; piece.len()];
            watched.read_exact(&mut buf).await.unwrap();
            read.extend(buf);
        }
        drop(theirs);
        watched.read_to_end(&mut read).await.unwrap();
        assert_eq!(read, pieces.concat(), "what is watched must pass unchanged");
        reported.await.unwrap()
    }

    #[tokio::test]
    async fn a_settings_frame_is_http2_however_it_is_cut() {
        let settings = [0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 100];
        assert_eq!(greeting_of(&[&settings]).await, ServerPreface::Http2);
        assert_eq!(
            greeting_of(&[&settings[..1], &settings[1..8], &settings[8..]]).await,
            ServerPreface::Http2
        );
    }

    #[tokio::test]
    async fn another_protocol_is_shown() {
        let http1 = ServerPreface::Foreign("received \"HTTP/1.1 400 Bad Request\"".into());
        assert_eq!(greeting_of(&[b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n"]).await, http1);
        assert_eq!(greeting_of(&[b"hi"]).await, ServerPreface::Foreign("received \"hi\"".into()));
        let goaway = greeting_of(&[&[0, 0, 8, 7, 0, 0, 0, 0, 0]]).await;
        assert!(matches!(goaway, ServerPreface::Foreign(_)), "{goaway:?}");
    }

    #[tokio::test]
    async fn silence_to_the_end_is_a_closed_connection() {
        assert!(matches!(greeting_of(&[]).await, ServerPreface::Closed(_)));
    }
}
