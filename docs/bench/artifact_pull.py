#!/usr/bin/env python3
"""Cold pulls of an artifact of large files, beside what their bytes cost at least, and beside containerd.

    artifact_pull.py LARDER [--mib N] [--files N] [--runs N] [--dir DIR] [--containerd DIR]

Needs root, docker-registry and curl. Random files of N MiB in all (default 2,048 in 4 files) are pushed as an artifact,
and as an image that wraps each in a gzip layer. Each program gets a new ext4 on a loop device past the page cache, and
they take turns:

    dd          copies the files with `dd conv=fsync`, one after the other, from the page cache
    sha256sum   reads them from the page cache, two at a time
    curl        fetches two at a time, `curl | tee FILE | sha256sum`, and syncs
    larder      pulls the artifact
    containerd  pulls the image with `ctr`, and syncs: `containerd` and `ctr` of DIR

Prints medians: seconds with the sync, CPU seconds, peak memory of the program, and the disk space at the end and at
most, as a part of the files' size. The aim: larder at most 1.1 times the sum of dd and sha256sum.
"""
import argparse
import hashlib
import http.client
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("larder")
parser.add_argument("--mib", type=int, default=2048)
parser.add_argument("--files", type=int, default=4)
parser.add_argument("--runs", type=int, default=2)
parser.add_argument("--dir", default=None)
parser.add_argument("--containerd", default=None)
OPTIONS = parser.parse_args()
WORK = tempfile.mkdtemp(prefix="artifact-", dir=OPTIONS.dir)
PIECE = 1 << 20
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Registry:
    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = "127.0.0.1:%d" % free.getsockname()[1]
        config = {"version": 0.1, "log": {"level": "error", "accesslog": {"disabled": True}},
                  "http": {"addr": self.address}, "storage": {"filesystem": {"rootdirectory": WORK + "/registry"}}}
        with open(WORK + "/registry.yml", "w") as file:
            json.dump(config, file)
        self.process = subprocess.Popen(["docker-registry", "serve", WORK + "/registry.yml"],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(100):
            try:
                self.call("GET", "/v2/")
                return
            except OSError:
                time.sleep(0.1)

    def call(self, method, path, body=None, **headers):
        connection = http.client.HTTPConnection(self.address)
        connection.request(method, path, body, {name.replace("_", "-"): str(value) for name, value in headers.items()})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status < 300, (method, path, answer.status, text)
        return answer.getheader("Location", "").split(self.address, 1)[-1]

    def push(self, repository, path):
        """Pushes a file as a blob, and removes it. Returns its descriptor."""
        digest, size = hashlib.sha256(), os.path.getsize(path)
        with open(path, "rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
            digest = "sha256:" + digest.hexdigest()
            file.seek(0)
            place = self.call("POST", f"/v2/{repository}/blobs/uploads/", b"")
            place += ("&" if "?" in place else "?") + "digest=" + digest
            self.call("PUT", place, file, Content_Length=size, Content_Type="application/octet-stream")
        os.remove(path)
        return {"digest": digest, "size": size}

    def push_bytes(self, repository, content):
        with open(WORK + "/document", "wb") as file:
            file.write(content)
        return self.push(repository, WORK + "/document")

    def push_manifest(self, repository, manifest):
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, **manifest}
        self.call("PUT", f"/v2/{repository}/manifests/1", json.dumps(manifest).encode(), Content_Type=MANIFEST)

    def path_of(self, blob):
        digest = blob["digest"].split(":")[1]
        return f"{WORK}/registry/docker/registry/v2/blobs/sha256/{digest[:2]}/{digest}/data"


def wrap(number, source):
    """Writes a gzip layer with this file. Returns its path and diff ID."""
    size, path = os.path.getsize(source), f"{WORK}/layer"
    header = bytearray(512)
    header[:7], header[100:108], header[108:124] = b"model-%d" % number, b"0000644\0", b"0000000\0" * 2
    header[124:136], header[136:148], header[156:157] = b"\x80" + size.to_bytes(11, "big"), b"%011o\0" % 0, b"0"
    header[257:265], header[148:156] = b"ustar\x0000", b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    plain, packer = hashlib.sha256(), zlib.compressobj(1, zlib.DEFLATED, 31)
    with open(path, "wb") as layer, open(source, "rb") as file:
        def add(content):
            plain.update(content)
            layer.write(packer.compress(content))
        add(bytes(header))
        while piece := file.read(PIECE):
            add(piece)
        add(bytes(-size % 512 + 1024))
        layer.write(packer.flush())
    return path, "sha256:" + plain.hexdigest()


class Disk:
    """A new ext4."""

    def __enter__(self):
        self.image, self.path = WORK + "/disk", WORK + "/mnt"
        subprocess.run(["truncate", "-s", f"{OPTIONS.mib * 3 + 1024}M", self.image], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", self.image],
                       check=True)
        self.device = subprocess.run(["losetup", "--direct-io=on", "--show", "-f", self.image], check=True,
                                     capture_output=True, text=True).stdout.strip()
        os.makedirs(self.path, exist_ok=True)
        subprocess.run(["mount", self.device, self.path], check=True)
        subprocess.run(["sync", "-f", self.path], check=True)
        self.before, self.most, self.ended = self.free(), 0, False
        self.watch = threading.Thread(target=self.follow)
        self.watch.start()
        return self

    def free(self):
        found = os.statvfs(self.path)
        return found.f_bfree * found.f_frsize

    def used(self):
        return self.before - self.free()

    def follow(self):
        while not self.ended:
            self.most = max(self.most, self.used())
            time.sleep(0.1)

    def __exit__(self, *_):
        self.ended = True
        self.watch.join()
        subprocess.run(["umount", "-R", self.path], check=True)
        subprocess.run(["losetup", "-d", self.device], check=True)
        os.remove(self.image)


def run(*commands, at_once=1):
    """Runs shell commands, so many at once. Returns their CPU seconds and the memory of the largest process."""
    running, cpu, memory, rest = {}, 0, 0, list(commands)
    while rest or running:
        while rest and len(running) < at_once:
            process = subprocess.Popen(rest.pop(0), shell=True, stdout=subprocess.DEVNULL, executable="/bin/bash",
                                       env={**os.environ, "HOME": WORK})
            running[process.pid] = process
        pid, status, usage = os.wait4(-1, 0)
        if process := running.pop(pid, None):
            process.returncode = status
            assert status == 0, process.args
            cpu, memory = cpu + usage.ru_utime + usage.ru_stime, max(memory, usage.ru_maxrss)
    return cpu, memory


def containerd(disk, pull):
    root = disk.path
    with open(root + "/config.toml", "w") as file:
        file.write(f'version = 3\nroot = "{root}/root"\nstate = "{root}/state"\n[grpc]\naddress = "{root}/c.sock"\n')
    with open(WORK + "/containerd.log", "ab") as log:
        daemon = subprocess.Popen([OPTIONS.containerd + "/containerd", "--config", root + "/config.toml"],
                                  stdout=log, stderr=log)
    ctr = f"{OPTIONS.containerd}/ctr -a {root}/c.sock"
    try:
        while subprocess.run(ctr + " version", shell=True, capture_output=True).returncode:
            time.sleep(0.2)
        begin = time.monotonic()
        cpu, memory = run(f"{ctr} images pull --plain-http {pull}")
        run("sync -f " + root)
        taken = time.monotonic() - begin
        with open(f"/proc/{daemon.pid}/status") as file:
            peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
        daemon.send_signal(signal.SIGTERM)
        _, _, usage = os.wait4(daemon.pid, 0)
        daemon.returncode = 0
        return taken, cpu + usage.ru_utime + usage.ru_stime, max(peak, memory)
    finally:
        if daemon.returncode is None:
            daemon.kill()
            daemon.wait()


def measured(disk, commands, at_once):
    begin = time.monotonic()
    cpu, memory = run(*commands, at_once=at_once)
    return time.monotonic() - begin, cpu, memory


def main():
    registry = Registry()
    files, layers, diff_ids = [], [], []
    for number in range(OPTIONS.files):
        with open(WORK + "/file", "wb") as file:
            for _ in range(OPTIONS.mib // OPTIONS.files):
                file.write(os.urandom(PIECE))
        files.append({"mediaType": "application/vnd.cncf.model.weight.v1.raw",
                      **registry.push("bench/model", WORK + "/file"),
                      "annotations": {"org.cncf.model.filepath": f"model-{number}"}})
        if OPTIONS.containerd:
            path, diff_id = wrap(number, registry.path_of(files[-1]))
            diff_ids.append(diff_id)
            layers.append({"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", **registry.push("bench/image", path)})
    config = {"mediaType": "application/vnd.oci.empty.v1+json", **registry.push_bytes("bench/model", b"{}")}
    registry.push_manifest("bench/model", {"artifactType": "application/vnd.cncf.model.manifest.v1+json",
                                           "config": config, "layers": files})
    if OPTIONS.containerd:
        config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids}})
        config = {"mediaType": "application/vnd.oci.image.config.v1+json",
                  **registry.push_bytes("bench/image", config.encode())}
        registry.push_manifest("bench/image", {"config": config, "layers": layers})
    sources = [registry.path_of(file) for file in files]
    url = f"http://{registry.address}/v2/bench/model/blobs/"

    def dd(disk):
        copies = [f"dd if={source} of={disk.path}/{number} bs=1M conv=fsync status=none"
                  for number, source in enumerate(sources)]
        return measured(disk, copies, 1)

    def sha256sum(disk):
        return measured(disk, [f"sha256sum {source}" for source in sources], 2)

    def curl(disk):
        fetches = [f"curl -sf {url}{file['digest']} | tee {disk.path}/{number} | sha256sum"
                   for number, file in enumerate(files)]
        begin = time.monotonic()
        cpu, memory = run(*fetches, at_once=2)
        run("sync -f " + disk.path)
        return time.monotonic() - begin, cpu, memory

    def larder(disk):
        pull = f"{OPTIONS.larder} --root {disk.path}/store pull -q {registry.address}/bench/model:1"
        return measured(disk, [pull], 1)

    programs = {"dd": dd, "sha256sum": sha256sum, "curl": curl, "larder": larder}
    if OPTIONS.containerd:
        programs["containerd"] = lambda disk: containerd(disk, f"{registry.address}/bench/image:1")
    found = {name: [] for name in programs}
    try:
        for turn in range(OPTIONS.runs):
            for name in sorted(programs, reverse=turn % 2 == 1):
                with Disk() as disk:
                    result = programs[name](disk)
                    size = OPTIONS.mib * PIECE
                    found[name].append((*result, disk.used() / size, disk.most / size))
                    print(name, found[name][-1], file=sys.stderr, flush=True)
    finally:
        registry.process.terminate()
        registry.process.wait()
        shutil.rmtree(WORK, ignore_errors=True)
    print("| | seconds | CPU s | peak MiB | disk at the end | at most |\n|---|--:|--:|--:|--:|--:|")
    medians = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in found.items()}
    for name, (seconds, cpu, memory, disk, most) in medians.items():
        print(f"| {name} | {seconds:.2f} | {cpu:.1f} | {memory / 1024:.0f} | {disk:.3f} | {most:.3f} |")
    least = medians["dd"][0] + medians["sha256sum"][0]
    print(f"larder / (dd + sha256sum): {medians['larder'][0] / least:.2f}")


main()
