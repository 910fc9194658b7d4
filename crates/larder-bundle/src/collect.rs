//! Runs the programs of the parts, each within a time limit.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::future::Future;
use std::io::{self, Read as _};
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::process::Command;
use tokio::time::{Instant, timeout, timeout_at};

use crate::parts::{self, BundlePart, PartSource};
use crate::redact::without_proxy_user;
use crate::{BundleFile, BundleOptions};

/// Limit of each stream and file; the bundle has the beginning of longer ones.
const PART_BYTES: u64 = 16 << 20;

/// The beginning of names of variables that concern larder, and whether their values are shown.
const VARIABLES: [(&str, bool); 10] = [
    ("LARDER_", true),
    ("HTTP_PROXY", true),
    ("HTTPS_PROXY", true),
    ("ALL_PROXY", true),
    ("NO_PROXY", true),
    ("CONTAINER", false),
    ("IMAGE_SERVICE_ENDPOINT", false),
    ("DOCKER_", false),
    ("OTEL_", false),
    ("SSL_CERT_", false),
];

/// Types of filesystems that are interfaces of the kernel.
const KERNEL_INTERFACES: [&str; 18] = [
    "autofs",
    "binfmt_misc",
    "bpf",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "devtmpfs",
    "efivarfs",
    "fusectl",
    "hugetlbfs",
    "mqueue",
    "nsfs",
    "proc",
    "pstore",
    "securityfs",
    "sysfs",
];

/// The output of a part until its end, and why it failed if it did.
type PartOutput = (String, Option<String>);

/// Collects all parts, one after the other. When the status has shown whether a daemon answers, what it is asked for is
/// collected at once: calls that hang take the time limit of one part together.
pub(crate) async fn collect(options: &BundleOptions) -> Vec<BundleFile> {
    let end = Instant::now() + options.timeout;
    let collection = Collection { options, daemon: OnceLock::new() };
    let mut files = Vec::with_capacity(parts::ALL.len());
    for group in parts::ALL.chunk_by(|part, next| part.follows_status() && next.follows_status()) {
        let outputs = group.iter().map(|part| timeout_at(end, collection.output_of(part)));
        // Without a daemon, commands work through the one that has opened the images: none is to end with it.
        let at_once = if collection.has_daemon() { group.len() } else { 1 };
        let outputs: Vec<_> = stream::iter(outputs).buffered(at_once).collect().await;
        for (part, output) in group.iter().zip(outputs) {
            let (text, error) = output.unwrap_or_else(|_| {
                (String::new(), Some(format!("left out: all parts together took {:?}\n", options.timeout)))
            });
            files.push(BundleFile { name: part.name.to_owned(), about: part.about, text, error });
        }
    }
    files
}

/// State that the parts collected so far have shown.
struct Collection<'a> {
    options: &'a BundleOptions,
    daemon: OnceLock<DaemonState>,
}

/// State of the daemon, from the call for the status.
struct DaemonState {
    status: Option<serde_json::Value>,
    /// Whether the status did not come within the time limit: no other call to the daemon will.
    hung: bool,
}

impl Collection<'_> {
    /// Whether the status is a daemon's.
    fn has_daemon(&self) -> bool {
        self.daemon.get().is_some_and(|daemon| daemon.status.is_some())
    }

    async fn output_of(&self, part: &BundlePart) -> PartOutput {
        match part.source {
            PartSource::About => (self.options.about.clone(), None),
            PartSource::Images(_) | PartSource::Metrics
                if self.daemon.get().is_some_and(|daemon| daemon.hung) =>
            {
                (String::new(), Some("left out: the daemon did not answer in time\n".to_owned()))
            }
            PartSource::Images(words) => self.images(part, words).await,
            PartSource::Own(words) => self.own(words).await.0,
            PartSource::Program(words) => self.run(words[0].as_ref(), &owned(&words[1..])).await.0,
            PartSource::Versions(programs) => self.versions(programs).await,
            PartSource::File(path) => split(self.limited(read_file(path.into())).await),
            PartSource::SettingsFile => match self.options.settings_file.clone() {
                Some(path) => split(self.limited(read_file(path)).await),
                None => (String::new(), None),
            },
            PartSource::Mounts => {
                let read = self.limited(read_file("/proc/self/mountinfo".into())).await;
                split(read.map(|mounts| {
                    mounts.lines().filter(|line| !is_interface(line)).map(with_newline).collect()
                }))
            }
            PartSource::Metrics => split(self.limited(self.metrics()).await),
            PartSource::Log => self.log().await,
            PartSource::Environment => (environment(std::env::vars_os()), None),
        }
    }

    /// A command that may ask the daemon. The first one shows whether it answers.
    async fn images(&self, part: &BundlePart, words: &[&str]) -> PartOutput {
        let (output, in_time) = self.own(words).await;
        if part.name == parts::STATUS {
            let status = serde_json::from_str(&output.0).ok();
            self.daemon.get_or_init(|| DaemonState { status, hung: !in_time });
        }
        if part.name == "gc-plan.json" && serde_json::from_str::<serde_json::Value>(&output.0).is_ok() {
            // The exit status says that disk usage would stay above the threshold: so does the plan.
            return (output.0, None);
        }
        output
    }

    async fn own(&self, words: &[&str]) -> (PartOutput, bool) {
        let mut arguments = self.options.arguments.clone();
        arguments.extend(owned(words));
        self.run(self.options.program.as_os_str(), &arguments).await
    }

    /// The output of a program, and whether it ended within the time limit of a part.
    async fn run(&self, program: &OsStr, arguments: &[OsString]) -> (PartOutput, bool) {
        self.run_within(self.options.part_timeout, program, arguments).await
    }

    async fn run_within(
        &self,
        limit: Duration,
        program: &OsStr,
        arguments: &[OsString],
    ) -> (PartOutput, bool) {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("NO_COLOR", "1").env("SYSTEMD_COLORS", "0").env("LC_ALL", "C.UTF-8");
        let done = match timeout(limit, output_of(command)).await {
            Ok(Ok(done)) => done,
            Ok(Err(error)) => {
                let error = format!("cannot run {}: {error}\n", program.to_string_lossy());
                return ((String::new(), Some(error)), true);
            }
            Err(_) => {
                let error = format!("did not end within {limit:?}: {}\n", line_of(program, arguments));
                return ((String::new(), Some(error)), false);
            }
        };
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        let said = String::from_utf8_lossy(&done.stderr);
        let failed = !done.status.success() || (text.is_empty() && !said.is_empty());
        let error = failed.then(|| format!("{}: {}\n{said}", line_of(program, arguments), done.status));
        ((text, error), true)
    }

    async fn versions(&self, programs: &[&str]) -> PartOutput {
        let end = Instant::now() + self.options.part_timeout;
        let mut text = String::new();
        for program in programs {
            let limit = end.saturating_duration_since(Instant::now());
            if limit.is_zero() {
                let _ = writeln!(text, "{program}: left out: no time left");
                continue;
            }
            let ((version, error), _) =
                self.run_within(limit, program.as_ref(), &owned(&["--version"])).await;
            let version = error.map_or(version, |error| error.lines().next().unwrap_or_default().to_owned());
            // Writing to a `String` does not fail.
            let _ = writeln!(text, "{program}: {}", version.trim());
        }
        (text, None)
    }

    async fn log(&self) -> PartOutput {
        let since = format!("-{}s", self.options.since.as_secs());
        let words =
            ["-u", "larder.service", "--no-pager", "-o", "short-iso", "-n", "20000", "--since", &since];
        self.run("journalctl".as_ref(), &owned(&words)).await.0
    }

    /// The page of metrics from the daemon's socket.
    async fn metrics(&self) -> io::Result<String> {
        let status = self.daemon.get().and_then(|daemon| daemon.status.as_ref());
        let socket = status.and_then(|status| status["socket"].as_str());
        let socket = socket.ok_or_else(|| io::Error::other("no daemon has reported its socket"))?;
        let mut stream = UnixStream::connect(socket).await?;
        // HTTP/1.0: the server closes the connection after the page.
        stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: larder\r\n\r\n").await?;
        let page = read_limited(stream).await?;
        let body = page.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
        body.ok_or_else(|| io::Error::other("the daemon's response has no body"))
    }

    async fn limited<T>(&self, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let limit = self.options.part_timeout;
        timeout(limit, work)
            .await
            .unwrap_or_else(|_| Err(io::Error::other(format!("did not end within {limit:?}"))))
    }
}

/// The output of a program: of each stream the beginning. A program that prints more finds the stream closed.
async fn output_of(mut command: Command) -> io::Result<Output> {
    let mut child = command.spawn()?;
    let streams = (child.stdout.take(), child.stderr.take());
    let (Some(stdout), Some(stderr)) = streams else {
        return Err(io::Error::other("no pipe to the program"));
    };
    let (stdout, stderr) = tokio::try_join!(read_limited(stdout), read_limited(stderr))?;
    Ok(Output { status: child.wait().await?, stdout: stdout.into(), stderr: stderr.into() })
}

/// The beginning of a stream, as text.
async fn read_limited(stream: impl AsyncRead + Unpin) -> io::Result<String> {
    let mut bytes = Vec::new();
    stream.take(PART_BYTES).read_to_end(&mut bytes).await?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The beginning of a file. A read that hangs keeps a thread, and not the bundle.
async fn read_file(path: PathBuf) -> io::Result<String> {
    let read = move || {
        let mut bytes = Vec::new();
        fs_err::File::open(path)?.take(PART_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    tokio::task::spawn_blocking(read).await.map_err(io::Error::other)?
}

fn split(read: io::Result<String>) -> PartOutput {
    match read {
        Ok(text) => (text, None),
        Err(error) => (String::new(), Some(format!("{error}\n"))),
    }
}

fn owned(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

fn line_of(program: &OsStr, arguments: &[OsString]) -> String {
    let words = std::iter::once(program).chain(arguments.iter().map(OsString::as_os_str));
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

fn with_newline(line: &str) -> String {
    format!("{line}\n")
}

/// Whether a line of mountinfo is about an interface of the kernel.
fn is_interface(line: &str) -> bool {
    let kind = line.split_once(" - ").and_then(|(_, rest)| rest.split(' ').next());
    kind.is_some_and(|kind| KERNEL_INTERFACES.contains(&kind))
}

/// The variables that concern larder, in order.
fn environment(variables: impl Iterator<Item = (OsString, OsString)>) -> String {
    let mut lines: Vec<String> = variables
        .filter_map(|(name, value)| {
            let (name, value) = (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned());
            let upper = name.to_ascii_uppercase();
            let (_, is_shown) = VARIABLES.iter().find(|(prefix, _)| upper.starts_with(prefix))?;
            let value = if upper.ends_with("_PROXY") { without_proxy_user(&value) } else { value };
            Some(if *is_shown { format!("{name}={value}\n") } else { format!("{name}=(set)\n") })
        })
        .collect();
    lines.sort();
    lines.concat()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn options(program: &str) -> BundleOptions {
        BundleOptions {
            program: PathBuf::from(program),
            arguments: Vec::new(),
            settings_file: None,
            output: None,
            since: Duration::from_secs(3600),
            part_timeout: Duration::from_secs(20),
            timeout: Duration::from_secs(600),
            about: "larder 1\n".to_owned(),
        }
    }

    #[tokio::test]
    async fn a_plan_that_does_not_free_enough_is_a_whole_part() {
        let script = "case \"$*\" in 'gc --dry-run'*) echo '{}'; echo 'not enough' >&2; exit 1 ;; df*) echo '{}'; exit 1 ;; esac";
        let options = BundleOptions { arguments: owned(&["-c", script, "larder"]), ..options("/bin/sh") };
        let files = collect(&options).await;
        let error = |name: &str| files.iter().find(|file| file.name == name).unwrap().error.clone();
        assert_eq!(error("gc-plan.json"), None);
        assert!(error("df.json").is_some());
        assert_eq!(files.len(), parts::ALL.len());
    }

    #[tokio::test]
    async fn a_daemon_that_hangs_is_asked_once() {
        let script = "case $1 in config) echo settings ;; fsck) echo broken >&2; exit 1 ;; \
            status) exec sleep 60 ;; *) touch $0/asked ;; esac";
        let dir = tempfile::tempdir().unwrap();
        let arguments = owned(&["-c", script, dir.path().to_str().unwrap()]);
        // Long enough for those that do not hang, whatever the machine does besides.
        let part_timeout = Duration::from_secs(4);
        let files = collect(&BundleOptions { arguments, part_timeout, ..options("/bin/sh") }).await;
        let part = |name: &str| files.iter().find(|file| file.name == name).unwrap();
        let error = |name: &str| part(name).error.clone().unwrap_or_default();
        assert!(error("status.json").contains("did not end within 4s: "), "{}", error("status.json"));
        assert_eq!(error("gc-plan.json"), "left out: the daemon did not answer in time\n");
        assert_eq!(error("metrics.txt"), error("gc-plan.json"));
        assert!(!dir.path().join("asked").exists(), "nothing else is asked for");
        assert_eq!((&*part("settings.yaml").text, &part("settings.yaml").error), ("settings\n", &None));
        assert!(error("fsck.txt").ends_with("exit status: 1\nbroken\n"), "{}", error("fsck.txt"));
    }

    #[tokio::test]
    async fn parts_of_the_daemon_are_collected_together_after_the_status() {
        // Each waits until four of them run.
        let script = "case $1 in status | config | fsck) echo '{}' ;; *) mktemp $0/XXXXXX >/dev/null && \
            while [ $(ls $0 | wc -l) -lt 4 ]; do sleep 0.02; done ;; esac";
        let running = tempfile::tempdir().unwrap();
        let arguments = owned(&["-c", script, running.path().to_str().unwrap()]);
        let files = collect(&BundleOptions { arguments, ..options("/bin/sh") }).await;
        let error = |name: &str| files.iter().find(|file| file.name == name).unwrap().error.clone();
        for name in ["status.json", "images.json", "mounts.json"] {
            assert_eq!(error(name), None, "{name}");
        }
    }

    #[tokio::test]
    async fn what_remains_after_the_time_limit_is_left_out() {
        let arguments = owned(&["-c", "exec sleep 60"]);
        let options = BundleOptions { arguments, timeout: Duration::ZERO, ..options("/bin/sh") };
        let files = collect(&options).await;
        for name in ["status.json", "settings.yaml"] {
            let error = files.iter().find(|file| file.name == name).and_then(|file| file.error.as_deref());
            assert!(
                error.is_some_and(|error| error.starts_with("left out: all parts together")),
                "{name}: {error:?}"
            );
        }
    }

    #[test]
    fn only_variables_of_larder_are_listed_and_values_of_few_are_shown() {
        let variables = [
            ("LARDER_BACKEND", "cri"),
            ("https_proxy", "http://proxy:3128"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=hunter2"),
            ("AWS_SECRET_ACCESS_KEY", "hunter2"),
        ];
        let listed = environment(variables.into_iter().map(|(name, value)| (name.into(), value.into())));
        assert_eq!(
            listed,
            "LARDER_BACKEND=cri\nOTEL_EXPORTER_OTLP_HEADERS=(set)\nhttps_proxy=http://proxy:3128\n"
        );
    }

    #[test]
    fn interfaces_of_the_kernel_are_no_mounts_of_interest() {
        assert!(is_interface("22 28 0:21 / /proc rw,nosuid - proc proc rw"));
        assert!(!is_interface("36 35 98:0 / /var/lib rw,noatime shared:1 - xfs /dev/sda1 rw,prjquota"));
    }
}
