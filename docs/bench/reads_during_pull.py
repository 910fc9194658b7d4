#!/usr/bin/env python3
"""How long reads wait for a pull in another shell: reads_during_pull.py LARDER IMAGE OTHER...

IMAGE is a large image of a registry, each OTHER a small one. Times `images`, `df` and `gc --dry-run` on an idle store, and
while another process pulls IMAGE; then `rm` of the first OTHER and a second pull, of the last OTHER, during that pull. The store is
in a new directory below $TMPDIR.
"""
import os, shutil, statistics, subprocess, sys, tempfile, time

READS = {"images": ["images"], "df": ["df"], "gc --dry-run": ["gc", "--dry-run"], "true": None}
IDLE = 40


class Store:
    def __init__(self, larder):
        self.home = tempfile.mkdtemp()
        self.larder = [os.path.abspath(larder), "--root", self.home + "/store"]
        self.environment = {"HOME": self.home, "PATH": os.environ["PATH"]}

    def start(self, *arguments):
        return subprocess.Popen(self.larder + list(arguments), env=self.environment, stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def run(self, *arguments):
        """The seconds that a command takes; it must succeed."""
        begin = time.perf_counter()
        process = self.start(*arguments)
        _, errors = process.communicate()
        taken = time.perf_counter() - begin
        assert process.returncode == 0, (arguments, errors)
        return taken

    def read(self, arguments):
        if arguments is not None:
            return self.run(*arguments)
        begin = time.perf_counter()
        subprocess.run(["true"], check=True)
        return time.perf_counter() - begin


def printed(label, idle, busy):
    for name in READS:
        times = [statistics.median(idle[name]), max(idle[name]), statistics.median(busy[name]), max(busy[name])]
        cells = " | ".join(f"{seconds * 1000:.1f}" for seconds in times)
        more = " | ".join(f"{(busy - still) * 1000:.1f}" for still, busy in zip(times[:2], times[2:]))
        print(f"| {label} | {name} | {len(busy[name])} | {cells} | {more} |")


def main():
    larder, image, others = sys.argv[1], sys.argv[2], sys.argv[3:]
    store = Store(larder)
    for other in others[:-1]:
        store.run("pull", other)
    idle = {name: [store.read(read) for _ in range(IDLE)] for name, read in READS.items()}
    pull = store.start("pull", image)
    busy = {name: [] for name in READS}
    begin, removed, second = time.perf_counter(), None, None
    while pull.poll() is None:
        for name, read in READS.items():
            busy[name].append(store.read(read))
        if time.perf_counter() - begin > 1 and removed is None and pull.poll() is None:
            removed = store.run("rm", others[0])
            second = store.run("pull", others[-1])
    assert pull.returncode == 0, pull.stderr.read()
    print(f"pull {time.perf_counter() - begin:.2f}s, rm {removed * 1000:.0f}ms, second pull {second * 1000:.0f}ms")
    print("| | read | n | idle p50 ms | idle max | during the pull p50 | max | p50 more | max more |")
    printed("", idle, busy)
    shutil.rmtree(store.home)


main()
