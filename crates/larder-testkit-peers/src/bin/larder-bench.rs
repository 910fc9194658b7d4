//! Compares what whole processes cost: `larder pull` of an image that is present, next to other CRI clients doing
//! the same against the same containerd, in one run, taking turns.
//!
//! User and system time and peak memory are what the kernel says of each process when it ended (`wait4`).

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use larder_testkit_peers::packages::find_program;
use larder_testkit_peers::{
    Availability, Containerd, ImageBuilder, Package, RegistryOptions, RegistryProcess, require,
};
use wait4::Wait4;

const HELP: &str = "\
Compare the cost of `larder pull` of a present image with other clients (needs root).

usage: larder-bench [--runs N] [--larder PATH] [--crictl PATH] [--bare PATH]

  --runs N       how often each is run; default 50
  --larder PATH  default: the larder next to this program
  --crictl PATH  a real crictl; default: the one on PATH, if there is one
  --bare PATH    docs/bench/bare_pull.go, built: grpc-go and nothing else

`ctr`, which comes with containerd, always takes part. Prints a table of medians, and larder's share of each.
";

/// Runs one command and prints what it cost. A fresh, small process does this, because the kernel counts the
/// memory that a child shares with its parent before it becomes another program.
const MEASURE: &str = "__measure";

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let mut words: Vec<OsString> = env::args_os().skip(1).collect();
    let outcome = if words.first().is_some_and(|word| word == MEASURE) {
        measure_here(&words.split_off(1))
    } else if words.iter().any(|word| word == "-h" || word == "--help") {
        eprint!("{HELP}");
        Ok(())
    } else {
        BenchOptions::parse(words).and_then(|options| bench(&options))
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("larder-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

struct BenchOptions {
    runs: usize,
    larder: PathBuf,
    crictl: Option<PathBuf>,
    bare: Option<PathBuf>,
}

impl BenchOptions {
    fn parse(words: Vec<OsString>) -> Outcome<BenchOptions> {
        let larder = env::current_exe()?.with_file_name("larder");
        let mut options = BenchOptions { runs: 50, larder, crictl: find_program("crictl"), bare: None };
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let name = word.to_string_lossy().into_owned();
            let value =
                words.next().ok_or(format!("{name}: not understood, or it needs a value; see --help"))?;
            match name.as_str() {
                "--runs" => options.runs = value.to_string_lossy().parse()?,
                "--larder" => options.larder = value.into(),
                "--crictl" => options.crictl = Some(value.into()),
                "--bare" => options.bare = Some(value.into()),
                _ => return Err(format!("{name}: not understood; see --help").into()),
            }
        }
        if options.runs == 0 {
            return Err("--runs must be at least 1".into());
        }
        Ok(options)
    }
}

/// One program that takes part, with everything that it was seen to cost.
struct Contender {
    name: &'static str,
    command: Vec<OsString>,
    costs: Vec<ProcessCost>,
}

impl Contender {
    fn new(name: &'static str, program: &Path, arguments: &[&str]) -> Contender {
        let command = std::iter::once(program.into()).chain(arguments.iter().map(OsString::from)).collect();
        Contender { name, command, costs: Vec::new() }
    }

    fn median(&self, of: impl Fn(&ProcessCost) -> u64) -> f64 {
        let mut values: Vec<u64> = self.costs.iter().map(of).collect();
        values.sort_unstable();
        #[expect(clippy::cast_precision_loss, reason = "microseconds and KiB of one short process")]
        values.get(values.len() / 2).map_or(f64::NAN, |value| *value as f64)
    }
}

/// Cost of one process.
#[derive(Debug, Clone, Copy)]
struct ProcessCost {
    wall_us: u64,
    user_us: u64,
    system_us: u64,
    peak_kib: u64,
}

fn bench(options: &BenchOptions) -> Outcome<()> {
    if let Availability::Skip(reason) = require(&Package::ALL) {
        return Err(reason.into());
    }
    let registry = RegistryProcess::start(RegistryOptions::default())?;
    let containerd = Containerd::start()?;
    containerd.add_registry(&registry)?;
    ImageBuilder::small(1, 100_000).push(&registry, "bench/small:1")?;
    let image = registry.image("bench/small:1");
    let (socket, endpoint) = (containerd.socket(), containerd.endpoint());
    let socket = socket.to_string_lossy();

    let ctr = find_program("ctr").ok_or("ctr, which comes with containerd, is not installed")?;
    let nothing = find_program("true").ok_or("true is not installed")?;
    let mut contenders = vec![
        Contender::new("larder pull", &options.larder, &["pull", "--backend", &endpoint, &image]),
        Contender::new(
            "ctr images pull",
            &ctr,
            &["-a", &socket, "-n", "k8s.io", "images", "pull", "--plain-http", &image],
        ),
    ];
    if let Some(bare) = &options.bare {
        contenders.push(Contender::new("bare grpc-go pull", bare, &[&socket, &image]));
    }
    if let Some(crictl) = &options.crictl {
        let arguments = ["--runtime-endpoint", &endpoint, "--image-endpoint", &endpoint, "pull", &image];
        contenders.push(Contender::new("crictl pull", crictl, &arguments));
    }
    contenders.push(Contender::new("larder --help", &options.larder, &["--help"]));
    contenders.push(Contender::new("true (the floor)", &nothing, &[]));

    for contender in &mut contenders {
        measure(&contender.command)?; // the image becomes present, the program's file is in memory
    }
    for _ in 0..options.runs {
        for contender in &mut contenders {
            contender.costs.push(measure(&contender.command)?);
        }
    }
    report(&contenders, options)
}

fn report(contenders: &[Contender], options: &BenchOptions) -> Outcome<()> {
    let cpu = |cost: &ProcessCost| cost.user_us + cost.system_us;
    let (own_cpu, own_peak) = (contenders[0].median(cpu), contenders[0].median(|cost| cost.peak_kib));
    let mut table = format!(
        "Medians of {} runs each, taking turns.\n\n\
         | program | wall ms | user+sys ms | peak MiB | larder's CPU / its | larder's memory / its |\n\
         |---|--:|--:|--:|--:|--:|\n",
        options.runs
    );
    for contender in contenders {
        let (cpu, peak) = (contender.median(cpu), contender.median(|cost| cost.peak_kib));
        let wall = contender.median(|cost| cost.wall_us);
        table += &[
            format!("| {} ", contender.name),
            format!("| {:.1} | {:.1} | {:.1} ", wall / 1e3, cpu / 1e3, peak / 1024.0),
            format!("| {:.2} | {:.2} |\n", own_cpu / cpu, own_peak / peak),
        ]
        .concat();
    }
    let size = fs_err::metadata(&options.larder)?.len();
    std::io::Write::write_all(
        &mut std::io::stdout(),
        format!("{table}\nlarder is a file of {size} bytes.\n").as_bytes(),
    )?;
    if options.crictl.is_none() {
        eprintln!("no crictl here: name one with --crictl PATH");
    }
    Ok(())
}

/// Runs the command in a small process of its own and reads what it cost.
fn measure(command: &[OsString]) -> Outcome<ProcessCost> {
    let output = Command::new(env::current_exe()?).arg(MEASURE).args(command).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let numbers: Vec<u64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match numbers[..] {
        [wall_us, user_us, system_us, peak_kib] if output.status.success() => {
            Ok(ProcessCost { wall_us, user_us, system_us, peak_kib })
        }
        _ => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)).into()),
    }
}

#[expect(clippy::disallowed_methods, reason = "what is measured lives in real time")]
fn measure_here(command: &[OsString]) -> Outcome<()> {
    let (program, arguments) = command.split_first().ok_or("no command to measure")?;
    let start = std::time::Instant::now();
    let mut child = Command::new(program).args(arguments).stdout(Stdio::null()).spawn()?;
    let ended = child.wait4()?;
    let wall = start.elapsed();
    if !ended.status.success() {
        return Err(format!("{}", ended.status).into());
    }
    let micros = |time: Duration| time.as_micros();
    let usage = ended.rusage;
    let line =
        format!("{} {} {} {}\n", micros(wall), micros(usage.utime), micros(usage.stime), usage.maxrss / 1024);
    Ok(std::io::Write::write_all(&mut std::io::stdout(), line.as_bytes())?)
}
