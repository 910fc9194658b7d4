//! The programs that pull, and what a pull of theirs costs.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use larder_testkit_peers::packages::find_program;
use larder_testkit_peers::{Containerd, ContainerdOptions, RegistryProcess};
use wait4::Wait4;

use crate::Outcome;

const FLOOR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/bench/pull_floor.py");

/// A program that pulls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PullProgram {
    Larder,
    /// Another build of larder.
    Baseline,
    /// `docs/bench/pull_floor.py`: each layer is fetched, hashed and written as one file, and nothing else.
    Floor,
    /// With the gzip of the Go library.
    Containerd,
    Podman,
}

impl PullProgram {
    pub(crate) const ALL: [PullProgram; 5] = [
        PullProgram::Larder,
        PullProgram::Baseline,
        PullProgram::Floor,
        PullProgram::Containerd,
        PullProgram::Podman,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            PullProgram::Larder => "larder",
            PullProgram::Baseline => "baseline",
            PullProgram::Floor => "floor",
            PullProgram::Containerd => "containerd",
            PullProgram::Podman => "podman",
        }
    }

    pub(crate) fn named(name: &str) -> Outcome<PullProgram> {
        let kind = PullProgram::ALL.into_iter().find(|kind| kind.name() == name);
        kind.ok_or_else(|| format!("--only {name}: no such program; see --help").into())
    }
}

/// Where the programs are.
pub(crate) struct ProgramPaths {
    pub(crate) larder: PathBuf,
    pub(crate) baseline: Option<PathBuf>,
    pub(crate) containerd: PathBuf,
    pub(crate) podman: Option<PathBuf>,
}

/// Cost of one pull: seconds, MiB of memory, MB of disk.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PullCost {
    pub(crate) wall: f64,
    pub(crate) sync: f64,
    pub(crate) cpu: f64,
    pub(crate) peak_mib: f64,
    pub(crate) disk_mb: f64,
}

impl PullCost {
    /// The median of each figure.
    pub(crate) fn median(costs: &[PullCost]) -> PullCost {
        let of = |figure: fn(&PullCost) -> f64| {
            let mut figures: Vec<f64> = costs.iter().map(figure).collect();
            figures.sort_by(f64::total_cmp);
            let middle = figures.len() / 2;
            match figures.len() {
                0 => f64::NAN,
                even if even.is_multiple_of(2) => f64::midpoint(figures[middle - 1], figures[middle]),
                _ => figures[middle],
            }
        };
        PullCost {
            wall: of(|cost| cost.wall),
            sync: of(|cost| cost.sync),
            cpu: of(|cost| cost.cpu),
            peak_mib: of(|cost| cost.peak_mib),
            disk_mb: of(|cost| cost.disk_mb),
        }
    }
}

impl ProgramPaths {
    /// Returns the program that has to be installed first.
    pub(crate) fn missing_program(&self, kind: PullProgram) -> Option<&'static str> {
        match kind {
            PullProgram::Larder => None,
            PullProgram::Baseline => self.baseline.is_none().then_some("--baseline PATH"),
            PullProgram::Floor => find_program("python3").is_none().then_some("python3"),
            PullProgram::Podman => self.podman.is_none().then_some("podman"),
            PullProgram::Containerd => self.containerd.as_os_str().is_empty().then_some("containerd"),
        }
    }

    /// Pulls `image` into an empty directory on a filesystem of its own.
    pub(crate) fn pull(
        &self,
        kind: PullProgram,
        registry: &RegistryProcess,
        image: &str,
        root: &Path,
    ) -> Outcome<PullCost> {
        let store = root.join("store");
        match kind {
            PullProgram::Larder => larder_pull(&self.larder, &store, image, root),
            PullProgram::Baseline => {
                let baseline = self.baseline.as_deref().ok_or("--baseline is not given")?;
                larder_pull(baseline, &store, image, root)
            }
            PullProgram::Floor => {
                fs_err::create_dir(&store)?;
                measure(Command::new("python3").arg(FLOOR).arg(image).arg(&store), None, root)
            }
            PullProgram::Podman => {
                let podman = self.podman.as_deref().ok_or("podman is not installed")?;
                let mut command = Command::new(podman);
                command.arg("--root").arg(&store).arg("--runroot").arg(root.join("run"));
                command.args(["--storage-driver", "overlay", "pull", "--tls-verify=false", "--quiet", image]);
                measure(&mut command, None, root)
            }
            PullProgram::Containerd => {
                // Without programs that inflate, it uses its own library.
                let path = root.join("bin");
                fs_err::create_dir(&path)?;
                let containerd = Containerd::start_with(ContainerdOptions {
                    below: Some(root.to_owned()),
                    program: Some(self.containerd.clone()),
                    path: Some(path.into()),
                    ..ContainerdOptions::default()
                })?;
                containerd.add_registry(registry)?;
                let mut command = Command::new(&self.larder);
                command.args(["--backend", &containerd.endpoint(), "pull", image]);
                measure(&mut command, containerd.pid(), root)
            }
        }
    }
}

fn larder_pull(program: &Path, store: &Path, image: &str, root: &Path) -> Outcome<PullCost> {
    measure(Command::new(program).arg("--root").arg(store).args(["pull", image]), None, root)
}

#[expect(clippy::disallowed_methods, reason = "what is measured lives in real time")]
fn measure(command: &mut Command, daemon: Option<u32>, root: &Path) -> Outcome<PullCost> {
    use std::time::Instant;
    let dir = File::open(root)?;
    rustix::fs::sync();
    let before = daemon.map(cpu_of).transpose()?.unwrap_or_default();
    let start = Instant::now();
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    // The messages fit into the pipe.
    let ended = child.wait4()?;
    let wall = start.elapsed();
    if !ended.status.success() {
        let mut stderr_text = String::new();
        if let Some(mut stderr) = child.stderr.take() {
            std::io::Read::read_to_string(&mut stderr, &mut stderr_text)?;
        }
        return Err(format!("{command:?}: {}: {stderr_text}", ended.status).into());
    }
    let start = Instant::now();
    rustix::fs::syncfs(&dir)?;
    let sync = start.elapsed();
    let own = ended.rusage.utime + ended.rusage.stime;
    let daemon_cpu = daemon.map(cpu_of).transpose()?.unwrap_or_default().saturating_sub(before);
    let peak_kib = match daemon {
        Some(pid) => peak_kib(pid)?,
        None => ended.rusage.maxrss / 1024,
    };
    Ok(PullCost {
        wall: wall.as_secs_f64(),
        sync: sync.as_secs_f64(),
        cpu: (own + daemon_cpu).as_secs_f64(),
        peak_mib: float(peak_kib) / 1024.0,
        disk_mb: float(allocated(root)?) / 1e6,
    })
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn float(count: u64) -> f64 {
    count as f64
}

/// CPU time of a process and of its children that have ended.
fn cpu_of(pid: u32) -> Outcome<Duration> {
    let stat = fs_err::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').ok_or("no ) in /proc/PID/stat")?;
    // From the state on: utime, stime, cutime and cstime are the 12th to 15th.
    let ticks: u64 =
        fields.split_whitespace().skip(11).take(4).filter_map(|field| field.parse::<u64>().ok()).sum();
    Ok(Duration::from_secs(ticks) / u32::try_from(rustix::param::clock_ticks_per_second())?)
}

fn peak_kib(pid: u32) -> Outcome<u64> {
    let status = fs_err::read_to_string(format!("/proc/{pid}/status"))?;
    let line =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM in /proc/PID/status")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

/// Bytes that everything below a directory takes on this filesystem, hard-linked files once.
fn allocated(root: &Path) -> Outcome<u64> {
    let device = fs_err::metadata(root)?.dev();
    let (mut bytes, mut seen, mut todo) = (0, std::collections::HashSet::new(), vec![root.to_owned()]);
    while let Some(dir) = todo.pop() {
        for entry in fs_err::read_dir(&dir)? {
            let path = entry?.path();
            let meta = fs_err::symlink_metadata(&path)?;
            if meta.dev() != device || !seen.insert(meta.ino()) {
                continue;
            }
            bytes += meta.blocks() * 512;
            if meta.is_dir() {
                todo.push(path);
            }
        }
    }
    Ok(bytes)
}
