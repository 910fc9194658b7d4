#!/usr/bin/env python3
"""What a daemon with nothing to do costs: idle.py LARDER [SECONDS]

Times from exec to READY=1 and to a /readyz that says 200, on a new store and on one that exists; then, 15 seconds after a
start, resident memory and CPU time over SECONDS (60).
"""
import os, shutil, socket, statistics, subprocess, sys, tempfile, time

STARTS = 21


def start(larder, home):
    """A daemon on a store in home, and the seconds until it was ready and until it said so over HTTP."""
    path = home + "/notify"
    if os.path.exists(path):
        os.unlink(path)
    messages = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    messages.bind(path)
    environment = {"HOME": home, "PATH": os.environ["PATH"], "NOTIFY_SOCKET": path}
    command = [larder, "--root", home + "/store", "serve", "--metrics-address", ""]
    begin = time.perf_counter()
    daemon = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    assert messages.recv(100).startswith(b"READY=1")
    ready = time.perf_counter() - begin
    while True:
        client = socket.socket(socket.AF_UNIX)
        client.connect(home + "/store/larder.sock")
        client.sendall(b"GET /readyz HTTP/1.1\r\nHost: larder\r\nConnection: close\r\n\r\n")
        if client.recv(100).startswith(b"HTTP/1.1 200"):
            return daemon, ready, time.perf_counter() - begin


def stop(daemon):
    daemon.terminate()
    daemon.wait()


def cpu_seconds(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid):
    status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    return {key: int(status[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM")}


def main():
    larder = os.path.abspath(sys.argv[1])
    seconds = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    times = {"new store": [], "store that exists": []}
    for _ in range(STARTS):
        home = tempfile.mkdtemp()
        for kind in times:
            daemon, *taken = start(larder, home)
            stop(daemon)
            times[kind].append(taken)
        shutil.rmtree(home)
    for kind, taken in times.items():
        for what, each in zip(("READY=1", "/readyz"), zip(*taken)):
            each = [1000 * one for one in each]
            print(f"{kind}, {what}: median {statistics.median(each):.1f} ms, slowest {max(each):.1f} ms")
    home = tempfile.mkdtemp()
    daemon, *_ = start(larder, home)
    time.sleep(15)
    before = cpu_seconds(daemon.pid)
    time.sleep(seconds)
    percent = 100 * (cpu_seconds(daemon.pid) - before) / seconds
    held = memory(daemon.pid)
    print(f"resident {held['VmRSS']:.1f} MiB (at most {held['VmHWM']:.1f}), CPU {percent:.3f}% over {seconds} s")
    stop(daemon)
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
