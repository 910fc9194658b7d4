//! Programs that the test starts, and stops by their process.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A running program with its log in a file. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Process {
    program: PathBuf,
    arguments: Vec<String>,
    log: PathBuf,
    child: Child,
}

impl Process {
    pub(super) fn start(program: &Path, arguments: Vec<String>, log: PathBuf) -> Process {
        let child = spawn(program, &arguments, &log);
        Process { program: program.to_owned(), arguments, log, child }
    }

    pub(super) fn restart(&mut self) {
        self.kill();
        self.child = spawn(&self.program, &self.arguments, &self.log);
    }

    /// Fails with its log if it has ended by itself.
    pub(super) fn assert_running(&mut self) {
        let ended = self.child.try_wait().expect("a child of this process");
        assert!(ended.is_none(), "{} has ended:\n{}", self.program.display(), self.last_lines());
    }

    /// The end of its log.
    pub(super) fn last_lines(&self) -> String {
        let log = fs_err::read(&self.log).unwrap_or_default();
        let end = &log[log.len().saturating_sub(4000)..];
        String::from_utf8_lossy(end).into_owned()
    }

    fn kill(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(program: &Path, arguments: &[String], log: &Path) -> Child {
    let log = fs_err::OpenOptions::new().create(true).append(true).open(log).expect("a log").into_file();
    let output = log.try_clone().expect("a log");
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(output).stderr(log);
    command.spawn().unwrap_or_else(|error| panic!("cannot start {}: {error}", program.display()))
}

/// Runs a program to its end.
pub(super) fn run(program: &str, arguments: &[&str], directory: &Path) {
    let done = Command::new(program).args(arguments).current_dir(directory).output();
    let done = done.unwrap_or_else(|error| panic!("cannot start {program}: {error}"));
    assert!(done.status.success(), "{program}: {}", String::from_utf8_lossy(&done.stderr));
}
