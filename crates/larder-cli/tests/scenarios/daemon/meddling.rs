//! Hostile calls to the daemon's socket.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use larder_testkit_peers::process::wait_until;
use rustix::process::{Resource, getrlimit, setrlimit};

use super::MachineWithDaemon;

#[test]
fn a_second_daemon_on_the_same_state_is_refused() {
    let Some(machine) = MachineWithDaemon::serving() else { return };
    let other = machine.home.path().join("other.sock");
    for arguments in [&["serve"][..], &["serve", "--socket", &other.to_string_lossy()]] {
        let refused = machine.larder(arguments);
        assert_ne!(refused.code, 0, "{refused:?}");
        assert!(refused.stderr.contains("in use by"), "{refused:?}");
    }
    machine.larder(&["images"]).expect(0);
}

#[test]
fn ten_thousand_idle_clients_keep_no_other_client_out() {
    if !can_open_files(10_100) {
        return;
    }
    let Some(machine) = MachineWithDaemon::serving() else { return };
    // Half of them begin to speak HTTP/2, and half say nothing.
    let clients = (0..10_000).map(|number| {
        let mut stream = UnixStream::connect(machine.socket()).unwrap();
        if number % 2 == 0 {
            // The daemon may have closed it already.
            let _ = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
        }
        stream
    });
    let idle: Vec<UnixStream> = clients.collect();
    machine.larder(&["images"]).expect(0);
    assert!(machine.status()["connections"].as_u64().is_some_and(|open| open <= 1200));
    drop(idle);
    wait_until("they are gone", || machine.status()["connections"] == 1);
}

/// Whether this process may have so many files open.
fn can_open_files(files: u64) -> bool {
    let mut limit = getrlimit(Resource::Nofile);
    let enough = limit.maximum.is_none_or(|most| most >= files);
    assert!(enough || std::env::var_os("CI").is_none(), "with CI set, this needs {files} open files");
    if !enough {
        eprintln!("SKIPPED: this needs {files} open files");
        return false;
    }
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    true
}

#[test]
fn nonsense_on_the_socket_ends_one_connection_and_no_more() {
    let Some(machine) = MachineWithDaemon::serving() else { return };
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let giant_frame = [&preface[..], &[0xff; 64]].concat();
    let half_a_frame = [&preface[..], b"\0\0\x08\x06\0\0\0\0\0\x01"].concat();
    let cases: [&[u8]; 6] = [
        b"\0\0\0\0\0\0\0\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        &giant_frame,
        &half_a_frame,
        &[b'x'; 10_000],
    ];
    for bytes in cases {
        let mut stream = UnixStream::connect(machine.socket()).unwrap();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
    }
    machine.larder(&["images"]).expect(0);
    wait_until("all of them are gone", || machine.status()["connections"] == 1);
}
