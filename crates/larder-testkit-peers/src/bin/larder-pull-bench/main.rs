//! Cold pulls of the same images by several programs, side by side, in one run.
//!
//! One registry on loopback serves all. Each pull gets a new ext4 of its own on a loop device, since an ext4 without
//! a journal makes files slowly for minutes after many were removed, which would charge one program for what the last
//! one left. The programs take turns, the first of a turn is the last of the next: the same program is up to a quarter
//! slower as the first, with memory that the machine has not used before.

mod disk;
mod program;

use std::env;
use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use larder_testkit_peers::packages::find_program;
use larder_testkit_peers::{Availability, Package, RegistryOptions, RegistryProcess, require};

use disk::{LoopDisk, LoopFileIo};
use program::{ProgramPaths, PullCost, PullProgram};

const HELP: &str = "\
Compare cold pulls of images by larder's own store, containerd and podman (needs root).

usage: larder-pull-bench [--runs N] [--dir DIR] [--loop cached|direct] [--only NAME[,NAME]] [--larder PATH]
                         [--baseline PATH] [--containerd PATH] LAYOUT...

  LAYOUT             a dir with an OCI image layout that has one image
  --runs N           how often each program pulls each image, even: each second turn is reversed; default 4
  --dir DIR          where the filesystems for the pulls are made, 16 GB at most each; default: the temporary dir
  --loop direct      write to these filesystems past the page cache of the file behind them, which a disk
                     of their own would not have either; DIR must allow it (memory does not); default: cached
  --only NAME,...    of: larder, baseline, floor, containerd, podman;
                     default: all that are installed; floor fetches, hashes and writes each layer as one file and
                     needs Python, with the package isal for speed
  --larder PATH      default: the larder next to this program
  --baseline PATH    another larder, usually of an older commit
  --containerd PATH  another containerd than the one on PATH

Prints medians. Wall time ends with the pull; larder's includes making the image durable, that of the others does not: the next
column says how long a sync took after it. CPU is the program's and its daemon's and their children's, peak memory the
daemon's, or else the program's.
";

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let words: Vec<OsString> = env::args_os().skip(1).collect();
    if words.is_empty() || words.iter().any(|word| word == "-h" || word == "--help") {
        eprint!("{HELP}");
        return ExitCode::from(2);
    }
    match PullBenchOptions::parse(words).and_then(|options| bench(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("larder-pull-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

struct PullBenchOptions {
    runs: usize,
    dir: PathBuf,
    loop_io: LoopFileIo,
    only: Option<Vec<PullProgram>>,
    programs: ProgramPaths,
    layouts: Vec<PathBuf>,
}

impl PullBenchOptions {
    fn parse(words: Vec<OsString>) -> Outcome<PullBenchOptions> {
        let larder = env::current_exe()?.with_file_name("larder");
        let containerd = find_program("containerd").unwrap_or_default();
        let programs = ProgramPaths { larder, baseline: None, containerd, podman: find_program("podman") };
        let (dir, loop_io) = (env::temp_dir(), LoopFileIo::Cached);
        let mut options =
            PullBenchOptions { runs: 4, dir, loop_io, only: None, programs, layouts: Vec::new() };
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let name = word.to_string_lossy().into_owned();
            if !name.starts_with('-') {
                options.layouts.push(word.into());
                continue;
            }
            let value =
                words.next().ok_or(format!("{name}: not understood, or it needs a value; see --help"))?;
            match name.as_str() {
                "--runs" => options.runs = value.to_string_lossy().parse()?,
                "--dir" => options.dir = value.into(),
                "--loop" => {
                    options.loop_io = match &*value.to_string_lossy() {
                        "cached" => LoopFileIo::Cached,
                        "direct" => LoopFileIo::Direct,
                        other => return Err(format!("--loop {other}: it is cached or direct").into()),
                    }
                }
                "--only" => {
                    let names = value.to_string_lossy().into_owned();
                    options.only = Some(names.split(',').map(PullProgram::named).collect::<Outcome<_>>()?);
                }
                "--larder" => options.programs.larder = value.into(),
                "--baseline" => options.programs.baseline = Some(value.into()),
                "--containerd" => options.programs.containerd = value.into(),
                _ => return Err(format!("{name}: not understood; see --help").into()),
            }
        }
        if options.runs == 0 || options.runs % 2 == 1 || options.layouts.is_empty() {
            return Err("an even number of runs and at least one LAYOUT; see --help".into());
        }
        Ok(options)
    }
}

fn bench(options: &PullBenchOptions) -> Outcome<()> {
    if let Availability::Skip(reason) = require(&Package::ALL) {
        return Err(reason.into());
    }
    let mut kinds = options.only.clone().unwrap_or_else(|| PullProgram::ALL.to_vec());
    kinds.retain(|kind| {
        let missing = options.programs.missing_program(*kind);
        if let Some(missing) = missing {
            eprintln!("without {}: {missing} is not there", kind.name());
        }
        missing.is_none()
    });
    let registry = RegistryProcess::start(RegistryOptions::default())?;
    for (at, layout) in options.layouts.iter().enumerate() {
        let name = format!("bench/image-{at}:1");
        push(layout, &registry.image(&name))?;
        let mut costs: Vec<Vec<PullCost>> = vec![Vec::new(); kinds.len()];
        for run in 0..options.runs {
            let mut turn: Vec<_> = kinds.iter().zip(&mut costs).collect();
            if run % 2 == 1 {
                turn.reverse();
            }
            for (kind, costs) in turn {
                let disk = LoopDisk::new(&options.dir, options.loop_io)?;
                costs.push(options.programs.pull(*kind, &registry, &registry.image(&name), disk.path())?);
            }
        }
        report(layout, options.runs, &kinds, &costs)?;
    }
    Ok(())
}

fn push(layout: &std::path::Path, image: &str) -> Outcome<()> {
    let skopeo = find_program("skopeo").ok_or("skopeo is not installed")?;
    let source = format!("oci:{}", layout.display());
    let output = Command::new(skopeo)
        .args(["copy", "--quiet", "--dest-tls-verify=false", &source, &format!("docker://{image}")])
        .output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("push {}: {}", layout.display(), String::from_utf8_lossy(&output.stderr).trim()).into())
}

fn report(
    layout: &std::path::Path,
    runs: usize,
    kinds: &[PullProgram],
    costs: &[Vec<PullCost>],
) -> Outcome<()> {
    let mut table = format!(
        "\n{}: medians of {runs}\n\n\
         | program | wall s | sync after it s | CPU s | peak MiB | disk MB | wall / larder's | larder's CPU / its |\n\
         |---|--:|--:|--:|--:|--:|--:|--:|\n",
        layout.file_name().unwrap_or_default().to_string_lossy()
    );
    let own = costs.first().map(|costs| PullCost::median(costs)).unwrap_or_default();
    for (kind, costs) in kinds.iter().zip(costs) {
        let cost = PullCost::median(costs);
        table += &[
            format!("| {} | {:.2} | {:.2} | {:.2} ", kind.name(), cost.wall, cost.sync, cost.cpu),
            format!("| {:.0} | {:.0} ", cost.peak_mib, cost.disk_mb),
            format!("| {:.2} | {:.2} |\n", cost.wall / own.wall, own.cpu / cost.cpu),
        ]
        .concat();
    }
    Ok(std::io::stdout().write_all(table.as_bytes())?)
}
